"""Stores of one layer's KV entries: each (batch row, KV head) has a number of entries of its own."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lkv.cache.quantization import QuantizedPool
from lkv.kernels.ragged_attention import QuantizedKV, append, append_and_attend, can_attend_quantized, ragged_attention
from lkv.utils import devices

# Pools of k [P, d] and v [P, dv], and for each row and head where its entries begin and how many there are (int32
# [B, H], on the pools' device), as `ragged_attention` takes them.
StoreView = tuple[Tensor, Tensor, Tensor, Tensor]


class RaggedStore:
    """Flat pools [P, d] of k and v, of which each (batch row, KV head) has one contiguous part (Sec. 4.5).

    A part is `lens` [B, H] compressed entries, which eviction left, then those appended since (all `appended_tokens`
    but the row's padding), then free slots. `scores` [P] float32 and `positions` [P] belong to the entries where some
    are to be evicted later.
    """

    def __init__(
        self,
        lens: Tensor,
        free_slots: int,
        key: Tensor,
        value: Tensor,
        has_scores: bool = False,
        appended_tokens: int = 0,
        padding: Tensor | None = None,
    ):
        """Allocate pools for `lens` [B, H] (int64 on the CPU) entries, the appended ones and `free_slots` more.

        Dtype, device and width are those of `key` [., d] and `value` [., dv]. `padding` [B, n] (bool, on the CPU) marks
        which of the first n appended tokens a row does not store; None for none.
        """
        self.lens, self.appended_tokens, self._padding = lens, appended_tokens, padding
        self._capacity = self._appended_entries + free_slots
        counts = self.counts.flatten()
        ends = (counts + free_slots).cumsum(0)
        self.starts = (ends - counts - free_slots).view_as(lens)
        size = int(ends[-1]) if len(ends) else 0
        # A prompt may be read in inference mode and continued outside it, where its tensors could not be written.
        with torch.inference_mode(False):
            self.k, self.v = key.new_empty((size, key.shape[-1])), value.new_empty((size, value.shape[-1]))
            self.scores = key.new_empty(size, dtype=torch.float32) if has_scores else None
            self.positions = key.new_empty(size, dtype=torch.int32) if has_scores else None
            # The attention kernels read these on the pools' device: no step waits for a copy.
            self._device_starts, self._device_compressed = devices.stack_to_device(key.device, self.starts, lens)
            self._device_lens = self._device_compressed.clone()  # appended entries included; changed in place
        if self.appended_tokens:
            self._count_on_device()

    @property
    def _appended_entries(self) -> Tensor | int:
        """Appended entries of each row [B, 1] (on the CPU), or one number where all rows have equally many."""
        return (
            self.appended_tokens if self._padding is None else self.appended_tokens - self._padding.sum(1, keepdim=True)
        )

    @property
    def counts(self) -> Tensor:
        """Entries of each row and head [B, H], appended ones included."""
        return self.lens + self._appended_entries

    @property
    def free_slots(self) -> int:
        """How many tokens can be appended before a reallocation."""
        left = self._capacity - self._appended_entries
        return left if isinstance(left, int) else int(left.min())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of appended k and v, and of the attention over them."""
        return self.k.dtype

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
        """Append new k and v to the free slots, then attend over everything stored.

        `query` [B, Hq, T, d], `key` [B, H, T, d] and `value` [B, H, T, dv] give [B, Hq, T, dv]. `scores` [B, H, T] and
        the `position` of the first new token are stored where `self.scores` are. `buffers`: see `append_and_attend`.
        """
        new = key.shape[2]
        if self.scores is not None and self.positions is not None and scores is not None:
            steps = torch.arange(new, device=key.device)
            slots = (self._device_starts + self._device_lens)[..., None] + steps
            self.scores[slots] = scores.float()
            self.positions[slots] = (position + steps).int()
        out = append_and_attend(query, key, value, *self.attention_view(), scale, buffers=buffers)
        self.count_appended(new)
        return out

    def attention_view(self) -> StoreView:
        """All entries, appended ones included."""
        return self.k, self.v, self._device_starts, self._device_lens

    def append_view(self) -> StoreView:
        """What `ragged_attention.append` writes to and counts on; call `count_appended` afterwards."""
        return self.attention_view()

    def compressed_view(self) -> StoreView:
        """The compressed entries alone; nothing that is read through it is ever written to."""
        return self.k, self.v, self._device_starts, self._device_compressed

    def count_appended(self, tokens: int, padding: Tensor | None = None) -> None:
        """Count `tokens` more as appended, but for the `padding` [B, tokens] among them."""
        if padding is not None:
            self._padding = torch.cat([self._all_padding(), padding], 1)
        self.appended_tokens += tokens

    def _all_padding(self) -> Tensor:
        """Which of all appended tokens are padding: [B, appended_tokens]."""
        if self._padding is None:
            return torch.zeros(len(self.lens), self.appended_tokens, dtype=torch.bool, device="cpu")
        return pad(self._padding, (0, self.appended_tokens - self._padding.shape[1]))

    def crop(self, tokens: int) -> None:
        """Drop the last `tokens` appended tokens."""
        self.appended_tokens -= tokens
        if self._padding is not None:
            self._padding = self._padding[:, : self.appended_tokens]
        # From the compressed lengths: an interrupted step may have counted its tokens on the device alone.
        self._count_on_device()

    def _count_on_device(self) -> None:
        appended = self._appended_entries
        if isinstance(appended, Tensor):
            (appended,) = devices.stack_to_device(self.k.device, appended)
        torch.add(self._device_compressed, appended, out=self._device_lens)

    def head_entries(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """Views of the compressed k and v [n, d] of one row and head."""
        start = int(self.starts[row, head])
        entries = slice(start, start + int(self.lens[row, head]))
        return self.k[entries], self.v[entries]

    def select(self, rows: Tensor, free_slots: int) -> "RaggedStore":
        """A new store of the batch rows `rows` [n], appended entries included."""
        padding = None if self._padding is None else self._padding[rows]
        new = self._resized(self.lens[rows], free_slots, padding)
        new.copy_from(self, slot_indices(self.starts[rows], new.counts, self.k.device))
        return new

    def _resized(self, lens: Tensor, free_slots: int, padding: Tensor | None) -> "RaggedStore":
        return RaggedStore(lens, free_slots, self.k, self.v, self.scores is not None, self.appended_tokens, padding)

    def reallocate(self, free_slots: int) -> "RaggedStore":
        """A copy with other free slots."""
        return self.select(torch.arange(len(self.lens), device="cpu"), free_slots)

    def drop_padding(self, padding: Tensor) -> "RaggedStore":
        """A store without those appended tokens that are `padding` [B, appended]; itself if there are none."""
        dropped = self._all_padding()
        if not bool((padding & ~dropped).any()):
            return self
        new = self._resized(self.lens, self.free_slots, dropped | padding)
        is_kept = [
            torch.cat([torch.ones(count, dtype=torch.bool, device="cpu"), ~padding[row, ~dropped[row]]])
            for row, counts in enumerate(self.lens.tolist())
            for count in counts
        ]
        entries = slot_indices(self.starts, self.counts, self.k.device)
        new.copy_from(self, entries[torch.cat(is_kept).to(entries.device)])
        return new

    def copy_from(self, source: "RaggedStore", entries: Tensor) -> None:
        """Fill all entries, in order, with those at `entries` of the pools of `source`."""
        slots = slot_indices(self.starts, self.counts, self.k.device)
        for pool, other in zip(self._pools(), source._pools(), strict=True):
            pool[slots] = other[entries]

    def _pools(self) -> list[Tensor]:
        return [pool for pool in (self.k, self.v, self.scores, self.positions) if pool is not None]

    def state(self) -> dict[str, Tensor]:
        """The compressed entries as tensors to be saved."""
        key, value = self.pack()
        return {"k": key, "v": value}

    def pack(self) -> tuple[Tensor, Tensor]:
        """The compressed k and v of all rows and heads one after another, [sum of lens, d] each."""
        slots = slot_indices(self.starts, self.lens, self.k.device)
        return self.k[slots], self.v[slots]

    def unpack(self, key: Tensor, value: Tensor) -> None:
        """Fill the compressed entries with what `pack` returned."""
        slots = slot_indices(self.starts, self.lens, self.k.device)
        self.k[slots], self.v[slots] = key.to(self.k), value.to(self.v)

    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(pool.untyped_storage().nbytes() for pool in self._pools())

    def entry_nbytes(self) -> int:
        """Bytes of k and v of one entry as the model computes them."""
        return (self.k.shape[-1] + self.v.shape[-1]) * self.k.element_size()


class QuantizedStore:
    """Compressed entries in 8 or 4 bits a value, and a `RaggedStore` of appended ones as the model computes them.

    k is quantised by channel within a head and v by entry: measured best at both widths. Where a compiled backend runs
    (Triton; C++ for few rows), and for a single token everywhere, attention reads the quantised values directly; else
    one layer's entries are dequantised at a time.
    """

    scores = None

    def __init__(self, lens: Tensor, key: QuantizedPool, value: QuantizedPool, appended: RaggedStore):
        """Combine packed pools of compressed entries with a store of appended ones, whose own `lens` are 0."""
        self.lens, self.key, self.value, self.appended = lens, key, value, appended
        flat, groups = lens.flatten(), -(-lens.flatten() // key.group)
        first_entries, first_groups = flat.cumsum(0) - flat, groups.cumsum(0) - groups
        # Entry i of a head is in slot start + i of the pools of appended entries, if it is none of the compressed ones.
        starts = (appended.starts - lens).flatten()
        with torch.inference_mode(False):  # see RaggedStore
            tables = devices.stack_to_device(appended.k.device, starts, flat, first_entries, first_groups)
            self._tables = tables.view(4, *lens.shape)
            self._device_lens = self._tables[1].clone()
        if appended.appended_tokens:
            self._count_on_device()

    @classmethod
    def quantize(cls, store: RaggedStore, bits: int) -> "QuantizedStore":
        """The compressed entries of `store` quantised, with the same number of free slots."""
        key, value = store.pack()
        appended = RaggedStore(torch.zeros_like(store.lens), store.free_slots, store.k, store.v)
        lens = store.lens.flatten()
        return cls(store.lens, QuantizedPool.pack(key, bits, lens=lens), QuantizedPool.pack(value, bits), appended)

    @property
    def appended_tokens(self) -> int:
        """As `RaggedStore.appended_tokens`."""
        return self.appended.appended_tokens

    @property
    def free_slots(self) -> int:
        """As `RaggedStore.free_slots`."""
        return self.appended.free_slots

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of appended k and v, and of dequantised ones."""
        return self.appended.dtype

    def attention_view(self) -> StoreView:
        """As `RaggedStore.attention_view`, over pools dequantised for this call."""
        counts = self.appended.counts
        store = RaggedStore(self.lens + counts, 0, self.appended.k, self.appended.v)
        device = self.appended.k.device
        compressed = slot_indices(store.starts, self.lens, device)
        late, fresh = (slot_indices(at, counts, device) for at in (store.starts + self.lens, self.appended.starts))
        # A loaded pool has the dtype it was saved in, which need not be the model's.
        store.k[compressed], store.v[compressed] = self.key.unpack().to(store.k), self.value.unpack().to(store.v)
        store.k[late], store.v[late] = self.appended.k[fresh], self.appended.v[fresh]
        return store.attention_view()

    def compressed_view(self) -> StoreView:
        """As `RaggedStore.compressed_view`, over pools dequantised for this call."""
        store = RaggedStore(self.lens, 0, self.appended.k, self.appended.v)
        store.unpack(self.key.unpack(), self.value.unpack())
        return store.compressed_view()

    def append_view(self) -> StoreView:
        """As `RaggedStore.append_view`."""
        return self.appended.k, self.appended.v, self._tables[0], self._device_lens

    def quantized_kv(self) -> QuantizedKV:
        """The compressed entries as `ragged_attention.append_and_attend` takes them, beside `append_view`."""
        k, v = self.key, self.value
        tables = self._tables[1:]
        return QuantizedKV(k.codes, k.scale, k.minimum, v.codes, v.scale, v.minimum, tables, k.bits, k.group)

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
        """As `RaggedStore.extend`, without scores."""
        view, quantized = self.append_view(), self.quantized_kv()
        if self._is_uniform and can_attend_quantized(query, key, value, *view, quantized):
            out = append_and_attend(query, key, value, *view, scale, buffers=buffers, quantized=quantized)
            self.count_appended(key.shape[2])
            return out
        append(key, value, *view)
        self.count_appended(key.shape[2])
        if query.shape[2] == 1 and query.device.type == "cpu":
            return self._attend_to_codes(query, scale)
        return ragged_attention(query, *self.attention_view(), scale)

    @property
    def _is_uniform(self) -> bool:
        """Whether k and v have one width and group size, which a kernel takes as blocks; files may contain others."""
        layouts = {(pool.bits, pool.group) for pool in (self.key, self.value)}
        return len(layouts) == 1 and self.key.group in (16, 32, 64, 128)

    def _attend_to_codes(self, query: Tensor, scale: float) -> Tensor:
        """Attention of one token, head by head: quantised values are multiplied as they are, none is dequantised."""
        batch, heads, rows, dim = query.shape
        grouped = (query.float() * scale).reshape(self.lens.numel(), -1, dim).unbind()
        places = (x.flatten().tolist() for x in (self.lens, self.appended.starts, self.appended.counts))
        outputs, begin = [], 0
        for q, scores, count, start, appended in zip(grouped, self.key.dot_products(grouped), *places, strict=True):
            late = slice(start, start + appended)
            late_scores = q @ self.appended.k[late].float().t()
            weights = torch.softmax(torch.cat([scores, late_scores], 1), -1)
            out = weights[:, count:] @ self.appended.v[late].float()
            outputs.append(out.add_(self.value.weighted_sum(weights[:, :count], begin, begin + count)))
            begin += count
        return torch.cat(outputs).to(query.dtype).view(batch, heads, rows, -1)

    def count_appended(self, tokens: int, padding: Tensor | None = None) -> None:
        """As `RaggedStore.count_appended`."""
        self.appended.count_appended(tokens, padding)

    def crop(self, tokens: int) -> None:
        """As `RaggedStore.crop`."""
        self.appended.crop(tokens)
        self._count_on_device()

    def _count_on_device(self) -> None:
        (appended,) = devices.stack_to_device(self.appended.k.device, self.appended.counts)
        torch.add(self._tables[1], appended, out=self._device_lens)

    def drop_padding(self, padding: Tensor) -> "QuantizedStore":
        """As `RaggedStore.drop_padding`; the compressed entries, which are never written to, are shared."""
        appended = self.appended.drop_padding(padding)
        return self if appended is self.appended else QuantizedStore(self.lens, self.key, self.value, appended)

    def select(self, rows: Tensor, free_slots: int) -> "QuantizedStore":
        """As `RaggedStore.select`."""
        heads = self.lens.shape[1]
        numbers = (rows[:, None] * heads + torch.arange(heads, device="cpu")).flatten()
        starts = (self.lens.flatten().cumsum(0) - self.lens.flatten()).view_as(self.lens)
        entries = slot_indices(starts[rows], self.lens[rows], self.appended.k.device)
        key, value = self.key.take_heads(numbers), self.value.take(entries)
        return QuantizedStore(self.lens[rows], key, value, self.appended.select(rows, free_slots))

    def reallocate(self, free_slots: int) -> "QuantizedStore":
        """As `RaggedStore.reallocate`; the compressed entries are shared."""
        return QuantizedStore(self.lens, self.key, self.value, self.appended.reallocate(free_slots))

    def state(self) -> dict[str, Tensor]:
        """As `RaggedStore.state`; `restore` takes it."""
        pools = (("k", self.key), ("v", self.value))
        return {f"{side}_{name}": tensor for side, pool in pools for name, tensor in pool.tensors().items()}

    @staticmethod
    def check_state(state: dict[str, Tensor], lens: Tensor, width: int) -> None:
        """Check that `state` has `lens` [B, H] entries with `width` channels.

        Raises KeyError, ValueError or CacheError otherwise.
        """
        key, value = _load_pools(state)
        if key.lens != tuple(lens.flatten().tolist()) or value.lens is not None:
            raise ValueError("its quantised pools have other heads than its counts")
        if len(value) != len(key) or (key.width, value.width) != (width, width):
            raise ValueError(f"its quantised pools are not {(int(lens.sum()), width)}")

    @classmethod
    def restore(cls, state: dict[str, Tensor], lens: Tensor, free_slots: int, like: Tensor) -> "QuantizedStore":
        """The store that returned `state`, on the device and for a cache of the dtype of `like`."""
        key, value = _load_pools({name: tensor.to(like.device) for name, tensor in state.items()})
        empty = like.new_empty(0, key.width), like.new_empty(0, value.width)
        return cls(lens, key, value, RaggedStore(torch.zeros_like(lens), free_slots, *empty))

    def nbytes(self) -> int:
        """As `RaggedStore.nbytes`."""
        return self.key.nbytes() + self.value.nbytes() + self.appended.nbytes()

    def entry_nbytes(self) -> int:
        """As `RaggedStore.entry_nbytes`."""
        return self.appended.entry_nbytes()


# A layer's entries, however they are stored.
KVStore = RaggedStore | QuantizedStore


def extend_padded(store: KVStore, query: Tensor, key: Tensor, value: Tensor, scale: float, padding: Tensor) -> Tensor:
    """Append and attend as `store.extend`, row by row.

    New tokens that are `padding` [B, T] (on the CPU) are not appended, and their outputs are 0.
    """
    rows = [slice(row, row + 1) for row in range(len(padding))]
    tokens = [(~hidden).nonzero()[:, 0].to(query.device) for hidden in padding]
    k_pool, v_pool, starts, lens = store.append_view()
    for row, real in zip(rows, tokens, strict=True):
        append(key[row][:, :, real], value[row][:, :, real], k_pool, v_pool, starts[row], lens[row])
    store.count_appended(padding.shape[1], padding)
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    k_pool, v_pool, starts, lens = store.attention_view()
    for row, real in zip(rows, tokens, strict=True):
        attended = ragged_attention(query[row][:, :, real], k_pool, v_pool, starts[row], lens[row], scale)
        out[row] = out[row].index_copy(2, real, attended)
    return out


def slot_indices(starts: Tensor, counts: Tensor, device: torch.device) -> Tensor:
    """The pool indices, on `device`, of `counts` [B, H] entries from `starts` [B, H] on, head after head."""
    counts = counts.flatten()
    begin, count = devices.stack_to_device(device, starts.flatten() - (counts.cumsum(0) - counts), counts)
    total = int(counts.sum())
    return torch.arange(total, device=device) + torch.repeat_interleave(begin, count, output_size=total)


def _load_pools(state: dict[str, Tensor]) -> tuple[QuantizedPool, QuantizedPool]:
    """The pools of k and v that `state` describes."""
    key, value = (
        QuantizedPool.from_tensors({name[2:]: x for name, x in state.items() if name.startswith(f"{side}_")})
        for side in "kv"
    )
    return key, value
