"""What numba compiles for ragged attention on a CPU, all of it in one file: its cache on disk watches no other.

Tensors are addresses here. Each step is two functions of `Arguments`: `attend_slices`, in as many threads as there are,
takes slices of the flat axis (the entries of all spans, one span after another) until none is left, and `join_slices`
puts together what the slices gave for each span.
"""

import ctypes
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, extending, from_dtype, njit, types
from numba.core import cgutils

# What it makes is called without the first parameter, which type checkers do not know.
intrinsic: Any = extending.intrinsic
FLOAT32, BFLOAT16, FLOAT16 = range(3)
# Entries that go through the caches together.
BLOCK = 64
# Entries whose scores are computed side by side, and channels in a vector.
_SIDE = 8
LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8


class Arguments(ctypes.Structure):
    """One step. Addresses of float32: `q` [spans, rows, dim], `out` [spans, rows, value_dim], `lse` [spans, rows] or 0;
    `parts` [slices + spans, rows, value_dim], `extremes` [slices + spans, rows, 2] and `scratch` [slices, BLOCK * (rows
    + largest dim) + 2 * dim] are unfilled. `k`, `v`: pools with `entries` entries in the dtype `kind`, as `key` and
    `value`, `added` new entries a span. A span's `rows` are the `tokens` of each of its query heads. `next_slice` and
    `outside` (set where a span is not within the pools) begin at 0; `scale` is that of base 2. `tables`, 0 where there
    are none, and `k_codes` to `group` are those of `QuantizedKV`, with `least_kind` the dtype of both least values
    (steps are bfloat16), `coded` entries and `k_groups` groups of k."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in "next_slice outside q k v starts lens key value out lse parts extremes scratch kind entries "
            "spans rows tokens dim value_dim slices added causal tables k_codes k_step k_least v_codes v_step v_least "
            "bits group least_kind coded k_groups".split()
        ),
        ("scale", ctypes.c_double),
    )


SIGNATURE = types.void(types.CPointer(from_dtype(np.dtype(Arguments))))

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _long(number: int) -> Any:
    return ir.Constant(_LONG, number)


def _at(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


def _loading(kind: Any, result: Any) -> Any:
    """A function of numba's: (address, index) to the number of the LLVM type `kind` there."""

    def load(typing: Any, address: Any, index: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.load(_at(builder, given[0], given[1], kind))

        return result(types.int64, types.int64), build

    return intrinsic(load)


def _storing(kind: Any, number: Any) -> Any:
    """A function of numba's: (address, index, number) writes the number there."""

    def store(typing: Any, address: Any, index: Any, x: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            builder.store(given[2], _at(builder, given[0], given[1], kind))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, number), build

    return intrinsic(store)


def _reading_bits(kind: Any, source: Any, result: Any) -> Any:
    """A function of numba's: the bits of a number as another type."""

    def view(typing: Any, x: Any) -> Any:
        return result(source), lambda context, builder, signature, given: builder.bitcast(given[0], kind)

    return intrinsic(view)


_load, _load_int, _load_half = (
    _loading(_FLOAT, types.float32), _loading(_INT, types.int32), _loading(ir.IntType(16), types.uint16)
)  # fmt: skip
_store, _store_int, _store_half = (
    _storing(_FLOAT, types.float32), _storing(_INT, types.int32), _storing(ir.IntType(16), types.uint16)
)  # fmt: skip
_bits_of = _reading_bits(_INT, types.float32, types.int32)
_of_bits = _reading_bits(_FLOAT, types.int32, types.float32)


@intrinsic
def _counted(typing: Any, address: Any) -> Any:
    """The integer at `address`, which is one more from now on, for every thread."""

    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(given[0], _LONG.as_pointer()), _long(1), "monotonic")

    return types.int64(types.int64), build


@intrinsic
def _address_of(typing: Any, pointer: Any) -> Any:
    return types.int64(pointer), lambda context, builder, signature, given: builder.ptrtoint(given[0], _LONG)


def _shuffled(builder: Any, x: Any, y: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_INT, len(order)), order))


def _repeated(builder: Any, x: Any, lanes: int, kind: Any = _FLOAT) -> Any:
    vector = ir.Constant(ir.VectorType(kind, lanes), ir.Undefined)
    return _shuffled(builder, builder.insert_element(vector, x, ir.Constant(_INT, 0)), vector, [0] * lanes)


def _load_vector(builder: Any, address: Any, index: Any) -> Any:
    pointer = _at(builder, address, index, _FLOAT)
    return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)


def _store_vector(builder: Any, vector: Any, address: Any, index: Any) -> None:
    pointer = _at(builder, address, index, _FLOAT)
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=4)


