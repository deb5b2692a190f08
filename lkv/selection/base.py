"""What every selector is: scores for the tokens of a prompt."""

from abc import ABC, abstractmethod

from torch import Tensor


class Selector(ABC):
    """Scores the tokens of a prompt once a layer has attended over it."""

    reads_queries = False
    # A token's score depends on its own k and v alone: computed once, it is final, however the text goes on.
    local = False

    @abstractmethod
    def scores(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Scores [B, H, T], higher is kept; `query` [B, Hq, T, d] (None where no selector reads it), `key` and `value`
        [B, H, T, d], after RoPE."""


class GivenScores(Selector):
    """Scores computed elsewhere, as a table [L, B, H, T]."""

    def __init__(self, table: Tensor):
        self._table = table

    def scores(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return self._table[layer]
