"""Probe how a model's code uses recurrent states, by reading a few tokens."""

from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from lkv.errors import UnsupportedModelError
from lkv.hf.cache_argument import pass_arguments
from lkv.hf.other_layers import LayerKind
from lkv.hf.spec import decoder_kinds, evaluation_mode

_TOKENS = 8  # longer than convolution kernels
_TOLERANCE = 0.1  # share of the norm: above rounding in 16 bits, below the effect of an ignored state


@torch.no_grad()
def probed_kinds(model: PreTrainedModel) -> tuple[LayerKind, ...]:
    """Return the kind of each decoder layer, with `is_stepwise` set for recurrent layers that need single-token passes.

    After a text, the code of some models starts a pass of several tokens from empty states. Raises
    UnsupportedModelError for a model whose layers keep their states outside the cache.
    """
    kinds = tuple(decoder_kinds(model))
    if not any(kind.is_recurrent for kind in kinds):
        return kinds
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    weight: Any = model.get_input_embeddings().weight
    ids = torch.arange(2 * _TOKENS, device=weight.device)[None] * 31 % vocabulary
    cache = DynamicCache(config=model.config)
    with evaluation_mode(model):
        for part in ids.chunk(2, 1):
            split = model.base_model(input_ids=part, **pass_arguments(cache, part))[0]
        whole = model.base_model(input_ids=ids, use_cache=False)[0][:, _TOKENS:]
    recurrent: list[Any] = [layer for layer, kind in zip(cache.layers, kinds, strict=True) if kind.is_recurrent]
    if not all(all(layer.has_previous_state.values()) for layer in recurrent):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps recurrent states outside of its cache, where LKV cannot reach them; use "
            "another model."
        )
    if float((split - whole).norm()) <= _TOLERANCE * float(whole.norm()):
        return kinds
    return tuple(
        replace(kind, options=kind.options | {"is_stepwise": True}) if kind.is_recurrent else kind for kind in kinds
    )
