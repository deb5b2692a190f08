"""A store whose compressed entries are quantised to 8 or 4 bits a value."""

from typing import Any

import torch
from torch import Tensor

from lkv.cache.quantization import QuantizedPool
from lkv.cache.store import RaggedStore, StoreView, slot_indices
from lkv.kernels.ragged_attention import QuantizedKV, append, append_and_attend, can_attend_quantized, ragged_attention
from lkv.utils import devices


class QuantizedStore:
    """A `KVStore` with compressed entries in 8 or 4 bits a value and appended ones as the model computes them.

    k is quantised by channel within a head and v by entry: measured best at both widths. Where a compiled backend runs
    (Triton; C++ for few rows), and for a single token everywhere, attention reads the quantised values
    directly; else one layer's entries are dequantised at a time.
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
            tables = devices.uploaded(appended.k.device, starts, flat, first_entries, first_groups)
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
        """As `KVStore.appended_tokens`."""
        return self.appended.appended_tokens

    @property
    def free_slots(self) -> int:
        """As `KVStore.free_slots`."""
        return self.appended.free_slots

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of appended k and v, and of dequantised ones."""
        return self.appended.dtype

    def attention_view(self) -> StoreView:
        """As `KVStore.attention_view`, over pools dequantised for this call."""
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
        """As `KVStore.compressed_view`, over pools dequantised for this call."""
        store = RaggedStore(self.lens, 0, self.appended.k, self.appended.v)
        store.unpack(self.key.unpack(), self.value.unpack())
        return store.compressed_view()

    def append_view(self) -> StoreView:
        """As `KVStore.append_view`."""
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
        """As `KVStore.extend`, without scores."""
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
        """As `KVStore.count_appended`."""
        self.appended.count_appended(tokens, padding)

    def crop(self, tokens: int) -> None:
        """As `KVStore.crop`."""
        self.appended.crop(tokens)
        self._count_on_device()

    def _count_on_device(self) -> None:
        (appended,) = devices.uploaded(self.appended.k.device, self.appended.counts)
        torch.add(self._tables[1], appended, out=self._device_lens)

    def drop_padding(self, padding: Tensor) -> "QuantizedStore":
        """As `KVStore.drop_padding`; the compressed entries, which are never written to, are shared."""
        appended = self.appended.drop_padding(padding)
        return self if appended is self.appended else QuantizedStore(self.lens, self.key, self.value, appended)

    def select(self, rows: Tensor, free_slots: int) -> "QuantizedStore":
        """As `KVStore.select`."""
        heads = self.lens.shape[1]
        numbers = (rows[:, None] * heads + torch.arange(heads, device="cpu")).flatten()
        starts = (self.lens.flatten().cumsum(0) - self.lens.flatten()).view_as(self.lens)
        entries = slot_indices(starts[rows], self.lens[rows], self.appended.k.device)
        key, value = self.key.take_heads(numbers), self.value.take(entries)
        return QuantizedStore(self.lens[rows], key, value, self.appended.select(rows, free_slots))

    def reallocate(self, free_slots: int) -> "QuantizedStore":
        """As `KVStore.reallocate`; the compressed entries are shared."""
        return QuantizedStore(self.lens, self.key, self.value, self.appended.reallocate(free_slots))

    def state(self) -> dict[str, Tensor]:
        """As `KVStore.state`; `restore` takes it."""
        pools = (("k", self.key), ("v", self.value))
        return {f"{side}_{name}": tensor for side, pool in pools for name, tensor in pool.tensors().items()}

    @staticmethod
    def check_state(state: dict[str, Tensor], lens: Tensor, width: int) -> None:
        """Check that `state` has `lens` [B, H] entries with `width` channels.

        Raises KeyError, ValueError or CacheError otherwise.
        """
        key, value = _pools(state)
        if key.lens != tuple(lens.flatten().tolist()) or value.lens is not None:
            raise ValueError("its quantised pools have other heads than its counts")
        if len(value) != len(key) or (key.width, value.width) != (width, width):
            raise ValueError(f"its quantised pools are not {(int(lens.sum()), width)}")

    @classmethod
    def restore(cls, state: dict[str, Tensor], lens: Tensor, free_slots: int, like: Tensor) -> "QuantizedStore":
        """The store that returned `state`, on the device and for a cache of the dtype of `like`."""
        key, value = _pools({name: tensor.to(like.device) for name, tensor in state.items()})
        empty = like.new_empty(0, key.width), like.new_empty(0, value.width)
        return cls(lens, key, value, RaggedStore(torch.zeros_like(lens), free_slots, *empty))

    def nbytes(self) -> int:
        """As `KVStore.nbytes`."""
        return self.key.nbytes() + self.value.nbytes() + self.appended.nbytes()

    def entry_nbytes(self) -> int:
        """As `KVStore.entry_nbytes`."""
        return self.appended.entry_nbytes()


def _pools(state: dict[str, Tensor]) -> tuple[QuantizedPool, QuantizedPool]:
    """The pools of k and v that `state` describes."""
    key, value = (
        QuantizedPool.from_tensors({name[2:]: x for name, x in state.items() if name.startswith(f"{side}_")})
        for side in "kv"
    )
    return key, value
