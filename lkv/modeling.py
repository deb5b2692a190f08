"""The seam to transformers: the only file that knows its internals (and `hooks.py` its base classes).

Keys that carry a hook (see `hooks`) go to it; all others go to the model's stock attention.
"""

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lkv.config import ModelSpec
from lkv.errors import CacheError, PromptError, UnsupportedModelError
from lkv.hooks import HOOK

_PREFIX = "lkv_"
_SAMPLES_PER_WEIGHT = 4
_KINDS = ("full_attention", "sliding_attention")
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense")


def attach(model: Any) -> ModelSpec:
    """Let LKV caches work in `model`, whatever attention implementation it has; other caches behave as before.

    Idempotent. Returns the model's `ModelSpec`; raises UnsupportedModelError where eviction cannot work.
    """
    spec = inspect_model(model)
    base = model.config._attn_implementation or "eager"
    if not base.startswith(_PREFIX):
        if base not in ("sdpa", "eager"):
            raise UnsupportedModelError(
                f"LKV does not work over the attention implementation {base!r} yet; load the model with "
                "attn_implementation='sdpa' or 'eager'."
            )
        AttentionInterface.register(_PREFIX + base, partial(_attention, base))
        # Without a mask function of the same name transformers would drop the padding.
        AttentionMaskInterface.register(_PREFIX + base, ALL_MASK_ATTENTION_FUNCTIONS[base])
        if model._can_set_attn_implementation():
            model.set_attn_implementation(_PREFIX + base)
    # Models with attention code of their own never call a registered function: every token would be lost.
    if not (model.config._attn_implementation or "").startswith(_PREFIX):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes attention by code of its own, which LKV cannot reach; use a model "
            "whose attention goes through transformers' AttentionInterface."
        )
    return spec


