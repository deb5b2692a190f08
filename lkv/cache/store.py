"""RaggedStore: entries of unequal number a head, one after another in flat pools, each span with room at its end."""

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from lkv.cache.ranking import Rows, best, sources
from lkv.cache.tail import Tail
from lkv.kernels.ragged_attention import append_and_attend
from lkv.utils import devices


class KVStore(Protocol):
    """What a layer holds, however it is stored: each (batch, KV head) has a span of `lens` settled entries [B, H], then
    those appended of the `tail` tokens that followed (all but the row's padding), and `room` for more in every row."""

    lens: Tensor

    @property
    def tail(self) -> int: ...

    @property
    def room(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """What appended k and v are held in, and what attention is computed in."""

    @property
    def scores(self) -> Tensor | None:
        """Those of the entries, where some are to be evicted later."""

    def settled(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pools, starts and lengths as `ragged_attention` has them, without the tails; never written to."""

    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        scores: Tensor | None = None,
        position: int = 0,
        buffers: dict[Any, Any] | None = None,
    ) -> Tensor:
        """Append new k, v [B, H, n, d], for which there must be room, and attend to everything held: [B, Hq, n, d] for
        `query` of that shape. `scores` [B, H, n] of tokens from `position` on are kept where some are. `buffers` as in
        `ragged_attention.append_and_attend`."""

    def for_append(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pools, starts and lengths as `ragged_attention.append` changes them; `count` what it appended."""

    def for_attention(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pools, starts and lengths as `ragged_attention` has them, with the tails."""

    def count(self, tokens: int, padding: Tensor | None = None) -> None:
        """Take notice of `tokens` more in the tail, appended but for the `padding` [B, tokens] among them."""

    def without(self, padding: Tensor) -> Self:
        """The spans without what is held of the tail's tokens `padding` [B, tail]; themselves if that is nothing."""

    def cut(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of the tail."""

    def select(self, rows: Tensor, room: int) -> Self:
        """New spans for the batch rows `rows` [n] of these, tails included, with `room` after them."""

    def relaid(self, room: int) -> Self:
        """A copy with `room` after the tails."""

    def state(self) -> dict[str, Tensor]:
        """Settled entries as tensors to be saved."""

    def nbytes(self) -> int:
        """Bytes of storage held."""

    def entry_nbytes(self) -> int:
        """Bytes of k and v of one entry as the model computes them."""


class RaggedStore:
    """Flat pools [P, d] of k and v in which each (batch, KV head) owns one contiguous span (Sec. 4.5).

    A span is `lens` settled entries, those appended and room for more. Appends are equal for all heads, and for all
    rows but for padding. `scores` [P] float32 and `positions` [P] go with the entries where some are to be
    evicted later.
    """

    def __init__(
        self, lens: Tensor, room: int, key: Tensor, value: Tensor, scored: bool = False, tail: Tail | None = None
    ):
        """Unfilled pools for `lens` [B, H] (int64 on the CPU) entries, a `tail` and `room` for more, with dtype and
        device of `key` and `value`."""
        self.lens, self._tail = lens, tail or Tail()
        self._space = self._tail.appended + room
        counts = self.held.flatten()
        ends = (counts + room).cumsum(0)
        self.starts = (ends - counts - room).view_as(lens)
        size = int(ends[-1]) if len(ends) else 0
        # A text may be compressed in inference mode and asked about outside it, where its tensors could not be written.
        with torch.inference_mode(False):
            self.k, self.v = key.new_empty((size, key.shape[-1])), value.new_empty((size, value.shape[-1]))
            self.scores = key.new_empty(size, dtype=torch.float32) if scored else None
            self.positions = key.new_empty(size, dtype=torch.int32) if scored else None
            # The attention kernels read these where the pools are: no step waits for a copy.
            self._device_starts, self._settled = devices.uploaded(key.device, self.starts, lens)
            self._device_lens = self._settled.clone()  # tails included; changed where it lies
        if self.tail:
            self._count_on_device()

    @property
    def tail(self) -> int:
        """As `KVStore.tail`."""
        return self._tail.tokens

    @property
    def held(self) -> Tensor:
        """Entries of each span [B, H], the tail's included."""
        return self.lens + self._tail.appended

    @property
    def room(self) -> int:
        """As `KVStore.room`."""
        left = self._space - self._tail.appended
        return left if isinstance(left, int) else int(left.min())

    @property
    def dtype(self) -> torch.dtype:
        """What k and v are held in."""
        return self.k.dtype

    def for_attention(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pools of k and v, starts and lengths (int32 [B, H], on the pools' device), as for `ragged_attention`."""
        return self.k, self.v, self._device_starts, self._device_lens

    def for_append(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `KVStore.for_append`."""
        return self.for_attention()

    def settled(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `for_attention`, without the tails; what is read of it never changes, whoever appends meanwhile."""
        return self.k, self.v, self._device_starts, self._settled

    @classmethod
    def of(
        cls, key: Tensor, value: Tensor, scores: Tensor, lens: Tensor, room: int, arrived: Tensor | None = None
    ) -> "RaggedStore":
        """A store of the best tokens of each head, in rising order: `lens` [B, H] of `key` and `value` [B, H, T, d]
        by `scores` [B, H, T]. Where scores are to be kept, they are those on arrival, `arrived` [B, H, T]."""
        kinds = [Rows.of(x) for x in (key, value, *(() if arrived is None else (arrived[..., None],)))]
        # Ranked first: what that takes is given back before the pools are made.
        rows = sources(scores, lens, room, *kinds)
        new = cls(lens, room, key, value, arrived is not None)
        for pool, kind, index in zip((new.k, new.v), kinds, rows, strict=False):
            torch.index_select(kind.matrix, 0, index, out=pool)
        if new.scores is not None and new.positions is not None:
            new.scores.copy_(kinds[2].matrix[rows[2], 0])
            torch.remainder(rows[2], scores.shape[-1], out=new.positions)
        return new

    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        scores: Tensor | None = None,
        position: int = 0,
        buffers: dict[Any, Any] | None = None,
    ) -> Tensor:
        """As `KVStore.extend`."""
        new = key.shape[2]
        if self.scores is not None and self.positions is not None and scores is not None:
            ends = self._device_starts + self._device_lens
            steps = torch.arange(new, device=key.device)
            self.scores[ends[..., None] + steps] = scores.float()
            self.positions[ends[..., None] + steps] = (position + steps).int()
        out = append_and_attend(query, key, value, *self.for_attention(), scale, buffers=buffers)
        self.count(new)
        return out

    def count(self, tokens: int, padding: Tensor | None = None) -> None:
        """As `KVStore.count`."""
        self._tail.grow(tokens, padding)

    def cut(self, tokens: int) -> None:
        """As `KVStore.cut`."""
        self._tail.cut(tokens)
        # From the settled lengths: a step that was interrupted may have counted its tokens on the device alone.
        self._count_on_device()

    def _count_on_device(self) -> None:
        appended = self._tail.appended
        if isinstance(appended, Tensor):
            (appended,) = devices.uploaded(self.k.device, appended)
        torch.add(self._settled, appended, out=self._device_lens)

    def settle(self, limits: Tensor, room: int, completed: Callable[[int, int, slice], Tensor]) -> "RaggedStore":
        """New spans of the best entries, at most `limits` [B, H] of each; nothing in their tail.

        `completed(row, head, span)` gives the scores of the entries of that span now.
        """
        held = self.held
        lens = torch.minimum(limits, held)
        chosen = []
        for row in range(len(held)):
            for head, count in enumerate(lens[row].tolist()):
                start = int(self.starts[row, head])
                span = slice(start, start + int(held[row, head]))
                chosen.append(best(completed(row, head, span), count) + start)
        new = RaggedStore(lens, room, self.k, self.v, scored=True)
        new._take(self, torch.cat(chosen))
        return new

    def settled_of(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """Views of the settled k and v [n, d] of one span."""
        start = int(self.starts[row, head])
        span = slice(start, start + int(self.lens[row, head]))
        return self.k[span], self.v[span]

    def select(self, rows: Tensor, room: int) -> "RaggedStore":
        """New spans for the batch rows `rows` [n] of these, tails included, with `room` after them."""
        new = RaggedStore(self.lens[rows], room, self.k, self.v, self.scores is not None, self._tail.select(rows))
        new._take(self, places(self.starts[rows], new.held, self.k.device))
        return new

    def relaid(self, room: int) -> "RaggedStore":
        """A copy with `room` after the tails."""
        return self.select(torch.arange(len(self.lens), device="cpu"), room)

    def without(self, padding: Tensor) -> "RaggedStore":
        """As `KVStore.without`."""
        known = self._tail.marks(len(padding))
        if not bool((padding & ~known).any()):
            return self
        new = RaggedStore(
            self.lens, self.room, self.k, self.v, self.scores is not None, Tail(self.tail, known | padding)
        )
        stays = [
            torch.cat([torch.ones(count, dtype=torch.bool, device="cpu"), ~padding[row, ~known[row]]])
            for row, counts in enumerate(self.lens.tolist())
            for count in counts
        ]
        entries = places(self.starts, self.held, self.k.device)
        new._take(self, entries[torch.cat(stays).to(entries.device)])
        return new

    def _take(self, source: "RaggedStore", entries: Tensor) -> None:
        """Fill all spans, in order, with entries of `source`'s pools."""
        held = places(self.starts, self.held, self.k.device)
        self.k[held], self.v[held] = source.k[entries], source.v[entries]
        if self.scores is not None and source.scores is not None:
            assert self.positions is not None and source.positions is not None
            self.scores[held], self.positions[held] = source.scores[entries], source.positions[entries]

    def state(self) -> dict[str, Tensor]:
        """Settled entries as tensors to be saved."""
        key, value = self.packed()
        return {"k": key, "v": value}

    def packed(self) -> tuple[Tensor, Tensor]:
        """Settled k and v of all spans one after another, without room or tail: [sum of lens, d] each."""
        settled = places(self.starts, self.lens, self.k.device)
        return self.k[settled], self.v[settled]

    def unpack(self, key: Tensor, value: Tensor) -> None:
        """Fill the settled entries with what `packed` gave."""
        settled = places(self.starts, self.lens, self.k.device)
        self.k[settled], self.v[settled] = key.to(self.k), value.to(self.v)

    def nbytes(self) -> int:
        """Bytes of storage behind the pools."""
        pools = (self.k, self.v, self.scores, self.positions)
        return sum(pool.untyped_storage().nbytes() for pool in pools if pool is not None)

    def entry_nbytes(self) -> int:
        """Bytes of k and v of one entry."""
        return (self.k.shape[-1] + self.v.shape[-1]) * self.k.element_size()


def places(starts: Tensor, lens: Tensor, device: torch.device) -> Tensor:
    """Pool indices, made on `device`, of all entries of the spans at `starts` with `lens` entries, one span after
    another."""
    counts = lens.flatten()
    begin, count = devices.uploaded(device, starts.flatten() - (counts.cumsum(0) - counts), counts)
    total = int(counts.sum())
    return torch.arange(total, device=device) + torch.repeat_interleave(begin, count, output_size=total)
