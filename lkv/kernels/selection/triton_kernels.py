"""The Triton kernels of eviction: score the entries (LKV-T), rank them, and move the kept ones into new pools.

A span has the n entries of one KV head of one batch row; entry i lies `i * step` numbers after the first. Spans are in
a prompt [B, H, T, d] of any layout, or in the pools of a store.
"""

# ruff: noqa: N803, N806 (constants are in capitals)
import triton
import triton.language as tl

from lkv.kernels.triton_helpers import IS_INTERPRETED, load_rows, split_heads, store_rows


@triton.jit
def _ordered(scores):
    """Scores in float32 as uint32 of the same order; 0 and -0 are equal."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def rank_kernel(scores, counts, keep, places, has_nan, width, BLOCK: tl.constexpr):
    """One span: which kept entry each of its entries is, -1 for those that are evicted; ties go to the earlier one.

    It has `counts` entries, or `width` where that is None, and keeps `keep` of them. `has_nan` [1] (None to leave that
    out) becomes 1 where one of its scores is NaN.

    The lowest kept score is found by radix selection, eight bits at a time, with one histogram per step.
    """
    span = tl.program_id(0)
    kept, count = tl.load(keep + span), width
    if counts is not None:
        count = tl.load(counts + span)
    row = scores + span.to(tl.int64) * width
    bins = tl.arange(0, 256)
    least = tl.zeros([1], tl.uint32)
    missing = kept + tl.zeros([1], tl.int32)
    for shift in tl.static_range(24, -8, -8):
        histogram = tl.zeros([256], tl.int32)
        for at in range(0, count, BLOCK):
            entry = at + tl.arange(0, BLOCK)
            inside = entry < count
            key = _ordered(tl.load(row + entry, mask=inside, other=0.0))
            if shift < 24:
                inside = inside & ((key >> (shift + 8)) == (least >> (shift + 8)))
            histogram += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=inside)
        # How many scores are higher than those of each bin.
        higher = tl.sum(histogram, 0) - tl.cumsum(histogram, 0)
        is_here = (higher < missing) & (higher + histogram >= missing)
        least = least | (tl.sum(tl.where(is_here, bins, 0), 0).to(tl.uint32) << shift)
        missing = missing - tl.sum(tl.where(is_here, higher, 0), 0)
    equals, chosen = tl.zeros([1], tl.int32), tl.zeros([1], tl.int32)
    unordered = tl.zeros([BLOCK], tl.int32)
    for at in range(0, count, BLOCK):
        entry = at + tl.arange(0, BLOCK)
        inside = entry < count
        score = tl.load(row + entry, mask=inside, other=0.0)
        unordered = unordered | (score != score).to(tl.int32)
        key = _ordered(score)
        is_equal = (inside & (key == least)).to(tl.int32)
        is_early = (is_equal > 0) & (equals + tl.cumsum(is_equal, 0) <= missing)
        is_kept = ((inside & (key > least)) | is_early) & (kept > 0)
        place = chosen + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(places + span.to(tl.int64) * width + entry, tl.where(is_kept, place, -1), mask=inside)
        equals += tl.sum(is_equal, 0)
        chosen += tl.sum(is_kept.to(tl.int32), 0)
    if has_nan is not None:
        tl.store(has_nan, 1, mask=tl.max(unordered, 0) > 0)


@triton.jit
def _entry_offsets(at, span, heads, entry, strides, starts, DIM: tl.constexpr):
    """Return the offsets of a span's entries in k or v: at `at` in pools, or in [B, H, T, .] if `starts` is None."""
    if starts is not None:
        offsets = at * DIM
    else:
        batch, head = split_heads(span, heads)
        offsets = batch * strides[0] + head * strides[1] + entry.to(tl.int64) * strides[2]
    return offsets


