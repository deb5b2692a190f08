"""CriticalKV (Feng et al. 2025)."""

from typing import Any

import torch
from torch import Tensor

from lkv.integrations.transformers.prefill import LayerKV
from lkv.integrations.transformers.spec import output_projections
from lkv.methods.selectors.base import Selector, to_fp32

_ROWS = 256  # projected values held at a time


class CriticalKV(Selector):
    """CriticalKV (Feng et al. 2025): another selector's choice, refined by how much a value can change the output.

    Of whatever a head may keep, the share `first_stage` goes to the best by the inner selector's scores; the rest to
    the best by (score + `epsilon`) times the L1 norm of the value after the output projection, averaged over the query
    heads that share the KV head. One ranking holds for all budgets, because a larger one keeps all that a smaller one
    does: the scores are minus the ranks, and say nothing across heads.

    The inner selector must give attention-like scores: ValueError where one is below 0. What it protects stays first.
    Raises UnsupportedModelError for a model whose output projections cannot be read.
    """

    def __init__(self, model: Any, inner: Selector, first_stage: float = 0.5, epsilon: float = 1e-4):
        if not 0.0 <= first_stage <= 1.0:
            raise ValueError(f"first_stage is {first_stage!r}, but it is a share of the budget and lies in [0, 1].")
        self._weights = output_projections(model)
        self._inner, self._first_stage, self._epsilon = inner, first_stage, epsilon
        self.reads_queries, self.last_queries = inner.reads_queries, inner.last_queries

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        attention = to_fp32(self._inner.scores(layer, prompt))
        if bool((attention < 0).any()):
            raise ValueError(
                f"CriticalKV weighs scores by the size of the values, and {type(self._inner).__name__} gives scores "
                "below 0; wrap a selector of attention, such as SnapKV, H2O or ExpectedAttention."
            )
        refined = (attention + self._epsilon) * self._norms(layer, prompt.value)
        first, second = _places(attention.flatten(0, 1)), _places(refined.flatten(0, 1))
        return -staged_ranks(first, second, self._first_stage).float().view(attention.shape)

    def _norms(self, layer: int, value: Tensor) -> Tensor:
        """L1 norms [B, H, T] of the projected values, averaged over a KV head's query heads."""
        heads, dim = value.shape[1], value.shape[-1]
        # [H, G, d, hidden]
        weight = self._weights[layer].t().unflatten(0, (heads, -1, dim))
        weight = to_fp32(weight.to(value.device))
        parts = []
        for block in to_fp32(value).split(_ROWS, 2):
            norms = torch.stack([(block @ weight[:, g]).abs().sum(-1) for g in range(weight.shape[1])])
            parts.append(norms.mean(0))
        return torch.cat(parts, -1)


def _places(scores: Tensor) -> Tensor:
    """The place [R, T] of each token in the order of `scores` [R, T], 0 for the best; of equal ones the earlier."""
    return _inverse(scores.argsort(stable=True, dim=-1, descending=True))


def staged_ranks(first: Tensor, second: Tensor, stage: float) -> Tensor:
    """The place [R, T] of each token when a budget grows one by one, c(n) = floor(stage n) of n chosen by `first` and
    the rest, of what that leaves, by `second`: places [R, T] in two orders.

    With D(c) of the tokens better in the second order left by the first c of the first one, a token is in at the
    smallest n with n - c(n) > D(c(n)), or once c(n) reaches its own place. D falls and n - c(n) rises with c, which is
    found bit by bit, for all tokens at once, by a wavelet matrix: it counts the tokens below two bounds.
    """
    tokens, last = first.shape[-1], int(first.shape[-1] * stage + 1e-9)
    steps = torch.arange(tokens + 2, device=first.device)
    counts = (steps[:-1].double() * stage + 1e-9).long()  # c(n)
    bits = (last + 1).bit_length()
    # The smallest n with c(n) >= c, tokens + 1 where there is none; and the largest n - c(n) with c(n) = c.
    earliest = torch.searchsorted(counts, torch.arange(max(tokens + 2, 1 << bits), device=first.device))
    slack = torch.where(steps[: last + 1] < last, earliest[1 : last + 2] - 1, tokens) - steps[: last + 1]
    slack = torch.nn.functional.pad(slack, (0, (1 << bits) - last - 1), value=tokens)  # beyond `last`: in at once

    # Places in the first order, by the second one; no bound reaches the greatest.
    values = first.gather(-1, _inverse(second)).clamp(max=(1 << bits) - 1)
    low, below = torch.zeros_like(first), torch.zeros_like(first)
    begin, end = torch.zeros_like(first), second  # where the tokens before this one stand among the values at hand
    at_once = slack[0] > second
    for bit in reversed(range(bits)):
        ones = values >> bit & 1
        zeros = torch.nn.functional.pad((1 - ones).cumsum(-1), (1, 0))
        total, before, upto = zeros[:, -1:], zeros.gather(-1, begin), zeros.gather(-1, end)
        under = below + upto - before
        left = slack[low + (1 << bit)] > second - under
        begin, end = torch.where(left, before, total + begin - before), torch.where(left, upto, total + end - upto)
        below, low = torch.where(left, below, under), torch.where(left, low, low + (1 << bit))
        target = torch.where(ones > 0, total + steps[:tokens] - zeros[:, :-1], zeros[:, :-1])
        values = torch.empty_like(values).scatter_(-1, target, values)
    # `low` is the largest c at which the token is out; the first c + 1 have one more, which may stand before it.
    c = torch.where(at_once, 0, low + 1)
    below = torch.where(at_once, 0, below + end - begin)
    enters = torch.maximum(earliest[c], c + second - below + 1)
    return torch.minimum(enters, earliest[first + 1]) - 1


def _inverse(order: Tensor) -> Tensor:
    """The inverse of each permutation [R, T]."""
    steps = torch.arange(order.shape[-1], device=order.device)
    return torch.empty_like(order).scatter_(-1, order, steps.expand_as(order))
