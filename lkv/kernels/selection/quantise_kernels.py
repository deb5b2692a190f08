"""The Triton kernels that quantise entries into tiers: the coordinates of k, then codes and norms of k or v.

Entries are packed, those of a span (one KV head of one batch row) after those of the span before. `tables`
[2 + 3 tiers, spans] has each span's first entry and its number of entries; then, for each tier, the number of entries
that a span has there, their first place in `order`, and their first place in the tier. The format of codes and the
arithmetic are those of `lkv.cache.tiers`.
"""

# ruff: noqa: N803, N806 (constants are in capitals)
import triton
import triton.language as tl

from lkv.kernels import FP8
from lkv.kernels.ragged_attention.arguments import FP8_UNIT
from lkv.kernels.ragged_attention.tier_kernels import code_width, level_formula, levels_of
from lkv.kernels.triton_helpers import load_rows, rotate, store_rows

_TINY = tl.constexpr(1.1754943508222875e-38)
_LARGEST = tl.constexpr(1e18)  # the square of larger norms overflows float32
_FP8, _PER_UNIT = tl.constexpr(FP8), tl.constexpr(1 / FP8_UNIT)
_ROUND, _ROUND_BITS = tl.constexpr(1.5 * 2**23), tl.constexpr(0x4B400000)  # added, it rounds to whole numbers
# With w = u (1 + c u^2) and t = c w^2, u is w times a polynomial of t: the largest t of all edges, and coefficients,
# the highest first. The largest error is 0.3 of a code.
_INVERSES = {
    8: (4.733, 0.000689621, -0.01158914, 0.0777465, -0.267677, 0.5147456, -0.6102344, 0.9766545),
    4: (1.341, -0.19281, 0.88574),
    3: (0.742, -0.29572, 0.93005),
}


@triton.constexpr_function
def _inverse(bits):
    return _INVERSES[bits]


