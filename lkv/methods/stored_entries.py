"""The entries that are left of a text, as selectors score them for later evictions."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lkv.hf.prompt_kv import LayerKV
from lkv.hf.rotation import Rotation


class ArrivedEntries(NamedTuple):
    """Entries of one head that arrived at different times."""

    kv: LayerKV  # k and v [1, 1, n, d]; `kv.end` is the current end of the text
    positions: Tensor  # [n], original positions
    scores: Tensor  # [n], as computed on arrival


class StoredEntries(NamedTuple):
    """The entries of one layer's pools; the last entries of each head may have no scores yet.

    Attributes:
        key: [P, d].
        value: [P, dv].
        scores: float32 [P], as computed on arrival.
        positions: int32 [P], original positions, including the row's padding.
        pool_starts: int32 [B, H], the index of the first entry of each head in the pools.
        counts: int32 [B, H], the entries of each head.
        spans: (start, count) of each row and head, in order.
        num_new: The number of last entries of each head, without score and position yet.
        first_new_position: The position of the first of these in the text.
        padding: The left padding of each row in tokens.
        scale: The scale of attention scores.
        rotation: The layer's RoPE; None if LKV cannot undo it.
        softcap: The cap of attention scores; None without one.
        sinks: The layer's attention sinks [Hq]; None without them.
        queries: The queries [B, Hq, n, d] of the last tokens; None if the selector reads none.
    """

    key: Tensor
    value: Tensor
    scores: Tensor
    positions: Tensor
    pool_starts: Tensor
    counts: Tensor
    spans: list[tuple[int, int]]
    num_new: int
    first_new_position: int
    padding: list[int]
    scale: float
    rotation: Rotation | None
    softcap: float | None
    sinks: Tensor | None = None
    queries: Tensor | None = None

    @property
    def end(self) -> int:
        """The position after the text."""
        return self.first_new_position + self.num_new

    def score_new_entries(self, score: Callable[[LayerKV], Tensor]) -> None:
        """Store the positions of the new entries and their scores [B, H, n], computed by `score`.

        Rows without padding are scored together, others one by one.
        """
        steps = torch.arange(self.num_new, device=self.key.device)
        slots = (self.pool_starts + self.counts - self.num_new)[..., None] + steps
        rows = [slice(row, row + 1) for row in range(len(slots))] if any(self.padding) else [slice(0, len(slots))]
        for part in rows:
            new_slots = slots[part]
            # Positions do not count padding, so keys are rotated as in an unpadded row.
            key, value = self.key[new_slots], self.value[new_slots]
            start = self.first_new_position - self.padding[part.start]
            kv = LayerKV(key, value, self.scale, start=start, rotation=self.rotation, softcap=self.softcap)
            self.scores[new_slots] = score(kv).float()
        self.positions[slots] = (self.first_new_position + steps).int()

    def heads(self) -> Iterator[tuple[int, ArrivedEntries]]:
        """Yield each head's index and entries, for all rows in order."""
        heads = self.pool_starts.shape[1]
        for number, (start, count) in enumerate(self.spans):
            row, slots = number // heads, slice(start, start + count)
            padding, key, value = self.padding[row], self.key[None, None, slots], self.value[None, None, slots]
            length, rotation, softcap = self.end - padding, self.rotation, self.softcap
            kv = LayerKV(key, value, self.scale, length=length, rotation=rotation, softcap=softcap)
            yield number % heads, ArrivedEntries(kv, self.positions[slots] - padding, self.scores[slots])

    def as_prompts(self) -> Iterator[tuple[Tensor, LayerKV]]:
        """Yield the entries as prompts of their own: all together, or the heads of a row, if they have equally many.

        Heads of a row that have not come one by one. Each prompt comes after the places [N, n] of its tokens among the
        entries of its N heads.
        """
        rows, heads = self.pool_starts.shape
        counts, first = [count for _, count in self.spans], 0
        for shape in [(rows, heads)] if len({*counts}) == 1 else self._shapes_by_row(counts):
            starts = self.pool_starts.flatten()[first : first + math.prod(shape), None]
            slots = starts + torch.arange(counts[first], device=self.key.device)
            order = self.positions[slots].argsort(-1)
            key, value = (pool[slots.gather(-1, order)].unflatten(0, shape) for pool in (self.key, self.value))
            row, own = first // heads, slice(first % heads, first % heads + shape[1])
            queries, sinks = self.queries, self.sinks
            if queries is not None:
                queries = queries[row : row + shape[0]].unflatten(1, (heads, -1))[:, own].flatten(1, 2)
                # A window of all entries would leave none to rank.
                queries = queries[:, :, max(0, queries.shape[2] - max(1, key.shape[2] - 1)) :]
            sinks = None if sinks is None else sinks.view(heads, -1)[own].flatten()
            first += math.prod(shape)
            yield order, LayerKV(key, value, self.scale, queries, sinks=sinks, softcap=self.softcap)

    def _shapes_by_row(self, counts: list[int]) -> list[tuple[int, int]]:
        rows, heads = self.pool_starts.shape
        own = [counts[row * heads : (row + 1) * heads] for row in range(rows)]
        return [shape for each in own for shape in ([(1, heads)] if len({*each}) == 1 else [(1, 1)] * heads)]
