"""The Triton kernels of eviction: score the entries (LKV-T), and move the best ones into new pools.

A span has the n entries of one KV head of one batch row; entry i lies `i * step` numbers after the first. Spans are in
a prompt [B, H, T, d] of any layout, or in the pools of a store.
"""

# ruff: noqa: N803, N806 (constants are in capitals)
import triton
import triton.language as tl

from lkv.kernels.triton_helpers import IS_INTERPRETED, load_rows, split_heads, store_rows


@triton.jit
def _load_keys(scores, entry, inside, recent, RECENT: tl.constexpr):
    """Load scores as uint32 of the same order, 0 where not `inside`; 0 and -0 are equal.

    `recent`: positions, the first of the span's, the end of the text, and how many of its last tokens are above all
    scores, the newest first, if RECENT > 0.
    """
    score = tl.load(scores + entry, mask=inside, other=0.0).to(tl.float32) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) ^ -2147483648).to(tl.uint32, bitcast=True)
    if RECENT > 0:
        positions, start, end, window = recent
        age = end - tl.load(positions + start + entry, mask=inside, other=0)
        key = tl.where(age <= window, (-age).to(tl.uint32, bitcast=True), key)
    return tl.where(inside, key, 0), score


@triton.jit
def _count(is_counted):
    return tl.sum(is_counted.to(tl.int32), 0)


