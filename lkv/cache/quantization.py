"""KV entries in 8, 4 or 3 bits a value: rotated, scaled to one norm, and rounded to levels of a normal distribution.

A rotation by a Hadamard matrix spreads the outliers of single channels over all of them, so that the values of an entry
are nearly normal and one norm an entry is scale enough. Each entry is coded by itself: it can be appended, moved or
dropped without its neighbours.
"""

import functools
import math

import torch
from torch import Tensor

from lkv.errors import CacheError
from lkv.kernels.ragged_attention.arguments import LEVELS

WIDTH_MULTIPLE = 8  # what head sizes must be multiples of
_LARGEST = 1e18  # norms beyond that have no float32 square


def code_width(bits: int, width: int) -> int:
    """Bytes of the codes of an entry with `width` channels."""
    return width * bits // 8


def check_width(*widths: int) -> None:
    """Raise CacheError for head sizes that cannot be quantised."""
    if any(width % WIDTH_MULTIPLE for width in widths):
        raise CacheError(
            f"heads of {' and '.join(map(str, sorted(set(widths))))} channels cannot be quantised: bits and memory "
            f"need a multiple of {WIDTH_MULTIPLE}; give a retention alone."
        )


@torch.no_grad()
def quantize(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Code entries of nearly normal values.

    Args:
        values: Rotated entries [n, d], d a multiple of 8.
        bits: 8, 4 or 3.

    Returns:
        Codes uint8 [n, d * bits / 8], and the norms bfloat16 [n] that their levels are multiplied by: those with which
        an entry's error is orthogonal to it. (Norms of the least error would shrink all entries by some percent at few
        bits, and so attention's outputs, while errors of many entries cancel out.)

    Raises:
        CacheError: If values are not finite, or too large.
    """
    values = values.float()
    norms = values.square().mean(-1, keepdim=True).sqrt()
    if values.numel() and not float(norms.amax()) < _LARGEST:
        raise CacheError("k or v has values that are not finite or too large: they cannot be quantised.")
    levels = _levels(bits, values.device)
    scaled = values / norms.clamp(min=torch.finfo(torch.float32).tiny)
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True)
    near = levels[codes]
    product = (scaled * near).sum(-1, True).clamp(min=torch.finfo(torch.float32).tiny)
    norms = norms * scaled.square().sum(-1, True) / product
    return _join(codes.to(torch.uint8), bits), norms[:, 0].bfloat16()


def dequantize(codes: Tensor, norms: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the entries [n, d] that `codes` and `norms` stand for, in `dtype`."""
    values = _levels(bits, codes.device)[_split(codes, bits).int()] * norms[:, None].float()
    return to_dtype(values, dtype)


def to_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values`, which may be changed, in `dtype`: what is beyond the range of float16 is its greatest number."""
    return (values.clamp_(-65504, 65504) if dtype == torch.float16 else values).to(dtype)


@functools.cache
def rotation(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make an orthogonal matrix [d, d] that mixes channels: Hadamard's and a cosine transform of the odd factor."""
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
    slope, cubic = LEVELS[bits]
    centred = torch.arange(2**bits, dtype=torch.float32, device="cpu") - (2**bits - 1) / 2
    with torch.inference_mode(False):
        return (centred * (slope + cubic * centred.square())).to(device)


def _join(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [n, d].

    4 bits: byte j holds channel j in its low bits, channel j + d / 2 above. 3 bits: channels j, j + d / 4, j + d / 2
    and j + 3 d / 4 are 12 bits, from the lowest up. The first d / 4 bytes hold the lower 8 bits of all; the others
    their upper 4, that of j in the low half of byte j, that of j + d / 8 in its high half.
    """
    if bits == 8:
        return codes
    if bits == 4:
        low, high = codes.chunk(2, 1)
        return low | high << 4
    words = torch.stack([part.int() << 3 * place for place, part in enumerate(codes.chunk(4, 1))]).sum(0)
    first, second = (words >> 8).chunk(2, 1)
    return torch.cat([words & 255, first | second << 4], 1).to(torch.uint8)


def _split(codes: Tensor, bits: int) -> Tensor:
    """Unpack what `_join` packed."""
    if bits == 8:
        return codes
    if bits == 4:
        return torch.cat([codes & 15, codes >> 4], 1)
    low, halves = codes.int().tensor_split([2 * codes.shape[1] // 3], 1)
    words = low | torch.cat([halves & 15, halves >> 4], 1) << 8
    return torch.cat([words >> 3 * place & 7 for place in range(4)], 1)
