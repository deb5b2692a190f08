"""Spans: entries of unequal number a head, one after another in flat pools, each span with room at its end."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lkv.cache.quantization import QuantizedPool
from lkv.ops.ragged_attention import append


class Spans:
    """Flat pools [P, d] of k and v in which each (batch, KV head) owns one contiguous span (Sec. 4.5).

    A span is `lens` settled entries, `tail` appended ones and `room` for more. Appends are equal for all heads, so tail
    and room are one integer each. `scores` [P] float32 and `positions` [P] go with the entries where some are to be
    evicted later.
    """

    def __init__(self, lens: Tensor, room: int, key: Tensor, value: Tensor, scored: bool = False):
        """Unfilled pools for `lens` [B, H] (int64 on the CPU) entries, with dtype and device of `key` and `value`."""
        self.lens, self.tail, self.room = lens, 0, room
        every = lens.flatten()
        ends = (every + room).cumsum(0)
        self.starts = (ends - every - room).view_as(lens)
        size = int(ends[-1]) if len(ends) else 0
        # A text may be compressed in inference mode and asked about outside it, where its tensors could not be written.
        with torch.inference_mode(False):
            self.k, self.v = key.new_empty((size, key.shape[-1])), value.new_empty((size, value.shape[-1]))
            self.scores = key.new_empty(size, dtype=torch.float32) if scored else None
            self.positions = key.new_empty(size, dtype=torch.int32) if scored else None
        # The attention kernels read these where the pools are: no step waits for a copy.
        self._device_starts = self.starts.to(key.device, torch.int32)
        self._device_lens = lens.to(key.device, torch.int32)  # tails included

    def for_attention(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pools of k and v, starts and lengths (int32 [B, H], on the pools' device), as for `ragged_attention`."""
        return self.k, self.v, self._device_starts, self._device_lens

    def put(self, row: int, head: int, chosen: Tensor, key: Tensor, value: Tensor) -> None:
        """Fill one span's settled entries with those of `key`, `value` [T, d] that are `chosen`."""
        start = int(self.starts[row, head])
        own = slice(start, start + len(chosen))
        # Straight into the pools: indexing would make a copy first.
        torch.index_select(key, 0, chosen, out=self.k[own])
        torch.index_select(value, 0, chosen, out=self.v[own])

    def mark(self, row: int, head: int, scores: Tensor, positions: Tensor) -> None:
        """Give the settled entries of one span their scores and positions [n]."""
        assert self.scores is not None and self.positions is not None
        start = int(self.starts[row, head])
        own = slice(start, start + len(scores))
        self.scores[own], self.positions[own] = scores.float(), positions.int()

    def append(self, key: Tensor, value: Tensor, scores: Tensor | None = None, position: int = 0) -> None:
        """Scatter new k, v [B, H, n, d] to the ends, and scores [B, H, n] of tokens from `position` on where these are
        kept; there must be room for n."""
        new = key.shape[2]
        if self.scores is not None and self.positions is not None and scores is not None:
            ends = self._device_starts + self._device_lens
            steps = torch.arange(new, device=key.device)
            self.scores[ends[..., None] + steps] = scores.float()
            self.positions[ends[..., None] + steps] = (position + steps).int()
        self._device_lens = append(key, value, self.k, self.v, self._device_starts, self._device_lens)
        self.tail += new
        self.room -= new

    def cut(self, tokens: int) -> None:
        """Forget the last `tokens` appended entries."""
        self._device_lens = self._device_lens - tokens
        self.tail -= tokens
        self.room += tokens

    def settle(
        self, limits: Sequence[Sequence[int]], room: int, completed: Callable[[int, int, slice], Tensor]
    ) -> "Spans":
        """New spans of the best entries, at most `limits` [B][H] of each; nothing in their tail.

        `completed(row, head, span)` gives the scores of the entries of that span now.
        """
        held = self.lens + self.tail
        lens = torch.minimum(torch.tensor(limits), held)
        chosen = []
        for row in range(len(held)):
            for head, count in enumerate(lens[row].tolist()):
                start = int(self.starts[row, head])
                span = slice(start, start + int(held[row, head]))
                chosen.append(best(completed(row, head, span), count) + start)
        new = Spans(lens, room, self.k, self.v, scored=True)
        new._take(self, torch.cat(chosen))
        return new

    def select(self, rows: Tensor, room: int) -> "Spans":
        """New spans for the batch rows `rows` [n] of these, tails included, with `room` after them."""
        new = Spans(self.lens[rows] + self.tail, room, self.k, self.v, self.scores is not None)
        new._take(self, _places(self.starts[rows], new.lens).to(self.k.device))
        new.lens = new.lens - self.tail
        new.tail = self.tail
        return new

    def relaid(self, room: int) -> "Spans":
        """A copy with `room` after the tails."""
        return self.select(torch.arange(len(self.lens)), room)

    def _take(self, other: "Spans", entries: Tensor) -> None:
        """Fill all spans, in order, with entries of `other`'s pools."""
        places = _places(self.starts, self.lens).to(self.k.device)
        self.k[places], self.v[places] = other.k[entries], other.v[entries]
        if self.scores is not None and other.scores is not None:
            assert self.positions is not None and other.positions is not None
            self.scores[places], self.positions[places] = other.scores[entries], other.positions[entries]

    def state(self) -> dict[str, Tensor]:
        """Settled entries as tensors to be saved."""
        key, value = self.packed()
        return {"k": key, "v": value}

    def packed(self) -> tuple[Tensor, Tensor]:
        """Settled k and v of all spans one after another, without room or tail: [sum of lens, d] each."""
        places = _places(self.starts, self.lens).to(self.k.device)
        return self.k[places], self.v[places]

    def unpack(self, key: Tensor, value: Tensor) -> None:
        """Fill the settled entries with what `packed` gave."""
        places = _places(self.starts, self.lens).to(self.k.device)
        self.k[places], self.v[places] = key.to(self.k), value.to(self.v)

    def nbytes(self) -> int:
        """Bytes of storage behind the pools."""
        pools = (self.k, self.v, self.scores, self.positions)
        return sum(pool.untyped_storage().nbytes() for pool in pools if pool is not None)