@triton.jit
def _find_thresholds(scores, count, first, limits, recent, RECENT: tl.constexpr, BLOCK: tl.constexpr):
    """Find the lowest kept key of each tier, bit by bit from the highest one on.

    The first BLOCK of the `count` scores stay in registers, others are loaded again for each bit. `limits` [tiers, at
    most `count`] says how many entries a tier and all better ones have. `recent`: as in `_load_keys`.

    Returns four tensors of that shape: the keys; how many of the entries of equal key are kept; and how many entries
    before `first` have greater and equal keys.
    """
    entry = tl.arange(0, BLOCK)[:, None]
    keys, _ = _load_keys(scores, entry, entry < count, recent, RECENT)
    least = (limits * 0).to(tl.uint32)
    number, shift = limits * 0 + count, 31  # `number` of the keys are not below `least`
    while shift >= 0:
        candidate = least | ((limits * 0 + 1).to(tl.uint32) << shift)
        total = _count(keys >= candidate[None, :])
        for at in range(BLOCK, count, BLOCK):
            more, _ = _load_keys(scores, at + entry, at + entry < count, recent, RECENT)
            total += _count(more >= candidate[None, :])
        least = tl.where(total >= limits, candidate, least)
        number = tl.where(total >= limits, total, number)
        shift = tl.where(tl.max(number - limits, 0) > 0, shift - 1, -1)
    above, greater, equal = limits * 0, limits * 0, limits * 0
    for at in range(0, count, BLOCK):
        keys, _ = _load_keys(scores, at + entry, at + entry < count, recent, RECENT)
        above += _count(keys > least[None, :])
        greater += _count((keys > least[None, :]) & (at + entry < first))
        equal += _count((keys == least[None, :]) & (at + entry < tl.minimum(first, count)))
    return least, limits - above, greater, equal


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
def _move_block(
    key, value, scores, positions, starts, span, heads, width, entry, inside, target, k_strides, v_strides, new_key,
    new_value, new_scores, new_positions, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Copy a block of a span's entries to `target` in new pools, those not `inside` to none."""
    at = span.to(tl.int64) * width + entry
    if starts is not None:
        at = tl.load(starts + span).to(tl.int64) + entry
    key_at = _entry_offsets(at, span, heads, entry, k_strides, starts, DIM)
    value_at = _entry_offsets(at, span, heads, entry, v_strides, starts, VALUE_DIM)
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
def _first_in_order(order_starts, earlier, tier, span, TIERS: tl.constexpr):
    """Return where a program's entries of each `tier` go in `order`; `earlier` entries are in it or better ones."""
    is_tier = (tier[:, None] == tier[None, :]).to(tl.int32) - (tier[:, None] == tier[None, :] + 1).to(tl.int32)
    start = tl.load(order_starts + tier * tl.num_programs(1) + span, mask=tier < TIERS, other=0)
    return start + tl.sum(is_tier * earlier[None, :], 1)


@triton.jit
def _store_order(order, next_in_order, tier, number, inside, place):
    """Store the places of entries of the tiers `number` in `order`; return where the next of each `tier` go."""
    is_own = (number[:, None] == tier[None, :]).to(tl.int32) * inside.to(tl.int32)[:, None]
    at = tl.sum(is_own * (next_in_order[None, :] + tl.cumsum(is_own, 0) - 1), 1)
    tl.store(order + at, place, mask=inside)
    return next_in_order + tl.sum(is_own, 0)


@triton.jit(do_not_specialize=["end"])
def select_kernel(
    ranked, keep, counts, has_nan, numbers, order, order_starts, width, share, heads, key, value, scores, positions,
    starts, end, k_batch, k_head, k_token, v_batch, v_head, v_token, new_key, new_value, new_scores, new_positions,
    new_starts, RECENT: tl.constexpr, TIERS: tl.constexpr, BLOCK: tl.constexpr, MOVED: tl.constexpr,
    BLOCK_T: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Keep the entries of a span with the highest scores `ranked` [spans, width], of equal ones the earlier.

    The last RECENT tokens before position `end`, at most a third of the entries, come before all scores. `keep`
    [TIERS, spans] says how many the tiers have, each with all better ones. Without `ranked` all entries are kept. Each
    program finds the thresholds of the whole span, and moves `share` of its entries: programs of a span need not wait
    for each other, and a GPU has more of them than there are spans.

    A span has `counts` entries (None: `width`). They lie in pools from `starts` on, or, where that is None, in
    [B, H, width, .] of the strides given. Their k and v go in order to new pools, and with `new_scores` their `scores`
    and `positions` (where those are None, their numbers). `order` (None to leave it out) gets the new places of kept
    entries, those of a tier and span from `order_starts` [TIERS, spans] on. Without `new_key` nothing is moved, and
    `numbers` [spans, width] has all tiers, TIERS of evicted entries. `has_nan` [1] (or None) is set to 1 by NaN scores.
    """
    span = tl.program_id(1)
    first, count = tl.program_id(0) * share, width if counts is None else tl.load(counts + span)
    if first >= count:
        return
    row, new_start = span.to(tl.int64) * width, 0 if new_key is None else tl.load(new_starts + span).to(tl.int64)
    start = row if RECENT == 0 else tl.load(starts + span).to(tl.int64)
    recent = positions, start, end, tl.minimum(count // 3, RECENT)
    if ranked is not None:
        tier = tl.arange(0, BLOCK_T)
        limits = tl.load(keep + tier * tl.num_programs(1) + span, mask=tier < TIERS, other=0)
        least, missing, greater, equals = _find_thresholds(ranked + row, count, first, limits, recent, RECENT, BLOCK)
        earlier = greater + tl.minimum(equals, missing)  # entries before `first` in each tier and all better ones
        next_place = tl.sum(tl.where(tier == TIERS - 1, earlier, 0), 0)
        if order is not None:
            next_in_order = _first_in_order(order_starts, earlier, tier, span, TIERS)
    for at in range(first, tl.minimum(first + share, count), MOVED):
        entry = at + tl.arange(0, MOVED)
        inside = entry < tl.minimum(first + share, count)
        place = entry
        if ranked is not None:
            keys, score = _load_keys(ranked + row, entry, inside, recent, RECENT)
            if has_nan is not None:
                tl.store(has_nan, 1, mask=_count(score != score) > 0)
            is_equal = (inside[:, None] & (keys[:, None] == least[None, :])).to(tl.int32)
            is_early = (is_equal > 0) & (equals[None, :] + tl.cumsum(is_equal, 0) <= missing[None, :])
            number = TIERS - tl.sum(((keys[:, None] > least[None, :]) | is_early).to(tl.int32), 1)
            equals += tl.sum(is_equal, 0)
            if new_key is None:
                tl.store(numbers + row + entry, number, mask=inside)
            inside = inside & (number < TIERS)
            place = next_place + tl.cumsum(inside.to(tl.int32), 0) - 1
            next_place += _count(inside)
            if order is not None:
                next_in_order = _store_order(order, next_in_order, tier, number, inside, new_start + place)
        if new_key is not None:
            _move_block(
                key, value, scores, positions, starts, span, heads, width, entry, inside, new_start + place,
                (k_batch, k_head, k_token), (v_batch, v_head, v_token), new_key, new_value, new_scores, new_positions,
                DIM, VALUE_DIM, BLOCK_D, BLOCK_V,
            )


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
def _unrotate(key_0, key_1, cos, sin, table, real, HALF: tl.constexpr):
    """Rotate halves of k back by what the tables have at `table`; return them as they are if there are none."""
    if cos is not None:
        cos_0, cos_1 = _load_halves(cos + table, real, HALF)
        sin_0, sin_1 = _load_halves(sin + table, real, HALF)
        rotated = key_0 * cos_0 - key_1 * sin_0, key_1 * cos_1 + key_0 * sin_1
    else:
        rotated = key_0, key_1
    return rotated


@triton.jit
def _content(halves, weight, bias, output, half, DIM: tl.constexpr, BLOCK_U: tl.constexpr):
    """Return the MLP over the halves of k and v of one head; `weight` [2 DIM, DIM], `bias` and `output` [DIM].

    BLOCK_U units at a time: all of them would not fit the registers.
    """
    dtype = tl.float32 if IS_INTERPRETED else weight.dtype.element_ty
    HALF: tl.constexpr = DIM // 2
    score = tl.zeros([halves[0].shape[0]], tl.float32)
    for first in tl.range(0, DIM, BLOCK_U, num_stages=2):
        unit = first + tl.arange(0, BLOCK_U)
        units = tl.zeros([halves[0].shape[0], BLOCK_U], tl.float32)
        for part in tl.static_range(4):
            at = half + part * HALF
            rows = load_rows(weight, at * DIM, half < HALF, unit, unit < DIM).to(dtype)
            units = tl.dot(halves[part].to(dtype), rows, units, input_precision="ieee")
        units += tl.load(bias + unit, mask=unit < DIM, other=0.0)[None, :]
        last = tl.load(output + unit, mask=unit < DIM, other=0.0)
        score += tl.sum(units * tl.sigmoid(units) * last[None, :], 1)
    return score


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

    ARRIVAL: the content of k (rotated back by the tables `cos` and `sin` [width, DIM] if given) and v, and the knots of
    the position. EVICTION: the expected attention (if `queries` are given) and the knots of the distance to `end`.

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
    half = tl.arange(0, BLOCK_H)
    both = inside[:, None] & (half[None, :] < HALF)
    key_0, key_1 = _load_halves(key + key_at[:, None] + half[None, :], both, HALF)
    value_0, value_1 = _load_halves(value + value_at[:, None] + half[None, :], both, HALF)
    if ARRIVAL:
        read_0, read_1 = _unrotate(key_0, key_1, cos, sin, entry[:, None] * DIM + half[None, :], both, HALF)
        halves = (read_0, read_1, value_0, value_1)
        weight += head * (2 * DIM * DIM)
        score = _content(halves, weight, bias + head * DIM, output + head * DIM, half, DIM, BLOCK_U)
        if KNOTS > 0:
            score += _knots(start_knots + head * KNOTS, place + 1 - padding, KNOTS, BLOCK_K)
    else:
        score = tl.load(scores + at, mask=inside, other=0.0)
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
