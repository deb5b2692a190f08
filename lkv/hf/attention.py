"""LKV's attention function inside a transformers model, registered over the model's own.

One layer of a forward pass runs as follows. The model's attention module calls `cache.update`; an LKV cache notes which
layer returned which keys (`state.note_pending_layer`). The module then calls the registered attention function,
which finds that layer by these keys and calls its `attend`. For any other cache it calls the model's own attention.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lkv.errors import CacheError, UnsupportedModelError
from lkv.hf.base_cache import NO_MASK
from lkv.hf.cache_layers import AttentionCacheLayer
from lkv.hf.compiled import extend
from lkv.hf.generate_hook import wrap_generation
from lkv.hf.masks import KeyOffset, attend_prompt, key_mask
from lkv.hf.model_spec import ModelSpec
from lkv.hf.rotation import layer_rotations
from lkv.hf.spec import (
    attention_sinks,
    check_adapters,
    inspect_model,
    local_kv_heads,
    sliding_windows,
    unwrap_model,
)
from lkv.hf.state import (
    PatchedModel,
    get_patch,
    has_pending_layer,
    set_patch,
    take_pending_layer,
    take_traced_layer,
    unwrap_prepare_inputs,
)

_PREFIX = "lkv_"
_FLASH = ("flash_attention_2", "flash_attention_3")
_BASES = ("sdpa", "eager", *_FLASH)
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # rotations that follow the longest text of a forward pass


def patch_attention(model: PreTrainedModel, spec: ModelSpec | None = None) -> PatchedModel:
    """Let LKV caches work in `model`; other caches behave as before.

    The model's attention implementation becomes LKV's, which computes attention for LKV caches and calls the previous
    implementation for all others. Idempotent: the model is read once, and every LKV entry point calls this itself.
    `unpatch_attention` undoes it.

    Args:
        model: A causal language model with attention implementation "sdpa", "eager", "flash_attention_2" or
            "flash_attention_3"; it may be wrapped by PEFT.
        spec: The model's description, where its weights are in other processes and cannot be read here.

    Returns:
        What was read of the model.

    Raises:
        UnsupportedModelError: If eviction cannot work in this model.
    """
    check_adapters(model)
    model = unwrap_model(model)
    patched = get_patch(model)
    if patched is None or patched.config is not model.config:
        has_weights, spec = spec is None, spec or inspect_model(model)
        _check_implementation(model)  # before the model reads anything
        patched = PatchedModel(
            spec=spec,
            sliding_windows=tuple(sliding_windows(model)),
            heads=local_kv_heads(model),
            rotations=layer_rotations(model, has_weights),
            sinks=tuple(attention_sinks(model)),
            config=model.config,
        )
    _register_attention(model, patched)
    wrap_generation(model)
    set_patch(model, patched)
    return patched


def unpatch_attention(model: PreTrainedModel) -> None:
    """Undo `patch_attention`: restore the model's attention implementation and its generation method.

    LKV caches no longer work in the model until it is patched again. Does nothing for a model that is not patched.

    Args:
        model: The model that was given to `patch_attention`, or to `RaggedCache`, `compress` and so on.
    """
    model = unwrap_model(model)
    patched = get_patch(model)
    if patched is None:
        return
    for config in patched._configs.values():
        config._attn_implementation_internal = (config._attn_implementation or "").removeprefix(_PREFIX) or None
    unwrap_prepare_inputs(model)
    set_patch(model, None)


@contextmanager
def attention_patched(model: PreTrainedModel) -> Iterator[PatchedModel]:
    """Patch the attention of `model` for the duration of a `with` block.

    A model that was patched before stays patched afterwards.

    Args:
        model: As for `patch_attention`.

    Yields:
        What was read of the model.
    """
    was_patched = get_patch(unwrap_model(model)) is not None
    try:
        yield patch_attention(model)
    finally:
        if not was_patched:
            unpatch_attention(model)


def is_rope_by_length(model: PreTrainedModel) -> bool:
    """Whether rotations follow the longest text of a forward pass.

    Texts cannot share one then, and two passes must not run at once.
    """
    return any(kind in patch_attention(model).spec.rope for kind in _LENGTH_DEPENDENT_ROPE)


def input_device(model: PreTrainedModel) -> torch.device:
    """The device on which the model takes its token ids."""
    weight: Any = model.get_input_embeddings().weight
    return weight.device


def _register_attention(model: Any, patched: PatchedModel) -> None:
    """Register LKV's attention function over the model's own and switch the model to it."""
    text, base = model.config.get_text_config(decoder=True), _check_implementation(model)
    if base in _BASES and model._can_set_attn_implementation():
        for config in _configs(model):
            implementation = config._attn_implementation
            if implementation in _BASES:
                AttentionInterface.register(_PREFIX + implementation, partial(_attention, implementation))
                # Without a mask function of the same name transformers would drop the padding.
                AttentionMaskInterface.register(_PREFIX + implementation, partial(_mask, implementation))
                config._attn_implementation_internal = _PREFIX + implementation
                patched._configs[id(config)] = config
    # Models with attention code of their own never call a registered function: every token would be lost.
    if not (text._attn_implementation or "").startswith(_PREFIX):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes attention by code of its own, which LKV cannot reach; use a model "
            "whose attention goes through transformers' AttentionInterface."
        )


def _check_implementation(model: Any) -> str:
    """The model's attention implementation. Raises UnsupportedModelError where LKV does not work over it."""
    base: str = model.config.get_text_config(decoder=True)._attn_implementation or "eager"
    if base not in _BASES and not base.startswith(_PREFIX):
        raise UnsupportedModelError(
            f"LKV does not work over the attention implementation {base!r} yet; load the model with "
            f"attn_implementation='sdpa', or one of {', '.join(_BASES[1:])}."
        )
    return base


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configuration objects of the model and of its parts."""
    parts = [getattr(model.config, name, None) for name in model.config.sub_configs]
    candidates = [model.config, *parts, *(getattr(module, "config", None) for module in model.modules())]
    return list({id(config): config for config in candidates if isinstance(config, PreTrainedConfig)}.values())


def _attention(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Compute the attention of one layer: the registered attention function."""
    # Models name the dropout and some the mask; libraries that wrap every attention function pass both by position.
    function = _eager_attention(module) if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]
    caller = _FlashModule(module, base) if base in _FLASH else module
    stock = partial(function, caller, query, key, value, attention_mask, dropout=dropout, **kwargs)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    if torch.compiler.is_dynamo_compiling() and (traced := take_traced_layer()) is not None:
        cache, index = traced
        _check_owner(cache.layers[index], module)
        is_stock = cache.layers[index].is_reading_prompt and not _would_need_mask(base, query, key, attention_mask)
        prompt = stock()[0] if is_stock else None
        return extend(cache.name, query, key, value, attention_mask, prompt, scale, index), None
    if has_pending_layer():
        return _attend(base, module, query, key, value, attention_mask, scale, stock)
    return stock()


