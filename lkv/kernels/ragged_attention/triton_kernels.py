"""The Triton kernels of ragged attention: slices over the entries, whose parts are joined in place, and the append.

A span has the entries of one KV head of one batch row. The entries of all spans, one span after another, form the flat
axis; a program of the slice kernel processes one slice of it for one tile of BLOCK_M packed rows. Packed row m of a
span is new token m // GROUP of query head m % GROUP of its group. Pools are [P, DIM] and [P, VALUE_DIM]. The partial
result of a slice for a span is a weighted sum of v in `parts` [places, VALUE_DIM], and the largest score and the sum of
weights in `extremes` [places, 2]; scores are in base 2. Programs draw tickets: the last program of a span reduces its
parts.
"""

# ruff: noqa: N803 (constants are in capitals)
import triton
import triton.language as tl

from lkv.kernels.ragged_attention.arguments import LEVELS
from lkv.kernels.triton_helpers import IS_INTERPRETED, load_rows, split_heads, store_rows

LN_2 = tl.constexpr(0.6931471805599453)
# Code c stands for u (slope + cubic u^2), u = c - (2^bits - 1) / 2.
SLOPE_8, CUBIC_8 = tl.constexpr(LEVELS[8][0]), tl.constexpr(LEVELS[8][1])
SLOPE_4, CUBIC_4 = tl.constexpr(LEVELS[4][0]), tl.constexpr(LEVELS[4][1])
SLOPE_3, CUBIC_3 = tl.constexpr(LEVELS[3][0]), tl.constexpr(LEVELS[3][1])


@triton.jit
def _pick(table, span, SPANS: tl.constexpr):
    """Return number `span` of a table [SPANS] in registers."""
    return tl.sum(tl.where(tl.arange(0, SPANS) == span, table, 0), 0)


