"""Attention over the codes of one tier, which are restored in registers; called by the slice kernel.

Entries are the rows of all matrix products and packed rows of queries their columns, so that restored codes are the
operands that tensor cores take from registers. Each warp attends to entries of its own. A product over all channels is
the sum of eight over every eighth, as one element of an entry's codes has eight codes (`restore_ptx`).
"""

# ruff: noqa: N803 (constants are in capitals)
import triton
import triton.language as tl

from lkv.kernels import FP8
from lkv.kernels.ragged_attention.arguments import FP8_UNIT, LEVELS
from lkv.kernels.ragged_attention.restore_ptx import CODES, FACTORS, INPUTS, RESULTS
from lkv.kernels.triton_helpers import cap, load_rows, store_rows

_LOWEST = tl.constexpr(-3e38)  # the maximum of a warp without entries; unlike -inf it can be subtracted from itself
_RESULTS = tl.constexpr(RESULTS)
_FP8 = tl.constexpr(FP8)
_FP8_FACTOR = tl.constexpr(2.0**120 * FP8_UNIT)  # of the numbers whose bits in float32 are those of codes


@triton.constexpr_function
def _uses_ptx(is_allowed, dim, bits, dtype):
    """Return whether the codes of a side are restored by PTX: at 3 bits it reads pairs of bytes."""
    return is_allowed and dtype != tl.float32 and (bits != 3 or dim % 16 == 0)


@triton.constexpr_function
def code_width(dim, bits):
    """Return the bytes of the codes of an entry."""
    return dim * abs(bits) // 8


@triton.constexpr_function
def _ptx(bits):
    return CODES[bits]


@triton.constexpr_function
def _constraints(bits):
    return ",".join(["=r"] * RESULTS + ["r"] * INPUTS[bits])


@triton.constexpr_function
def _factor(is_ptx, bits):
    return FACTORS[bits] if is_ptx else 1.0


@triton.constexpr_function
def level_formula(bits):
    """Return the two coefficients of `LEVELS`."""
    return LEVELS[bits]


