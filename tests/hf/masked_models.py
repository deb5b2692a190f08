"""The stock model of any kinds of layers, with a -inf mask on what a method evicts, and parts of it for others."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lkv.hf.attention import patch_attention
from lkv.hf.cache_argument import pass_arguments
from lkv.hf.spec import decoder_kinds
from lkv.methods.budgets import PerHead
from lkv.methods.method import Method
from tests.cache.helpers import RATIOS, OwnScores, score

PROMPT = 40


def method_of(model: Any) -> Method:
    spec = patch_attention(model).spec
    ratios = [[RATIOS[layer % 3][head % 2] for head in range(spec.kv_heads)] for layer in range(spec.layers)]
    return Method("own", PerHead(ratios), OwnScores())


@torch.no_grad()
def read(model: Any, cache: Any, text: Tensor, chunks: Sequence[int] = (1, 4, 1)) -> Tensor:
    """Logits of `text`, fed in parts of `chunks` tokens."""
    return torch.cat([model(part, **pass_arguments(cache, part)).logits for part in text.split([*chunks], 1)], 1)


def replace_attention(module: Any, is_eager: bool, attend: Any, monkeypatch) -> Any:
    """Have models of `module` attend by `attend`; returns what they did before."""
    if is_eager:
        stock = module.eager_attention_forward
        monkeypatch.setattr(module, "eager_attention_forward", attend)
    else:
        stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend)
    return stock


def hide(gone: Tensor, key: Tensor, value: Tensor, ratios: Sequence[float]) -> None:
    """Mark in `gone` [B, H, t] what heads that keep their best floor(r t) of t tokens lose."""
    tokens = gone.shape[2]
    table = score(key[:, :, :tokens], value[:, :, :tokens]).masked_fill(gone, -torch.inf)
    for head, ratio in enumerate(ratios):
        worst = table[:, head].argsort(-1)[:, : tokens - int(ratio * tokens + 1e-6)]
        gone[:, head].scatter_(1, worst, True)


class Masked:
    """The stock model whose heads, at the passes that begin at `places`, keep their best floor(r t) of t tokens."""

    def __init__(self, model: Any, method: Method, places: Sequence[int], monkeypatch):
        own, self._ratios = sys.modules[type(model).__module__], method.budget
        kinds = decoder_kinds(model)
        self._places, self._layers = {*places}, sum(kind.is_evicted for kind in kinds)
        # The number of the layer whose k and v a later layer reads.
        evicted = [kind for kind in kinds if kind.is_evicted]
        self._producers = {index: number for number, kind in enumerate(evicted) for index in kind.readers}
        names = "sliding_attention", "chunked_attention"
        windows = [(index, kind) for index, kind in enumerate(kinds) if kind.name in names]
        self._windows = {layer for index, kind in windows for layer in (index, *kind.readers)}
        self._hidden: dict[int, Tensor] = {}  # of each layer, [B, H, T]
        self._calls = 0
        is_eager = model.config._attn_implementation.endswith("eager")
        self._stock = replace_attention(own, is_eager, self, monkeypatch)

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        if getattr(module, "layer_idx", None) in self._windows:
            return self._stock(module, query, key, value, mask, **kwargs)
        batch, heads, tokens, _ = key.shape
        if (producer := self._producers.get(getattr(module, "layer_idx", None))) is not None:
            mask = self._mask(self._hidden[producer], query)
            return self._stock(module, query, key, value, mask, **kwargs)
        layer, self._calls = self._calls % self._layers, self._calls + 1
        start = tokens - query.shape[2]
        gone = self._hidden.get(layer, torch.zeros(batch, heads, 0, dtype=torch.bool))
        gone = torch.cat([gone, torch.zeros(batch, heads, tokens - gone.shape[2], dtype=torch.bool)], 2)
        if start in self._places:
            hide(gone[:, :, :start], key, value, self._ratios.ratios(layer, heads, start))
        self._hidden[layer] = gone
        return self._stock(module, query, key, value, self._mask(gone, query), **kwargs)

    def _mask(self, gone: Tensor, query: Tensor) -> Tensor:
        """The additive mask of the last tokens, from which the entries `gone` [B, H, T] are hidden."""
        own = torch.arange(gone.shape[2])
        hidden = gone[:, :, None] | (own[-query.shape[2] :, None] < own)
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, -torch.inf)
        return mask.repeat_interleave(query.shape[1] // gone.shape[1], 1)


def masked(
    model: Any, method: Method, text: Tensor, chunks: Sequence[int], places: Sequence[int], monkeypatch
) -> Tensor:
    with monkeypatch.context() as patch:
        Masked(model, method, places, patch)
        return read(model, DynamicCache(config=model.config), text, chunks)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def turns(model: Any) -> list[int]:
    """The tokens of the passes after a prompt, 6 in all."""
    is_stepwise = any(kind.is_stepwise for kind in patch_attention(model).kinds)
    return [1] * 6 if is_stepwise else [1, 4, 1]
