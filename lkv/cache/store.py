"""Stores of one layer's KV entries: each (batch row, KV head) has a number of entries of its own."""

from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from lkv.kernels.ragged_attention import append, append_and_attend, ragged_attention
from lkv.utils import devices

# Pools of k [P, d] and v [P, dv], and for each row and head where its entries begin and how many there are (int32
# [B, H], on the pools' device), as `ragged_attention` takes them.
StoreView = tuple[Tensor, Tensor, Tensor, Tensor]


class KVStore(Protocol):
    """The entries of one layer, however they are stored.

    Each (row, KV head) has `lens` [B, H] compressed entries, which eviction left, then those appended since (all
    `appended_tokens` but the row's padding), then at least `free_slots` unused ones.
    """

    lens: Tensor

    @property
    def appended_tokens(self) -> int:
        """Tokens appended since the last eviction."""

    @property
    def free_slots(self) -> int:
        """How many tokens can be appended before a reallocation."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of appended k and v, and of the attention over them."""

    @property
    def scores(self) -> Tensor | None:
        """The scores of the entries, where some are to be evicted later."""

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

        Args:
            query: [B, Hq, T, d].
            key: [B, H, T, d].
            value: [B, H, T, dv].
            scale: What the products of queries and keys are multiplied by.
            scores: [B, H, T], stored with the entries where `self.scores` are.
            position: The position of the first new token, stored with the scores.
            buffers: As in `ragged_attention.append_and_attend`.

        Returns:
            [B, Hq, T, dv].
        """

    def compressed_view(self) -> StoreView:
        """The compressed entries alone; nothing that is read through it is ever written to."""

    def attention_view(self) -> StoreView:
        """All entries, appended ones included."""

    def append_view(self) -> StoreView:
        """What `ragged_attention.append` writes to and counts on; tell `count_appended` afterwards."""

    def count_appended(self, tokens: int, padding: Tensor | None = None) -> None:
        """Count `tokens` more as appended, but for the `padding` [B, tokens] among them."""

    def drop_padding(self, padding: Tensor) -> Self:
        """A store without those appended tokens that are `padding` [B, appended]; itself if there are none."""

    def crop(self, tokens: int) -> None:
        """Drop the last `tokens` appended tokens."""

    def select(self, rows: Tensor, free_slots: int) -> Self:
        """A new store of the batch rows `rows` [n], appended entries included."""

    def reallocate(self, free_slots: int) -> Self:
        """A copy with other free slots."""

    def state(self) -> dict[str, Tensor]:
        """The compressed entries as tensors to be saved."""

    def nbytes(self) -> int:
        """Bytes of storage."""

    def entry_nbytes(self) -> int:
        """Bytes of k and v of one entry as the model computes them."""


class AppendedTokens:
    """The tokens appended after the compressed entries: equally many in all rows, but for padding.

    `padding` [B, k] (bool, on the CPU) marks which of the first k tokens a row does not store; None for none.
    """

    def __init__(self, tokens: int = 0, padding: Tensor | None = None):
        self.tokens, self.padding = tokens, padding

    @property
    def counts(self) -> Tensor | int:
        """Entries of each row [B, 1] (on the CPU), or one number where all rows have equally many."""
        return self.tokens if self.padding is None else self.tokens - self.padding.sum(1, keepdim=True)

    def add(self, tokens: int, padding: Tensor | None = None) -> None:
        """Count `tokens` more, of which some are `padding` [B, tokens]."""
        if padding is not None:
            self.padding = torch.cat([self.padding_of(len(padding)), padding], 1)
        self.tokens += tokens

    def crop(self, tokens: int) -> None:
        """Drop the last `tokens` of them."""
        self.tokens -= tokens
        if self.padding is not None:
            self.padding = self.padding[:, : self.tokens]

    def select(self, rows: Tensor) -> "AppendedTokens":
        """Those of the batch rows `rows` [n]."""
        return AppendedTokens(self.tokens, None if self.padding is None else self.padding[rows])

    def padding_of(self, rows: int) -> Tensor:
        """Which of all tokens are padding in each of `rows` rows: [B, tokens]."""
        if self.padding is None:
            return torch.zeros(rows, self.tokens, dtype=torch.bool, device="cpu")
        return pad(self.padding, (0, self.tokens - self.padding.shape[1]))


class RaggedStore:
    """Flat pools [P, d] of k and v, of which each (batch row, KV head) has one contiguous part (Sec. 4.5).

    A part is `lens` compressed entries, the appended ones, and free slots. `scores` [P] float32 and `positions` [P]
    belong to the entries where some are to be evicted later.
    """

    def __init__(
        self,
        lens: Tensor,
        free_slots: int,
        key: Tensor,
        value: Tensor,
        has_scores: bool = False,
        appended: AppendedTokens | None = None,
    ):
        """Allocate pools for `lens` [B, H] (int64 on the CPU) entries, the `appended` ones and `free_slots` more.

        Dtype, device and width are those of `key` [., d] and `value` [., dv].
        """
        self.lens, self._appended = lens, appended or AppendedTokens()
        self._capacity = self._appended.counts + free_slots  # for appended tokens
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
            self._device_starts, self._device_compressed = devices.uploaded(key.device, self.starts, lens)
            self._device_lens = self._device_compressed.clone()  # appended entries included; changed in place
        if self.appended_tokens:
            self._count_on_device()

    @property
    def appended_tokens(self) -> int:
        """As `KVStore.appended_tokens`."""
        return self._appended.tokens

    @property
    def counts(self) -> Tensor:
        """Entries of each row and head [B, H], appended ones included."""
        return self.lens + self._appended.counts

    @property
    def free_slots(self) -> int:
        """As `KVStore.free_slots`."""
        left = self._capacity - self._appended.counts
        return left if isinstance(left, int) else int(left.min())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of k and v."""
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
        """As `KVStore.extend`."""
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
        """As `KVStore.attention_view`."""
        return self.k, self.v, self._device_starts, self._device_lens

    def append_view(self) -> StoreView:
        """As `KVStore.append_view`."""
        return self.attention_view()

    def compressed_view(self) -> StoreView:
        """As `KVStore.compressed_view`."""
        return self.k, self.v, self._device_starts, self._device_compressed

    def count_appended(self, tokens: int, padding: Tensor | None = None) -> None:
        """As `KVStore.count_appended`."""
        self._appended.add(tokens, padding)

    def crop(self, tokens: int) -> None:
        """As `KVStore.crop`."""
        self._appended.crop(tokens)
        # From the compressed lengths: an interrupted step may have counted its tokens on the device alone.
        self._count_on_device()

    def _count_on_device(self) -> None:
        appended = self._appended.counts
        if isinstance(appended, Tensor):
            (appended,) = devices.uploaded(self.k.device, appended)
        torch.add(self._device_compressed, appended, out=self._device_lens)

    def head_entries(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """Views of the compressed k and v [n, d] of one row and head."""
        start = int(self.starts[row, head])
        entries = slice(start, start + int(self.lens[row, head]))
        return self.k[entries], self.v[entries]

    def select(self, rows: Tensor, free_slots: int) -> "RaggedStore":
        """As `KVStore.select`."""
        appended = self._appended.select(rows)
        new = RaggedStore(self.lens[rows], free_slots, self.k, self.v, self.scores is not None, appended)
        new.copy_from(self, slot_indices(self.starts[rows], new.counts, self.k.device))
        return new

    def reallocate(self, free_slots: int) -> "RaggedStore":
        """As `KVStore.reallocate`."""
        return self.select(torch.arange(len(self.lens), device="cpu"), free_slots)

    def drop_padding(self, padding: Tensor) -> "RaggedStore":
        """As `KVStore.drop_padding`."""
        dropped = self._appended.padding_of(len(padding))
        if not bool((padding & ~dropped).any()):
            return self
        appended = AppendedTokens(self.appended_tokens, dropped | padding)
        new = RaggedStore(self.lens, self.free_slots, self.k, self.v, self.scores is not None, appended)
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
        self.k[slots], self.v[slots] = source.k[entries], source.v[entries]
        if self.scores is not None and source.scores is not None:
            assert self.positions is not None and source.positions is not None
            self.scores[slots], self.positions[slots] = source.scores[entries], source.positions[entries]

    def state(self) -> dict[str, Tensor]:
        """As `KVStore.state`."""
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
        """As `KVStore.nbytes`."""
        pools = (self.k, self.v, self.scores, self.positions)
        return sum(pool.untyped_storage().nbytes() for pool in pools if pool is not None)

    def entry_nbytes(self) -> int:
        """As `KVStore.entry_nbytes`."""
        return (self.k.shape[-1] + self.v.shape[-1]) * self.k.element_size()


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
    begin, count = devices.uploaded(device, starts.flatten() - (counts.cumsum(0) - counts), counts)
    total = int(counts.sum())
    return torch.arange(total, device=device) + torch.repeat_interleave(begin, count, output_size=total)
