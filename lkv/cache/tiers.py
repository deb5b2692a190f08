"""Precision tiers: their entries, the assignment of entries to tiers, and the coordinates for quantising k."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lkv.cache.quantization import dequantize, rotation
from lkv.cache.ragged_store import packed_starts, slot_indices
from lkv.methods.targets import Precision


@dataclass(frozen=True, eq=False)
class Tier:
    """Quantised entries of all rows and heads, one after another.

    Attributes:
        precision: The bits of k and v.
        lens: The number of entries of each row and head, int64 [B, H] on the CPU.
        tensors: Codes [N, .] and norms [N] of k, then of v.
        scores: float32 [N] if entries are to be evicted later, else None.
        positions: int32 [N], likewise.
    """

    precision: Precision
    lens: Tensor
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    scores: Tensor | None = None
    positions: Tensor | None = None

    def dequantize(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return k [N, d] and v [N, dv], still rotated."""
        key, key_norms, value, value_norms = self.tensors
        bits = self.precision
        return dequantize(key, key_norms, bits.key_bits, dtype), dequantize(value, value_norms, bits.value_bits, dtype)

    @property
    def starts(self) -> Tensor:
        """The first entry of each row and head, [B, H]."""
        return packed_starts(self.lens)

    def select(self, part: Any) -> "Tier":
        """Return the entries of the rows and heads that `part` indexes in `lens`."""
        lens = self.lens[part]
        entries = slot_indices(self.starts[part], lens, self.tensors[0].device)
        return self._take(entries, lens)

    def _take(self, entries: Tensor, lens: Tensor) -> "Tier":
        scores, positions = (None if x is None else x[entries] for x in (self.scores, self.positions))
        key, key_norms, value, value_norms = (x[entries] for x in self.tensors)
        return replace(
            self, lens=lens, tensors=(key, key_norms, value, value_norms), scores=scores, positions=positions
        )

    def nbytes(self) -> int:
        """Return the bytes of storage."""
        tensors = (*self.tensors, self.scores, self.positions)
        return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)


@dataclass(frozen=True, eq=False)
class KeyBasis:
    """The shift and scale applied to k before it is rotated: mean and scale of each head, [2, B, H, d].

    With k' = (k - mean) / scale R and q' = q scale R, q' k' equals q k up to q mean, which is the same for all entries
    and does not change attention. `scale` is the square root of each channel's standard deviation: this minimises the
    error of products with queries of unknown direction.
    """

    tensor: Tensor

    @classmethod
    def of(cls, key: Tensor, heads: Tensor, shape: torch.Size, is_centred: bool = True) -> "KeyBasis":
        """Measure the basis of entries `key` [N, d] of the rows and heads numbered `heads` [N], of `shape` = [B, H].

        The mean is 0 unless `is_centred`: capped scores do not keep their differences.
        """
        count, wide = shape.numel(), torch.promote_types(key.dtype, torch.float32)
        values, zeros = key.to(wide), key.new_zeros((count, key.shape[-1]), dtype=wide)
        entries = zeros[:, :1].index_add(0, heads, torch.ones_like(values[:, :1])).clamp(min=1)
        mean = zeros.index_add(0, heads, values) / entries
        spread = (zeros.index_add(0, heads, (values - mean[heads]).square()) / entries).sqrt()
        # A constant channel needs no precision, but its scale must not be 0.
        typical = spread.mean(1, keepdim=True)
        scale = spread.clamp(min=typical * 1e-3).sqrt().where(typical > 1e-12, 1.0)
        half = key.dtype if key.dtype == torch.float16 else torch.bfloat16
        mean = mean if is_centred else torch.zeros_like(mean)
        return cls(torch.stack([mean, scale]).to(half).view(2, *shape, -1))

    def select(self, rows: Tensor) -> "KeyBasis":
        """Return the basis of the batch rows `rows` [n]."""
        return KeyBasis(self.tensor[:, rows.to(self.tensor.device)])

    def select_heads(self, heads: slice) -> "KeyBasis":
        """Return the basis of some heads."""
        return KeyBasis(self.tensor[:, :, heads].contiguous())

    def enter(self, key: Tensor, heads: Tensor) -> Tensor:
        """Return k' of entries [N, d] of the rows and heads `heads` [N]."""
        mean, scale = (x[heads].to(key.dtype) for x in self.tensor.flatten(1, 2))
        return (key - mean) / scale @ rotation(key.shape[-1], key.dtype, key.device)

    def leave(self, key: Tensor, heads: Tensor) -> Tensor:
        """Undo `enter`."""
        mean, scale = (x[heads].to(key.dtype) for x in self.tensor.flatten(1, 2))
        return (key @ rotation(key.shape[-1], key.dtype, key.device).mT) * scale + mean


@dataclass(frozen=True)
class TierSplit:
    """The assignment of a store's entries to tiers.

    Attributes:
        precisions: The tiers' precisions, best first: at most one unquantised, then up to `MAX_QUANTIZED` quantised.
        lens: The number of entries of each row and head in each tier, int64 [tiers, B, H] on the CPU.
        numbers: The tier index of each entry, in order of rows and heads, [sum of lens].
    """

    precisions: tuple[Precision, ...]
    lens: Tensor
    numbers: Tensor

    def entries(self) -> tuple[Tensor, ...]:
        """Return the entries of each tier, in order, without waiting for the device."""
        return self.numbers.argsort(stable=True).split(self.lens.flatten(1).sum(1).tolist())
