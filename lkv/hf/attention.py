"""LKV's attention inside a transformers model, used for LKV's caches only.

One layer of a forward pass runs as follows. The model's attention module calls `cache.update`; an LKV cache records
which layer returned which keys (`state.note_pending_layer`). The module then looks up its attention function in
transformers. While a layer is pending in this thread, the look-up returns `_attention`, which finds the layer by its
keys and calls its `attend`. The model's configuration and attributes do not change.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from lkv.errors import CacheError, UnsupportedModelError
from lkv.hf.base_cache import NO_MASK
from lkv.hf.cache_layers import AttentionCacheLayer
from lkv.hf.compiled import extend
from lkv.hf.generate_hook import NO_WEIGHTS, wrap_generation
from lkv.hf.masks import KeyOffset, Mask, MaskOffset, attend_prompt, key_mask
from lkv.hf.model_spec import ModelSpec
from lkv.hf.position_hook import record_positions
from lkv.hf.rotation import layer_rotations
from lkv.hf.spec import attention_sinks, check_adapters, decoder_kinds, inspect_model, local_kv_heads, unwrap_model
from lkv.hf.state import (
    NOT_PATCHED,
    PatchedModel,
    get_patch,
    has_waiting_layer,
    patch_of_config,
    set_patch,
    take_pending_layer,
    take_shared_layer,
    take_traced_layer,
)
from lkv.hf.state_probe import probed_kinds
from lkv.hf.weight_digests import WeightDigests, settings

_IMPLEMENTATIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # RoPE types with frequencies by text length


def patch_attention(model: PreTrainedModel, spec: ModelSpec | None = None) -> PatchedModel:
    """Register LKV's attention for `model`, so that it works with LKV caches.

    The model's configuration, attributes and results with other caches do not change. Idempotent: the model is
    inspected once, and every LKV entry point calls this itself. `unpatch_attention` undoes it.

    Args:
        model: A causal language model with attention implementation "sdpa", "eager", "flash_attention_2" or
            "flash_attention_3"; it may be wrapped by PEFT.
        spec: The model's description, needed if its weights are in other processes and cannot be read here.

    Returns:
        The inspected properties of the model.

    Raises:
        UnsupportedModelError: If eviction cannot work in this model.
    """
    check_adapters(model)
    model = unwrap_model(model)
    patched = get_patch(model)
    if patched is None or patched.config is not model.config.get_text_config(decoder=True):
        has_weights, spec = spec is None, spec or inspect_model(model)
        text_config = model.config.get_text_config(decoder=True)
        _check_attention_code(model, text_config)  # before the first forward pass
        patched = PatchedModel(
            spec=spec,
            kinds=probed_kinds(model) if has_weights else tuple(decoder_kinds(model)),
            heads=local_kv_heads(model),
            rotations=layer_rotations(model, has_weights),
            sinks=tuple(attention_sinks(model)),
            softcap=getattr(text_config, "attn_logit_softcapping", None),
            config=text_config,
            position_hook=record_positions(model),
            weights=WeightDigests(model) if has_weights else None,
        )
        _patch_attention_interface()
        wrap_generation(type(model))
        set_patch(model, patched)
    _check_implementation(patched.config._attn_implementation)
    return patched


def unpatch_attention(model: PreTrainedModel) -> None:
    """Undo `patch_attention`: LKV caches no longer work in the model until it is patched again.

    Does nothing for a model that is not patched.

    Args:
        model: A model that was passed to `patch_attention`, `RaggedCache`, `compress` or another entry point.
    """
    set_patch(unwrap_model(model), None)


def read_weights(model: PreTrainedModel) -> dict[str, str]:
    """Return the digests of `WeightDigests.read` of a model and its `settings`, empty if weights cannot be read here.

    A model whose weights have changed since it was patched is inspected again.
    """
    weights, own = patch_attention(model).weights, unwrap_model(model)
    if weights is not None and not weights.are_of(own):
        unpatch_attention(model)
        weights = patch_attention(model).weights
    return {} if weights is None else settings(own.config) | weights.read(own)


@contextmanager
def attention_patched(model: PreTrainedModel) -> Iterator[PatchedModel]:
    """Patch the attention of `model` for the duration of a `with` block.

    A model that was already patched stays patched afterwards.

    Args:
        model: As for `patch_attention`.

    Yields:
        The inspected properties of the model.
    """
    was_patched = get_patch(unwrap_model(model)) is not None
    try:
        yield patch_attention(model)
    finally:
        if not was_patched:
            unpatch_attention(model)


def has_length_dependent_rope(model: PreTrainedModel) -> bool:
    """Return whether RoPE frequencies depend on the length of the longest text in a batch (dynamic NTK, LongRoPE).

    Such a model cannot batch different texts, and its passes must not run concurrently.
    """
    return any(kind in patch_attention(model).spec.rope for kind in _LENGTH_DEPENDENT_ROPE)


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device on which the model takes its token ids."""
    weight: Any = model.get_input_embeddings().weight
    return weight.device