def _eager_attention(module: nn.Module) -> Callable[..., Any]:
    """Return the eager attention of a module's class, or of the first of its bases whose file defines one."""
    name = "eager_attention_forward"
    files = (sys.modules.get(parent.__module__) for parent in type(module).__mro__)
    return next(getattr(file, name) for file in files if hasattr(file, name))


def _mask(base: str, *args: Any, **kwargs: Any) -> Any:
    """The mask of one kind of layer: that of the model, or `key_mask` where the layers of a cache need no more."""
    offset = kwargs.get("kv_offset", 0)
    if offset is NO_MASK:
        return None
    # A window as long as all of the text (Phi-3.5) hides nothing.
    window = kwargs.get("local_size")
    hides_nothing = window is not None and window >= offset + kwargs["kv_length"]
    # Models combine the causal function with others, and may ask for a whole mask to change it.
    is_causal = hides_nothing or kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    is_free = is_causal and kwargs.get("allow_is_causal_skip", True)
    # Eager attention adds its mask to the scores, and flash attention takes no 4-D mask anyway.
    if base != "sdpa" or not isinstance(offset, KeyOffset) or not is_free:
        return ALL_MASK_ATTENTION_FUNCTIONS[base](*args, **kwargs)
    # Before transformers 5.4 the positions of the queries are given, not their number.
    queries = kwargs["q_length"] if "q_length" in kwargs else len(kwargs["cache_position"])
    return key_mask(kwargs.get("attention_mask"), queries, kwargs["kv_length"], offset)


def _would_need_mask(base: str, query: Tensor, key: Tensor, mask: Any) -> bool:
    """Whether the model's own SDPA would need a 4-D mask; `attend_prompt` does without one."""
    has_padding = isinstance(mask, Tensor) and mask.ndim == 2
    return base == "sdpa" and (has_padding or (mask is None and query.shape[2] != key.shape[2]))


# Outside compiled graphs: the stored keys change shape with every token, and would be compiled each time.
@torch.compiler.disable
def _attend(
    base: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: partial[Any]
) -> tuple[Tensor, Any]:
    """Attention by the cache layer that returned `key`, or the model's own where no LKV layer did."""
    layer = take_pending_layer(key)
    if layer is None:
        return stock()
    _check_owner(layer, module)
    if isinstance(getattr(module, "sinks", None), Tensor) and not layer.takes_sinks:
        raise UnsupportedModelError(
            f"{type(module).__name__} has attention sinks, which neither the training of policies nor KVzip's second "
            "pass computes yet; use a method without either, such as snapkv."
        )
    is_own = _would_need_mask(base, query, key, mask)
    prompt = partial(attend_prompt, query, key, value, mask, scale) if is_own else lambda: stock()[0]
    return layer.attend(query, key, value, mask, scale, prompt), None


def _check_owner(layer: AttentionCacheLayer, module: Any) -> None:
    """Raise CacheError where `layer` stores k and v of another model than that of `module`."""
    owner = layer.model_config
    if owner is not None and getattr(module, "config", owner) is not owner:
        raise CacheError("this cache was made for another model; make one with RaggedCache(model, ...) for this model.")


class _FlashModule:
    """An attention module whose configuration names the flash attention that is called, not LKV's function over it."""

    def __init__(self, module: nn.Module, implementation: str):
        self._module = module
        self.config = _FlashConfig(module.config, implementation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _FlashConfig:
    def __init__(self, config: Any, implementation: str):
        self._config, self._attn_implementation = config, implementation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