@triton.constexpr_function
def _block(dim):
    """Return the padded number of elements of an entry; a product takes at least 16."""
    return max(16, triton.next_power_of_2(dim // 8))


@triton.jit
def _channels(element, part: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the channel of code `part` of each element."""
    if BITS == 3:
        return 2 * element + part // 4 + part % 4 * (DIM // 4)
    return 4 * element + part // 2 + part % 2 * (DIM // 2)


@triton.jit
def levels_of(code, BITS: tl.constexpr):
    """Return the levels of codes (int32) in float32."""
    if BITS == _FP8:
        levels = ((code & 128) << 24 | (code & 127) << 20).to(tl.float32, bitcast=True) * _FP8_FACTOR
    else:
        formula: tl.constexpr = level_formula(BITS)
        centred = code.to(tl.float32) - (2**BITS - 1) / 2
        levels = centred * (formula[0] + formula[1] * (centred * centred))
    return levels


@triton.jit
def _load_levels(codes, entry, channel, inside, DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the levels of codes in float32, in the shape to which `entry` and `channel` broadcast.

    Every lane reads the bytes that hold its own code; the layout is that of `lkv.cache.tiers`.
    """
    at = codes + entry * code_width(DIM, BITS)
    if BITS == 8 or BITS == _FP8:
        code = tl.load(at + channel, mask=inside, other=0).to(tl.int32)
    elif BITS == 4:
        byte = tl.load(at + channel % (DIM // 2), mask=inside, other=0).to(tl.int32)
        code = byte >> channel // (DIM // 2) * 4 & 15
    else:
        word = channel % (DIM // 4)
        low = tl.load(at + word, mask=inside, other=0).to(tl.int32)
        halves = tl.load(at + DIM // 4 + word % (DIM // 8), mask=inside, other=0).to(tl.int32)
        code = (low | (halves >> word // (DIM // 8) * 4 & 15) << 8) >> channel // (DIM // 4) * 3 & 7
    return levels_of(code, BITS)


@triton.jit
def _load_words(codes, entry, element, inside, DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the words or pairs of bytes of elements, as `restore_ptx` takes them."""
    if BITS == 4:
        at = codes.to(tl.pointer_type(tl.int32)) + entry * (DIM // 8)
        words = (tl.load(at + element, mask=inside, other=0),)  # type: tuple[tl.tensor, ...]
    elif BITS == 8 or BITS == _FP8:
        at = codes.to(tl.pointer_type(tl.int32)) + entry * (DIM // 4)
        first = tl.load(at + element, mask=inside, other=0)
        words = (first, tl.load(at + DIM // 8 + element, mask=inside, other=0))
    else:
        at = codes.to(tl.pointer_type(tl.int16)) + entry * (DIM * 3 // 16)
        first = tl.load(at + element, mask=inside, other=0)
        # Both halves of a byte serve. They are loaded apart: a shift that depends on the element would make Triton pass
        # what is restored through shared memory.
        is_low, at = element < DIM // 16, at + DIM // 8 + element % (DIM // 16)
        second = tl.load(at, mask=inside & is_low, other=0)
        words = (first, second, tl.load(at, mask=inside & (element >= DIM // 16), other=0))
    return words


@triton.jit
def _restore(
    codes, entry, element, inside, WARPS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Return eight tensors in TYPE, float16 or float32, one for each code of an element: levels divided by `_factor`.

    They have the shape to which `entry` and `element` broadcast; with WARPS, its first axis is split by warps.
    """
    if PTX:
        words = _load_words(codes, entry, element, inside, DIM, BITS)
        if WARPS > 0:
            split = ()  # type: tuple[tl.tensor, ...]
            for part in tl.static_range(len(words)):
                word = words[part]
                split += (tl.reshape(word, (WARPS, word.shape[0] // WARPS, word.shape[1])),)
            words = split
        restored = tl.inline_asm_elementwise(_ptx(BITS), _constraints(BITS), words, (tl.float16,) * 8, True, 2)
    else:
        plain = ()  # type: tuple[tl.tensor, ...]
        for part in tl.static_range(_RESULTS):
            levels = _load_levels(codes, entry, _channels(element, part, DIM, BITS), inside, DIM, BITS).to(TYPE)
            if WARPS > 0:
                levels = tl.reshape(levels, (WARPS, levels.shape[0] // WARPS, levels.shape[1]))
            plain += (levels,)
        restored = plain
    return restored


@triton.jit
def _load_queries(
    q, row_at, is_row, WARPS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr,
):
    """Return the channels [WARPS, elements, rows] of each of the eight products, and the rows' scales [rows].

    Rows are divided by a power of two, so that they fit into float16 as they are.
    """
    element = tl.arange(0, _block(DIM))
    rows = ()  # type: tuple[tl.tensor, ...]
    largest = tl.zeros([element.shape[0], row_at.shape[0]], tl.float32)
    for part in tl.static_range(_RESULTS):
        at = row_at[None, :] + _channels(element, part, DIM, BITS)[:, None]
        row = tl.load(q + at, mask=(element < DIM // 8)[:, None] & is_row[None, :], other=0.0).to(tl.float32)
        rows += (row,)
        largest = tl.maximum(largest, tl.abs(row))
    # Once: what warps exchange keeps a register through all loops.
    peak = tl.max(largest, 0)
    row_scale = tl.exp2(tl.ceil(tl.log2(tl.where(peak > 0.0, peak, 1.0))))
    queries = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(_RESULTS):
        row = (rows[part] / row_scale[None, :]).to(TYPE)
        queries += (tl.broadcast_to(row[None, :, :], (WARPS, row.shape[0], row.shape[1])),)
    return queries, row_scale


@triton.jit
def _rows_first(sums, BITS: tl.constexpr):
    """Return sums [elements, rows] of the eight codes of elements as [rows, channels]; see `sum_channels`."""
    lower = tl.join(tl.join(sums[0], sums[1]), tl.join(sums[2], sums[3]))
    upper = tl.join(tl.join(sums[4], sums[5]), tl.join(sums[6], sums[7]))
    joined = tl.join(lower, upper)  # [elements, rows, 2, 2, 2], of which the last axes are bits 0, 1 and 2 of a part
    ordered = tl.permute(joined, (1, 3, 2, 0, 4)) if BITS == 3 else tl.permute(joined, (1, 2, 0, 4, 3))
    return tl.reshape(ordered, (joined.shape[1], 8 * joined.shape[0]))


@triton.jit
def sum_channels(DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the channels of the sums of `attend_tier`, and which of them exist."""
    sections: tl.constexpr = 4 if BITS == 3 else 2
    size: tl.constexpr = 8 * _block(DIM) // sections
    column = tl.arange(0, sections * size)
    return column // size * (DIM // sections) + column % size, column % size < DIM // sections


@triton.jit
def _products(key, queries):
    """Return the sum of the eight products."""
    scores = tl.dot(key[0], queries[0], input_precision="ieee")
    for part in tl.static_range(1, _RESULTS):
        scores = tl.dot(key[part], queries[part], scores, input_precision="ieee")
    return scores


@triton.jit
def _add_values(sums, shrink, value, share, norm):
    """Return `sums` of warps times `shrink` [WARPS, rows], plus the products of `share`, `norm` and v."""
    if value[0].dtype == tl.float16:
        norm = tl.minimum(norm, 65504.0)
    share = (share * norm[:, :, None]).to(value[0].dtype)
    added = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(_RESULTS):
        added += (tl.dot(value[part], share, sums[part] * shrink[:, None, :], input_precision="ieee"),)
    return added


@triton.jit
def _join_warps(highest, weight, sums, factor, BITS: tl.constexpr):
    """Return maximum, weight and sums of rows from those of warps, whose sums are multiplied by `factor` [WARPS]."""
    peak = tl.max(highest, 0)
    by_warp = tl.exp2(highest - peak[None, :])
    weight = tl.sum(weight * by_warp, 0)
    by_warp *= factor[:, None]
    joined = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(_RESULTS):
        joined += (tl.sum(sums[part] * by_warp[:, None, :], 0),)
    return tl.where(weight > 0.0, peak, float("-inf")), weight, _rows_first(joined, BITS)


@triton.jit
def attend_tier(
    q, row_at, is_row, codes, first, count, visible, scale, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    ALLOWS_PTX: tl.constexpr, TYPE: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """Attend to `count` entries of one tier from number `first` on; each row sees the first `visible` [rows] of them.

    `row_at` [rows] are the offsets of packed rows in `q`, of which those of `is_row` exist. `codes` are codes and norms
    of k, then of v; products are in float16, but in float32 if that is TYPE. Returns maximum and weight [rows], and
    sums [rows, channels] in the order of `sum_channels`.
    """
    number_type: tl.constexpr = tl.float32 if tl.float32 == TYPE else tl.float16
    key_ptx: tl.constexpr = _uses_ptx(ALLOWS_PTX, DIM, KEY_BITS, TYPE)
    value_ptx: tl.constexpr = _uses_ptx(ALLOWS_PTX, VALUE_DIM, VALUE_BITS, TYPE)
    # Entries of a warp at once: plain operations load a code for each lane, and take more registers.
    own_entries: tl.constexpr = 32 if key_ptx and value_ptx else 16
    is_narrow: tl.constexpr = code_width(8, KEY_BITS) + code_width(8, VALUE_BITS) <= 12
    stages: tl.constexpr = 1 if own_entries == 16 else STAGES if is_narrow else 2
    step: tl.constexpr = WARPS * own_entries
    k_norms, v_norms = codes[1] + first, codes[3] + first
    k_codes = codes[0] + first * code_width(DIM, KEY_BITS)
    v_codes = codes[2] + first * code_width(VALUE_DIM, VALUE_BITS)
    element, value_element = tl.arange(0, _block(DIM)), tl.arange(0, _block(VALUE_DIM))
    own = tl.arange(0, WARPS)[:, None] * own_entries + tl.arange(0, own_entries)[None, :]
    queries, row_scale = _load_queries(q, row_at, is_row, WARPS, DIM, KEY_BITS, number_type)
    row_scale *= scale * _factor(key_ptx, KEY_BITS)
    highest = tl.full([WARPS, row_at.shape[0]], _LOWEST, tl.float32)
    weight = tl.zeros([WARPS, row_at.shape[0]], tl.float32)
    zeros = tl.zeros([WARPS, _block(VALUE_DIM), row_at.shape[0]], tl.float32)
    sums = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)  # type: tuple[tl.tensor, ...]
    next_k_norm = tl.load(k_norms + own, mask=own < count, other=0.0)
    next_v_norm = tl.load(v_norms + own, mask=own < count, other=0.0)
    # Norms of v are divided by the largest of a warp's first block, so that they fit into float16.
    v_unit = tl.max(next_v_norm.to(tl.float32), 1)
    v_unit = tl.where(v_unit > 1e-30, v_unit, 1.0)
    for at in tl.range(0, count, step, num_stages=stages):
        entry, flat = at + own, at + tl.arange(0, step)
        # As one axis of entries, which is split into warps after loading: then no two lanes use the same memory bank.
        key = _restore(
            k_codes, flat.to(tl.int64)[:, None], element[None, :],
            (flat < count)[:, None] & (element < DIM // 8)[None, :], WARPS, DIM, KEY_BITS, number_type, key_ptx,
        )
        value = _restore(
            v_codes, entry.to(tl.int64)[:, None, :], value_element[None, :, None],
            (entry < count)[:, None, :] & (value_element < VALUE_DIM // 8)[None, :, None], 0, VALUE_DIM, VALUE_BITS,
            number_type, value_ptx,
        )
        k_norm, v_norm = next_k_norm.to(tl.float32), next_v_norm.to(tl.float32) * (1.0 / v_unit)[:, None]
        # Those of the next block, which arrive while this one is computed.
        next_k_norm = tl.load(k_norms + step + entry, mask=entry + step < count, other=0.0)
        next_v_norm = tl.load(v_norms + step + entry, mask=entry + step < count, other=0.0)
        # Norms scale scores and weights rather than all values of k and v.
        scores = cap(_products(key, queries) * k_norm[:, :, None] * row_scale[None, None, :], SOFTCAP)
        scores = tl.where(entry[:, :, None] < visible[None, None, :], scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        shrink, share = tl.exp2(highest - new), tl.exp2(scores - new[:, None, :])
        highest, weight = new, weight * shrink + tl.sum(share, 1)
        sums = _add_values(sums, shrink, value, share, v_norm)
    return _join_warps(highest, weight, sums, v_unit * _factor(value_ptx, VALUE_BITS), VALUE_BITS)


@triton.jit
def _store_restored(
    codes, norms, code, pool, at, inside, DIM: tl.constexpr, BITS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store the k or v of entries `code` of a tier at the entries `at` of a pool."""
    channel = tl.arange(0, BLOCK_D)
    is_channel = channel < DIM
    both = inside[:, None] & is_channel[None, :]
    values = _load_levels(codes, code[:, None], channel[None, :], both, DIM, BITS)
    values *= tl.load(norms + code, mask=inside, other=0.0).to(tl.float32)[:, None]
    if pool.dtype.element_ty == tl.float16:
        values = tl.clamp(values, -65504.0, 65504.0)
    store_rows(pool, at * DIM, values, inside, channel, is_channel)


@triton.jit
def restore_kernel(
    k_pool, v_pool, starts, lens, added, new_k, new_v, new_starts, spans, k_codes_0, k_norms_0, v_codes_0, v_norms_0,
    tables_0, k_codes_1, k_norms_1, v_codes_1, v_norms_1, tables_1, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Copy all entries of a span, one after another, to pools without codes, and note where it starts there.

    Arguments as in `slice_kernel`. The programs of a span take its blocks in turns.
    """
    span = tl.program_id(1)
    tiers = (k_codes_0, k_norms_0, v_codes_0, v_norms_0), (k_codes_1, k_norms_1, v_codes_1, v_norms_1)
    all_tables = tables_0, tables_1
    start, end = tl.load(starts + span).to(tl.int64), tl.load(lens + span) + added
    # Behind all that earlier spans have: codes, and slots of the pools.
    new_start = start
    for tier in tl.static_range(len(BITS) // 2):
        new_start += tl.load(all_tables[tier] + span) + tl.load(all_tables[tier] + spans + span)
    if tl.program_id(0) == 0:
        tl.store(new_starts + span, new_start.to(tl.int32))
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    for low in range(tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        entry = low + tl.arange(0, BLOCK)
        at = new_start + entry
        coded = low * 0
        for tier in tl.static_range(len(BITS) // 2):
            k_codes, k_norms, v_codes, v_norms = tiers[tier]
            after = coded + tl.load(all_tables[tier] + span)
            inside = (entry >= coded) & (entry < after)
            code = tl.load(all_tables[tier] + spans + span).to(tl.int64) + (entry - coded)
            _store_restored(k_codes, k_norms, code, new_k, at, inside, DIM, BITS[2 * tier], BLOCK_D)
            _store_restored(v_codes, v_norms, code, new_v, at, inside, VALUE_DIM, BITS[2 * tier + 1], BLOCK_V)
            coded = after
        inside = (entry >= coded) & (entry < end)
        key = load_rows(k_pool, (start + entry) * DIM, inside, dims, dims < DIM)
        store_rows(new_k, at * DIM, key, inside, dims, dims < DIM)
        value = load_rows(v_pool, (start + entry) * VALUE_DIM, inside, value_dims, value_dims < VALUE_DIM)
        store_rows(new_v, at * VALUE_DIM, value, inside, value_dims, value_dims < VALUE_DIM)
