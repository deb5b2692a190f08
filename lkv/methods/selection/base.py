"""What every selector is: scores for the tokens of a prompt."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lkv.errors import CacheError, PromptError


class Selector(ABC):
    """Scores the tokens of a prompt once a layer has attended over it."""

    reads_queries = False
    last_queries: int | None = None  # how many of the prompt's last queries it reads, where it does not read all
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


def check_scores(selector: Selector, scores: Tensor, key: Tensor) -> Tensor:
    """Return `scores` if they can rank the tokens of `key` [B, H, T, d]; raise CacheError, which names the selector,
    for another shape than [B, H, T] or values that are no numbers."""
    name, shape = type(selector).__name__, tuple(key.shape[:3])
    if not isinstance(scores, Tensor) or tuple(scores.shape) != shape:
        given = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise CacheError(
            f"the selector {name} gave scores {given} for {shape} tokens of each row and head; make its scores() "
            "return one number for every token, [B, H, T]."
        )
    if bool(scores.isnan().any()):
        raise CacheError(
            f"the selector {name} gave scores that are not a number (NaN), by which nothing can be ranked; make its "
            "scores() return finite numbers."
        )
    return scores


def precise(x: Tensor) -> Tensor:
    """`x` in float32 or better: in 16 bits the scores of many tokens would be equal."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def grouped(selector: Selector, query: Tensor | None, heads: int) -> Tensor:
    """Queries [B, Hq, T, d] by the KV head that they read, [B, H, Hq / H, T, d].

    Raises ValueError where there are none.
    """
    if query is None:
        raise ValueError(f"{type(selector).__name__} reads the queries; call read_prompt with queries=True.")
    return query.unflatten(1, (heads, -1))


def check_sinks(selector: Selector, tokens: int, sinks: int) -> None:
    """Raise PromptError for a prompt that has no token besides the first `sinks`."""
    if tokens <= sinks:
        raise PromptError(
            f"the prompt has {tokens} tokens, but {type(selector).__name__} always keeps the first {sinks} and needs "
            "more than that; give a longer prompt, fewer sinks or another method."
        )
