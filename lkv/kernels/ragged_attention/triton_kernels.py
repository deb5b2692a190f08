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

from lkv.kernels.ragged_attention.tier_kernels import attend_tier, sum_channels
from lkv.kernels.triton_helpers import IS_INTERPRETED, cap, load_rows, rotate, split_heads, store_rows

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
    # The interpreter knows bfloat16 as bits, and would multiply those.
    query = query.to(tl.float32) if IS_INTERPRETED and query.dtype == tl.bfloat16 else query
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
def _queries_of(queries, span, kv_heads, packed, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Return where packed rows of queries are, and at which offsets: in `turned` with a basis, else as they came."""
    q, turned, first_turned, first_row, strides = queries
    if turned is not None:
        where, at = turned, (first_turned + (packed - first_row)) * DIM
    else:
        where, at = q, _row_offsets(span, kv_heads, packed, strides, GROUP)
    return where, at


@triton.jit
def _turn_queries(
    queries, span, kv_heads, tile, axes, basis, GROUP: tl.constexpr, DIM: tl.constexpr, JOIN_M: tl.constexpr
):
    """Store the rows of a tile in `turned`, in the coordinates of a basis; JOIN_M rows at a time."""
    q, turned, first_turned, first_row, strides = queries
    dims, real, _, _ = axes
    factor = tl.load(basis[1] + span * DIM + dims, mask=real, other=0.0).to(tl.float32)
    for row in range(tile[1], tile[2], JOIN_M):
        packed = row + tl.arange(0, JOIN_M)
        is_row = packed < tile[2]
        query = load_rows(q, _row_offsets(span, kv_heads, packed, strides, GROUP), is_row, dims, real)
        query = rotate(query.to(tl.float32) * factor[None, :], basis[2], DIM, 1, DIM)
        store_rows(turned, (first_turned + (packed - first_row)) * DIM, query, is_row, dims, real)
    # Other threads load what this one stores.
    tl.debug_barrier()


@triton.jit
def _attend_span(
    queries, k_span, v_span, tiers, parts, extremes, spans, span, kv_heads, begin, end, length, tile, axes, slot, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAUSAL: tl.constexpr, BITS: tl.constexpr,
    ALLOWS_PTX: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """Attend from a tile to the entries `begin` to `end` of a span; packed row m's part goes to `slot` + m."""
    rows, first_row, after_rows = tile
    dims, real, value_dims, value_real = axes
    coded = begin * 0
    has_part = coded > 0
    for tier in tl.static_range(len(BITS) // 2):
        k_codes, k_norms, v_codes, v_norms, tables = tiers[tier]
        after_tier = coded + tl.load(tables + span)
        low, high = tl.maximum(begin, coded), tl.minimum(end, after_tier)
        if low < high:
            packed = first_row + tl.arange(0, ROWS)
            is_row = packed < after_rows
            limit = high + 0 * packed
            if CAUSAL:
                limit = tl.minimum(limit, length - rows + packed // GROUP + 1)
            first_code = tl.load(tables + spans + span).to(tl.int64) + (low - coded)
            where, at = _queries_of(queries, span, kv_heads, packed, GROUP, DIM)
            found = attend_tier(
                where, at, is_row, (k_codes, k_norms, v_codes, v_norms), first_code, high - low, limit - low, scale,
                DIM, VALUE_DIM, BITS[2 * tier], BITS[2 * tier + 1], WARPS, STAGES, ALLOWS_PTX, k_span.dtype.element_ty,
                SOFTCAP,
            )
            channels, is_channel = sum_channels(VALUE_DIM, BITS[2 * tier + 1])
            _store_part(parts, extremes, slot + packed, is_row, found, channels, is_channel, has_part, VALUE_DIM)
        has_part |= low < high
        coded = after_tier
    # Every pair has a part, even without entries.
    if (tl.maximum(begin, coded) < end) | (has_part == 0):
        packed = first_row + tl.arange(0, BLOCK_M)
        is_row = packed < after_rows
        visible = length - 1 + 0 * packed
        if CAUSAL:
            visible = length - rows + packed // GROUP
        where, at = _queries_of(queries, span, kv_heads, packed, GROUP, DIM)
        query = load_rows(where, at, is_row, dims, real).to(k_span.dtype.element_ty)
        found = _attend_pools(
            query, k_span, v_span, tl.maximum(begin, coded), end, visible, axes, scale, DIM, VALUE_DIM,
            BLOCK_M, BLOCK_N, BLOCK_V, SOFTCAP,
        )
        _store_part(parts, extremes, slot + packed, is_row, found, value_dims, value_real, has_part, VALUE_DIM)


@triton.jit
def _finish_span(
    q, key, value, k_pool, v_pool, out, lse, parts, extremes, tickets, oldest, newest, start, length, span, kv_heads,
    tile, strides, axes, basis, scale, NEW: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_S: tl.constexpr, JOIN_M: tl.constexpr, BLOCK_V: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """Draw a span's ticket: the first program appends the new token, the last one joins parts and stores outputs."""
    rows, first_row, after_rows = tile
    q_strides, k_strides, v_strides, out_strides = strides
    dims, real, value_dims, value_real = axes
    # All threads have stored before one of them draws the ticket, which publishes what they stored.
    tl.debug_barrier()
    ticket = tickets + span * tl.num_programs(1) + tl.program_id(1)
    drawn = tl.atomic_add(ticket, 1, sem="acq_rel")
    if NEW == 1:
        # By the first, whom no other waits for.
        is_first = (drawn == 0) & (tl.program_id(1) == 0)
        if is_first:
            _append(
                key, value, k_pool, v_pool, start + length, span, tl.arange(0, 1), tl.arange(0, 1) == 0, kv_heads,
                k_strides, v_strides, axes, basis, DIM, VALUE_DIM,
            )
    if drawn == newest - oldest:
        tl.store(ticket, 0)
        packed_rows = tl.cast(rows * GROUP, tl.int64)
        # JOIN_M rows at a time: the parts of all rows of a tile would not fit a program's registers.
        for row in range(first_row, after_rows, JOIN_M):
            joined = row + tl.arange(0, JOIN_M)
            is_row = joined < after_rows
            peak, share, mean = _join_parts(
                parts, extremes, oldest + span, newest + span, joined, is_row, packed_rows, value_dims, value_real,
                VALUE_DIM, BLOCK_S, JOIN_M, BLOCK_V,
            )
            if basis[3] is not None:
                mean = rotate(mean, basis[3], 1, VALUE_DIM, VALUE_DIM)
            if (NEW == 1) | (basis[0] is not None):
                query = load_rows(q, _row_offsets(span, kv_heads, joined, q_strides, GROUP), is_row, dims, real)
            if basis[0] is not None:
                # Entries in the basis are without the mean, which all scores of a query get back.
                centre = tl.load(basis[0] + span * DIM + dims, mask=real, other=0.0).to(tl.float32)
                peak += tl.sum(query.to(tl.float32) * centre[None, :], 1) * scale
            if NEW == 1:
                peak, share, mean = _attend_new(
                    (peak, share, mean), query, key, value, span, kv_heads, k_strides, v_strides, axes, scale, SOFTCAP
                )
            # A row without entries gives 0, with a logarithm of -inf.
            share = tl.where(share == 0.0, 1.0, share)
            if lse is not None:
                place = _row_offsets(span, kv_heads, joined, (kv_heads * packed_rows, rows, 1), GROUP)
                tl.store(lse + place, (peak + tl.log2(share)) * LN_2, mask=is_row)
            out_at = _row_offsets(span, kv_heads, joined, out_strides, GROUP)
            store_rows(out, out_at, mean / share[:, None], is_row, value_dims, value_real)


@triton.jit
def _slice_of_spans(starts, lens, spans, added, LEAST: tl.constexpr, SPANS: tl.constexpr):
    """Return tables [SPANS] of starts, lengths and ends on the flat axis, and where a program's slice begins and ends.

    The tables are read together and kept in registers, so that k waits for one load. All programs read the same values,
    because the last program updates `lens`. Last comes the size of slices.
    """
    span = tl.arange(0, SPANS)
    lengths = tl.load(lens + span, mask=span < spans, other=0) + added
    all_starts = tl.load(starts + span, mask=span < spans, other=0)
    # An empty span still occupies one position, so that every span has a program to reduce it.
    places = tl.where(span < spans, tl.maximum(lengths, 1), 0)
    ends, total = tl.cumsum(places, 0), tl.sum(places, 0)
    size = tl.maximum(tl.cdiv(total, tl.num_programs(0)), LEAST)
    low = tl.program_id(0) * size
    return (all_starts, lengths, ends), low, tl.minimum(low + size, total), size


@triton.jit
def _count_new(ticket, lens, lengths, spans, NEW: tl.constexpr, SPANS: tl.constexpr):
    """Count new tokens in `lens`, as the last program of all."""
    # Every program has read `lens` when the last one is here.
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(ticket, 0)
        span = tl.arange(0, SPANS)
        tl.store(lens + span, lengths + (1 if NEW == 1 else 0), mask=span < spans)


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
    span are in it, and the first of them. With a basis (else None), the queries of a span are transformed first, and
    stored in `turned` [programs, BLOCK_M, DIM], float32; what is joined is transformed back. SOFTCAP caps scores, in
    base 2 as they are (0: none). `added` entries a span are in the pools, but not counted in `lens` yet. NEW: 0 leaves
    `lens` as it is, 1 appends the one new token of each span, 2 counts what was added. `tickets` [spans * tiles + 1]
    are 0 before and after.
    """
    tables, low, high, size = _slice_of_spans(starts, lens, spans, added, LEAST, SPANS)
    first_row, packed_rows = tl.program_id(1) * ROWS, tl.cast(rows * GROUP, tl.int64)
    tile = rows, first_row, tl.minimum(first_row + ROWS, rows * GROUP)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    axes = dims, dims < DIM, value_dims, value_dims < VALUE_DIM
    strides = (q_batch, q_head, q_row), (k_batch, k_head, 0), (v_batch, v_head, 0), (out_batch, out_head, out_row)
    basis, tier_1 = (k_mean, k_scale, k_rotation, v_rotation), (k_codes_1, k_norms_1, v_codes_1, v_norms_1, tables_1)
    tiers = (k_codes_0, k_norms_0, v_codes_0, v_norms_0, tables_0), tier_1
    first_turned = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * BLOCK_M
    queries = q, turned, first_turned, first_row, strides[0]
    if low < high:
        first, last = tl.sum((tables[2] <= low).to(tl.int32), 0), tl.sum((tables[2] < high).to(tl.int32), 0)
        # Addresses of all tiers, hoisted out of this loop, would not fit the registers.
        for span in tl.range(first, last + 1, disable_licm=len(BITS) > 0):
            length, after = _pick(tables[1], span, SPANS), _pick(tables[2], span, SPANS)
            before, start = after - tl.maximum(length, 1), _pick(tables[0], span, SPANS).to(tl.int64)
            begin, end = tl.maximum(low - before, 0), tl.minimum(high - before, length)
            if CAUSAL:
                # New tokens that no row of this tile sees are not read.
                end = tl.minimum(end, length - rows + (tile[2] - 1) // GROUP + 1)
            if turned is not None:
                _turn_queries(queries, span, kv_heads, tile, axes, basis, GROUP, DIM, JOIN_M)
            # Programs and spans increase together, so their sum is a unique index of the pair.
            _attend_span(
                queries, k_pool + start * DIM, v_pool + start * VALUE_DIM, tiers, parts, extremes, spans, span,
                kv_heads, begin, end, length, tile, axes, (tl.program_id(0) + span) * packed_rows, scale, GROUP, DIM,
                VALUE_DIM, CAUSAL, BITS, ALLOWS_PTX, WARPS, STAGES, ROWS, BLOCK_M, BLOCK_N, BLOCK_V, SOFTCAP,
            )
            _finish_span(
                q, key, value, k_pool, v_pool, out, lse, parts, extremes, tickets, before // size, (after - 1) // size,
                start, length, span, kv_heads, tile, strides, axes, basis, scale, NEW, GROUP, DIM, VALUE_DIM, BLOCK_S,
                JOIN_M, BLOCK_V, SOFTCAP,
            )
    if NEW > 0:
        _count_new(tickets + spans * tl.num_programs(1), lens, tables[1], spans, NEW, SPANS)


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
