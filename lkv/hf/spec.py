"""The description of a transformers model: its shape, the layers to evict from, a fingerprint of its weights."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from lkv.errors import PromptError, UnsupportedModelError
from lkv.hf import positions
from lkv.hf.fingerprint import read_directions, read_norms, read_values, without_adapters
from lkv.hf.model_spec import ModelSpec
from lkv.hf.other_layers import LayerKind, layer_kinds, unknown_kinds
from lkv.hf.shapes import attention_sizes, layer_config

_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj")


def inspect_model(model: PreTrainedModel) -> ModelSpec:
    """Describe a causal language model for a policy. Raises UnsupportedModelError with the reason if it cannot be used.

    Under tensor parallelism the spec describes the whole model, and every process of the group must call this.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise UnsupportedModelError("this is not a causal language model of transformers; give one with .generate().")
    name, text = type(model).__name__, config.get_text_config(decoder=True)
    kinds = _check_architecture(model, text)
    heads, kv_heads, head_dim = _attention_sizes(model, kinds)
    weights = without_adapters(dict(model.named_parameters()))
    limit = positions.max_positions(text)
    if not isinstance(limit, int):
        raise UnsupportedModelError(
            f"{name} does not state its number of positions; LKV works with models that have a limit."
        )
    devices = {weight.device.type for weight in weights.values()}
    if "meta" in devices:
        raise UnsupportedModelError(f"some weights of {name} are offloaded; load all of them on GPUs, or on the CPU.")
    local_kv_heads(model)
    rope = getattr(text, "rope_parameters", None) or {}
    decoder, depth = model.get_decoder(), text.num_hidden_layers
    return ModelSpec(
        architecture=name,
        layers=sum(kind.is_evicted for kind in kinds),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=json.dumps({key: rope[key] for key in sorted(rope) if rope[key] is not None}),
        max_positions=limit,
        weights=read_values(weights, depth),
        directions=read_directions(
            without_adapters(dict(decoder.named_parameters())), depth, read_norms(decoder, depth)
        ),
    )


def _check_architecture(model: PreTrainedModel, text: PreTrainedConfig) -> list[LayerKind]:
    """Return the kinds of layers of a model with attention and a cache that LKV works with, or raise."""
    name = type(model).__name__
    if getattr(text, "num_kv_shared_layers", 0) and not hasattr(text, "kv_sharing_modes"):
        raise UnsupportedModelError(
            f"{name} has layers that share keys and values, which LKV works with from transformers 5.24 on; install it."
        )
    is_alike = not getattr(text, "is_heterogeneous", False)
    heads, kv_heads = (getattr(text, "num_attention_heads", None), _kv_heads(text)) if is_alike else (1, 1)
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{name} has multi-head latent attention (MLA): its cache has one small latent vector a token for "
            "all heads, so there is nothing to evict by head; use a model with multi-head or grouped-query attention."
        )
    if not isinstance(kv_heads, int) or not isinstance(heads, int):
        raise UnsupportedModelError(
            f"{name} has no per-head key-value cache; LKV works with multi-head and grouped-query attention."
        )
    has_common_cache = getattr(model, "_supports_default_dynamic_cache", None)
    if has_common_cache is not None and not has_common_cache():
        raise UnsupportedModelError(
            f"{name} has a cache of its own here, which LKV cannot replace; use another model, or a newer transformers."
        )
    kinds = decoder_kinds(model)
    unknown = unknown_kinds(kinds)
    if unknown or not any(kind.is_evicted for kind in kinds):
        raise UnsupportedModelError(
            f"{name} has layers of kind {unknown or sorted({kind.name for kind in kinds})}; LKV works with "
            "full-attention layers, which it evicts from, and sliding-window, recurrent or convolution layers beside "
            "them. Use such a model."
        )
    if any(sinks is not None and sinks.shape != (heads,) for sinks in attention_sinks(model)):
        raise UnsupportedModelError(
            f"{name} has attention sinks that are not one number a query head here, as in gpt-oss on one device; use "
            "such a model, without tensor parallelism."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; LKV works with decoder-only models.")
    return kinds


def _attention_sizes(model: PreTrainedModel, kinds: list[LayerKind]) -> tuple[int, int, int]:
    """Return query heads, KV heads and head size of the full-attention layers, which must be the same in all."""
    text = model.config.get_text_config(decoder=True)
    sizes = {attention_sizes(layer_config(text, index)) for index, kind in enumerate(kinds) if kind.is_evicted}
    if len(sizes) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has full-attention layers of {len(sizes)} shapes; LKV works with models whose "
            "full-attention layers have the same numbers of heads and the same head size."
        )
    return sizes.pop()


def decoder_kinds(model: PreTrainedModel) -> list[LayerKind]:
    """Return the kind of each decoder layer."""
    return layer_kinds(model.config.get_text_config(decoder=True))


def attention_sinks(model: PreTrainedModel) -> list[Tensor | None]:
    """Return the attention sinks of each full-attention layer, one extra logit per query head [Hq], or None."""
    sinks: dict[int, Tensor] = {}
    for module in model.get_decoder().modules():
        index, weight = getattr(module, "layer_idx", None), getattr(module, "sinks", None)
        if isinstance(index, int) and isinstance(weight, nn.Parameter):
            sinks[index] = weight
    return [sinks.get(index) for index, kind in enumerate(decoder_kinds(model)) if kind.is_evicted]