@triton.jit
def move_kernel(
    key, value, scores, positions, starts, k_batch, k_head, k_token, v_batch, v_head, v_token, counts, places, width,
    new_key, new_value, new_scores, new_positions, new_starts, after, heads, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Copy a block of a span's entries to their `places` [spans, width] in new pools, those at -1 to none.

    If `places` is None, all are copied in order, after the `after` existing entries of a span (None: 0).

    Entries lie in pools from `starts` on, or, where that is None, in [B, H, width, .] of the strides given. With
    `new_scores` their scores go with them, and their positions (where those are None, their numbers).
    """
    span = tl.program_id(1)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = width
    if counts is not None:
        count = tl.load(counts + span)
    at = span.to(tl.int64) * width + entry
    place, inside = entry, entry < count
    if places is not None:
        place = tl.load(places + at, mask=inside, other=-1)
        inside = inside & (place >= 0)
    if starts is not None:
        at = tl.load(starts + span).to(tl.int64) + entry
    key_at = _entry_offsets(at, span, heads, entry, (k_batch, k_head, k_token), starts, DIM)
    value_at = _entry_offsets(at, span, heads, entry, (v_batch, v_head, v_token), starts, VALUE_DIM)
    target = tl.load(new_starts + span).to(tl.int64) + place
    if after is not None:
        target += tl.load(after + span)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    moved = load_rows(key, key_at, inside, dims, dims < DIM)
    store_rows(new_key, target * DIM, moved, inside, dims, dims < DIM)
    moved = load_rows(value, value_at, inside, value_dims, value_dims < VALUE_DIM)
    store_rows(new_value, target * VALUE_DIM, moved, inside, value_dims, value_dims < VALUE_DIM)
    if new_scores is not None:
        tl.store(new_scores + target, tl.load(scores + at, mask=inside), mask=inside)
        position = entry
        if positions is not None:
            position = tl.load(positions + at, mask=inside)
        tl.store(new_positions + target, position, mask=inside)


@triton.jit
def _knots(table, places, KNOTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Evaluate the piecewise linear function of values `table` [KNOTS] at the logarithms 0, 1, 2, ... of `places`."""
    knot = tl.arange(0, BLOCK_K)
    value = tl.load(table + knot, mask=knot < KNOTS, other=0.0)
    x = tl.minimum(tl.log2(tl.maximum(places, 1).to(tl.float32)), KNOTS - 1.0)
    share = tl.maximum(1.0 - tl.abs(x[:, None] - knot[None, :].to(tl.float32)), 0.0)
    return tl.sum(share * value[None, :], 1)


@triton.jit
def _load_halves(pointers, real, HALF: tl.constexpr):
    """Return the two halves of channels, the first of which lies at `pointers`, in float32."""
    first = tl.load(pointers, mask=real, other=0.0).to(tl.float32)
    return first, tl.load(pointers + HALF, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _content(halves, weight, bias, output, half, unit, DIM: tl.constexpr):
    """Return the MLP over the halves of k and v of one head; `weight` [2 DIM, DIM], `bias` and `output` [DIM]."""
    dtype = tl.float32 if IS_INTERPRETED else weight.dtype.element_ty
    HALF: tl.constexpr = DIM // 2
    units = tl.zeros([halves[0].shape[0], unit.shape[0]], tl.float32)
    for part in tl.static_range(4):
        at = half + part * HALF
        rows = load_rows(weight, at * DIM, half < HALF, unit, unit < DIM).to(dtype)
        units = tl.dot(halves[part].to(dtype), rows, units, input_precision="ieee")
    units += tl.load(bias + unit, mask=unit < DIM, other=0.0)[None, :]
    last = tl.load(output + unit, mask=unit < DIM, other=0.0)
    return tl.sum(units * tl.sigmoid(units) * last[None, :], 1)


@triton.jit
def _expected_attention(
    key_0, key_1, value_0, value_1, queries, cos, sin, scale, normaliser, weight, half, DIM: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """Compute expected attention by GROUP means and the columns of the spread in `queries`, before the mean rotation.

    Three TF32 products are as accurate as float32 in a third of the time. With an MLP in float32, for which `PRECISION`
    is "ieee", they would exceed the registers.
    """
    HALF: tl.constexpr = DIM // 2
    row, real = tl.arange(0, BLOCK_R), half < HALF
    both = real[:, None] & (row[None, :] < ROWS)
    query_0, query_1 = _load_halves(queries + row[None, :] * DIM + half[:, None], both, HALF)
    cos_0, cos_1 = _load_halves(cos + half, real, HALF)
    sin_0, sin_1 = _load_halves(sin + half, real, HALF)
    turned = (query_0 * cos_0[:, None] - query_1 * sin_0[:, None]) * scale
    products = tl.dot(key_0, turned, input_precision=PRECISION)
    turned = (query_1 * cos_1[:, None] + query_0 * sin_1[:, None]) * scale
    products = tl.dot(key_1, turned, products, input_precision=PRECISION)
    is_mean = row[None, :] < GROUP
    spread = tl.sum(tl.where(is_mean, 0.0, products * products), 1) / 2
    base = tl.load(normaliser + row, mask=row < GROUP, other=0.0)
    logits = tl.where(is_mean, products + spread[:, None] - base[None, :], float("-inf"))
    top = tl.max(logits, 1)
    expected = top + tl.log(tl.sum(tl.exp(logits - top[:, None]), 1))
    norm = tl.sqrt(tl.sum(value_0 * value_0, 1) + tl.sum(value_1 * value_1, 1))
    return weight * (expected + tl.log(tl.maximum(norm, 1e-12)))


@triton.jit
def score_kernel(
    key, value, starts, counts, k_batch, k_head, k_token, v_batch, v_head, v_token, scores, positions, out, cos, sin,
    weight, bias, output, queries, mean_cos, mean_sin, normaliser, attention_weight, start_knots, end_knots, heads,
    width, start, end, padding, scale, ARRIVAL: tl.constexpr, EVICTION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, KNOTS: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """LKV-T of a block of entries: k and v are read once, one score is written.

    ARRIVAL: the content of k (rotated back by the tables `cos` and `sin` [width, DIM] if they are given) and v, and the
    knots of the position. EVICTION: the expected attention (if `queries` are given) and the knots of the distance to
    `end`.

    Entries lie in [B, H, width, DIM] of the strides given, at the positions from `start` on; their scores go to `out`
    [B, H, width]. Or they lie in pools from `starts` on, `counts` of each span. There ARRIVAL is for the last `width`
    of them, whose `scores` and `positions` [P] are written, and `out` is None; EVICTION is for all of them, and `out`
    gets the sum with `scores`, -inf beyond `counts`. Positions count `padding` tokens before the text.
    """
    HALF: tl.constexpr = DIM // 2
    span = tl.program_id(1)
    head = (span % heads).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, place = entry < width, start + entry
    at = span.to(tl.int64) * width + entry
    if starts is not None:
        count, first = tl.load(counts + span), 0
        if ARRIVAL:
            first = count - width
        inside = inside & (first + entry < count)
        at = tl.load(starts + span).to(tl.int64) + first + entry
        if not ARRIVAL:
            place = tl.load(positions + at, mask=inside, other=0)
    key_at = _entry_offsets(at, span, heads, entry, (k_batch, k_head, k_token), starts, DIM)
    value_at = _entry_offsets(at, span, heads, entry, (v_batch, v_head, v_token), starts, DIM)
    half, unit = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_U)
    both = inside[:, None] & (half[None, :] < HALF)
    key_0, key_1 = _load_halves(key + key_at[:, None] + half[None, :], both, HALF)
    value_0, value_1 = _load_halves(value + value_at[:, None] + half[None, :], both, HALF)
    score = tl.zeros([BLOCK], tl.float32)
    if ARRIVAL:
        read_0, read_1 = key_0, key_1
        if cos is not None:
            table = entry[:, None] * DIM + half[None, :]
            cos_0, cos_1 = _load_halves(cos + table, both, HALF)
            sin_0, sin_1 = _load_halves(sin + table, both, HALF)
            read_0, read_1 = key_0 * cos_0 - key_1 * sin_0, key_1 * cos_1 + key_0 * sin_1
        halves = (read_0, read_1, value_0, value_1)
        weight += head * (2 * DIM * DIM)
        score += _content(halves, weight, bias + head * DIM, output + head * DIM, half, unit, DIM)
        if KNOTS > 0:
            score += _knots(start_knots + head * KNOTS, place + 1 - padding, KNOTS, BLOCK_K)
    else:
        score += tl.load(scores + at, mask=inside, other=0.0)
    if EVICTION:
        if queries is not None:
            score += _expected_attention(
                key_0, key_1, value_0, value_1, queries + head * (ROWS * DIM), mean_cos, mean_sin, scale,
                normaliser + head * GROUP, tl.load(attention_weight + head), half, DIM, PRECISION, GROUP, ROWS, BLOCK_R,
            )
        if KNOTS > 0:
            score += _knots(end_knots + head * KNOTS, end - place, KNOTS, BLOCK_K)
    if out is None:
        tl.store(scores + at, score, mask=inside)
        tl.store(positions + at, place, mask=inside)
    else:
        score = tl.where(inside, score, float("-inf"))
        tl.store(out + span.to(tl.int64) * width + entry, score, mask=entry < width)