def _attention(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    # Models name the dropout; libraries that wrap every registered attention function give it by its place.
    stock = partial(_stock(base, module), module, query, key, value, mask, dropout=dropout, **kwargs)
    hook = getattr(key, HOOK, None)
    if hook is None:
        return stock()
    owner = hook.__self__.model_config
    if owner is not None and getattr(module, "config", owner) is not owner:
        raise CacheError("this cache was made for another model; make one with RaggedCache(model, ...) for this model.")
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    return _hooked(hook, query, key, value, mask, scale, lambda: stock()[0]), None


@torch.compiler.disable
def _hooked(hook: Callable[..., Tensor], *args: Any) -> Tensor:
    """Out of a compiled graph: what a layer holds changes shape with every token, and would be compiled every time."""
    return hook(*args)


def _stock(base: str, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    if base == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


def inspect_model(model: Any) -> ModelSpec:
    """Read what a policy must know from a causal language model; UnsupportedModelError says why one is refused.

    Under tensor parallelism the spec is that of the whole model, and every process of the group must call this.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "generate"):
        raise UnsupportedModelError("this is no transformers causal language model; give one with .generate().")
    name = type(model).__name__
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = _kv_heads(text)
    if not isinstance(kv_heads, int) or not isinstance(heads, int) or getattr(text, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{name} has no per-head key-value cache; LKV works with multi-head and grouped-query attention."
        )
    windows = layer_windows(model)
    other = {kind for kind in getattr(text, "layer_types", None) or [] if kind not in _KINDS}
    if other or None not in windows:
        raise UnsupportedModelError(
            f"{name} has layers of kind {sorted(other) or ['sliding_attention']}; LKV evicts from full-attention ones "
            "beside sliding ones that stay as they are. Use a model of such layers."
        )
    if any(key.endswith(".sinks") for key, _ in model.named_parameters()) or getattr(
        text, "attn_logit_softcapping", None
    ):
        raise UnsupportedModelError(
            f"{name} has attention sinks or capped attention logits, which LKV does not compute yet; use a model with "
            "plain softmax attention, such as Llama, Qwen2, Qwen3, Mistral, Phi-3 or Gemma-3."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; LKV works with decoder-only models.")
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise UnsupportedModelError(f"{name} states no number of positions; LKV works with models that have a limit.")
    devices = {str(weight.device) for weight in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise UnsupportedModelError(f"{name} is spread over {sorted(devices)}; load it whole on one device.")
    local_heads(model)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    rope = getattr(text, "rope_parameters", None) or {}
    return ModelSpec(
        architecture=name,
        layers=windows.count(None),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=", ".join(f"{key} {rope[key]}" for key in sorted(rope) if rope[key] is not None),
        max_positions=limit,
        weights=_fingerprint(model, text.num_hidden_layers),
    )


def layer_windows(model: Any) -> list[int | None]:
    """The sliding window of each layer, None where a layer sees everything: the ones that are evicted from."""
    text = model.config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    # Without a list of kinds a window holds for all layers.
    everywhere = "sliding_attention" if window else "full_attention"
    kinds = getattr(text, "layer_types", None) or [everywhere] * text.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def local_heads(model: Any) -> slice:
    """The KV heads whose k and v this process computes: all of them, or its share under tensor parallelism.

    Raises UnsupportedModelError where the heads cannot be shared out evenly, or the model is split in another way.
    """
    heads = _kv_heads(model.config.get_text_config(decoder=True))
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or mesh.size() == 1:
        return slice(0, heads)
    name, size = type(model).__name__, getattr(model, "tp_size", None) or 1
    if mesh.size() != size:
        raise UnsupportedModelError(
            f"{name} is split over {mesh.size()} processes, but only {size} share its heads; load it with tensor "
            "parallelism alone (tp_plan='auto')."
        )
    # A plan may leave attention whole, or gather k and v again ("colwise_gather_output"): then all heads are here.
    if not any(key.endswith(_KEY_PROJECTIONS) and style == "colwise" for key, style in model.tp_plan.items()):
        return slice(0, heads)
    if heads % size:
        raise UnsupportedModelError(
            f"{name} has {heads} KV heads, which {size} processes cannot share evenly; use a number of processes that "
            f"divides {heads}."
        )
    rank = (mesh if mesh.ndim == 1 else mesh["tp"]).get_local_rank()
    return slice(rank * heads // size, (rank + 1) * heads // size)


def _kv_heads(text: Any) -> Any:
    return getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)


def _fingerprint(model: nn.Module, layers: int) -> tuple[float, ...]:
    """A few values of each matrix of the first, middle and last layer, in the order of their names."""
    values: list[float] = []
    wanted = {0, layers // 2, layers - 1}
    for name, weight in sorted(model.named_parameters()):
        layer = re.search(r"\.(\d+)\.", name)
        if layer and int(layer[1]) in wanted and weight.ndim == 2 and weight.is_floating_point():
            places = torch.linspace(0, weight.numel() - 1, _SAMPLES_PER_WEIGHT + 2, dtype=torch.float64)[1:-1].long()
            values += [round(float(x), 8) for x in _values(weight, places)]
    return tuple(values)


@torch.no_grad()
def _values(weight: Tensor, places: Tensor) -> Tensor:
    """The values at flat `places` of a matrix, also of one whose rows or columns lie in several processes."""
    rows, columns = places // weight.shape[1], places % weight.shape[1]
    index = rows.to(weight.device)
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        found = weight[index]
    else:
        from torch.distributed.tensor import DTensor, Replicate

        # A lookup fetches the few rows alone; indexing would gather the whole matrix.
        whole: Any = embedding(DTensor.from_local(index, mesh, [Replicate()] * mesh.ndim, run_check=False), weight)
        found = whole.full_tensor()
    return found.float().cpu()[torch.arange(len(rows)), columns]


def has_padding(mask: Any) -> bool:
    """Whether a causal mask [B, 1, Tq, Tk] (bool, additive or None) hides a key from the last query."""
    if not isinstance(mask, Tensor):
        return False
    last = mask[:, :, -1]
    return not bool(last.all() if last.dtype == torch.bool else (last == 0).all())


def left_padding(mask: Any) -> list[int] | None:
    """How many keys each row of a causal mask [B, 1, Tq, Tk] hides at its beginning; None where nothing is hidden.

    Raises PromptError for padding anywhere else, and for a row of nothing but padding.
    """
    if not isinstance(mask, Tensor):
        return None
    last = mask[:, 0, -1]
    visible = last if last.dtype == torch.bool else last == 0
    if not bool(visible.any(-1).all()):
        raise PromptError("a row of the batch is nothing but padding; leave it out.")
    first = visible.long().argmax(-1)
    if bool((visible.sum(-1) != visible.shape[-1] - first).any()):
        raise PromptError("the batch is padded on the right; pad it on the left (tokenizer.padding_side = 'left').")
    return first.tolist() if bool(first.any()) else None


def kv_nbytes(cache: Any) -> int:
    """Bytes of storage behind the k and v of one of transformers' own caches."""
    return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))


