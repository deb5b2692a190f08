"""Pools of keys or values held in 8 or 4 bits a value; the arithmetic is torchao's, an optional dependency.

A group of values shares a step and its least value: value = code * step + least. Groups of values of one entry suit v;
groups of one channel over the entries of a head suit k, whose outliers keep to their channels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lkv.errors import CacheError

BITS = (8, 4)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Values of a group that is not full are filled up while it is restored: a bound on what that takes.
_LARGEST_GROUP = 1024
# The range of a group must itself be a float32.
_LARGEST = 1e38


@dataclass(frozen=True, eq=False)
class QuantizedPool:
    """A pool [P, d] in `bits` bits a value.

    `codes` uint8 [P, d], or [P, ceil(d / 2)] with two 4-bit codes a byte. Without `lens`, `step` and `least` are
    [P, ceil(d / G)]: groups of G channels of one entry. With `lens`, the lengths of the spans that make up the pool,
    they are [N, d]: groups of G entries of one channel, begun anew with each span. The last group of an entry or span
    may be smaller. `step` is bfloat16, `least` float16 in a float16 pool and else bfloat16.
    """

    codes: Tensor
    step: Tensor
    least: Tensor
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
        """Quantise `pool` [P, d]: by channel within spans of `lens` entries (best for keys), else by entry (values).

        No value is off by more than half a step, plus the rounding of the pool's dtype. A step is the range of the
        group / (2^bits - 1), up to 1% more as steps are rounded up, and more in float32 and float64 pools where the
        least value is far from 0: it is rounded down to a bfloat16. Raises ValueError for bits, group, lens, a shape,
        a dtype or values that cannot be stored, and CacheError where torchao is missing.
        """
        _check(pool, bits, group)
        ao = _torchao()
        spans = None if lens is None else tuple(torch.as_tensor(lens, device="cpu").tolist())
        if spans is None:
            axis, block = -1, (1, 1, group)
            groups = _fill(pool.float(), group, 1).unflatten(1, (-1, group))
        elif sum(spans) == len(pool) and min(spans, default=0) >= 0:
            axis, block = 1, (1, group, 1)
            filled = [_fill(span, group, 0) for span in pool.float().split(spans)] if spans else [pool.float()]
            groups = torch.cat(filled).unflatten(0, (-1, group))
        else:
            raise ValueError(f"lens {spans} are no spans that make up the pool's {len(pool)} entries.")
        least = groups.amin(axis)
        least = least.to(pool.dtype) if pool.element_size() == 2 else _round_down(least)
        # With the least value at 0 the zero point is 0: ranges that do not reach 0 waste no codes.
        groups -= least.unsqueeze(axis)
        highest = 2**bits - 1
        step, zero = ao.choose_qparams_affine(groups, ao.MappingType.ASYMMETRIC, block, torch.uint8, 0, highest)
        # Rounded up, or the greatest values would be cut. A bfloat16 reaches as far as a float32.
        step = -_round_down(-step)
        if len(pool):
            codes = ao.quantize_affine(groups, block, step.float(), zero, torch.uint8, 0, highest)
        else:
            # torchao takes an empty zero point for none.
            codes = groups.to(torch.uint8)
        codes = codes.flatten(1)[:, : pool.shape[1]] if spans is None else _cut(codes.flatten(0, 1), spans, group)
        return cls(_join(codes, bits), step, least, spans, bits, group, pool.shape[1], pool.dtype)

    def __len__(self) -> int:
        return self.codes.shape[0]

    @torch.no_grad()
    def unpack(self) -> Tensor:
        """All entries [P, d] in the pool's dtype."""
        codes = _split(self.codes, self.bits, self.width)
        if self.lens is None:
            groups = functional.pad(codes, (0, -self.width % self.group)).unflatten(1, (-1, self.group))
            return self._dequantize(groups, -1).flatten(1)[:, : self.width].to(self.dtype)
        whole = [functional.pad(span, (0, 0, 0, -len(span) % self.group)) for span in codes.split(self.lens)]
        groups = torch.cat([codes[:0], *whole]).unflatten(0, (-1, self.group))
        return _cut(self._dequantize(groups, 1).flatten(0, 1).to(self.dtype), self.lens, self.group)

    def _dequantize(self, codes: Tensor, axis: int) -> Tensor:
        """float32 values of `codes` [n, m, G] or [n, G, d], whose groups lie along `axis`."""
        block = [1, 1, 1]
        block[axis] = self.group
        values = _torchao().dequantize_affine(
            codes, block, self.step.float(), None, torch.uint8, 0, 2**self.bits - 1
        )  # fmt: skip
        values += self.least.float().unsqueeze(axis)
        # Half a step above the greatest float16 would be infinite.
        return values.clamp_(-65504, 65504) if self.dtype == torch.float16 else values

    @torch.no_grad()
    def scores(self, queries: Sequence[Tensor]) -> list[Tensor]:
        """Products of `queries`, [M, d] float32 for each span, with its entries: [M, n] a span.

        For a pool grouped by channel. q (code step + least) is (q step) code + q least: codes are multiplied as they
        are, and no entry is restored.
        """
        assert self.lens is not None
        products, begin, first = [], 0, 0
        for query, n in zip(queries, self.lens, strict=True):
            groups = -(-n // self.group)
            step, least = (x[first : first + groups].float() for x in (self.step, self.least))
            scaled = query * step[:, None]
            codes, parts = self.codes[begin : begin + n], []
            whole = n // self.group
            even = codes[: whole * self.group].unflatten(0, (whole, self.group))
            parts = [] if not whole else [self._products(scaled[:whole], even).transpose(0, 1).flatten(1)]
            if whole < groups:
                parts.append(self._products(scaled[whole:], codes[None, whole * self.group :])[0])
            shift = (query @ least.t()).repeat_interleave(self.group, 1)[:, :n]
            products.append(torch.cat(parts, 1).add_(shift) if parts else shift)
            begin, first = begin + n, first + groups
        return products

    def _products(self, queries: Tensor, codes: Tensor) -> Tensor:
        """`queries` [N, M, d] with `codes` [N, n, d or d / 2] of 8 or 4 bits: [N, M, n]."""
        if self.bits == 8:
            return queries @ codes.float().transpose(1, 2)
        low, high = (codes & 15).float(), (codes >> 4).float()
        half = codes.shape[2]
        high = high[..., : self.width - half]
        return (queries[..., :half] @ low.transpose(1, 2)).baddbmm_(queries[..., half:], high.transpose(1, 2))

    @torch.no_grad()
    def weighted(self, shares: Tensor, start: int, stop: int) -> Tensor:
        """The sum of the entries `start` to `stop` by `shares` [M, n] float32: [M, d]. For a pool grouped by entry."""
        assert self.lens is None
        step, least = (x[start:stop].float() for x in (self.step, self.least))
        codes = self.codes[start:stop]
        parts = [codes] if self.bits == 8 else [codes & 15, codes >> 4]
        values = torch.cat([part.float() for part in parts], 1)[:, : self.width]
        values = functional.pad(values, (0, -self.width % self.group)).unflatten(1, (-1, self.group))
        # [G, M, n] shares, each times its entry's step, with the codes [G, n, group] of its group of channels.
        out = torch.bmm(shares * step.t()[:, None], values.transpose(0, 1))
        out += (shares @ least).t()[..., None]
        return out.transpose(0, 1).flatten(1)[:, : self.width]

    def take(self, index: Tensor) -> "QuantizedPool":
        """The entries `index` [n] of a pool grouped by entry, as if only they had been packed.

        Raises ValueError where groups run over the entries: take whole spans there (`take_spans`).
        """
        if self.lens is not None:
            raise ValueError("single entries cannot be taken from a pool grouped by channel; use take_spans.")
        return replace(self, codes=self.codes[index], step=self.step[index], least=self.least[index])

    def take_spans(self, index: Tensor | Sequence[int]) -> "QuantizedPool":
        """The spans `index` [n] of a pool grouped by channel, as if only they had been packed.

        Raises ValueError where the pool has no spans (`take`).
        """
        if self.lens is None:
            raise ValueError("a pool grouped by entry knows no spans; use take with the entries.")
        chosen = torch.as_tensor(index, device="cpu").tolist()
        counts = [-(-n // self.group) for n in self.lens]

        def runs(tensor: Tensor, sizes: Iterable[int]) -> Tensor:
            parts = tensor.split([*sizes])
            return torch.cat([tensor[:0], *(parts[i] for i in chosen)])

        return replace(
            self,
            codes=runs(self.codes, self.lens),
            step=runs(self.step, counts),
            least=runs(self.least, counts),
            lens=tuple(self.lens[i] for i in chosen),
        )

    def nbytes(self) -> int:
        """Bytes of the storages held: codes, steps and least values."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (self.codes, self.step, self.least))

    def tensors(self) -> dict[str, Tensor]:
        """Everything needed to restore the pool, ready for safetensors."""
        layout = torch.tensor([self.bits, self.group, self.width, _DTYPES.index(self.dtype)], device="cpu")
        held = {"layout": layout, "codes": self.codes, "step": self.step, "least": self.least}
        return held if self.lens is None else {**held, "lens": torch.tensor(self.lens, dtype=torch.long, device="cpu")}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "QuantizedPool":
        """The pool that gave `tensors()`, bit for bit. Raises CacheError if they do not fit one another."""
        try:
            codes, step, least = (tensors[name] for name in ("codes", "step", "least"))
            bits, group, width, dtype = tensors["layout"].tolist()
            lens = tuple(tensors["lens"].tolist()) if "lens" in tensors else None
            by_channel = None if lens is None else (sum(-(-n // group) for n in lens), width)
            fits = (
                (bits in BITS and 1 < group <= _LARGEST_GROUP and width > 0 and 0 <= dtype < len(_DTYPES))
                and tensors["layout"].dtype == torch.long
                and (step.dtype == torch.bfloat16 and least.dtype in (torch.float16, torch.bfloat16))
                and (codes.dtype == torch.uint8 and codes.shape == (len(codes), -(-width * bits // 8)))
                and step.shape == least.shape == (by_channel or (len(codes), -(-width // group)))
                and (lens is None or (sum(lens) == len(codes) and min(lens, default=0) >= 0))
            )
        except (KeyError, ValueError, TypeError, ZeroDivisionError):
            fits = False
        if not fits:
            raise CacheError("these tensors are no quantised pool; give what QuantizedPool.tensors() returned.")
        return cls(codes, step, least, lens, bits, group, width, _DTYPES[dtype])


def require_library() -> None:
    """Raise CacheError now, rather than after a long prompt, if torchao is missing."""
    _torchao()


def _torchao() -> Any:
    """The primitives of torchao, imported only where they are needed. Raises CacheError if they are missing."""
    try:
        from torchao.quantization import quant_primitives
    except ImportError as error:
        raise CacheError(
            f"quantised storage needs torchao, which cannot be imported ({error}); "
            "run `pip install 'lkv-cache[quantization]'`."
        ) from error
    return quant_primitives


def _check(pool: Tensor, bits: int, group: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits is {bits!r}, but it must be one of {BITS}.")
    if not 2 <= group <= _LARGEST_GROUP:
        raise ValueError(
            f"group is {group!r}, but it is the number of values that share a step: give 2 to {_LARGEST_GROUP}."
        )
    if pool.ndim != 2 or not pool.shape[1] or pool.dtype not in _DTYPES:
        raise ValueError(f"the pool is {pool.dtype} {tuple(pool.shape)}, but it must be floating point [P, d], d > 0.")
    if pool.numel() and not float(pool.abs().amax()) <= _LARGEST:
        raise ValueError(f"the pool holds values that are not finite or beyond {_LARGEST}: they cannot be quantised.")


def _fill(values: Tensor, group: int, axis: int) -> Tensor:
    """`values` with the last one repeated along `axis` up to whole groups: that changes no range."""
    n = values.shape[axis]
    return values.index_select(axis, torch.arange(n + -n % group, device=values.device).clamp(max=n - 1))


def _cut(filled: Tensor, lens: Sequence[int], group: int) -> Tensor:
    """`filled` without what filled each of its spans of `lens` rows up to whole groups."""
    parts = filled.split([n + -n % group for n in lens]) if lens else []
    return torch.cat([filled[:0], *(part[:n] for part, n in zip(parts, lens, strict=True))])


def _round_down(values: Tensor) -> Tensor:
    """The greatest bfloat16 not above each float32."""
    near = values.bfloat16()
    return torch.where(near.float() > values, torch.nextafter(near, torch.full_like(near, -torch.inf)), near)


def _join(codes: Tensor, bits: int) -> Tensor:
    """Two 4-bit codes a byte: the first half of the channels below, the second above."""
    if bits == 8:
        # A copy: a view would hold the filling too.
        return codes.clone(memory_format=torch.contiguous_format)
    half = -(-codes.shape[1] // 2)
    return codes[:, :half] | functional.pad(codes[:, half:], (0, codes.shape[1] % 2)) << 4


def _split(codes: Tensor, bits: int, width: int) -> Tensor:
    return codes if bits == 8 else torch.cat([codes & 15, codes >> 4], 1)[:, :width]
