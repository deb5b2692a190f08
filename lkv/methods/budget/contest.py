"""Budgets that follow from a contest of the tokens by their scores."""

import torch
from torch import Tensor

from lkv.errors import check_retention
from lkv.methods.budget.base import ROUNDING


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