def cut_to(cache: Any, length: int) -> None:
    """Cut every layer of `cache`, LKV's or transformers' own, back to its first `length` tokens.

    Only a number below 0 means the same to `crop` in every version: from 5.17 on 0 cuts nothing, before it cuts all.
    """
    # Layer by layer: an interrupted forward pass leaves them unequal.
    for layer in cache.layers:
        if excess := layer.get_seq_length() - length:
            layer.crop(-excess)


def output_projections(model: Any) -> list[Tensor]:
    """The weight [hidden, Hq * d] of each full-attention layer's output projection; only the columns of the heads
    computed here under tensor parallelism.

    Raises UnsupportedModelError for a model that has no such matrices, or quantised ones.
    """
    weights = []
    for module, name in _full_attention_modules(model):
        weight = getattr(module, name).weight.detach()
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        if weight.ndim != 2 or not weight.is_floating_point():
            raise UnsupportedModelError(
                f"{type(model).__name__} has a quantised output projection, which cannot be read as a matrix; load the "
                "model without quantisation, or use a method that needs no weights."
            )
        weights.append(weight)
    return weights


def _full_attention_modules(model: Any) -> list[tuple[nn.Module, str]]:
    """The attention module of each full-attention layer, with the name of its output projection."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for module in model.get_decoder().modules():
        index = getattr(module, "layer_idx", None)
        name = next((name for name in _OUTPUT_PROJECTIONS if hasattr(getattr(module, name, None), "weight")), None)
        if isinstance(index, int) and name is not None:
            found[index] = module, name
    windows = layer_windows(model)
    if sorted(found) != list(range(len(windows))):
        raise UnsupportedModelError(
            f"{type(model).__name__} has attention layers without an output projection that LKV knows; use a model "
            "such as Llama, Qwen2, Qwen3, Mistral, Phi-3 or Gemma-3, or another method."
        )
    return [found[index] for index, window in enumerate(windows) if window is None]


class Rotation:
    """The rotary embedding of a model's full-attention layers, by the model's own code.

    Raises UnsupportedModelError for a model that has none.
    """

    def __init__(self, model: Any):
        module, _ = _full_attention_modules(model)[0]
        turn = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        rotary = getattr(model.get_decoder(), "rotary_emb", None)
        if turn is None or rotary is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no rotary embedding that LKV can undo; use a model such as Llama, Qwen2, "
                "Qwen3, Mistral, Phi-3 or Gemma-3, or another method."
            )
        self._apply, self._rotary = turn, rotary
        self._kind = {"layer_type": "full_attention"} if "layer_type" in signature(rotary.forward).parameters else {}

    def undone(self, x: Tensor) -> Tensor:
        """What x [B, H, T, d], rotated at positions 0 to T - 1, was before."""
        cos, sin = self._tables(x, 0, x.shape[2])
        size = cos.square() + sin.square()  # not 1 where the model scales its rotations, as YaRN does
        return self._turned(x, cos / size, -sin / size)

    def mean(self, like: Tensor, start: int, end: int) -> Tensor:
        """The mean of the rotations at positions `start` to `end` - 1, a matrix [d, d] that rows are multiplied by."""
        cos, sin = (table.mean(1, keepdim=True) for table in self._tables(like, start, end))
        dim = like.shape[-1]
        return self._turned(torch.eye(dim, dtype=like.dtype, device=like.device)[None, None], cos, sin)[0, 0]

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._apply(x, x[:, :1], cos, sin)[0]

    def _tables(self, like: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        # A copy: embeddings that follow the text's length change when they are asked about later positions.
        rotary = copy.deepcopy(self._rotary, {id(config): config for config in [getattr(self._rotary, "config", None)]})
        return rotary(like, torch.arange(start, end, device=like.device)[None], **self._kind)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model` in eval mode for the duration, with its training flag put back afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


__all__ = [
    "Rotation", "attach", "cut_to", "evaluation_mode", "has_padding", "inspect_model", "kv_nbytes", "layer_windows",
    "left_padding", "local_heads", "output_projections",
]  # fmt: skip
