"""What every selector is: scores for the tokens of a prompt."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lkv.errors import CacheError, PromptError
from lkv.integrations.transformers.prefill import LayerKV
from lkv.methods.registry import Buildable


class ArrivedEntries(NamedTuple):
    """Entries of one head that arrived at different times."""

    prompt: LayerKV  # their k and v [1, 1, n, d]; its `end` is where the text ends now
    positions: Tensor  # [n], that they were read at
    scores: Tensor  # [n], that they got on arrival


class Selector(Buildable, ABC):
    """Scores the tokens of a prompt, once a layer has attended over it.

    A subclass implements `scores`, declares what it reads, and is registered with
    `lkv.methods.registry.register_selector` (in this package) or `lkv.register_method` (in any other).

    Attributes:
        reads_queries: whether it reads `prompt.query`.
        last_queries: how many of the prompt's last queries it reads, where it does not read all.
        is_local: whether a token's score depends on its own k and v alone, so that a text can be evicted from while it
            is still being read: `score_on_arrival`, completed by `score_at_eviction`.
        has_second_pass: whether it needs the whole prompt, already read by the model, before it scores (`for_prompt`).
        refines: whether its ranking depends on how many tokens each head keeps (`refine`).
    """

    reads_queries = False
    last_queries: int | None = None
    is_local = False
    has_second_pass = False
    refines = False

    def for_prompt(self, ids: Sequence[int], prompt: list[LayerKV]) -> "Selector":
        """The selector for the one prompt `ids`, already read into `prompt`: itself, for most."""
        return self

    @abstractmethod
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Score the tokens of one layer of a prompt.

        Args:
            layer: number of the layer, among those evicted from.
            prompt: its keys and values [B, H, T, d] after RoPE, and what else the class has declared.

        Returns:
            Scores [B, H, T]; of each head the tokens with the highest are kept.
        """

    def refine(self, layer: int, prompt: LayerKV, scores: Tensor, counts: list[list[int]]) -> Tensor:
        """Rank the tokens again by new `scores` [B, H, T], now that each head is known to keep `counts` [B][H]."""
        return scores

    def score_on_arrival(self, layer: int, prompt: LayerKV) -> Tensor:
        """The part [B, H, T] of a local selector's scores that is final when its tokens arrive."""
        return self.scores(layer, prompt)

    def score_at_eviction(self, layer: int, head: int, entries: ArrivedEntries) -> Tensor:
        """The completed scores [n] of the `entries` of head number `head`, counted within this process."""
        return entries.scores


class PrecomputedScores(Selector):
    """Scores computed elsewhere, as a table [L, B, H, T]."""

    def __init__(self, table: Tensor):
        self._table = table

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """The layer's part of the table."""
        # The layers of a model may lie on several devices, the table lies on one.
        return self._table[layer].to(prompt.key.device)


def check_shape(selector: Selector, scores: Tensor, key: Tensor) -> Tensor:
    """Return `scores` if they have the shape [B, H, T] of `key`; raise CacheError, naming the selector, otherwise."""
    name, shape = type(selector).__name__, tuple(key.shape[:3])
    if not isinstance(scores, Tensor) or tuple(scores.shape) != shape:
        given = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise CacheError(
            f"expected scores of shape {shape} from the selector {name} but got {given}; make its scores() return one "
            "number for every token, [B, H, T]."
        )
    return scores


def not_numbers(scores: Tensor) -> Tensor:
    """Whether `scores` contain NaN, as a tensor on their device, which is not waited for."""
    # The largest of numbers with NaN among them is NaN; a mask of all would cost memory.
    return scores.amax().isnan()


def check_numbers(selector: Selector, checks: Sequence[Tensor]) -> None:
    """Raise CacheError, which names the selector, where one of `checks` (`not_numbers` of its scores) is true."""
    if checks and bool(torch.stack([check.to(checks[-1].device) for check in checks]).any()):
        raise CacheError(
            f"the scores of the selector {type(selector).__name__} contain NaN, so tokens cannot be ranked by them; "
            "make its scores() return numbers."
        )


def check_sinks(selector: Selector, tokens: int, sinks: int) -> None:
    """Raise PromptError for a prompt that has no token besides the first `sinks`."""
    if tokens <= sinks:
        raise PromptError(
            f"the prompt has {tokens} tokens, but {type(selector).__name__} always keeps the first {sinks} and needs "
            "more than that; give a longer prompt, fewer sinks or another method."
        )
