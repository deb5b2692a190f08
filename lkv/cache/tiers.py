"""KV entries in 8, 4 or 3 bits or in FP8: codes, the coordinates for quantising k, and tiers of equal precision.

An entry is rotated, scaled by its norm, and rounded to levels for a normal distribution. A Hadamard rotation spreads
outlier channels over all channels. The values of an entry are then nearly normal, and one scale per entry is enough.
Entries are coded independently, so they can be appended, moved or dropped one by one.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lkv.cache.ragged_store import packed_starts, slot_indices
from lkv.errors import CacheError
from lkv.kernels import FP8
from lkv.kernels.ragged_attention.arguments import FP8_UNIT, LEVELS
from lkv.methods.base import any_flag
from lkv.methods.targets import Precision

WIDTH_MULTIPLE = 8  # head sizes must be multiples of it
_LARGEST = 1e18  # the square of larger norms overflows float32


def code_width(bits: int, width: int) -> int:
    """Return the bytes of the codes of an entry with `width` channels."""
    return width * abs(bits) // 8


def check_width(*widths: int) -> None:
    """Raise CacheError for head sizes that cannot be quantised."""
    if any(width % WIDTH_MULTIPLE for width in widths):
        raise CacheError(
            f"heads of {' and '.join(map(str, sorted(set(widths))))} channels cannot be quantised: bits and memory "
            f"need a multiple of {WIDTH_MULTIPLE}; give a retention alone."
        )


@torch.no_grad()
def quantize(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise entries with nearly normal values.

    Args:
        values: Rotated entries [n, d], d a multiple of 8; `check_norms` says later whether they were finite.
        bits: 8, 4 or 3, or `FP8`.

    Returns:
        Codes uint8 [n, code_width(bits, d)], and norms bfloat16 [n], the scales of their levels. The norms make the
        error of an entry orthogonal to it. (Least-squares norms would shrink all entries, and so the attention
        outputs, by some percent at few bits, while errors of many entries cancel out.)
    """
    values = values.float()
    norms = values.square().mean(-1, keepdim=True).sqrt()
    levels = _levels(bits, values.device)
    scaled = values / norms.clamp(min=torch.finfo(torch.float32).tiny)
    if bits == FP8:
        magnitudes = levels[:127]
        codes = torch.bucketize(scaled.abs(), (magnitudes[1:] + magnitudes[:-1]) / 2, out_int32=True)
        codes |= (scaled < 0).int() << 7
    else:
        codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    near = levels[codes]
    product = (scaled * near).sum(-1, True).clamp(min=torch.finfo(torch.float32).tiny)
    norms = norms * scaled.square().sum(-1, True) / product
    return _join(codes.to(torch.uint8), bits), norms[:, 0].bfloat16()


def are_invalid(*norms: Tensor) -> Tensor:
    """Return whether `norms` of quantised entries are not finite or too large, as bool on their device."""
    return torch.cat(norms).amax().lt(_LARGEST).logical_not_()


def check_norms(flags: Sequence[Tensor]) -> None:
    """Raise CacheError if one of `flags`, results of `are_invalid`, is set."""
    if flags and any_flag(flags):
        raise CacheError("k or v has values that are not finite or too large: they cannot be quantised.")


