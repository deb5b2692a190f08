"""Spans: entries of unequal number a head, one after another in flat pools, each span with room at its end."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lkv import devices
from lkv.cache.quantization import QuantizedPool
from lkv.ops.ragged_attention import append, extend, ragged_attention


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
            self._device_starts, self._settled = _on(key.device, self.starts, lens)
            self._device_lens = self._settled.clone()  # tails included; changed where it lies

    @property
    def dtype(self) -> torch.dtype:
        """What k and v are held in."""
        return self.k.dtype

    def for_attention(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pools of k and v, starts and lengths (int32 [B, H], on the pools' device), as for `ragged_attention`."""
        return self.k, self.v, self._device_starts, self._device_lens

    def fill(self, key: Tensor, value: Tensor, scores: Tensor, arrived: Tensor | None = None) -> None:
        """Settle the best tokens of each head, in rising order: as many of `key` and `value` [B, H, T, d] by `scores`
        [B, H, T] as there are settled entries. Where scores are to be kept, they are those on arrival, `arrived`
        [B, H, T]."""
        heads, tokens = scores.shape[1:]
        most = int(self.lens.max())
        if not most:
            return
        counts, starts = self._settled.flatten(), self._device_starts.flatten()
        order = _ranked(scores.flatten(0, 1))[:, :most]
        # What a head does not keep goes behind all tokens, so that one sort puts every head's in order.
        kept = torch.arange(most, device=order.device) < counts[:, None]
        order = order.where(kept, tokens).sort(-1).values
        places = _places(self.starts, self.lens, order.device)
        head = torch.repeat_interleave(counts, output_size=len(places))
        token = order[head, places - starts[head]]
        row, kv_head = head // heads, head % heads
        self.k[places] = key[row, kv_head, token]
        self.v[places] = value[row, kv_head, token]
        if self.scores is not None and self.positions is not None:
            assert arrived is not None
            self.scores[places], self.positions[places] = arrived[row, kv_head, token].float(), token.int()

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
        `ragged_attention.extend`."""
        new = key.shape[2]
        if self.scores is not None and self.positions is not None and scores is not None:
            ends = self._device_starts + self._device_lens
            steps = torch.arange(new, device=key.device)
            self.scores[ends[..., None] + steps] = scores.float()
            self.positions[ends[..., None] + steps] = (position + steps).int()
        out = extend(query, key, value, *self.for_attention(), scale, buffers=buffers)
        self.tail += new
        self.room -= new
        return out

    def append(self, key: Tensor, value: Tensor) -> None:
        """`extend` for those who attend by other means."""
        append(key, value, *self.for_attention())
        self.tail += key.shape[2]
        self.room -= key.shape[2]

    def cut(self, tokens: int) -> None:
        """Forget the last `tokens` appended entries."""
        self.tail -= tokens
        self.room += tokens
        # From the settled lengths: a step that was interrupted may have counted its tokens on the device alone.
        torch.add(self._settled, self.tail, out=self._device_lens)

    def settle(self, limits: Tensor, room: int, completed: Callable[[int, int, slice], Tensor]) -> "Spans":
        """New spans of the best entries, at most `limits` [B, H] of each; nothing in their tail.

        `completed(row, head, span)` gives the scores of the entries of that span now.
        """
        held = self.lens + self.tail
        lens = torch.minimum(limits, held)
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
        new._take(self, _places(self.starts[rows], new.lens, self.k.device))
        new.lens, new.tail = new.lens - self.tail, self.tail
        new._settled -= self.tail
        return new

    def relaid(self, room: int) -> "Spans":
        """A copy with `room` after the tails."""
        return self.select(torch.arange(len(self.lens), device="cpu"), room)

    def _take(self, other: "Spans", entries: Tensor) -> None:
        """Fill all spans, in order, with entries of `other`'s pools."""
        places = _places(self.starts, self.lens, self.k.device)
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
        places = _places(self.starts, self.lens, self.k.device)
        return self.k[places], self.v[places]

    def unpack(self, key: Tensor, value: Tensor) -> None:
        """Fill the settled entries with what `packed` gave."""
        places = _places(self.starts, self.lens, self.k.device)
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
    def dtype(self) -> torch.dtype:
        """What appended k and v are held in, and what is restored for attention."""
        return self.fresh.dtype

    @property
    def room(self) -> int:
        """How many more can be appended."""
        return self.fresh.room

    def for_attention(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `Spans.for_attention`, over pools restored for the moment."""
        whole = Spans(self.lens + self.tail, 0, self.fresh.k, self.fresh.v)
        device = self.fresh.k.device
        settled = _places(whole.starts, self.lens, device)
        tails = torch.full_like(self.lens, self.tail)
        late, own = (_places(starts, tails, device) for starts in (whole.starts + self.lens, self.fresh.starts))
        # A loaded pool has the dtype it was saved in, which need not be the model's.
        whole.k[settled], whole.v[settled] = self.key.unpack_all().to(whole.k), self.value.unpack_all().to(whole.v)
        whole.k[late], whole.v[late] = self.fresh.k[own], self.fresh.v[own]
        return whole.for_attention()

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
        """As `Spans.extend`."""
        self.fresh.append(key, value)
        if query.shape[2] == 1 and query.device.type == "cpu":
            return self._attend_to_codes(query, scale)
        return ragged_attention(query, *self.for_attention(), scale)

    def _attend_to_codes(self, query: Tensor, scale: float) -> Tensor:
        """Attention of one token, head by head: codes are multiplied as they are, and nothing is restored."""
        batch, heads, rows, dim = query.shape
        grouped = (query.float() * scale).reshape(self.lens.numel(), -1, dim).unbind()
        settled, starts = self.lens.flatten().tolist(), self.fresh.starts.flatten().tolist()
        parts, begin = [], 0
        for own, found, count, start in zip(grouped, self.key.scores(grouped), settled, starts, strict=True):
            tail = slice(start, start + self.tail)
            late = own @ self.fresh.k[tail].float().t()
            shares = torch.softmax(torch.cat([found, late], 1), -1)
            out = shares[:, count:] @ self.fresh.v[tail].float()
            parts.append(out.add_(self.value.weighted(shares[:, :count], begin, begin + count)))
            begin += count
        return torch.cat(parts).to(query.dtype).view(batch, heads, rows, -1)

    def cut(self, tokens: int) -> None:
        """As `Spans.cut`."""
        self.fresh.cut(tokens)

    def select(self, rows: Tensor, room: int) -> "QuantizedSpans":
        """As `Spans.select`."""
        heads = self.lens.shape[1]
        spans = (rows[:, None] * heads + torch.arange(heads, device="cpu")).flatten()
        starts = (self.lens.flatten().cumsum(0) - self.lens.flatten()).view_as(self.lens)
        entries = _places(starts[rows], self.lens[rows], self.fresh.k.device)
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
    return _ranked(scores)[:count].sort().values


def _ranked(scores: Tensor) -> Tensor:
    """Indices of `scores` [..., T], the highest first. Of equal ones the earlier is first, where topk would choose by
    how many are asked for: what a row keeps does not depend on those beside it."""
    return scores.argsort(dim=-1, descending=True, stable=True)


def _places(starts: Tensor, lens: Tensor, device: torch.device) -> Tensor:
    """Pool indices, made on `device`, of all entries of the spans at `starts` with `lens` entries, one span after
    another."""
    every = lens.flatten()
    begin, count = _on(device, starts.flatten() - (every.cumsum(0) - every), every)
    total = int(every.sum())
    return torch.arange(total, device=device) + torch.repeat_interleave(begin, count, output_size=total)


def _on(device: torch.device, *counts: Tensor) -> list[Tensor]:
    """Tables of one shape from the CPU as int32 on `device`, in one copy that nothing waits for."""
    table = torch.stack(counts).int()
    if devices.is_gpu(device):
        table = table.pin_memory()
    return [*table.to(device, non_blocking=True).unbind()]