def _check_implementation(implementation: str | None) -> None:
    """Raise UnsupportedModelError for an attention implementation that LKV does not support."""
    if implementation not in (None, *_IMPLEMENTATIONS):
        raise UnsupportedModelError(
            f"LKV does not work over the attention implementation {implementation!r} yet; load the model with "
            f"attn_implementation='sdpa', or one of {', '.join(_IMPLEMENTATIONS[1:])}."
        )


def _check_attention_code(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError for a model that does not use transformers' attention interface."""
    _check_implementation(config._attn_implementation)
    if config._attn_implementation == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} caps attention scores, which the implementation 'sdpa' leaves out; load the model "
            "with attn_implementation='eager'."
        )
    # With this option GPT-2 uses its own eager attention.
    is_reordered = config._attn_implementation == "eager" and getattr(config, "reorder_and_upcast_attn", False)
    if is_reordered or not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{type(model).__name__} computes attention by code of its own, which LKV cannot reach; use a model whose "
            "attention goes through transformers' AttentionInterface"
            + (", or this one with attn_implementation='sdpa'." if is_reordered else ".")
        )


@functools.cache
def _patch_attention_interface() -> None:
    """Make transformers look up LKV's attention and mask functions in passes with an LKV cache."""
    look_up = AttentionInterface.get_interface

    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function: Callable[..., Any] = look_up(self, attn_implementation, default)
        return functools.partial(_attention, attn_implementation, function) if has_waiting_layer() else function

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]
    for name in _IMPLEMENTATIONS:
        AttentionMaskInterface.register(name, functools.partial(_mask, name, ALL_MASK_ATTENTION_FUNCTIONS[name]))


def _attention(
    base: str,
    function: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, Any]:
    """Compute the attention of one layer.

    `function` is the attention function that transformers would call, registered as `base`.
    """
    # Models pass dropout, and some the mask, by keyword; wrappers of attention functions pass both by position.
    model_attention = functools.partial(function, module, query, key, value, attention_mask, dropout=dropout, **kwargs)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    if torch.compiler.is_dynamo_compiling() and (traced := take_traced_layer()) is not None:
        cache, index = traced
        layer = cache.layers[index]
        _check_owner(layer, module)
        runs_model_attention = layer.is_before_eviction and not _would_need_mask(base, query, key, attention_mask)
        model_output = model_attention()[0] if runs_model_attention else None
        return extend(cache.name, query, key, value, attention_mask, model_output, scale, index), None
    return _attend(base, module, query, key, value, attention_mask, scale, model_attention)