def dequantize(codes: Tensor, norms: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the entries [n, d], still rotated.

    Args:
        codes: uint8 [n, code_width(bits, d)].
        norms: bfloat16 [n].
        bits: 8, 4 or 3, or `FP8`.
        dtype: Of the result.
    """
    values = _levels(bits, codes.device)[_split(codes, bits).int()] * norms[:, None].float()
    return to_dtype(values, dtype)


def to_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert `values`, possibly in place, to `dtype`, clamped to the range of float16."""
    return (values.clamp_(-65504, 65504) if dtype == torch.float16 else values).to(dtype)


@functools.cache
def rotation(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make an orthogonal matrix [d, d] that mixes channels: Hadamard, times a cosine transform for the odd factor."""
    hadamard, odd = torch.ones(1, 1, dtype=torch.float64, device="cpu"), width
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu") / math.sqrt(2)
    while odd % 2 == 0:
        hadamard, odd = torch.kron(pair, hadamard), odd // 2
    step = torch.arange(odd, dtype=torch.float64, device="cpu")
    cosine = torch.cos(math.pi / odd * step[:, None] * (step + 0.5)) * math.sqrt(2 / odd)
    cosine[0] /= math.sqrt(2)
    with torch.inference_mode(False):
        return torch.kron(cosine, hadamard).to(dtype).to(device)


@functools.cache
def _levels(bits: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        if bits == FP8:
            numbers = torch.arange(128, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
            magnitudes = numbers.nan_to_num(480.0) * FP8_UNIT
            return torch.cat([magnitudes, -magnitudes]).to(device)
        slope, cubic = LEVELS[bits]
        centred = torch.arange(2**bits, dtype=torch.float32, device="cpu") - (2**bits - 1) / 2
        return (centred * (slope + cubic * centred.square())).to(device)


def _join(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [n, d].

    4 bits: byte j has channel j in its low half and channel j + d / 2 in its high half. 3 bits: channels j, j + d / 4,
    j + d / 2 and j + 3 d / 4 form a 12-bit group j, lowest bits first. The first d / 4 bytes have the lower 8 bits of
    all groups. The next d / 8 have the upper 4: group j in the low half of byte j, group j + d / 8 in the high half.
    """
    if abs(bits) == 8:
        return codes
    if bits == 4:
        low, high = codes.chunk(2, 1)
        return low | high << 4
    words = torch.stack([part.int() << 3 * place for place, part in enumerate(codes.chunk(4, 1))]).sum(0)
    first, second = (words >> 8).chunk(2, 1)
    return torch.cat([words & 255, first | second << 4], 1).to(torch.uint8)


def _split(codes: Tensor, bits: int) -> Tensor:
    """Unpack what `_join` packed."""
    if abs(bits) == 8:
        return codes
    if bits == 4:
        return torch.cat([codes & 15, codes >> 4], 1)
    low, halves = codes.int().tensor_split([2 * codes.shape[1] // 3], 1)
    words = low | torch.cat([halves & 15, halves >> 4], 1) << 8
    return torch.cat([words >> 3 * place & 7 for place in range(4)], 1)


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

    def select(self, part: Tensor | tuple[slice, slice]) -> "Tier":
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


def basis_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the basis of k in `dtype` is stored."""
    return dtype if dtype == torch.float16 else torch.bfloat16


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
        """Measure the basis of entries.

        Args:
            key: Their k, [N, d].
            heads: The flat row and head index of each, [N].
            shape: Rows and heads, [B, H].
            is_centred: If False the mean is 0: capped scores do not keep their differences.
        """
        count, wide = shape.numel(), torch.promote_types(key.dtype, torch.float32)
        values, zeros = key.to(wide), key.new_zeros((count, key.shape[-1]), dtype=wide)
        entries = zeros[:, :1].index_add(0, heads, torch.ones_like(values[:, :1])).clamp(min=1)
        mean = zeros.index_add(0, heads, values) / entries
        spread = (zeros.index_add(0, heads, (values - mean[heads]).square()) / entries).sqrt()
        # A constant channel needs no precision, but its scale must not be 0.
        typical = spread.mean(1, keepdim=True)
        scale = spread.clamp(min=typical * 1e-3).sqrt().where(typical > 1e-12, 1.0)
        mean = mean if is_centred else torch.zeros_like(mean)
        return cls(torch.stack([mean, scale]).to(basis_dtype(key.dtype)).view(2, *shape, -1))

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


def count_tiers(lens: Tensor) -> Tensor:
    """Return the entries of each tier from `lens` [tiers, B, H], which are cumulative from the best tier on."""
    return lens.diff(dim=0, prepend=torch.zeros_like(lens[:1]))


@dataclass(frozen=True)
class TierSplit:
    """The assignment of a store's entries to tiers.

    Attributes:
        precisions: The tiers' precisions, best first: at most one unquantised, then up to `MAX_QUANTIZED` quantised.
        lens: The number of entries of each row and head in each tier, int64 [tiers, B, H] on the CPU.
        order: The entries of the first tier, in order of rows and heads, then those of the next, [sum of lens]; None
            for one tier.
    """

    precisions: tuple[Precision, ...]
    lens: Tensor
    order: Tensor | None = None

    def entries(self) -> tuple[Tensor | slice, ...]:
        """Return the entries of each tier as indices, without waiting for the device."""
        counts = self.lens.flatten(1).sum(1).tolist()
        return (slice(None),) * len(counts) if self.order is None else self.order.split(counts)

    def without_empty(self) -> "TierSplit":
        """Return the split without quantised tiers that have no entries."""
        pairs = enumerate(self.precisions)
        filled = [n for n, precision in pairs if not precision.is_quantized or bool(self.lens[n].any())]
        return TierSplit(tuple(self.precisions[n] for n in filled), self.lens[filled], self.order)