def local_kv_heads(model: PreTrainedModel) -> slice:
    """Return the KV heads that this process computes: all of them, or its share under tensor parallelism.

    Raises UnsupportedModelError if the heads cannot be divided evenly, or the model is split in another way.
    """
    text = model.config.get_text_config(decoder=True)
    is_alike = not getattr(text, "is_heterogeneous", False)
    heads = _kv_heads(text) if is_alike else _attention_sizes(model, decoder_kinds(model))[1]
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or mesh.size() == 1:
        return slice(0, heads)
    name, size = type(model).__name__, getattr(model, "tp_size", None) or 1
    if mesh.size() != size:
        raise UnsupportedModelError(
            f"{name} is split over {mesh.size()} processes, but only {size} share its heads; load it with tensor "
            "parallelism alone (tp_plan='auto')."
        )
    # A plan may not split attention, or gather k and v again ("colwise_gather_output"): then all heads are local.
    if not any(key.endswith(_KEY_PROJECTIONS) and style == "colwise" for key, style in model.tp_plan.items()):
        return slice(0, heads)
    if heads % size:
        raise UnsupportedModelError(
            f"{name} has {heads} KV heads, which {size} processes cannot share evenly; use a number of processes that "
            f"divides {heads}."
        )
    rank = (mesh if mesh.ndim == 1 else mesh["tp"]).get_local_rank()
    return slice(rank * heads // size, (rank + 1) * heads // size)


def _kv_heads(text: PreTrainedConfig) -> Any:
    return getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)


def output_projections(model: PreTrainedModel) -> list[Tensor]:
    """Return the weight [hidden, Hq * d] of each full-attention layer's output projection.

    Under tensor parallelism it has only the columns of this process's heads. Raises UnsupportedModelError if the
    matrices do not exist or are quantised.
    """
    weights = []
    for module, name in full_attention_modules(model):
        projection = getattr(module, name)
        # GPTQ and AWQ layers have no `weight`, only packed codes.
        weight: object = getattr(projection, "weight", None)
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
            raise UnsupportedModelError(
                f"{type(model).__name__} has a quantised output projection, which cannot be read as a matrix; load the "
                "model without quantisation, or use a method that needs no weights."
            )
        weights.append(weight.detach().T if isinstance(projection, Conv1D) else weight.detach())
    return weights


def full_attention_modules(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """Return the attention module of each full-attention layer, with the name of its output projection."""
    return _attention_modules(model, [index for index, kind in enumerate(decoder_kinds(model)) if kind.is_evicted])


def reader_modules(model: PreTrainedModel) -> list[list[tuple[nn.Module, str]]]:
    """Return, for each full-attention layer, the modules of the layers that read its keys and values, as above."""
    return [_attention_modules(model, kind.readers) for kind in decoder_kinds(model) if kind.is_evicted]


def _attention_modules(model: PreTrainedModel, layers: Sequence[int]) -> list[tuple[nn.Module, str]]:
    modules: dict[int, tuple[nn.Module, str]] = {}
    for module in model.get_decoder().modules():
        index = getattr(module, "layer_idx", None)
        name = next((name for name in _OUTPUT_PROJECTIONS if isinstance(getattr(module, name, None), nn.Module)), None)
        # The recurrent module of a hybrid layer has no attribute `is_causal`.
        if isinstance(index, int) and name is not None and (index not in modules or hasattr(module, "is_causal")):
            modules[index] = module, name
    if not modules.keys() >= {*layers}:
        raise UnsupportedModelError(
            f"{type(model).__name__} has attention layers without an output projection that LKV knows; use a model "
            "such as Llama, Qwen2, Qwen3, Mistral, Phi-3 or Gemma-3, or another method."
        )
    return [modules[index] for index in layers]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, in order; an empty list if they cannot be found."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in unwrap_model(model).get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next((list(modules) for modules in lists if len(modules) == count), [])


def max_positions(model: PreTrainedModel) -> int:
    """Return the longest text, in tokens, that `model` can read."""
    return positions.max_positions(model.config.get_text_config(decoder=True))


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of tokens that `model` has embeddings of."""
    embeddings = unwrap_model(model).get_input_embeddings()
    return int(getattr(embeddings, "num_embeddings", 0) or embeddings.weight.shape[0])


def check_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Raise PromptError for a token without an embedding in `model`, such as one that was added to its tokenizer."""
    if (largest := max(ids, default=0)) >= (size := vocabulary_size(model)):
        raise PromptError(
            f"the text contains the token {tokenizer.convert_ids_to_tokens(largest)!r}, number {largest:,} of the "
            f"tokenizer, but the model has embeddings of {size:,} tokens; leave it out, use the model's own tokenizer, "
            "or add an embedding with model.resize_token_embeddings and train it."
        )


def unwrap_model(model: Any) -> Any:
    """Return the transformers model inside a compiled or PEFT model, or `model` itself if it is neither."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, PreTrainedModel) or not isinstance(getattr(model, "base_model", None), nn.Module):
        return model
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    base = model.base_model
    return base if isinstance(base, PreTrainedModel) else getattr(base, "model", base)


def check_adapters(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for PEFT's prompt learning, which adds virtual tokens unknown to the cache."""
    config = getattr(getattr(model, "_orig_mod", model), "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False) and not getattr(model, "_adapters_disabled", False):
        raise UnsupportedModelError(
            "this PEFT model puts learned tokens before every text (prompt, prefix or P-tuning), which LKV cannot tell "
            "from the text; use adapters such as LoRA, or the model without them (disable_adapter())."
        )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` in eval mode for the duration of the block, then restore its training flag."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
