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

from lkv.kernels.ragged_attention.tier_kernels import as_operand, attend_tier, sum_channels
from lkv.kernels.triton_helpers import cap, load_rows, rotate, split_heads, store_rows

LN_2 = tl.constexpr(0.6931471805599453)


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
def _attend_pools(
    query, k_span, v_span, begin, end, visible, axes, scale, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """Return maximum, weight and sums of rows over the entries `begin` to `end` of a span's pools.

    Each row sees entries up to `visible`.
    """
    dims, real, value_dims, value_real = axes
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for at in range(begin, end, BLOCK_N):
        entry = at + tl.arange(0, BLOCK_N)
        inside = entry < end
        key_at = k_span + entry[None, :].to(tl.int64) * DIM + dims[:, None]
        key = tl.load(key_at, mask=inside[None, :] & real[:, None], other=0.0).to(query.dtype)
        value = load_rows(v_span, entry.to(tl.int64) * VALUE_DIM, inside, value_dims, value_real).to(query.dtype)
        scores = cap(tl.dot(query, key, input_precision="ieee") * scale, SOFTCAP)
        is_visible = inside[None, :] & (entry[None, :] <= visible[:, None])
        scores = tl.where(is_visible, scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        # Avoid inf - inf for a row without visible entries so far.
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2(highest - base)
        share = tl.exp2(scores - base[:, None])
        sums = sums * shrink[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
        highest, weight = new, weight * shrink + tl.sum(share, 1)
    return highest, weight, sums


@triton.jit
def _store_part(parts, extremes, slot, is_row, state, channels, is_channel, has_earlier, VALUE_DIM: tl.constexpr):
    """Store what a program found for rows [M] of a span, merged with the part that it stored there before, if any."""
    highest, weight, sums = state
    if has_earlier:
        # Other threads have stored what this one loads, and load what it stores.
        tl.debug_barrier()
        peak = tl.load(extremes + 2 * slot, mask=is_row, other=float("-inf"))
        share = tl.load(extremes + 2 * slot + 1, mask=is_row, other=0.0)
        earlier = load_rows(parts, slot * VALUE_DIM, is_row, channels, is_channel)
        tl.debug_barrier()
        new = tl.maximum(highest, peak)
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink, factor = tl.exp2(highest - base), tl.exp2(peak - base)
        weight = weight * shrink + share * factor
        sums = sums * shrink[:, None] + earlier * factor[:, None]
        highest = new
    tl.store(extremes + 2 * slot, highest, mask=is_row)
    tl.store(extremes + 2 * slot + 1, weight, mask=is_row)
    store_rows(parts, slot * VALUE_DIM, sums, is_row, channels, is_channel)


@triton.jit
def _join_parts(
    parts, extremes, first, last, packed, within, packed_rows, value_dims, value_real, VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr, JOIN_M: tl.constexpr, BLOCK_V: tl.constexpr,
):
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
def _append(
    key, value, k_pool, v_pool, first, span, token, is_token, kv_heads, k_strides, v_strides, axes, basis,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):
    """Append the new tokens `token` [T] of a span to its pools, whose entry `first` is new token 0's."""
    dims, real, value_dims, value_real = axes
    k_mean, k_scale, k_rotation, v_rotation = basis
    at = first + token.to(tl.int64)
    fresh = load_rows(key, _row_offsets(span, kv_heads, token, k_strides, 1), is_token, dims, real)
    fresh_value = load_rows(value, _row_offsets(span, kv_heads, token, v_strides, 1), is_token, value_dims, value_real)
    if k_rotation is not None:
        mean = tl.load(k_mean + span * DIM + dims, mask=real, other=0.0).to(tl.float32)
        factor = tl.load(k_scale + span * DIM + dims, mask=real, other=1.0).to(tl.float32)
        fresh = rotate((fresh.to(tl.float32) - mean[None, :]) / factor[None, :], k_rotation, DIM, 1, DIM)
        fresh_value = rotate(fresh_value, v_rotation, VALUE_DIM, 1, VALUE_DIM)
    store_rows(k_pool, at * DIM, fresh, is_token, dims, real)
    store_rows(v_pool, at * VALUE_DIM, fresh_value, is_token, value_dims, value_real)


@triton.jit
def _attend_new(
    state, query, key, value, span, kv_heads, k_strides, v_strides, axes, scale, SOFTCAP: tl.constexpr
):
    """Attend from rows `query` to the one new token of their span as well; all in the model's coordinates."""
    highest, weight, sums = state
    dims, real, value_dims, value_real = axes
    batch, kv_head = split_heads(span, kv_heads)
    fresh = tl.load(key + batch * k_strides[0] + kv_head * k_strides[1] + dims, mask=real, other=0.0)
    fresh_value = tl.load(
        value + batch * v_strides[0] + kv_head * v_strides[1] + value_dims, mask=value_real, other=0.0
    )
    score = cap(tl.sum(query.to(tl.float32) * fresh.to(tl.float32)[None, :], 1) * scale, SOFTCAP)
    new = tl.maximum(highest, score)
    shrink, factor = tl.exp2(highest - new), tl.exp2(score - new)
    weight = weight * shrink + factor
    sums = sums * shrink[:, None] + fresh_value.to(tl.float32)[None, :] * factor[:, None]
    return new, weight, sums


@triton.jit
def _queries_of(q, turned, k_rotation, q_at, turned_at):
    """Return where queries are, and at which offsets: in `turned` with a basis, else as they came."""
    if k_rotation is not None:
        where, at = turned, turned_at
    else:
        where, at = q, q_at
    return where, at


@triton.jit
def slice_kernel(
    q, key, value, k_pool, v_pool, starts, lens, out, lse, parts, extremes, tickets, spans, kv_heads, rows, added,
    scale, out_batch, out_head, out_row, q_batch, q_head, q_row, k_batch, k_head, v_batch, v_head, turned, k_mean,
    k_scale, k_rotation, v_rotation, k_codes_0, k_norms_0, v_codes_0, v_norms_0, tables_0, k_codes_1, k_norms_1,
    v_codes_1, v_norms_1, tables_1,
    NEW: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SPANS: tl.constexpr,
    LEAST: tl.constexpr, CAUSAL: tl.constexpr, BITS: tl.constexpr, ALLOWS_PTX: tl.constexpr, WARPS: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr, JOIN_M: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """One slice of the flat axis for one tile of packed rows; row m of a span is new token m // GROUP.

    The first entries of a span are quantised, those of the first tier before those of the second; only the others are
    in the pools. BITS are the bits of k, then of v, of each tier. `tables` [2, spans] of a tier: how many entries of a
    span are in it, and the first of them.

    With a basis (else None), the queries of a span are transformed first, and stored in `turned` [programs, BLOCK_M,
    DIM], float32; what is joined is transformed back.

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
    first_row, packed_rows = tl.program_id(1) * ROWS, tl.cast(rows * GROUP, tl.int64)
    after_rows = tl.minimum(first_row + ROWS, rows * GROUP)
    packed = first_row + tl.arange(0, BLOCK_M)
    token, within = packed // GROUP, packed < after_rows
    latest = (after_rows - 1) // GROUP  # the tile's last token
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    real, value_real = dims < DIM, value_dims < VALUE_DIM
    axes = dims, real, value_dims, value_real
    q_strides, out_strides = (q_batch, q_head, q_row), (out_batch, out_head, out_row)
    basis = k_mean, k_scale, k_rotation, v_rotation
    first_turned = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * BLOCK_M
    tiers = (k_codes_0, k_norms_0, v_codes_0, v_norms_0), (k_codes_1, k_norms_1, v_codes_1, v_norms_1)
    all_tables = tables_0, tables_1
    if low < high:
        first = tl.sum((ends <= low).to(tl.int32), 0)
        last = tl.sum((ends < high).to(tl.int32), 0)
        # Addresses of all tiers, hoisted out of this loop, would not fit the registers.
        for span in tl.range(first, last + 1, disable_licm=len(BITS) > 0):
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
            # Programs and spans increase together, so their sum is a unique index of the pair.
            first_slot = (tl.program_id(0) + span) * packed_rows
            if k_rotation is not None:
                factor = tl.load(k_scale + span * DIM + dims, mask=real, other=0.0).to(tl.float32)
                for row in range(first_row, after_rows, JOIN_M):
                    turned_row = row + tl.arange(0, JOIN_M)
                    is_row = turned_row < after_rows
                    query = load_rows(q, _row_offsets(span, kv_heads, turned_row, q_strides, GROUP), is_row, dims, real)
                    query = rotate(query.to(tl.float32) * factor[None, :], k_rotation, DIM, 1, DIM)
                    store_rows(turned, (first_turned + turned_row - first_row) * DIM, query, is_row, dims, real)
                # Other threads load what this one stores.
                tl.debug_barrier()
            coded = begin * 0
            has_part = coded > 0
            for tier in tl.static_range(len(BITS) // 2):
                tables = all_tables[tier]
                after_tier = coded + tl.load(tables + span)
                low_entry, high_entry = tl.maximum(begin, coded), tl.minimum(end, after_tier)
                if low_entry < high_entry:
                    tier_row = first_row + tl.arange(0, ROWS)
                    is_row = tier_row < after_rows
                    limit = high_entry + 0 * tier_row
                    if CAUSAL:
                        limit = tl.minimum(limit, length - rows + tier_row // GROUP + 1)
                    first_code = tl.load(tables + spans + span).to(tl.int64) + (low_entry - coded)
                    queries, query_at = _queries_of(
                        q, turned, k_rotation, _row_offsets(span, kv_heads, tier_row, q_strides, GROUP),
                        (first_turned + tl.arange(0, ROWS)) * DIM,
                    )
                    found = attend_tier(
                        queries, query_at, is_row, tiers[tier], first_code, high_entry - low_entry, limit - low_entry,
                        scale, DIM, VALUE_DIM, BITS[2 * tier], BITS[2 * tier + 1], WARPS, STAGES, ALLOWS_PTX,
                        k_pool.dtype.element_ty, SOFTCAP,
                    )
                    channels, is_channel = sum_channels(VALUE_DIM, BITS[2 * tier + 1])
                    _store_part(
                        parts, extremes, first_slot + tier_row, is_row, found, channels, is_channel, has_part, VALUE_DIM
                    )
                has_part |= low_entry < high_entry
                coded = after_tier
            # Every pair has a part, even without entries.
            if (tl.maximum(begin, coded) < end) | (has_part == 0):
                queries, query_at = _queries_of(
                    q, turned, k_rotation, _row_offsets(span, kv_heads, packed, q_strides, GROUP),
                    (first_turned + tl.arange(0, BLOCK_M)) * DIM,
                )
                query = load_rows(queries, query_at, within, dims, real).to(k_pool.dtype.element_ty)
                found = _attend_pools(
                    as_operand(query), k_pool + start * DIM, v_pool + start * VALUE_DIM, tl.maximum(begin, coded), end,
                    visible, axes, scale, DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_V, SOFTCAP,
                )
                _store_part(
                    parts, extremes, first_slot + packed, within, found, value_dims, value_real, has_part, VALUE_DIM
                )
            # All threads have stored before one of them draws the ticket, which publishes what they stored.
            tl.debug_barrier()
            ticket = tickets + span * tl.num_programs(1) + tl.program_id(1)
            oldest, newest = before // size, (after - 1) // size
            drawn = tl.atomic_add(ticket, 1, sem="acq_rel")
            if NEW == 1:
                # By the first to draw a ticket, whom no other waits for.
                is_first = (drawn == 0) & (tl.program_id(1) == 0)
                if is_first:
                    _append(
                        key, value, k_pool, v_pool, start + length, span, tl.arange(0, 1), tl.arange(0, 1) == 0,
                        kv_heads, (k_batch, k_head, 0), (v_batch, v_head, 0), axes, basis, DIM, VALUE_DIM,
                    )
            if drawn == newest - oldest:
                tl.store(ticket, 0)
                # JOIN_M rows at a time: the parts of all rows of a tile would not fit a program's registers.
                for row in range(first_row, after_rows, JOIN_M):
                    joined = row + tl.arange(0, JOIN_M)
                    is_row = joined < after_rows
                    peak, share, mean = _join_parts(
                        parts, extremes, oldest + span, newest + span, joined, is_row, packed_rows, value_dims,
                        value_real, VALUE_DIM, BLOCK_S, JOIN_M, BLOCK_V,
                    )
                    if v_rotation is not None:
                        mean = rotate(mean, v_rotation, 1, VALUE_DIM, VALUE_DIM)
                    if (NEW == 1) | (k_rotation is not None):
                        query = load_rows(q, _row_offsets(span, kv_heads, joined, q_strides, GROUP), is_row, dims, real)
                    if k_rotation is not None:
                        # Entries in the basis are without the mean, which all scores of a query get back.
                        centre = tl.load(k_mean + span * DIM + dims, mask=real, other=0.0).to(tl.float32)
                        peak += tl.sum(query.to(tl.float32) * centre[None, :], 1) * scale
                    if NEW == 1:
                        peak, share, mean = _attend_new(
                            (peak, share, mean), query, key, value, span, kv_heads, (k_batch, k_head),
                            (v_batch, v_head), axes, scale, SOFTCAP,
                        )
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
def append_kernel(
    key, value, k_pool, v_pool, starts, lens, k_mean, k_scale, k_rotation, v_rotation, kv_heads, rows, k_batch, k_head,
    k_row, v_batch, v_head, v_row, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Append up to BLOCK_R new tokens of a span to its pools, in the coordinates of a basis (else None)."""
    span = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    _append(
        key, value, k_pool, v_pool, (tl.load(starts + span) + tl.load(lens + span)).to(tl.int64), span, token,
        token < rows, kv_heads, (k_batch, k_head, k_row), (v_batch, v_head, v_row),
        (dims, dims < DIM, value_dims, value_dims < VALUE_DIM), (k_mean, k_scale, k_rotation, v_rotation), DIM,
        VALUE_DIM,
    )
