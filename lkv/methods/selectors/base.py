"""What every selector is: scores for the tokens of a prompt."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lkv.errors import CacheError, PromptError
from lkv.integrations.transformers.prefill import LayerKV, to_fp32


class ArrivedEntries(NamedTuple):
    """Entries of one head that arrived at different times: their `prompt` (k, v [1, 1, n, d], of which `end` is where
    the text ends now), the `positions` [n] they were read at, and the `scores` [n] they got on arrival."""

    prompt: LayerKV
    positions: Tensor
    scores: Tensor


class Selector(ABC):
    """Scores the tokens of a prompt once a layer has attended over it.

    A class declares what it reads besides k and v: with `reads_queries` the prompt has its queries, all of them or the
    last `last_queries`.
    """

    reads_queries = False
    last_queries: int | None = None  # how many of the prompt's last queries it reads, where it does not read all
    # Entries can be scored and evicted while the text goes on: a score on arrival, completed at each eviction.
    is_local = False
    # It reads a whole prompt, already read by the model, before it can score (`for_prompt`).
    has_second_pass = False

    def for_prompt(self, ids: Sequence[int], prompt: list[LayerKV]) -> "Selector":
        """What scores the one prompt `ids`, already read into `prompt`: this selector itself, for most."""
        return self

    @abstractmethod
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Scores [B, H, T], higher is kept, of the T tokens of one layer of a prompt."""

    def score_on_arrival(self, layer: int, prompt: LayerKV) -> Tensor:
        """The part [B, H, T] of a local selector's scores that is final when its tokens arrive."""
        return self.scores(layer, prompt)

    def score_at_eviction(self, layer: int, head: int, entries: ArrivedEntries) -> Tensor:
        """The scores [n] of the `entries` that head number `head` (of those here) holds, completed."""
        return entries.scores


class GivenScores(Selector):
    """Scores computed elsewhere, as a table [L, B, H, T]."""

    def __init__(self, table: Tensor):
        self._table = table

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        # The layers of a model may lie on several devices, the table lies on one.
        return self._table[layer].to(prompt.key.device)


def check_shape(selector: Selector, scores: Tensor, key: Tensor) -> Tensor:
    """Return `scores` if there is one for each token of `key` [B, H, T, d]; raise CacheError, which names the selector,
    for another shape than [B, H, T]."""
    name, shape = type(selector).__name__, tuple(key.shape[:3])
    if not isinstance(scores, Tensor) or tuple(scores.shape) != shape:
        given = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise CacheError(
            f"the selector {name} gave scores {given} for {shape} tokens of each row and head; make its scores() "
            "return one number for every token, [B, H, T]."
        )
    return scores


def not_numbers(scores: Tensor) -> Tensor:
    """Whether some of `scores` are no numbers, on their device, which is not waited for."""
    # The largest of numbers with NaN among them is NaN; a mask of all would cost memory.
    return scores.amax().isnan()


def check_numbers(selector: Selector, doubts: Sequence[Tensor]) -> None:
    """Raise CacheError, which names the selector, where one of `doubts` (`not_numbers` of its scores) is true."""
    if doubts and bool(torch.stack([doubt.to(doubts[-1].device) for doubt in doubts]).any()):
        raise CacheError(
            f"the selector {type(selector).__name__} gave scores that are not a number (NaN), by which nothing can be "
            "ranked; make its scores() return finite numbers."
        )


def check_sinks(selector: Selector, tokens: int, sinks: int) -> None:
    """Raise PromptError for a prompt that has no token besides the first `sinks`."""
    if tokens <= sinks:
        raise PromptError(
            f"the prompt has {tokens} tokens, but {type(selector).__name__} always keeps the first {sinks} and needs "
            "more than that; give a longer prompt, fewer sinks or another method."
        )


__all__ = ["ArrivedEntries", "GivenScores", "Selector", "check_sinks", "to_fp32"]
