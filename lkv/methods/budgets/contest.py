"""Budgets that follow from a contest of the tokens by their scores."""

from typing import Any

import torch
from torch import Tensor

from lkv.errors import CacheError, check_retention
from lkv.methods.budgets.base import ROUNDING, Amount


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


class Contest:
    """`GlobalTopK` of a prompt still to be read: one contest of all heads of all layers, by any selector's scores.

    Under tensor parallelism the heads of one process compete.
    """

    def __init__(self, amount: Amount):
        self._amount = amount

    def for_prompt(self, selector: Any, prompt: list[Any]) -> GlobalTopK:
        """The budgets for one prompt, read into `prompt`, by the scores of `selector`."""
        scores = [selector.scores(index, layer) for index, layer in enumerate(prompt)]
        table = torch.stack([part.to(scores[0].device) for part in scores])
        return GlobalTopK(table, self._amount.of(table.shape[-1]))

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        raise CacheError(
            "one contest of all layers needs all of them before it evicts from the first: compress the text with "
            "lkv.compress(..., method=...), or use another budget rule."
        )