class QuantizedSpans:
    """Spans whose settled entries are held in 8 or 4 bits a value, the appended ones as they are.

    k is quantised by channel within a span and v by entry: measured best at both widths. An attention step restores
    one layer's entries at a time.
    """

    scores = None

    def __init__(self, lens: Tensor, key: QuantizedPool, value: QuantizedPool, fresh: Spans):
        """`key` and `value` hold the settled entries of all spans packed; `fresh` the tails, of spans settled empty."""
        self.lens, self.key, self.value, self.fresh = lens, key, value, fresh

    @classmethod
    def of(cls, spans: Spans, bits: int) -> "QuantizedSpans":
        """The settled entries of `spans` quantised, with the same room."""
        key, value = spans.packed()
        fresh = Spans(torch.zeros_like(spans.lens), spans.room, spans.k, spans.v)
        lens = spans.lens.flatten()
        return cls(spans.lens, QuantizedPool.pack(key, bits, lens=lens), QuantizedPool.pack(value, bits), fresh)

    @property
    def tail(self) -> int:
        """Appended entries a span."""
        return self.fresh.tail

    @property
    def room(self) -> int:
        """How many more can be appended."""
        return self.fresh.room

    def for_attention(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `Spans.for_attention`, over pools restored for the moment."""
        whole = Spans(self.lens + self.tail, 0, self.fresh.k, self.fresh.v)
        device = self.fresh.k.device
        settled = _places(whole.starts, self.lens).to(device)
        tails = torch.full_like(self.lens, self.tail)
        late, own = _places(whole.starts + self.lens, tails).to(device), _places(self.fresh.starts, tails).to(device)
        # A loaded pool has the dtype it was saved in, which need not be the model's.
        whole.k[settled], whole.v[settled] = self.key.unpack_all().to(whole.k), self.value.unpack_all().to(whole.v)
        whole.k[late], whole.v[late] = self.fresh.k[own], self.fresh.v[own]
        return whole.for_attention()

    def append(self, key: Tensor, value: Tensor, scores: Tensor | None = None, position: int = 0) -> None:
        """As `Spans.append`."""
        self.fresh.append(key, value)

    def cut(self, tokens: int) -> None:
        """As `Spans.cut`."""
        self.fresh.cut(tokens)

    def select(self, rows: Tensor, room: int) -> "QuantizedSpans":
        """As `Spans.select`."""
        heads = self.lens.shape[1]
        spans = (rows[:, None] * heads + torch.arange(heads)).flatten()
        starts = (self.lens.flatten().cumsum(0) - self.lens.flatten()).view_as(self.lens)
        entries = _places(starts[rows], self.lens[rows]).to(self.fresh.k.device)
        return QuantizedSpans(
            self.lens[rows], self.key.take_spans(spans), self.value.take(entries), self.fresh.select(rows, room)
        )

    def relaid(self, room: int) -> "QuantizedSpans":
        """A copy with `room` after the tails; what is settled is never written to and shared."""
        return QuantizedSpans(self.lens, self.key, self.value, self.fresh.relaid(room))

    def state(self) -> dict[str, Tensor]:
        """Settled entries as tensors to be saved; `restore` takes them up."""
        pools = (("k", self.key), ("v", self.value))
        return {f"{side}_{name}": tensor for side, pool in pools for name, tensor in pool.tensors().items()}

    @staticmethod
    def check_state(state: dict[str, Tensor], lens: Tensor, width: int) -> None:
        """Raise KeyError, ValueError or QuantizationError unless `state` holds spans of `lens` entries [B, H] with
        `width` channels."""
        key, value = (QuantizedPool.from_tensors(_of_side(state, side)) for side in "kv")
        if key.lens != tuple(lens.flatten().tolist()) or value.lens is not None:
            raise ValueError("its quantised pools have other spans than its counts")
        if len(value) != len(key) or (key.width, value.width) != (width, width):
            raise ValueError(f"its quantised pools are not {(int(lens.sum()), width)}")

    @classmethod
    def restore(cls, state: dict[str, Tensor], lens: Tensor, room: int, like: Tensor) -> "QuantizedSpans":
        """What `state` gave, on the device and for a cache of the dtype of `like`."""
        state = {name: tensor.to(like.device) for name, tensor in state.items()}
        key, value = (QuantizedPool.from_tensors(_of_side(state, side)) for side in "kv")
        fresh = Spans(torch.zeros_like(lens), room, like.new_empty(0, key.width), like.new_empty(0, value.width))
        return cls(lens, key, value, fresh)

    def nbytes(self) -> int:
        """Bytes of storage of codes, steps, least values and tails."""
        return self.key.nbytes() + self.value.nbytes() + self.fresh.nbytes()


def _of_side(state: dict[str, Tensor], side: str) -> dict[str, Tensor]:
    """The tensors of the quantised pool of "k" or "v"."""
    return {name[2:]: tensor for name, tensor in state.items() if name.startswith(side + "_")}


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest of `scores` [T], in rising order."""
    if count == len(scores):
        return torch.arange(count, device=scores.device)
    return scores.topk(count, sorted=False).indices.sort().values


def _places(starts: Tensor, lens: Tensor) -> Tensor:
    """Pool indices of all entries of the spans at `starts` with `lens` entries, one span after another."""
    starts, lens = starts.flatten(), lens.flatten()
    first = lens.cumsum(0) - lens
    return torch.arange(int(lens.sum())) + torch.repeat_interleave(starts - first, lens)