def _multiplied_and_added(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))


def _entries_at(builder: Any, address: Any, last: Any, dim: Any) -> list[Any]:
    """Addresses of entries side by side, `last` for those after it: nothing behind it is read."""
    indices = [builder.select(builder.icmp_signed("<", _long(i), last), _long(i), last) for i in range(_SIDE)]
    size = builder.mul(dim, _long(4))
    return [builder.add(address, builder.mul(index, size)) for index in indices]


def _folded(builder: Any, vectors: list[Any]) -> Any:
    """The sums over the lanes of each of `_SIDE` vectors, as one."""
    while len(vectors) > 1 or vectors[0].type.count > _SIDE:
        pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        lanes = LANES if len(vectors) == 1 else 2 * LANES
        even, odd = list(range(0, lanes, 2)), list(range(1, lanes, 2))
        vectors = [
            builder.fadd(_shuffled(builder, x, y, even), _shuffled(builder, x, y, odd)) for x, y in pairs
        ]  # fmt: skip
    return vectors[0]


@intrinsic
def _scores_side_by_side(typing: Any, q: Any, k: Any, last: Any, dim: Any, out: Any, scale: Any) -> Any:
    """`scale` times the product of `q` [dim] with each of the entries of `k` [_SIDE, dim] up to `last`, into `out`."""

    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        q, k, last, dim, out, scale = given
        zeros = ir.Constant(_VECTOR, [0.0] * LANES)
        entries = _entries_at(builder, k, last, dim)
        sums = [cgutils.alloca_once(builder, _VECTOR) for _ in entries]
        for cell in sums:
            builder.store(zeros, cell)
        with cgutils.for_range_slice(builder, _long(0), dim, _long(LANES)) as (channel, _):
            query = _load_vector(builder, q, channel)
            for cell, entry in zip(sums, entries, strict=True):
                key = _load_vector(builder, entry, channel)
                builder.store(_multiplied_and_added(builder, query, key, builder.load(cell)), cell)
        scores = _folded(builder, [builder.load(cell) for cell in sums])
        _store_vector(builder, builder.fmul(scores, _repeated(builder, scale, _SIDE)), out, _long(0))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32), build


@intrinsic
def _values_side_by_side(typing: Any, shares: Any, v: Any, last: Any, dim: Any, sums: Any) -> Any:
    """Add the entries of `v` [_SIDE, dim] up to `last`, each times its one of `shares`, to `sums` [dim]."""

    def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        shares, v, last, dim, sums = given
        entries = _entries_at(builder, v, last, dim)
        weights = [
            _repeated(builder, builder.load(_at(builder, shares, _long(i), _FLOAT)), LANES) for i in range(_SIDE)
        ]
        with cgutils.for_range_slice(builder, _long(0), dim, _long(LANES)) as (channel, _):
            # Two chains of additions, so that neither waits long for itself.
            chains = [_load_vector(builder, sums, channel), ir.Constant(_VECTOR, [0.0] * LANES)]
            for i, (weight, entry) in enumerate(zip(weights, entries, strict=True)):
                value = _load_vector(builder, entry, channel)
                chains[i % 2] = _multiplied_and_added(builder, weight, value, chains[i % 2])
            _store_vector(builder, builder.fadd(*chains), sums, channel)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), build


def _of_codes(builder: Any, address: Any, channel: Any, shift: Any, mask: Any) -> Any:
    """The codes of a vector of channels as numbers; `shift` and `mask` take one of the two that a byte may hold."""
    pointer = _at(builder, address, channel, ir.IntType(8))
    pointer = builder.bitcast(pointer, ir.VectorType(ir.IntType(8), LANES).as_pointer())
    codes = builder.zext(builder.load(pointer, align=1), ir.VectorType(_INT, LANES))
    shift, mask = (_repeated(builder, builder.trunc(x, _INT), LANES, _INT) for x in (shift, mask))
    return builder.uitofp(builder.and_(builder.lshr(codes, shift), mask), _VECTOR)


def _restoring(shared: bool, number: Any) -> Any:
    """A function of numba's: (codes, shift, mask, step, least, count, out) writes `count` numbers code * step + least
    to `out`, where step and least are numbers that all have, or the addresses of one for each."""

    def restore(typing: Any, codes: Any, shift: Any, mask: Any, step: Any, least: Any, count: Any, out: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            codes, shift, mask, step, least, count, out = given
            if shared:
                step, least = (_repeated(builder, x, LANES) for x in (step, least))
            with cgutils.for_range_slice(builder, _long(0), count, _long(LANES)) as (channel, _):
                numbers = _of_codes(builder, codes, channel, shift, mask)
                pair = (step, least) if shared else (_load_vector(builder, x, channel) for x in (step, least))
                _store_vector(builder, _multiplied_and_added(builder, numbers, *pair), out, channel)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3, number, number, types.int64, types.int64), build

    return intrinsic(restore)