@triton.jit
def _row_offsets(span, kv_heads, packed, strides, GROUP: tl.constexpr):
    """Return the offsets of a span's packed rows in a tensor [B, Hq, Tq, .] with `strides`, in 64 bits."""
    batch_stride, head_stride, row_stride = strides
    batch, head = (span // kv_heads).to(tl.int64), (span % kv_heads) * GROUP + packed % GROUP
    token = packed // GROUP
    return batch * batch_stride + head.to(tl.int64) * head_stride + token.to(tl.int64) * row_stride


@triton.jit
def _cap(scores, SOFTCAP: tl.constexpr):
    """Return SOFTCAP tanh(scores / SOFTCAP), or `scores` if it is 0."""
    return SOFTCAP * (2 * tl.sigmoid(scores * (2 / SOFTCAP)) - 1) if SOFTCAP else scores


@triton.jit
def _attend_block(query, key, value, value_norm, seen, scale, state, SOFTCAP: tl.constexpr):
    """Add a block of entries to the running maximum, weight and sums of rows, `state`.

    `scale` scales all scores, or each entry [1, N]; `value_norm` scales the entries of v.
    """
    highest, weight, sums = state
    scores = _cap(tl.dot(query, key, input_precision="ieee") * scale, SOFTCAP)
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(highest, tl.max(scores, 1))
    # Avoid inf - inf for a row without visible entries so far.
    base = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2(highest - base)
    share = tl.exp2(scores - base[:, None])
    sums = sums * shrink[:, None] + tl.dot((share * value_norm).to(value.dtype), value, input_precision="ieee")
    return new, weight * shrink + tl.sum(share, 1), sums


@triton.jit
def _attend_pools(
    query, k_span, v_span, begin, end, visible, axes, scale, state,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Run `_attend_block` over the entries `begin` to `end` of a span; each row sees entries up to `visible`."""
    dims, real, value_dims, value_real = axes
    for at in range(begin, end, BLOCK_N):
        entry = at + tl.arange(0, BLOCK_N)
        inside = entry < end
        key_at = k_span + entry[None, :].to(tl.int64) * DIM + dims[:, None]
        key = tl.load(key_at, mask=inside[None, :] & real[:, None], other=0.0).to(query.dtype)
        value = load_rows(v_span, entry.to(tl.int64) * VALUE_DIM, inside, value_dims, value_real).to(query.dtype)
        is_visible = inside[None, :] & (entry[None, :] <= visible[:, None])
        state = _attend_block(query, key, value, 1.0, is_visible, scale, state, SOFTCAP)
    return state


@triton.jit
def _load_levels(codes, entry, channel, inside, DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the levels of codes in float32, in the shape to which `entry` and `channel` broadcast.

    Every lane reads the bytes that hold its own code (the layout is that of `lkv.cache.quantization`), so that channels
    come in their natural order; lanes that share a byte find it in the cache.
    """
    at = codes + entry * (DIM * BITS // 8)
    if BITS == 8:
        code = tl.load(at + channel, mask=inside, other=0).to(tl.int32)
    elif BITS == 4:
        byte = tl.load(at + channel % (DIM // 2), mask=inside, other=0).to(tl.int32)
        code = byte >> channel // (DIM // 2) * 4 & 15
    else:
        word = channel % (DIM // 4)
        low = tl.load(at + word, mask=inside, other=0).to(tl.int32)
        halves = tl.load(at + DIM // 4 + word % (DIM // 8), mask=inside, other=0).to(tl.int32)
        code = (low | (halves >> word // (DIM // 8) * 4 & 15) << 8) >> channel // (DIM // 4) * 3 & 7
    slope: tl.constexpr = SLOPE_8 if BITS == 8 else SLOPE_4 if BITS == 4 else SLOPE_3
    cubic: tl.constexpr = CUBIC_8 if BITS == 8 else CUBIC_4 if BITS == 4 else CUBIC_3
    centred = code.to(tl.float32) - (2**BITS - 1) / 2
    return centred * (slope + cubic * (centred * centred))


@triton.jit
def _attend_tier(
    query, codes, first_code, coded, after, begin, end, visible, axes, scale, state, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """As `_attend_pools` over the entries `coded` to `after` of a span, which are quantised in one tier.

    `codes` are codes and norms of k, then of v; the span's first ones are at the number that `first_code` points to.
    """
    k_codes, k_norms, v_codes, v_norms = codes
    dims, real, value_dims, value_real = axes
    shift = tl.load(first_code).to(tl.int64) - coded
    last = tl.minimum(end, after)
    for at in range(tl.maximum(begin, coded), last, BLOCK_N):
        entry = at + tl.arange(0, BLOCK_N)
        inside = entry < last
        code_at = shift + entry
        key_here, value_here = inside[None, :] & real[:, None], inside[:, None] & value_real[None, :]
        key = _load_levels(k_codes, code_at[None, :], dims[:, None], key_here, DIM, KEY_BITS)
        value = _load_levels(v_codes, code_at[:, None], value_dims[None, :], value_here, VALUE_DIM, VALUE_BITS)
        key, value = key.to(query.dtype), value.to(query.dtype)
        # Norms scale scores and weights rather than all values of k and v.
        key_norm = tl.load(k_norms + code_at, mask=inside, other=0.0).to(tl.float32)
        value_norm = tl.load(v_norms + code_at, mask=inside, other=0.0).to(tl.float32)
        if query.dtype == tl.float16:
            value_norm = tl.minimum(value_norm, 65504.0)
        is_visible = inside[None, :] & (entry[None, :] <= visible[:, None])
        key_scale = scale * key_norm[None, :]
        state = _attend_block(query, key, value, value_norm[None, :], is_visible, key_scale, state, SOFTCAP)
    return state


@triton.jit
def _join_parts(
    parts, extremes, first, last, packed, within, packed_rows, value_dims, value_real, VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr, JOIN_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Maximum, weight and sums of the packed rows `packed` [JOIN_M] of a span from its parts `first` to `last`."""
    highest = tl.full([JOIN_M], float("-inf"), tl.float32)
    weight = tl.zeros([JOIN_M], tl.float32)
    sums = tl.zeros([JOIN_M, BLOCK_V], tl.float32)
    for at in range(first, last + 1, BLOCK_S):
        part = at + tl.arange(0, BLOCK_S)
        slot = part[:, None].to(tl.int64) * packed_rows + packed[None, :]
        inside = (part <= last)[:, None] & within[None, :]
        peak = tl.load(extremes + 2 * slot, mask=inside, other=float("-inf"))
        share = tl.load(extremes + 2 * slot + 1, mask=inside, other=0.0)
        part_sums = tl.load(
            parts + slot[:, :, None] * VALUE_DIM + value_dims[None, None, :],
            mask=inside[:, :, None] & value_real[None, None, :],
            other=0.0,
        )
        new = tl.maximum(highest, tl.max(peak, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink, factor = tl.exp2(highest - base), tl.exp2(peak - base[None, :])
        weight = weight * shrink + tl.sum(share * factor, 0)
        sums = sums * shrink[:, None] + tl.sum(part_sums * factor[:, :, None], 0)
        highest = new
    return highest, weight, sums


@triton.jit
def _attend_new(
    state, q, key, value, k_pool, v_pool, end, span, kv_heads, packed, within, scale, q_strides, k_strides, v_strides,
    axes, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend to the one new token of a span as well, and append it at `end` of the pools."""
    highest, weight, sums = state
    dims, real, value_dims, value_real = axes
    batch, kv_head = split_heads(span, kv_heads)
    query = load_rows(q, _row_offsets(span, kv_heads, packed, q_strides, GROUP), within, dims, real)
    fresh = tl.load(key + batch * k_strides[0] + kv_head * k_strides[1] + dims, mask=real, other=0.0)
    fresh_value = tl.load(
        value + batch * v_strides[0] + kv_head * v_strides[1] + value_dims, mask=value_real, other=0.0
    )
    score = _cap(tl.sum(query.to(tl.float32) * fresh.to(tl.float32)[None, :], 1) * scale, SOFTCAP)
    new = tl.maximum(highest, score)
    shrink, factor = tl.exp2(highest - new), tl.exp2(score - new)
    weight = weight * shrink + factor
    sums = sums * shrink[:, None] + fresh_value.to(tl.float32)[None, :] * factor[:, None]
    if tl.program_id(1) == 0:
        tl.store(k_pool + end * DIM + dims, fresh, mask=real)
        tl.store(v_pool + end * VALUE_DIM + value_dims, fresh_value, mask=value_real)
    return new, weight, sums


@triton.jit
def slice_kernel(
    q, key, value, k_pool, v_pool, starts, lens, out, lse, parts, extremes, tickets, spans, kv_heads, rows, added,
    scale, out_batch, out_head, out_row, q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, k_codes_0,
    k_norms_0, v_codes_0, v_norms_0, tables_0, k_codes_1, k_norms_1, v_codes_1, v_norms_1, tables_1,
    NEW: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SPANS: tl.constexpr,
    LEAST: tl.constexpr, CAUSAL: tl.constexpr, TIERS: tl.constexpr, KEY_BITS_0: tl.constexpr,
    VALUE_BITS_0: tl.constexpr, KEY_BITS_1: tl.constexpr, VALUE_BITS_1: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr, JOIN_M: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One slice of the flat axis for one tile of packed rows; row m of a span is new token m // GROUP.

    The first entries of a span are quantised in TIERS tiers, those of the first before those of the second; only the
    others are in the pools. `tables` [2, spans] of a tier: how many entries of a span are in it, and the first of them.

    SOFTCAP caps scores, in base 2 as they are (0: none).

    `added` entries a span are in the pools, but not counted in `lens` yet. NEW: 0 leaves `lens` as it is, 1 appends the
    one new token of each span, 2 counts what was added. `tickets` [spans * tiles + 1] are 0 before and after.
    """
    # Read together and kept in registers, so that k waits for one load. All programs read the same values, because the
    # last program updates `lens`.
    all_spans = tl.arange(0, SPANS)
    is_span = all_spans < spans
    all_lengths = tl.load(lens + all_spans, mask=is_span, other=0) + added
    all_starts = tl.load(starts + all_spans, mask=is_span, other=0)
    # An empty span still occupies one position, so that every span has a program to reduce it.
    places = tl.where(is_span, tl.maximum(all_lengths, 1), 0)
    ends, total = tl.cumsum(places, 0), tl.sum(places, 0)
    size = tl.maximum(tl.cdiv(total, tl.num_programs(0)), LEAST)
    low = tl.program_id(0) * size
    high = tl.minimum(low + size, total)
    first_row, packed_rows = tl.program_id(1) * BLOCK_M, tl.cast(rows * GROUP, tl.int64)
    packed = first_row + tl.arange(0, BLOCK_M)
    token, within = packed // GROUP, packed < rows * GROUP
    latest = tl.minimum((first_row + BLOCK_M - 1) // GROUP, rows - 1)  # the tile's last token
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    real, value_real = dims < DIM, value_dims < VALUE_DIM
    axes = dims, real, value_dims, value_real
    q_strides, out_strides = (q_batch, q_head, q_row), (out_batch, out_head, out_row)
    if low < high:
        first = tl.sum((ends <= low).to(tl.int32), 0)
        last = tl.sum((ends < high).to(tl.int32), 0)
        for span in range(first, last + 1):
            length = _pick(all_lengths, span, SPANS)
            after = _pick(ends, span, SPANS)
            before = after - tl.maximum(length, 1)
            begin = tl.maximum(low - before, 0)
            end = tl.minimum(high - before, length)
            visible = length - 1 + 0 * token
            if CAUSAL:
                # New tokens that no row of this tile sees are not read.
                end = tl.minimum(end, length - rows + latest + 1)
                visible = length - rows + token
            start = _pick(all_starts, span, SPANS).to(tl.int64)
            query = load_rows(q, _row_offsets(span, kv_heads, packed, q_strides, GROUP), within, dims, real)
            # The interpreter knows bfloat16 as bits, and would multiply those.
            query = query.to(tl.float32) if IS_INTERPRETED and query.dtype == tl.bfloat16 else query
            state = (
                tl.full([BLOCK_M], float("-inf"), tl.float32),
                tl.zeros([BLOCK_M], tl.float32),
                tl.zeros([BLOCK_M, BLOCK_V], tl.float32),
            )
            coded = begin * 0
            if TIERS > 0:
                after_tier = coded + tl.load(tables_0 + span)
                state = _attend_tier(
                    query, (k_codes_0, k_norms_0, v_codes_0, v_norms_0), tables_0 + spans + span, coded,
                    after_tier, begin, end, visible, axes, scale, state, DIM, VALUE_DIM, KEY_BITS_0, VALUE_BITS_0,
                    BLOCK_N, SOFTCAP,
                )  # fmt: skip
                coded = after_tier
            if TIERS > 1:
                after_tier = coded + tl.load(tables_1 + span)
                state = _attend_tier(
                    query, (k_codes_1, k_norms_1, v_codes_1, v_norms_1), tables_1 + spans + span, coded,
                    after_tier, begin, end, visible, axes, scale, state, DIM, VALUE_DIM, KEY_BITS_1, VALUE_BITS_1,
                    BLOCK_N, SOFTCAP,
                )  # fmt: skip
                coded = after_tier
            highest, weight, sums = _attend_pools(
                query, k_pool + start * DIM, v_pool + start * VALUE_DIM, tl.maximum(begin, coded), end, visible, axes,
                scale, state, DIM, VALUE_DIM, BLOCK_N, SOFTCAP,
            )  # fmt: skip
            # Programs and spans increase together, so their sum is a unique index of the pair.
            slot = (tl.program_id(0) + span) * packed_rows + packed
            tl.store(extremes + 2 * slot, highest, mask=within)
            tl.store(extremes + 2 * slot + 1, weight, mask=within)
            store_rows(parts, slot * VALUE_DIM, sums, within, value_dims, value_real)
            # All threads have stored before one of them draws the ticket, which publishes what they stored.
            tl.debug_barrier()
            ticket = tickets + span * tl.num_programs(1) + tl.program_id(1)
            oldest, newest = before // size, (after - 1) // size
            if tl.atomic_add(ticket, 1, sem="acq_rel") == newest - oldest:
                tl.store(ticket, 0)
                # JOIN_M rows at a time: the parts of all rows of a tile would not fit a program's registers.
                for row in range(first_row, tl.minimum(first_row + BLOCK_M, rows * GROUP), JOIN_M):
                    joined = row + tl.arange(0, JOIN_M)
                    is_row = joined < packed_rows
                    peak, share, mean = _join_parts(
                        parts, extremes, oldest + span, newest + span, joined, is_row, packed_rows, value_dims,
                        value_real, VALUE_DIM, BLOCK_S, JOIN_M, BLOCK_V,
                    )  # fmt: skip
                    if NEW == 1:
                        peak, share, mean = _attend_new(
                            (peak, share, mean), q, key, value, k_pool, v_pool, start + length, span, kv_heads, joined,
                            is_row, scale, q_strides, (k_batch, k_head), (v_batch, v_head), axes, GROUP, DIM, VALUE_DIM,
                            SOFTCAP,
                        )  # fmt: skip
                    # A row without entries gives 0, with a logarithm of -inf.
                    share = tl.where(share == 0.0, 1.0, share)
                    if lse is not None:
                        place = _row_offsets(span, kv_heads, joined, (kv_heads * packed_rows, rows, 1), GROUP)
                        tl.store(lse + place, (peak + tl.log2(share)) * LN_2, mask=is_row)
                    out_at = _row_offsets(span, kv_heads, joined, out_strides, GROUP)
                    store_rows(out, out_at, mean / share[:, None], is_row, value_dims, value_real)
    if NEW > 0:
        # Every program has read `lens` when the last one is here.
        tl.debug_barrier()
        ticket = tickets + spans * tl.num_programs(1)
        if tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(0) * tl.num_programs(1) - 1:
            tl.store(ticket, 0)
            tl.store(lens + all_spans, all_lengths + (1 if NEW == 1 else 0), mask=is_span)


@triton.jit
def _rotate_rows(
    x, x_at, out, out_at, is_row, mean, factor, rotation, step_in, step_out, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Store rows [BLOCK_R, WIDTH] at `x_at` of x, times an orthogonal matrix [WIDTH, WIDTH], in `out`.

    Before that, channels are multiplied by `factor`; or, with a `mean`, it is subtracted and they are divided by
    `factor`. Both are None to skip this.
    """
    channels = tl.arange(0, BLOCK_W)
    turned = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    for first in tl.static_range(0, BLOCK_W, 16):
        channel = first + tl.arange(0, 16)
        real = channel < WIDTH
        part = load_rows(x, x_at, is_row, channel, real).to(tl.float32)
        if factor is not None:
            by = tl.load(factor + channel, mask=real, other=1.0).to(tl.float32)
            if mean is not None:
                part = (part - tl.load(mean + channel, mask=real, other=0.0).to(tl.float32)[None, :]) / by[None, :]
            else:
                part = part * by[None, :]
        matrix = load_rows(rotation, channel * step_in, real, channels * step_out, channels < WIDTH)
        turned = tl.dot(part, matrix, turned, input_precision=PRECISION)
    store_rows(out, out_at, turned, is_row, channels, channels < WIDTH)


@triton.jit
def enter_kernel(
    q, key, value, new_q, new_key, new_value, mean, scale, key_rotation, value_rotation, heads, kv_heads, rows, q_batch,
    q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, GROUP: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Transform new tokens of one head of q, k or v to the coordinates of a `Basis`; the results are contiguous."""
    batch, head = split_heads(tl.program_id(0), heads + 2 * kv_heads)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row, row = row < rows, row.to(tl.int64)
    if head < heads:
        factor = scale + (batch * kv_heads + head // GROUP) * DIM
        _rotate_rows(
            q, batch * q_batch + head * q_head + row * q_row, new_q, ((batch * heads + head) * rows + row) * DIM,
            is_row, None, factor, key_rotation, DIM, 1, DIM, PRECISION, BLOCK_R, BLOCK_D,
        )  # fmt: skip
    elif head < heads + kv_heads:
        head -= heads
        span = batch * kv_heads + head
        _rotate_rows(
            key, batch * k_batch + head * k_head + row * k_row, new_key, (span * rows + row) * DIM, is_row,
            mean + span * DIM, scale + span * DIM, key_rotation, DIM, 1, DIM, PRECISION, BLOCK_R, BLOCK_D,
        )  # fmt: skip
    else:
        head -= heads + kv_heads
        _rotate_rows(
            value, batch * v_batch + head * v_head + row * v_row, new_value,
            ((batch * kv_heads + head) * rows + row) * VALUE_DIM, is_row, None, None, value_rotation, VALUE_DIM, 1,
            VALUE_DIM, PRECISION, BLOCK_R, BLOCK_V,
        )  # fmt: skip


@triton.jit
def leave_kernel(
    x, out, value_rotation, heads, rows, batch_stride, head_stride, row_stride, VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Transform one head's outputs over rotated values to the model's coordinates, in the layout of `x`."""
    batch, head = split_heads(tl.program_id(0), heads)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = batch * batch_stride + head * head_stride + row.to(tl.int64) * row_stride
    _rotate_rows(
        x, at, out, at, row < rows, None, None, value_rotation, 1, VALUE_DIM, VALUE_DIM, PRECISION, BLOCK_R, BLOCK_V
    )
