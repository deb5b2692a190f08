"""RaggedStore whose settled entries are held in 8 or 4 bits a value."""

from typing import Any

import torch
from torch import Tensor

from lkv.cache.quantization import QuantizedPool
from lkv.cache.store import RaggedStore, places
from lkv.kernels.ragged_attention import QuantizedKV, append, append_and_attend, can_attend_quantized, ragged_attention
from lkv.utils import devices


class QuantizedStore:
    """RaggedStore whose settled entries are held in 8 or 4 bits a value, the appended ones as they are.

    k is quantised by channel within a span and v by entry: measured best at both widths. New tokens attend to the codes
    as they are where a compiled backend runs (Triton; numba, up to its most rows), and one token everywhere; else one
    layer's entries are restored at a time.
    """

    scores = None

    def __init__(self, lens: Tensor, key: QuantizedPool, value: QuantizedPool, fresh: RaggedStore):
        """`key` and `value` hold the settled entries of all spans packed; `fresh` the tails, of spans settled empty."""
        self.lens, self.key, self.value, self.fresh = lens, key, value, fresh
        flat, groups = lens.flatten(), -(-lens.flatten() // key.group)
        firsts, first_groups = flat.cumsum(0) - flat, groups.cumsum(0) - groups
        device = fresh.k.device
        # Entry i of a span is at place i + its start of the pools of the tails, if it is none of the settled ones.
        begins = (fresh.starts - lens).flatten()
        with torch.inference_mode(False):  # see RaggedStore
            self._tables = devices.uploaded(device, begins, flat, firsts, first_groups).view(4, *lens.shape)
            self._device_lens = self._tables[1].clone()
        if fresh.tail:
            self._count_on_device()

    @classmethod
    def of(cls, spans: RaggedStore, bits: int) -> "QuantizedStore":
        """The settled entries of `spans` quantised, with the same room."""
        key, value = spans.packed()
        fresh = RaggedStore(torch.zeros_like(spans.lens), spans.room, spans.k, spans.v)
        lens = spans.lens.flatten()
        return cls(spans.lens, QuantizedPool.pack(key, bits, lens=lens), QuantizedPool.pack(value, bits), fresh)

    @property
    def tail(self) -> int:
        """As `KVStore.tail`."""
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
        """As `RaggedStore.for_attention`, over pools restored for the moment."""
        tails = self.fresh.held
        whole = RaggedStore(self.lens + tails, 0, self.fresh.k, self.fresh.v)
        device = self.fresh.k.device
        settled = places(whole.starts, self.lens, device)
        late, fresh = (places(starts, tails, device) for starts in (whole.starts + self.lens, self.fresh.starts))
        # A loaded pool has the dtype it was saved in, which need not be the model's.
        whole.k[settled], whole.v[settled] = self.key.unpack().to(whole.k), self.value.unpack().to(whole.v)
        whole.k[late], whole.v[late] = self.fresh.k[fresh], self.fresh.v[fresh]
        return whole.for_attention()

    def settled(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `RaggedStore.settled`, over pools restored for the moment."""
        whole = RaggedStore(self.lens, 0, self.fresh.k, self.fresh.v)
        whole.unpack(self.key.unpack(), self.value.unpack())
        return whole.settled()

    def for_append(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `KVStore.for_append`."""
        return self.fresh.k, self.fresh.v, self._tables[0], self._device_lens

    def for_codes(self) -> tuple[tuple[Tensor, Tensor], QuantizedKV, Tensor, Tensor]:
        """The pools of the tails, the codes of what is settled, starts and lengths, as
        `ragged_attention.append_and_attend` has them."""
        k, v = self.key, self.value
        codes = QuantizedKV(
            k.codes, k.step, k.least, v.codes, v.step, v.least, self._tables[1:], k.bits, k.group
        )  # fmt: skip
        return (self.fresh.k, self.fresh.v), codes, self._tables[0], self._device_lens

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
        """As `KVStore.extend`; there are no scores."""
        pools, codes, starts, lens = self.for_codes()
        if self._alike and can_attend_quantized(query, key, value, *pools, starts, lens, codes):
            out = append_and_attend(query, key, value, *pools, starts, lens, scale, buffers=buffers, quantized=codes)
            self.count(key.shape[2])
            return out
        append(key, value, *self.for_append())
        self.count(key.shape[2])
        if query.shape[2] == 1 and query.device.type == "cpu":
            return self._attend_to_codes(query, scale)
        return ragged_attention(query, *self.for_attention(), scale)

    @property
    def _alike(self) -> bool:
        """Whether k and v are held in one way, in groups that a kernel can take as blocks; a file may hold others."""
        ways = {(pool.bits, pool.group) for pool in (self.key, self.value)}
        return len(ways) == 1 and self.key.group in (16, 32, 64, 128)

    def count(self, tokens: int, padding: Tensor | None = None) -> None:
        """As `KVStore.count`."""
        self.fresh.count(tokens, padding)

    def _attend_to_codes(self, query: Tensor, scale: float) -> Tensor:
        """Attention of one token, head by head: codes are multiplied as they are, and nothing is restored."""
        batch, heads, rows, dim = query.shape
        grouped = (query.float() * scale).reshape(self.lens.numel(), -1, dim).unbind()
        settled, starts, tails = (x.flatten().tolist() for x in (self.lens, self.fresh.starts, self.fresh.held))
        parts, begin = [], 0
        spans = zip(grouped, self.key.scores(grouped), settled, starts, tails, strict=True)
        for asked, scores, count, start, appended in spans:
            tail = slice(start, start + appended)
            late = asked @ self.fresh.k[tail].float().t()
            shares = torch.softmax(torch.cat([scores, late], 1), -1)
            out = shares[:, count:] @ self.fresh.v[tail].float()
            parts.append(out.add_(self.value.weighted(shares[:, :count], begin, begin + count)))
            begin += count
        return torch.cat(parts).to(query.dtype).view(batch, heads, rows, -1)

    def cut(self, tokens: int) -> None:
        """As `KVStore.cut`."""
        self.fresh.cut(tokens)
        self._count_on_device()

    def _count_on_device(self) -> None:
        (appended,) = devices.uploaded(self.fresh.k.device, self.fresh.held)
        torch.add(self._tables[1], appended, out=self._device_lens)

    def without(self, padding: Tensor) -> "QuantizedStore":
        """As `KVStore.without`; what is settled is never written to and shared."""
        fresh = self.fresh.without(padding)
        return self if fresh is self.fresh else QuantizedStore(self.lens, self.key, self.value, fresh)

    def select(self, rows: Tensor, room: int) -> "QuantizedStore":
        """As `KVStore.select`."""
        heads = self.lens.shape[1]
        spans = (rows[:, None] * heads + torch.arange(heads, device="cpu")).flatten()
        starts = (self.lens.flatten().cumsum(0) - self.lens.flatten()).view_as(self.lens)
        entries = places(starts[rows], self.lens[rows], self.fresh.k.device)
        return QuantizedStore(
            self.lens[rows], self.key.take_spans(spans), self.value.take(entries), self.fresh.select(rows, room)
        )

    def relaid(self, room: int) -> "QuantizedStore":
        """A copy with `room` after the tails; what is settled is never written to and shared."""
        return QuantizedStore(self.lens, self.key, self.value, self.fresh.relaid(room))

    def state(self) -> dict[str, Tensor]:
        """Settled entries as tensors to be saved; `restore` takes them up."""
        pools = (("k", self.key), ("v", self.value))
        return {f"{side}_{name}": tensor for side, pool in pools for name, tensor in pool.tensors().items()}

    @staticmethod
    def check_state(state: dict[str, Tensor], lens: Tensor, width: int) -> None:
        """Raise KeyError, ValueError or CacheError unless `state` holds spans of `lens` entries [B, H] with
        `width` channels."""
        key, value = (QuantizedPool.from_tensors(_of_side(state, side)) for side in "kv")
        if key.lens != tuple(lens.flatten().tolist()) or value.lens is not None:
            raise ValueError("its quantised pools have other spans than its counts")
        if len(value) != len(key) or (key.width, value.width) != (width, width):
            raise ValueError(f"its quantised pools are not {(int(lens.sum()), width)}")

    @classmethod
    def restore(cls, state: dict[str, Tensor], lens: Tensor, room: int, like: Tensor) -> "QuantizedStore":
        """What `state` gave, on the device and for a cache of the dtype of `like`."""
        state = {name: tensor.to(like.device) for name, tensor in state.items()}
        key, value = (QuantizedPool.from_tensors(_of_side(state, side)) for side in "kv")
        fresh = RaggedStore(torch.zeros_like(lens), room, like.new_empty(0, key.width), like.new_empty(0, value.width))
        return cls(lens, key, value, fresh)

    def nbytes(self) -> int:
        """Bytes of storage of codes, steps, least values and tails."""
        return self.key.nbytes() + self.value.nbytes() + self.fresh.nbytes()

    def entry_nbytes(self) -> int:
        """As `KVStore.entry_nbytes`."""
        return self.fresh.entry_nbytes()


def _of_side(state: dict[str, Tensor], side: str) -> dict[str, Tensor]:
    """The tensors of the quantised pool of "k" or "v"."""
    return {name[2:]: tensor for name, tensor in state.items() if name.startswith(side + "_")}