@triton.jit
def measure_kernel(key, tables, measured, spans, DIM: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the mean and the standard deviation of CHANNELS channels of a span's k in `measured` [2, spans, DIM]."""
    span, channel = tl.program_id(1), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    start, count, real = tl.load(tables + span).to(tl.int64), tl.load(tables + spans + span), channel < DIM
    # Measured from the first entry, so that no difference of large squares is taken.
    origin = tl.load(key + start * DIM + channel, mask=real & (count > 0), other=0.0).to(tl.float32)
    sums, squares = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    for at in range(0, count, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        values = load_rows(key, (start + entry) * DIM, entry < count, channel, real).to(tl.float32)
        values = tl.where((entry < count)[:, None], values - origin[None, :], 0.0)
        sums += tl.sum(values, 0)
        squares += tl.sum(values * values, 0)
    number = tl.maximum(count, 1)
    mean = sums / number
    place = measured + span * DIM + channel
    tl.store(place, origin + mean, mask=real)
    tl.store(place + spans * DIM, tl.sqrt(tl.maximum(squares / number - mean * mean, 0.0)), mask=real)


@triton.jit
def _key_basis(basis, measured, span, spans, is_writer, channel, CENTRED: tl.constexpr, DIM: tl.constexpr):
    """Return mean and scale of a span's channels: those in `basis` [2, spans, DIM], or those made of `measured`.

    The latter are those of `KeyBasis.of`; the program that `is_writer` stores them in `basis`.
    """
    at, real = span * DIM + channel, channel < DIM
    if measured is None:
        mean, scale = tl.load(basis + at, mask=real, other=0.0), tl.load(basis + spans * DIM + at, mask=real, other=1.0)
    else:
        spread = tl.load(measured + spans * DIM + at, mask=real, other=0.0)
        typical = tl.where(real, tl.sum(spread, 0) / DIM, 0.0)
        scale = tl.where(typical > 1e-12, tl.sqrt(tl.maximum(spread, typical * 1e-3)), 1.0)
        mean = tl.load(measured + at, mask=real, other=0.0) if CENTRED else tl.zeros_like(scale)
        mean, scale = mean.to(basis.dtype.element_ty), scale.to(basis.dtype.element_ty)
        tl.store(basis + at, mean, mask=real & is_writer)
        tl.store(basis + spans * DIM + at, scale, mask=real & is_writer)
    return mean.to(tl.float32), scale.to(tl.float32)


@triton.jit
def _nearest(x, BITS: tl.constexpr):
    """Return the codes (int32) whose levels are nearest to `x`, and these; of two equally near ones that nearer to 0.

    Codes of FP8 are of the lower magnitude then.
    """
    if BITS == _FP8:
        magnitude = tl.minimum(tl.abs(x) * _PER_UNIT, 448.0)
        # Of the exponent and three bits of the mantissa; numbers below 2^-6 are multiples of 2^-9.
        normal = ((magnitude.to(tl.int32, bitcast=True) + 0x7FFFF) >> 20) - 960
        code = tl.where(magnitude < 0.015625, tl.ceil(magnitude * 512 - 0.5).to(tl.int32), normal)
        code = code | (x < 0.0).to(tl.int32) << 7
        level = levels_of(code, BITS)
    else:
        formula: tl.constexpr = level_formula(BITS)
        inverse: tl.constexpr = _inverse(BITS)
        cubic: tl.constexpr = formula[1]
        # Between codes c and c + 1, edge u = c + 1 - HALF, is the number u (slope + cubic u^2).
        slope: tl.constexpr = formula[0] + 0.75 * cubic
        HALF: tl.constexpr = 2 ** (BITS - 1)
        u = x * (1.0 / slope)
        t = tl.minimum(u * u * (cubic / slope), inverse[0])
        factor = tl.full(x.shape, inverse[1], tl.float32)
        for number in tl.static_range(2, len(inverse)):
            factor = factor * t + inverse[number]
        edge = (u * factor + _ROUND) - _ROUND
        edge += (x > edge * (slope + cubic * (edge * edge))).to(tl.float32)
        edge = tl.minimum(tl.maximum(edge, 1.0 - HALF), HALF)
        code = (edge + _ROUND).to(tl.int32, bitcast=True) - (_ROUND_BITS - HALF + 1)
        centred = edge - 0.5
        level = centred * (formula[0] + cubic * (centred * centred))
    return code, level


@triton.jit
def _shifted(codes, channel, by):
    """Return codes [rows, BLOCK] of the channels `by` further on, in place of those of `channel`."""
    last: tl.constexpr = codes.shape[1] - 1
    place = tl.minimum(tl.maximum(channel + by, 0), last)[None, :]
    return tl.gather(codes, tl.broadcast_to(place, codes.shape), 1)


@triton.jit
def _join(codes, channel, DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the bytes of codes [rows, BLOCK], as `lkv.cache.tiers` packs them."""
    if BITS == 4:
        codes = codes | _shifted(codes, channel, DIM // 2) << 4
    elif BITS == 3:
        for part in tl.static_range(1, 4):
            codes = codes | (_shifted(codes, channel, part * (DIM // 4)) & 7) << 3 * part
        first, second = _shifted(codes, channel, -(DIM // 4)), _shifted(codes, channel, -(DIM // 8))
        codes = tl.where((channel < DIM // 4)[None, :], codes & 255, first >> 8 & 15 | (second >> 8 & 15) << 4)
    return codes


@triton.jit
def _store_codes(x, squares, codes, norms, at, inside, channel, invalid, DIM: tl.constexpr, BITS: tl.constexpr):
    """Store codes and norms of rotated entries `x` [rows, BLOCK], of sums `squares`, at the entries `at` of a tier."""
    norm = tl.sqrt(squares / DIM)
    factor = 1.0 / tl.maximum(norm, _TINY)
    x *= factor[:, None]
    code, level = _nearest(x, BITS)
    product = tl.sum(x * level, 1)
    norm *= squares * factor * factor / tl.maximum(product, _TINY)
    tl.store(invalid, 1, mask=tl.sum(tl.where(norm < _LARGEST, 0, inside.to(tl.int32)), 0) > 0)
    tl.store(norms + at, norm.to(norms.dtype.element_ty), mask=inside)
    width: tl.constexpr = code_width(DIM, BITS)
    store_rows(codes, at * width, _join(code, channel, DIM, BITS), inside, channel, channel < width)


@triton.jit
def quantise_kernel(
    values, order, tables, spans, rotation, basis, measured, invalid, codes_0, norms_0, codes_1, norms_1, codes_2,
    norms_2, BITS: tl.constexpr, CENTRED: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Rotate a span's entries of one tier, k in its basis, and store their codes and norms.

    `values` [N, DIM] are k, or v if `basis` is None. `order` [N] are the entries by tier (None: as they are). BITS are
    16 for a tier that is not quantised, whose `codes` are a pool. `measured` as in `_key_basis`. `invalid` [1] becomes
    1 where a norm is not finite or too large.
    """
    span, tier = tl.program_id(1), tl.program_id(2)
    channel = tl.arange(0, BLOCK_D)
    is_writer = (tl.program_id(0) == 0) & (tier == 0)
    if basis is not None:
        mean, scale = _key_basis(basis, measured, span, spans, is_writer, channel, CENTRED, DIM)
    own = tables + (2 + 3 * tier) * spans + span
    count, source, target = tl.load(own), tl.load(own + spans), tl.load(own + 2 * spans).to(tl.int64)
    outputs = (codes_0, norms_0), (codes_1, norms_1), (codes_2, norms_2)
    for at in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        number = at + tl.arange(0, ROWS)
        inside, entry = number < count, source + number
        if order is not None:
            entry = tl.load(order + entry, mask=inside, other=0)
        x = load_rows(values, entry.to(tl.int64) * DIM, inside, channel, channel < DIM).to(tl.float32)
        if basis is not None:
            x = (x - mean[None, :]) * (1.0 / scale)[None, :]
        squares = tl.sum(x * x, 1)  # as it is after the rotation
        x = rotate(x, rotation, DIM, 1, DIM)
        for each in tl.static_range(len(BITS)):
            if tier == each:
                codes, norms = outputs[each]
                if BITS[each] == 16:
                    store_rows(codes, (target + number) * DIM, x, inside, channel, channel < DIM)
                else:
                    _store_codes(x, squares, codes, norms, target + number, inside, channel, invalid, DIM, BITS[each])