_restore_channels, _restore_entry = _restoring(False, types.int64), _restoring(True, types.float32)

_UNIT, _NOTHING = np.float32(1), np.float32(-np.inf)
_LEAST = np.float32(-126)
# Added to a small number it leaves its integer in the last bits.
_SHIFT, _SHIFT_BITS = np.float32(1.5 * 2**23), np.int32(0x4B400000)
_SERIES = tuple(np.float32(np.log(2) ** n / np.prod(np.arange(1.0, n + 1))) for n in range(1, 7))
_LN2 = np.float32(np.log(2))


@njit(fastmath={"contract"})
def exp2(x):
    """2^x for x <= 0, at least 2^-126, within 3e-7 of itself; no number where x is none."""
    x = _LEAST if x < _LEAST else x
    shifted = x + _SHIFT
    rest = x - (shifted - _SHIFT)
    first, second, third, fourth, fifth, sixth = _SERIES
    series = ((((sixth * rest + fifth) * rest + fourth) * rest + third) * rest + second) * rest + first
    return (series * rest + _UNIT) * _of_bits(np.int32((_bits_of(shifted) - _SHIFT_BITS + np.int32(127)) << 23))


@njit
def _base(highest):
    """What is taken off scores before their exponential: inf - inf would be no number."""
    return highest if highest != _NOTHING else np.float32(0)


@njit
def _scores(q, k, count, dim, out, scale):
    for i in range(0, count, _SIDE):
        _scores_side_by_side(q, k + 4 * i * dim, count - 1 - i, dim, out + 4 * i, scale)


