"""Budget rules: how many tokens each KV head may keep."""

from typing import Protocol

import torch
from torch import Tensor

from lkv.errors import check_retention
from lkv.policy import Policy

# r t is rounded down (Sec. 3.3); the margin keeps 0.15 x 4000 = 599.9999 from losing a token to rounding.
ROUNDING = 1e-6


class Budget(Protocol):
    """A rule that turns a retention into token counts."""

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        """How many tokens each head of `layer` keeps, [B][H], given its scores [B, H, T]."""
        ...


class Uniform:
    """Every head keeps the same share."""

    def __init__(self, retention: float):
        self._retention = check_retention(retention)

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        batch, heads, tokens = scores.shape
        return [[int(self._retention * tokens + ROUNDING)] * heads] * batch


class PerHead:
    """Each head keeps floor(r t) tokens by its own fixed ratio r, from a list [L][H]."""

    def __init__(self, ratios: list[list[float]]):
        self._ratios = ratios

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        batch, _, tokens = scores.shape
        return [[min(tokens, int(ratio * tokens + ROUNDING)) for ratio in self._ratios[layer]]] * batch


class LearnedBudget(PerHead):
    """LKV-H: the policy's ratios, fixed after training (Sec. 3.3)."""

    def __init__(self, policy: Policy, retention: float):
        super().__init__(policy.inference_ratios(retention).tolist())


class GlobalTopK:
    """One contest of all tokens of all heads by raw scores [L, B, H, T] (KVzip's rule)."""

    def __init__(self, table: Tensor, retention: float):
        layers, _, heads, tokens = table.shape
        room = int(check_retention(retention) * layers * heads * tokens + ROUNDING)
        best = table.transpose(0, 1).flatten(1).topk(room, -1).indices // tokens
        winners = [torch.bincount(row, minlength=layers * heads).view(layers, heads) for row in best]
        self._counts = torch.stack(winners, 1)

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        return self._counts[layer].tolist()
