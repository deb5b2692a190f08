"""Pools of keys or values quantised to 8 or 4 bits a value; torchao, an optional dependency, does the arithmetic.

A group of values shares a scale and its minimum: value = code * scale + minimum. v is grouped by entry, over channels;
k is grouped by channel, over the entries of a head, because its outliers are confined to single channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lkv.errors import CacheError
from lkv.utils.extras import optional_import

BITS = (8, 4)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# A group that is not full is padded while it is dequantised: a bound on the memory for that.
_LARGEST_GROUP = 1024
# The range of a group must itself be a float32.
_LARGEST = 1e38


@dataclass(frozen=True, eq=False)
class QuantizedPool:
    """A pool [P, d] in `bits` bits a value.

    Attributes:
        codes: uint8 [P, d], or [P, ceil(d / 2)] with two 4-bit codes a byte.
        scale: bfloat16. Grouped by entry (`lens` is None) it is [P, ceil(d / G)]: groups of G channels. Grouped by
            channel it is [N, d]: groups of G entries of one head, which start anew with each head. The last group of an
            entry or head may be smaller.
        minimum: Of the shape of `scale`; float16 in a float16 pool and else bfloat16.
        lens: How many entries each head has, for a pool grouped by channel.
        bits: 8 or 4.
        group: G.
        width: d.
        dtype: The dtype of the values before quantisation.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    lens: tuple[int, ...] | None
    bits: int
    group: int
    width: int
    dtype: torch.dtype

    @classmethod
    @torch.no_grad()
    def pack(
        cls, pool: Tensor, bits: int, group: int = 32, lens: Tensor | Sequence[int] | None = None
    ) -> "QuantizedPool":
        """Quantise `pool` [P, d]: by channel within heads of `lens` entries (best for keys), else by entry (values).

        No value is off by more than half a scale, plus the rounding of the pool's dtype. A scale is the range of the
        group / (2^bits - 1), up to 1% more as scales are rounded up, and more in float32 and float64 pools where the
        minimum is far from 0: it is rounded down to a bfloat16. Raises ValueError for bits, group, lens, a shape, a
        dtype or values that cannot be stored, and CacheError where torchao is missing.
        """
        if bits not in BITS:
            raise ValueError(f"bits is {bits!r}, but it must be one of {BITS}.")
        if not 2 <= group <= _LARGEST_GROUP:
            raise ValueError(
                f"group is {group!r}, but it is the number of values that share a scale: give 2 to {_LARGEST_GROUP}."
            )
        if pool.ndim != 2 or not pool.shape[1] or pool.dtype not in _DTYPES:
            raise ValueError(
                f"the pool is {pool.dtype} {tuple(pool.shape)}, but it must be floating point [P, d], d > 0."
            )
        if pool.numel() and not float(pool.abs().amax()) <= _LARGEST:
            raise ValueError(
                f"the pool contains values that are not finite or beyond {_LARGEST}: they cannot be quantised."
            )
        ao = load_torchao()
        heads = None if lens is None else tuple(torch.as_tensor(lens, device="cpu").tolist())
        if heads is None:
            axis, block = -1, (1, 1, group)
            groups = _fill(pool.float(), group, 1).unflatten(1, (-1, group))
        elif sum(heads) == len(pool) and min(heads, default=0) >= 0:
            axis, block = 1, (1, group, 1)
            filled = [_fill(part, group, 0) for part in pool.float().split(heads)] if heads else [pool.float()]
            groups = torch.cat(filled).unflatten(0, (-1, group))
        else:
            raise ValueError(f"lens {heads} do not add up to the pool's {len(pool)} entries.")
        minimum = groups.amin(axis)
        minimum = minimum.to(pool.dtype) if pool.element_size() == 2 else _round_down(minimum)
        # With the minimum at 0 the zero point is 0: ranges that do not reach 0 waste no codes.
        groups -= minimum.unsqueeze(axis)
        highest = 2**bits - 1
        scale, zero = ao.choose_qparams_affine(groups, ao.MappingType.ASYMMETRIC, block, torch.uint8, 0, highest)
        # Rounded up, or the greatest values would be cut. A bfloat16 reaches as far as a float32.
        scale = -_round_down(-scale)
        if len(pool):
            codes = ao.quantize_affine(groups, block, scale.float(), zero, torch.uint8, 0, highest)
        else:
            # torchao takes an empty zero point for none.
            codes = groups.to(torch.uint8)
        codes = codes.flatten(1)[:, : pool.shape[1]] if heads is None else _cut(codes.flatten(0, 1), heads, group)
        return cls(_join(codes, bits), scale, minimum, heads, bits, group, pool.shape[1], pool.dtype)

    def __len__(self) -> int:
        return self.codes.shape[0]

    @torch.no_grad()
    def unpack(self) -> Tensor:
        """Dequantise all entries [P, d], in the pool's dtype."""
        codes = _split(self.codes, self.bits, self.width)
        if self.lens is None:
            groups = functional.pad(codes, (0, -self.width % self.group)).unflatten(1, (-1, self.group))
            return self._dequantize(groups, -1).flatten(1)[:, : self.width].to(self.dtype)
        filled = [functional.pad(part, (0, 0, 0, -len(part) % self.group)) for part in codes.split(self.lens)]
        groups = torch.cat([codes[:0], *filled]).unflatten(0, (-1, self.group))
        return _cut(self._dequantize(groups, 1).flatten(0, 1).to(self.dtype), self.lens, self.group)

    def _dequantize(self, codes: Tensor, axis: int) -> Tensor:
        """float32 values of `codes` [n, m, G] or [n, G, d], whose groups lie along `axis`."""
        block = [1, 1, 1]
        block[axis] = self.group
        scale, highest = self.scale.float(), 2**self.bits - 1
        values = load_torchao().dequantize_affine(codes, block, scale, None, torch.uint8, 0, highest)
        values += self.minimum.float().unsqueeze(axis)
        # Half a scale above the greatest float16 would be infinite.
        return values.clamp_(-65504, 65504) if self.dtype == torch.float16 else values

    @torch.no_grad()
    def dot_products(self, queries: Sequence[Tensor]) -> list[Tensor]:
        """Products of `queries`, [M, d] float32 for each head, with its entries: [M, n] a head.

        For a pool grouped by channel. As q (code scale + minimum) is (q scale) code + q minimum, codes are multiplied
        as they are, and no entry is dequantised.
        """
        assert self.lens is not None
        products, begin, first = [], 0, 0
        for query, n in zip(queries, self.lens, strict=True):
            groups, full = -(-n // self.group), n // self.group
            scale, minimum = (x[first : first + groups].float() for x in (self.scale, self.minimum))
            scaled = query * scale[:, None]
            codes, parts = self.codes[begin : begin + n], []
            if full:
                even = codes[: full * self.group].unflatten(0, (full, self.group))
                parts.append(self._multiply(scaled[:full], even).transpose(0, 1).flatten(1))
            if full < groups:
                parts.append(self._multiply(scaled[full:], codes[None, full * self.group :])[0])
            shift = (query @ minimum.t()).repeat_interleave(self.group, 1)[:, :n]
            products.append(torch.cat(parts, 1).add_(shift) if parts else shift)
            begin, first = begin + n, first + groups
        return products

    def _multiply(self, queries: Tensor, codes: Tensor) -> Tensor:
        """`queries` [N, M, d] times `codes` [N, n, d or d / 2] of 8 or 4 bits: [N, M, n]."""
        if self.bits == 8:
            return queries @ codes.float().transpose(1, 2)
        low, high = (codes & 15).float(), (codes >> 4).float()
        half = codes.shape[2]
        high = high[..., : self.width - half]
        return (queries[..., :half] @ low.transpose(1, 2)).baddbmm_(queries[..., half:], high.transpose(1, 2))

    @torch.no_grad()
    def weighted_sum(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """The sum of the entries `start` to `stop` by `weights` [M, n] float32: [M, d]. For a pool grouped by entry."""
        assert self.lens is None
        scale, minimum = (x[start:stop].float() for x in (self.scale, self.minimum))
        values = _split(self.codes[start:stop], self.bits, self.width).float()
        values = functional.pad(values, (0, -self.width % self.group)).unflatten(1, (-1, self.group))
        # [G, M, n] weights, each times its entry's scale, with the codes [G, n, group] of its group of channels.
        out = torch.bmm(weights * scale.t()[:, None], values.transpose(0, 1))
        out += (weights @ minimum).t()[..., None]
        return out.transpose(0, 1).flatten(1)[:, : self.width]

    def take(self, index: Tensor) -> "QuantizedPool":
        """The entries `index` [n] of a pool grouped by entry, as if only they had been packed.

        Raises ValueError for a pool grouped by channel (`take_heads`).
        """
        if self.lens is not None:
            raise ValueError("single entries cannot be taken from a pool grouped by channel; use take_heads.")
        return replace(self, codes=self.codes[index], scale=self.scale[index], minimum=self.minimum[index])

    def take_heads(self, index: Tensor | Sequence[int]) -> "QuantizedPool":
        """The heads `index` [n] of a pool grouped by channel, as if only they had been packed.

        Raises ValueError for a pool grouped by entry (`take`).
        """
        if self.lens is None:
            raise ValueError("a pool grouped by entry has no heads; use take with the entries.")
        heads = torch.as_tensor(index, device="cpu").tolist()
        groups = [-(-n // self.group) for n in self.lens]

        def pick(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
            parts = tensor.split([*sizes])
            return torch.cat([tensor[:0], *(parts[head] for head in heads)])

        return replace(
            self,
            codes=pick(self.codes, self.lens),
            scale=pick(self.scale, groups),
            minimum=pick(self.minimum, groups),
            lens=tuple(self.lens[head] for head in heads),
        )

    def nbytes(self) -> int:
        """Bytes of storage: codes, scales and minima."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (self.codes, self.scale, self.minimum))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that `from_tensors` needs, ready for safetensors. The names are those of the file format."""
        layout = torch.tensor([self.bits, self.group, self.width, _DTYPES.index(self.dtype)], device="cpu")
        tensors = {"layout": layout, "codes": self.codes, "step": self.scale, "least": self.minimum}
        if self.lens is not None:
            tensors["lens"] = torch.tensor(self.lens, dtype=torch.long, device="cpu")
        return tensors

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "QuantizedPool":
        """The pool that returned `tensors()`, bit for bit. Raises CacheError if they do not fit one another."""
        try:
            codes, scale, minimum = (tensors[name] for name in ("codes", "step", "least"))
            bits, group, width, dtype = tensors["layout"].tolist()
            lens = tuple(tensors["lens"].tolist()) if "lens" in tensors else None
            by_channel = None if lens is None else (sum(-(-n // group) for n in lens), width)
            fits = (
                (bits in BITS and 1 < group <= _LARGEST_GROUP and width > 0 and 0 <= dtype < len(_DTYPES))
                and tensors["layout"].dtype == torch.long
                and (scale.dtype == torch.bfloat16 and minimum.dtype in (torch.float16, torch.bfloat16))
                and (codes.dtype == torch.uint8 and codes.shape == (len(codes), -(-width * bits // 8)))
                and scale.shape == minimum.shape == (by_channel or (len(codes), -(-width // group)))
                and (lens is None or (sum(lens) == len(codes) and min(lens, default=0) >= 0))
            )
        except (KeyError, ValueError, TypeError, ZeroDivisionError):
            fits = False
        if not fits:
            raise CacheError("these tensors are no quantised pool; give what QuantizedPool.tensors() returned.")
        return cls(codes, scale, minimum, lens, bits, group, width, _DTYPES[dtype])


def load_torchao() -> Any:
    """The primitives of torchao; MissingPackageError where it is not installed."""
    with optional_import("quantization", "quantised storage"):
        from torchao.quantization import quant_primitives
    return quant_primitives


def _fill(values: Tensor, group: int, axis: int) -> Tensor:
    """Repeat the last of `values` along `axis` until the last group is full: that changes no range."""
    n = values.shape[axis]
    return values.index_select(axis, torch.arange(n + -n % group, device=values.device).clamp(max=n - 1))


def _cut(filled: Tensor, lens: Sequence[int], group: int) -> Tensor:
    """Remove what filled the last group of each of the heads of `lens` entries."""
    parts = filled.split([n + -n % group for n in lens]) if lens else []
    return torch.cat([filled[:0], *(part[:n] for part, n in zip(parts, lens, strict=True))])


def _round_down(values: Tensor) -> Tensor:
    """The greatest bfloat16 not above each float32."""
    near = values.bfloat16()
    return torch.where(near.float() > values, torch.nextafter(near, torch.full_like(near, -torch.inf)), near)


def _join(codes: Tensor, bits: int) -> Tensor:
    """Two 4-bit codes a byte: the first half of the channels below, the second above."""
    if bits == 8:
        # A copy: a view would keep the filling, too.
        return codes.clone(memory_format=torch.contiguous_format)
    half = -(-codes.shape[1] // 2)
    return codes[:, :half] | functional.pad(codes[:, half:], (0, codes.shape[1] % 2)) << 4


def _split(codes: Tensor, bits: int, width: int) -> Tensor:
    return codes if bits == 8 else torch.cat([codes & 15, codes >> 4], 1)[:, :width]
