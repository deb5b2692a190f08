"""Stores of one layer's KV entries, with a separate number of entries for each (batch row, KV head)."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from lkv.kernels.ragged_attention import RaggedKV, append, append_and_attend, can_attend_quantized, ragged_attention
from lkv.kernels.selection import kernels_for
from lkv.utils import devices

Buffers = dict[Any, Any] | None  # work space of attention, see `append_and_attend`


class SoftmaxOptions(NamedTuple):
    """What a layer's softmax has beside its scale: attention sinks [Hq], and the cap of scores."""

    sinks: Tensor | None = None
    softcap: float | None = None


PLAIN = SoftmaxOptions()


class KVStore(Protocol):
    """One layer's KV entries, with a separate number of entries for each (batch row, KV head).

    Each has `lens` [B, H] compressed entries, kept by eviction, then the entries appended since (`appended_tokens`
    minus the row's padding), then free slots.

    Attributes:
        lens: Compressed entries of each row and head, int64 [B, H] on the CPU.
    """

    lens: Tensor

    @property
    def scores(self) -> Tensor | None:
        """The scores of unquantised entries if entries are to be evicted later, else None."""

    @property
    def appended_tokens(self) -> int:
        """Tokens appended since the last eviction, padding included."""

    @property
    def counts(self) -> Tensor:
        """Entries of each row and head [B, H], appended ones included."""

    @property
    def free_slots(self) -> int:
        """The number of tokens that can be appended before a reallocation."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of appended k and v, and of the attention over them."""

    def drop_scores(self) -> None:
        """Drop scores and positions, because no eviction follows."""

    def extend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        buffers: Buffers = None,
        options: SoftmaxOptions = PLAIN,
    ) -> Tensor:
        """Append new k and v to the free slots, then attend over all entries.

        Scores of the new tokens are not computed here.

        Args:
            query: [B, Hq, T, d].
            key: [B, H, T, d].
            value: [B, H, T, dv].
            scale: The attention scaling factor.
            buffers: As in `append_and_attend`.
            options: The layer's sinks and cap.

        Returns:
            The attention output, [B, Hq, T, dv].
        """
        kv = self.stored_view()
        if kv.quantized and not can_attend_quantized(query, kv, key, value):
            append(key, value, kv._replace(quantized=()))  # rows may have more tiers than attention supports
            self.count_appended(key.shape[2])
            return self.attend(query, scale, options)
        out = append_and_attend(
            query, key, value, kv, scale, buffers=buffers, sinks=options.sinks, softcap=options.softcap
        )
        self.count_appended(key.shape[2])
        return out

    def attend(self, query: Tensor, scale: float, options: SoftmaxOptions = PLAIN) -> Tensor:
        """Attend as `extend` from tokens that are the last entries already: [B, Hq, T, dv]."""
        kv = self.stored_view()
        kv = self.attention_view() if kv.quantized and not can_attend_quantized(query, kv) else kv
        return ragged_attention(query, kv, scale, sinks=options.sinks, softcap=options.softcap)

    def append(self, row: int, key: Tensor, value: Tensor) -> None:
        """Append k [1, H, n, d] and v of new tokens to one row, without counting them (`count_appended`)."""
        append(key, value, self.stored_view().of_row(row))

    def attend_compressed(self, query: Tensor, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Attend from `query` [B, Hq, T, d] to the compressed entries only, without a mask.

        Returns outputs [B, Hq, T, dv] and log-sum-exps [B, Hq, T], for `merge_attention`.
        """

    def attention_view(self) -> RaggedKV:
        """Return all entries in the model's coordinates, appended ones included."""

    def stored_view(self) -> RaggedKV:
        """Return all entries as they are stored, appended ones included."""
        return self.attention_view()

    def restore(self) -> "RaggedStore":
        """Return an unquantised store of all entries in the model's coordinates; itself if nothing is quantised."""

    def count_appended(self, tokens: int, padding: Tensor | None = None) -> None:
        """Count `tokens` more appended tokens, except the `padding` [B, tokens] among them."""

    def crop(self, tokens: int) -> None:
        """Drop the last `tokens` appended tokens."""

    def drop_padding(self, padding: Tensor) -> "KVStore":
        """Return a store without the appended tokens marked in `padding` [B, appended]; itself if there are none."""

    def select(self, rows: Tensor, free_slots: int) -> "KVStore":
        """Return a new store of the batch rows `rows` [n], appended entries included."""

    def select_heads(self, heads: slice) -> "KVStore":
        """Return a new store of the entries of some heads, without free slots."""

    def reallocate(self, free_slots: int) -> "KVStore":
        """Return a store with another number of free slots; quantised entries are read-only and shared."""

    def state(self) -> dict[str, Tensor]:
        """Return the compressed entries as tensors, for saving."""

    def nbytes(self) -> int:
        """Return the bytes of storage, free slots included."""

    def entry_nbytes(self) -> int:
        """Return the bytes of k and v of one unquantised entry."""


class RaggedStore(KVStore):
    """Flat pools [P, d] of k and v, with one contiguous span for each (batch row, KV head) (Sec. 4.5).

    `scores` [P] float32 and `positions` [P] are stored if entries are to be evicted later.
    """

    # Attributes here, properties in `KVStore`.
    scores: Tensor | None = None
    appended_tokens: int = 0

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

        Dtype, device and width are taken from `key` [., d] and `value` [., dv]. `padding` [B, n] (bool, on the CPU)
        marks padding among the first n appended tokens, which is not stored; None for none.
        """
        self.lens, self.appended_tokens, self._padding = lens, appended_tokens, padding
        self._capacity = self._appended_entries + free_slots
        counts = self.counts.flatten()
        ends = (counts + free_slots).cumsum(0)
        self.starts = (ends - counts - free_slots).view_as(lens)
        size = int(ends[-1]) if len(ends) else 0
        # A prompt may be read in inference mode and continued outside it, where inference tensors are read-only.
        with torch.inference_mode(False):
            self.k, self.v = key.new_empty((size, key.shape[-1])), value.new_empty((size, value.shape[-1]))
            self.scores = key.new_empty(size, dtype=torch.float32) if has_scores else None
            self.positions = key.new_empty(size, dtype=torch.int32) if has_scores else None
            # The attention kernels read these on the pools' device, so that no step waits for a copy.
            self._device_starts, self._device_compressed = devices.stack_to_device(key.device, self.starts, lens)
            self._device_lens = self._device_compressed.clone()  # appended entries included; updated in place
        if self.appended_tokens:
            self.count_on_device()

    @property
    def _appended_entries(self) -> Tensor | int:
        """Return the appended entries of each row [B, 1] (on the CPU), or one number if they are equal."""
        return (
            self.appended_tokens if self._padding is None else self.appended_tokens - self._padding.sum(1, keepdim=True)
        )

    @property
    @override
    def counts(self) -> Tensor:
        return self.lens + self._appended_entries

    @property
    @override
    def free_slots(self) -> int:
        free_slots = self._capacity - self._appended_entries
        return free_slots if isinstance(free_slots, int) else int(free_slots.min())

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @override
    def drop_scores(self) -> None:
        self.scores = self.positions = None

    @override
    def attend_compressed(self, query: Tensor, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        return ragged_attention(query, self.compressed_view(), scale, causal=False, lse=True, softcap=softcap)

    @override
    def attention_view(self) -> RaggedKV:
        return RaggedKV(self.k, self.v, self._device_starts, self._device_lens)

    def compressed_view(self) -> RaggedKV:
        """Return the compressed entries only, which are never modified."""
        return RaggedKV(self.k, self.v, self._device_starts, self._device_compressed)

    @override
    def restore(self) -> "RaggedStore":
        return self

    @override
    def count_appended(self, tokens: int, padding: Tensor | None = None) -> None:
        if padding is not None:
            self._padding = torch.cat([self._all_padding(), padding], 1)
        self.appended_tokens += tokens

    def _all_padding(self) -> Tensor:
        """Return a mask of the padding among all appended tokens: [B, appended_tokens]."""
        if self._padding is None:
            return torch.zeros(len(self.lens), self.appended_tokens, dtype=torch.bool, device="cpu")
        return pad(self._padding, (0, self.appended_tokens - self._padding.shape[1]))

    @override
    def crop(self, tokens: int) -> None:
        self.appended_tokens -= tokens
        if self._padding is not None:
            self._padding = self._padding[:, : self.appended_tokens]
        # From the compressed lengths: an interrupted step may have counted its tokens on the device only.
        self.count_on_device()

    def count_on_device(self) -> None:
        """Copy the lengths counted on the host to the device, without waiting."""
        appended = self._appended_entries
        if isinstance(appended, Tensor):
            (appended,) = devices.stack_to_device(self.k.device, appended)
        torch.add(self._device_compressed, appended, out=self._device_lens)

    @override
    def select(self, rows: Tensor, free_slots: int) -> "RaggedStore":
        padding = None if self._padding is None else self._padding[rows]
        new = self._resized(self.lens[rows], free_slots, padding)
        new.copy_from(self, slot_indices(self.starts[rows], new.counts, self.k.device))
        return new

    @override
    def select_heads(self, heads: slice) -> "RaggedStore":
        new = self._resized(self.lens[:, heads], 0, self._padding)
        new.copy_from(self, slot_indices(self.starts[:, heads], new.counts, self.k.device))
        return new

    def _resized(self, lens: Tensor, free_slots: int, padding: Tensor | None) -> "RaggedStore":
        return RaggedStore(lens, free_slots, self.k, self.v, self.scores is not None, self.appended_tokens, padding)

    @override
    def reallocate(self, free_slots: int) -> "RaggedStore":
        kernels = kernels_for(self.k, self.v)
        if kernels is None or not len(self.k):
            return self.select(torch.arange(len(self.lens), device="cpu"), free_slots)
        new = self._resized(self.lens, free_slots, self._padding)
        entries = kernels.Entries.of_pools(*self.attention_view()[:4], int(self.counts.max()))
        extra = None if new.scores is None else (new.scores, new.positions)
        pools = new.k, new.v, new._device_starts
        kernels.move(entries, pools, scores=self.scores, positions=self.positions, extra=extra)
        return new

    @override
    def drop_padding(self, padding: Tensor) -> "RaggedStore":
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
        """Fill all entries, in order, from the pool indices `entries` of `source`."""
        slots = slot_indices(self.starts, self.counts, self.k.device)
        for pool, other in zip(self._pools(), source._pools(), strict=True):
            pool[slots] = other[entries]

    def _pools(self) -> list[Tensor]:
        return [pool for pool in (self.k, self.v, self.scores, self.positions) if pool is not None]

    @override
    def state(self) -> dict[str, Tensor]:
        return dict(zip("kv", self.pack(), strict=True))

    def pack(self) -> tuple[Tensor, Tensor]:
        """Return the compressed k and v of all rows and heads one after another, [sum of lens, d] each."""
        if len(self.k) == int(self.lens.sum()):
            return self.k, self.v
        slots = slot_indices(self.starts, self.lens, self.k.device)
        return self.k[slots], self.v[slots]

    def fill(self, *packed: Tensor | None) -> None:
        """Fill the compressed entries with the results of `pack`, scores and positions; None leaves what there is."""
        slots = slot_indices(self.starts, self.lens, self.k.device)
        for pool, values in zip(self._pools(), packed, strict=False):
            if values is not None:
                pool[slots] = values.to(pool)

    @override
    def nbytes(self) -> int:
        return sum(pool.untyped_storage().nbytes() for pool in self._pools())

    @override
    def entry_nbytes(self) -> int:
        return (self.k.shape[-1] + self.v.shape[-1]) * self.k.element_size()


def packed_starts(counts: Tensor) -> Tensor:
    """Return the first entry of each row and head [B, H] if `counts` [B, H] entries are packed."""
    flat = counts.flatten()
    return (flat.cumsum(0) - flat).view_as(counts)


def slot_indices(starts: Tensor, counts: Tensor, device: torch.device) -> Tensor:
    """Return the pool indices, on `device`, of `counts` [B, H] entries from `starts` [B, H] on, head after head."""
    begin, count = devices.stack_to_device(device, (starts - packed_starts(counts)).flatten(), counts.flatten())
    total = int(counts.sum())
    return torch.arange(total, device=device) + torch.repeat_interleave(begin, count, output_size=total)


def extend_padded(
    store: KVStore, query: Tensor, key: Tensor, value: Tensor, scale: float, padding: Tensor, options: SoftmaxOptions
) -> Tensor:
    """Append and attend as `store.extend`, row by row.

    Args:
        store: The entries.
        query: As in `KVStore.extend`, as are `key`, `value`, `scale` and `options`.
        key: New keys.
        value: New values.
        scale: The attention scaling factor.
        padding: The new tokens that are not appended and get outputs of 0, bool [B, T] on the CPU.
        options: The layer's sinks and cap.
    """
    tokens = [(~hidden).nonzero()[:, 0].to(query.device) for hidden in padding]
    for row, real in enumerate(tokens):
        store.append(row, key[row : row + 1, :, real], value[row : row + 1, :, real])
    store.count_appended(padding.shape[1], padding)
    return attend_padded(store, query, scale, padding, options)


def attend_padded(store: KVStore, query: Tensor, scale: float, padding: Tensor, options: SoftmaxOptions) -> Tensor:
    """Attend as `store.attend`, row by row; tokens marked in `padding` [B, T] are not entries, and get outputs of 0."""
    tokens = [(~hidden).nonzero()[:, 0].to(query.device) for hidden in padding]
    kv, (sinks, softcap) = store.attention_view(), options
    out = query.new_zeros(*query.shape[:3], kv.v_pool.shape[-1])
    for row, real in enumerate(tokens):
        rows = slice(row, row + 1)
        attended = ragged_attention(query[rows][:, :, real], kv.of_row(row), scale, sinks=sinks, softcap=softcap)
        out[rows] = out[rows].index_copy(2, real, attended)
    return out
