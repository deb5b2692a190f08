"""CriticalKV (Feng et al. 2025)."""

from typing import Any

import torch
from torch import Tensor

from lkv.host.spec import output_projections
from lkv.methods.selection.base import Selector, precise
from lkv.prefill import PromptLayer

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
    def scores(self, layer: int, prompt: PromptLayer) -> Tensor:
        attention = precise(self._inner.scores(layer, prompt))
        if bool((attention < 0).any()):
            raise ValueError(
                f"CriticalKV weighs scores by the size of the values, and {type(self._inner).__name__} gives scores "
                "below 0; wrap a selector of attention, such as SnapKV, H2O or ExpectedAttention."
            )
        refined = (attention + self._epsilon) * self._norms(layer, prompt.value)
        rows = [
            _ranks(first, second, self._first_stage)
            for first, second in zip(_order(attention), _order(refined), strict=True)
        ]
        return -torch.tensor(rows, dtype=torch.float32, device=attention.device).view(attention.shape)

    def _norms(self, layer: int, value: Tensor) -> Tensor:
        """L1 norms [B, H, T] of the projected values, averaged over a KV head's query heads."""
        heads, dim = value.shape[1], value.shape[-1]
        # [H, G, d, hidden]
        weight = self._weights[layer].t().unflatten(0, (heads, -1, dim))
        weight = precise(weight.to(value.device))
        parts = []
        for block in precise(value).split(_ROWS, 2):
            norms = torch.stack([(block @ weight[:, g]).abs().sum(-1) for g in range(weight.shape[1])])
            parts.append(norms.mean(0))
        return torch.cat(parts, -1)


def _order(scores: Tensor) -> list[list[int]]:
    """The tokens of every head, the best first."""
    return scores.flatten(0, 1).argsort(stable=True, dim=-1, descending=True).tolist()


def _ranks(first: list[int], second: list[int], share: float) -> list[int]:
    """The place of each token when a budget grows one by one, floor(share n) of n being chosen in the order `first`."""
    tokens = len(first)
    ranks = [-1] * tokens
    chosen = next_second = 0
    for rank in range(tokens):
        token = -1
        if int((rank + 1) * share + 1e-9) > chosen:
            # One place more for the first stage; where it falls to a token of the second, that one's place is free.
            token = first[chosen]
            chosen += 1
        if token < 0 or ranks[token] >= 0:
            while ranks[second[next_second]] >= 0:
                next_second += 1
            token = second[next_second]
        ranks[token] = rank
    return ranks