def _mask(base: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the mask of one kind of layer: `key_mask` where it is enough for an LKV cache, else the model's mask."""
    offset = kwargs.get("kv_offset", 0)
    if offset is NO_MASK:
        return None
    if isinstance(offset, MaskOffset) and kwargs.get("dtype") == torch.float64:
        # Eager attention adds the mask and computes the softmax in float32, in which the least float64 is -inf: rows
        # of padding, which see nothing, would be NaN.
        kwargs["dtype"] = torch.float32
    # Only SDPA can use a `key_mask` instead of a 4-D mask: eager attention adds its mask to the scores, flash attention
    # takes no 4-D mask, and models whose layers share k and v slice the rows of theirs.
    has_rows = getattr(kwargs.get("config"), "num_kv_shared_layers", 0) and kwargs.get("attention_mask") is not None
    if base != "sdpa" or not isinstance(offset, KeyOffset) or has_rows:
        return function(*args, **kwargs)
    # A window as long as the whole text (Phi-3.5) masks nothing.
    window = kwargs.get("local_size")
    hides_nothing = window is not None and window >= offset + kwargs["kv_length"]
    # Models combine the causal mask function with others, and may request a full mask to modify it.
    is_causal = hides_nothing or kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    if not (is_causal and kwargs.get("allow_is_causal_skip", True)):
        return function(*args, **kwargs)
    # Before transformers 5.4 this is the positions of the queries instead of their number.
    queries = kwargs["q_length"] if "q_length" in kwargs else len(kwargs["cache_position"])
    return key_mask(kwargs.get("attention_mask"), queries, kwargs["kv_length"], offset)


def _would_need_mask(base: str, query: Tensor, key: Tensor, mask: Mask) -> bool:
    """Return whether the model's own SDPA would need a 4-D mask; `attend_prompt` does not."""
    has_padding = isinstance(mask, Tensor) and mask.ndim == 2
    return base == "sdpa" and (has_padding or (mask is None and query.shape[2] != key.shape[2]))


# Kept out of compiled graphs: stored keys change shape with every token, which would recompile each time.
@torch.compiler.disable
def _attend(
    base: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float,
    model_attention: functools.partial[Any],
) -> tuple[Tensor, Any]:
    """Compute attention with the cache layer that returned `key`, or the model's own if no LKV layer did."""
    layer = take_pending_layer(key)
    is_reader = layer is None
    if layer is None and (layer := take_shared_layer(key)) is None:
        return model_attention()
    _check_owner(layer, module)
    _check_implementation(base)
    if (patched := patch_of_config(module.config)) is None:
        raise CacheError(NOT_PATCHED)
    options = model_attention.keywords
    if options.get("softcap") != patched.softcap:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not cap attention scores at {patched.softcap}, as its configuration says; "
            "set attn_logit_softcapping=None there."
        )
    is_requested = options.get("output_attentions") or getattr(module.config, "output_attentions", False)
    if is_requested or _are_weights_collected():
        raise CacheError(NO_WEIGHTS)
    attend_full = (
        functools.partial(attend_prompt, query, key, value, mask, scale)
        if _would_need_mask(base, query, key, mask)
        else lambda: model_attention()[0]
    )
    attend = layer.attend_again if is_reader else layer.attend
    out = attend(query, key, value, mask, scale, attend_full)
    if layer.is_detached and any(x.requires_grad for x in (query, key, value)):
        out = _NoGradients.apply(out, query, key, value)
    return out, None


class _NoGradients(torch.autograd.Function):
    """Refuses gradients of attention over entries that are detached from the pass that made them."""

    @staticmethod
    def forward(context: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> None:
        raise CacheError(
            "gradients do not pass through a compressed cache, whose entries are detached: train without it, or on "
            "prompts that are read in one pass, or read under torch.no_grad()."
        )


def _are_weights_collected() -> bool:
    """Return whether transformers collects attention weights by hooks, without passing the request to the layers."""
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    return collector is not None and "attentions" in (collector.get() or ())


def _check_owner(layer: AttentionCacheLayer, module: object) -> None:
    """Raise CacheError if `layer` stores k and v of a model other than the one `module` belongs to."""
    owner = layer.model_config
    if owner is not None and getattr(module, "config", owner) is not owner:
        raise CacheError("this cache was made for another model; make one with RaggedCache(model, ...) for this model.")
