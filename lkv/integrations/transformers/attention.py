"""LKV's attention function inside a transformers model: keys that carry a hook (see `hooks`) go to it, all others to
the stock attention of the model."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lkv.config import ModelSpec
from lkv.errors import CacheError, UnsupportedModelError
from lkv.integrations.transformers.cache_layers import HOOK
from lkv.integrations.transformers.generation import announce_ids
from lkv.integrations.transformers.rotation import Rotation, layer_rotations
from lkv.integrations.transformers.spec import inspect_model, local_kv_heads, sliding_windows

_PREFIX = "lkv_"
_ATTACHED = "_lkv_attached"
# On a cache of pages: what computes the attention over it and over what lies elsewhere (see `paged`).
PAGED = "_lkv_paged"


@dataclass(frozen=True)
class PatchedModel:
    """What LKV read of a model that it is attached to.

    `windows`: the sliding window of each layer, None where a layer is evicted from; `heads`: the KV heads computed in
    this process; `rotations`: the RoPE of each layer that is evicted from, None where LKV cannot undo it; `config`: its
    configuration object.
    """

    spec: ModelSpec
    windows: tuple[int | None, ...]
    heads: slice
    rotations: tuple[Rotation | None, ...]
    config: Any


def patch_attention(model: Any, spec: ModelSpec | None = None) -> PatchedModel:
    """Let LKV caches work in `model`, whatever attention implementation it has; other caches behave as before.

    Idempotent; the model is read once. `spec` tells what it is where its weights are not here to be read. Raises
    UnsupportedModelError where eviction cannot work.
    """
    attached = getattr(model, _ATTACHED, None)
    if attached is None or attached.config is not model.config:
        spec = spec or inspect_model(model)
        attached = PatchedModel(
            spec, tuple(sliding_windows(model)), local_kv_heads(model), layer_rotations(model), model.config
        )
    _let_in(model)
    setattr(model, _ATTACHED, attached)
    return attached


def input_device(model: Any) -> torch.device:
    """Where the model takes its ids."""
    return model.get_input_embeddings().weight.device


def _let_in(model: Any) -> None:
    """Register LKV's attention over the model's own and switch the model to it."""
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
    announce_ids(model)


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
    # Models name the dropout, some the mask too; libraries that wrap every attention function give it by its place.
    stock = partial(_stock(base, module), module, query, key, value, attention_mask, dropout=dropout, **kwargs)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    hook = getattr(key, HOOK, None)
    if hook is None:
        paged = getattr(kwargs.get("cache"), PAGED, None)
        return stock() if paged is None else (paged(module, query, key, value, scale, kwargs), None)
    owner = hook.__self__.model_config
    if owner is not None and getattr(module, "config", owner) is not owner:
        raise CacheError("this cache was made for another model; make one with RaggedCache(model, ...) for this model.")
    return _hooked(hook, query, key, value, attention_mask, scale, lambda: stock()[0]), None


@torch.compiler.disable
def _hooked(hook: Callable[..., Tensor], *args: Any) -> Tensor:
    """Out of a compiled graph: what a layer holds changes shape with every token, and would be compiled every time."""
    return hook(*args)


def _stock(base: str, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    if base == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model` in eval mode for the duration, with its training flag put back afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