@njit
def _highest(scores, count, highest):
    # Four chains; a comparison with what is no number leaves a chain as it is.
    a = b = c = d = highest
    for i in range(count // 4):
        w, x, y, z = _load(scores, 4 * i), _load(scores, 4 * i + 1), _load(scores, 4 * i + 2), _load(scores, 4 * i + 3)
        a, b, c, d = w if w > a else a, x if x > b else b, y if y > c else c, z if z > d else d
    for i in range(count // 4 * 4, count):
        w = _load(scores, i)
        a = w if w > a else a
    a, c = b if b > a else a, d if d > c else c
    return c if c > a else a


@njit(fastmath={"reassoc", "contract", "nsz"})
def _weigh(scores, count, base):
    """Scores into shares, where they lie; returns the sum of these."""
    total = np.float32(0)
    for i in range(count):
        share = exp2(_load(scores, i) - base)
        _store(scores, i, share)
        total += share
    for i in range(count, (count + _SIDE - 1) // _SIDE * _SIDE):
        _store(scores, i, np.float32(0))
    return total


@njit
def _add_values(shares, v, count, dim, sums):
    for i in range(0, count, _SIDE):
        _values_side_by_side(shares + 4 * i, v + 4 * i * dim, count - 1 - i, dim, sums)


@njit
def _fill(target, count, number):
    for i in range(count):
        _store(target, i, number)


@njit
def _scale(numbers, count, factor):
    for i in range(count):
        _store(numbers, i, _load(numbers, i) * factor)


@njit
def _of_float16(bits):
    magnitude = (bits & 0x7FFF) << 13
    number = _of_bits(np.int32(magnitude)) * np.float32(2.0**112)
    if bits & 0x7C00 == 0x7C00:
        number = _of_bits(np.int32(magnitude | 0x7F800000))
    return -number if bits & 0x8000 else number


@njit
def _in_float32(kind, pool, first, count, buffer):
    """Address of `count` numbers from the one numbered `first` on, in `buffer` where they have to be widened."""
    if kind == FLOAT32:
        return pool + 4 * first
    source = pool + 2 * first
    if kind == BFLOAT16:
        for i in range(count):
            _store(buffer, i, _of_bits(np.int32(_load_half(source, i)) << np.int32(16)))
    else:
        for i in range(count):
            _store(buffer, i, _of_float16(np.int32(_load_half(source, i))))
    return buffer


@njit
def _number(kind, address, index):
    """The number in half precision at `index`."""
    bits = np.int32(_load_half(address, index))
    return _of_bits(bits << np.int32(16)) if kind == BFLOAT16 else _of_float16(bits)


@njit
def _restore_keys(given, span, first, count, steps, buffer):
    """Entries of a span, from its `first` on, into `buffer`; `steps` has room for a group's steps and least values."""
    dim, half, least, last = given.dim, given.dim // 2, steps + 4 * given.dim, np.int64(-1)
    width = dim * given.bits // 8
    codes = given.k_codes + (np.int64(_load_int(given.tables, given.spans + span)) + first) * width
    groups = np.int64(_load_int(given.tables, 2 * given.spans + span))
    for i in range(count):
        group = groups + (first + i) // given.group
        if group != last:
            last = group
            for c in range(dim):
                _store(steps, c, _number(BFLOAT16, given.k_step, group * dim + c))
                _store(least, c, _number(given.least_kind, given.k_least, group * dim + c))
        entry, out = codes + i * width, buffer + 4 * i * dim
        if given.bits == 8:
            _restore_channels(entry, 0, 255, steps, least, dim, out)
        else:
            _restore_channels(entry, 0, 15, steps, least, half, out)
            _restore_channels(entry, 4, 15, steps + 4 * half, least + 4 * half, half, out + 4 * half)
    return buffer


@njit
def _restore_values(given, span, first, count, buffer):
    """As `_restore_keys`, where groups are of the channels of one entry."""
    dim, half, group = given.value_dim, given.value_dim // 2, given.group
    width, groups = dim * given.bits // 8, (dim + group - 1) // group
    begin = np.int64(_load_int(given.tables, given.spans + span)) + first
    for i in range(count):
        entry, out = given.v_codes + (begin + i) * width, buffer + 4 * i * dim
        for number in range(groups):
            low, high = number * group, min((number + 1) * group, dim)
            step = _number(BFLOAT16, given.v_step, (begin + i) * groups + number)
            least = _number(given.least_kind, given.v_least, (begin + i) * groups + number)
            if given.bits == 8:
                _restore_entry(entry + low, 0, 255, step, least, high - low, out + 4 * low)
            else:
                middle = min(max(half, low), high)
                _restore_entry(entry + low, 0, 15, step, least, middle - low, out + 4 * low)
                _restore_entry(entry + middle - half, 4, 15, step, least, high - middle, out + 4 * middle)
    return buffer


@njit
def _copy(kind, source, first, pool, begin, count):
    if kind == FLOAT32:
        for i in range(count):
            _store_int(pool, begin + i, _load_int(source, first + i))
    else:
        for i in range(count):
            _store_half(pool, begin + i, _load_half(source, first + i))


@njit
def _append(given, span, start, old, begin, end):
    """Those new entries of a span that are among its entries from `begin` to `end`; `old` were there."""
    for i in range(max(begin, old), end):
        new = span * given.added + i - old
        _copy(given.kind, given.key, new * given.dim, given.k, (start + i) * given.dim, given.dim)
        _copy(given.kind, given.value, new * given.value_dim, given.v, (start + i) * given.value_dim, given.value_dim)


@njit
def _attend_block(given, row, scores, v, count):
    """Running maximum, weight and sums of `row`, one of all slots', with one more block of entries."""
    before, weight = _load(given.extremes, 2 * row), _load(given.extremes, 2 * row + 1)
    highest = _highest(scores, count, before)
    base, sums = _base(highest), given.parts + 4 * row * given.value_dim
    if highest != before:
        shrink = exp2(before - base)
        weight *= shrink
        _scale(sums, given.value_dim, shrink)
    _store(given.extremes, 2 * row, highest)
    _store(given.extremes, 2 * row + 1, weight + _weigh(scores, count, base))
    _add_values(scores, v, count, given.value_dim, sums)


@njit
def _coded(given, span):
    """How many entries of a span are codes, its first ones."""
    return np.int64(_load_int(given.tables, span)) if given.tables != 0 else np.int64(0)


@njit
def _attend_part(given, scratch, slot, span, start, length, begin, end):
    """What the entries from `begin` to `end` of a span give its rows, into `slot`."""
    rows, dim, buffer, scale = given.rows, given.dim, scratch + 4 * BLOCK * given.rows, np.float32(given.scale)
    _fill(given.parts + 4 * slot * rows * given.value_dim, rows * given.value_dim, np.float32(0))
    for row in range(rows):
        _store(given.extremes, 2 * (slot * rows + row), _NOTHING)
        _store(given.extremes, 2 * (slot * rows + row) + 1, np.float32(0))
    size, coded, first = given.value_dim, _coded(given, span), begin
    while first < end:
        in_codes = first < coded
        count = min(BLOCK, (min(end, coded) if in_codes else end) - first)
        if in_codes:
            k = _restore_keys(given, span, first, count, buffer + 4 * BLOCK * max(dim, size), buffer)
        else:
            k = _in_float32(given.kind, given.k, (start + first) * dim, count * dim, buffer)
        for row in range(rows):
            _scores(given.q + 4 * (span * rows + row) * dim, k, count, dim, scratch + 4 * BLOCK * row, scale)
        if in_codes:
            v = _restore_values(given, span, first, count, buffer)
        else:
            v = _in_float32(given.kind, given.v, (start + first) * size, count * size, buffer)
        for row in range(rows):
            seen = count
            if given.causal != 0:
                seen = min(count, length - given.tokens + row % given.tokens + 1 - first)
            if seen > 0:
                _attend_block(given, slot * rows + row, scratch + 4 * BLOCK * row, v, seen)
        first += count


@njit
def _size_of_slices(given):
    total = 0
    for span in range(given.spans):
        total += _load_int(given.lens, span) + given.added
    return max(1, (total + given.slices - 1) // given.slices)


@njit
def _attend_slice(given, number, size):
    """All parts of spans that lie in one slice; slices and spans rise together, so their sum is a slot of its own."""
    size_of_scratch = BLOCK * (given.rows + max(given.dim, given.value_dim)) + 2 * given.dim
    scratch = given.scratch + 4 * number * size_of_scratch
    low, flat = number * size, 0
    for span in range(given.spans):
        start, old = np.int64(_load_int(given.starts, span)), np.int64(_load_int(given.lens, span))
        length = old + given.added
        begin, end = max(low - flat, 0), min(low + size - flat, length)
        if begin < end:
            _append(given, span, start, old, begin, end)
            _attend_part(given, scratch, number + span, span, start, length, begin, end)
        flat += length


@njit
def _outside_codes(given, span, coded):
    first = np.int64(_load_int(given.tables, given.spans + span))
    group = np.int64(_load_int(given.tables, 2 * given.spans + span))
    groups = (coded + given.group - 1) // given.group
    return first < 0 or first + coded > given.coded or group < 0 or group + groups > given.k_groups


@njit
def _outside(given):
    """Whether a span is not within the pools; before anything is read of them."""
    for span in range(given.spans):
        start, old = np.int64(_load_int(given.starts, span)), np.int64(_load_int(given.lens, span))
        coded, length = _coded(given, span), old + given.added
        if not 0 <= coded <= old or (length > coded and (start + coded < 0 or start + length > given.entries)):
            return True
        if coded > 0 and _outside_codes(given, span, coded):
            return True
    return False


def attend_slices(pointer):
    """Take slices until there is none; any number of threads may do so at once."""
    given = carray(pointer, 1)[0]
    if _outside(given):
        given.outside = 1
        return
    size = _size_of_slices(given)
    while True:
        # `next_slice` comes first of all.
        number = _counted(_address_of(pointer))
        if number >= given.slices:
            return
        _attend_slice(given, number, size)


@njit
def _join_row(given, span, row, first, last):
    """One row of a span from what the slices `first` to `last` gave."""
    highest, weight = _NOTHING, np.float32(0)
    for number in range(first, last + 1):
        part = _load(given.extremes, 2 * ((number + span) * given.rows + row))
        highest = part if part > highest else highest
    index = span * given.rows + row
    out = given.out + 4 * index * given.value_dim
    _fill(out, given.value_dim, np.float32(0))
    for number in range(first, last + 1):
        slot = (number + span) * given.rows + row
        factor = exp2(_load(given.extremes, 2 * slot) - _base(highest))
        weight += factor * _load(given.extremes, 2 * slot + 1)
        for i in range(given.value_dim):
            _store(out, i, _load(out, i) + factor * _load(given.parts, slot * given.value_dim + i))
    if weight != 0:
        _scale(out, given.value_dim, _UNIT / weight)
    if given.lse != 0:
        _store(given.lse, index, (highest + np.log2(weight)) * _LN2 if weight != 0 else _NOTHING)


def join_slices(pointer):
    """After all slices: outputs and log-sum-exps, and the new entries counted in `lens`."""
    given = carray(pointer, 1)[0]
    if given.outside != 0:
        return
    size, flat = _size_of_slices(given), 0
    for span in range(given.spans):
        length = np.int64(_load_int(given.lens, span)) + given.added
        # A span without entries has no slices.
        last = (flat + length - 1) // size if length > 0 else -1
        for row in range(given.rows):
            _join_row(given, span, row, flat // size, last)
        flat += length
    for span in range(given.spans):
        _store_int(given.lens, span, np.int32(_load_int(given.lens, span) + given.added))
