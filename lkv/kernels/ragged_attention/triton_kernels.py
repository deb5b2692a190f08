"""The kernels of `triton` over entries: one slice of the flat axis, the join of its parts, and the append."""

import triton
import triton.language as tl

from lkv.kernels.ragged_attention.triton_parts import attended_in_pools, query_of, rows_of, slice_of, store_part

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def slice_kernel(
    q,
    k_pool,
    v_pool,
    starts,
    lens,
    parts,
    extremes,
    counted,
    spans,
    kv_heads,
    rows,
    added,
    scale,
    q_batch,
    q_head,
    q_row,
    GROUP: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    SPANS: tl.constexpr,  # noqa: N803
    LEAST: tl.constexpr,  # noqa: N803
    CAUSAL: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """One slice of the flat axis for one tile of packed rows; row m of a span is new token m // GROUP."""
    low, high, held, ends = slice_of(lens, counted, spans, added, SPANS, LEAST)
    packed, token, within, latest = rows_of(rows, GROUP, BLOCK_M)
    all_spans = tl.arange(0, SPANS)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    real, value_real = dims < DIM, value_dims < VALUE_DIM
    if low < high:
        first = tl.sum((ends <= low).to(tl.int32), 0)
        last = tl.sum((ends < high).to(tl.int32), 0)
        for span in range(first, last + 1):
            length = tl.load(lens + span) + added
            before = tl.sum(tl.where(all_spans < span, held, 0), 0)
            begin = tl.maximum(low - before, 0)
            end = tl.minimum(high - before, length)
            visible = length - 1 + 0 * token
            if CAUSAL:
                # New tokens that no row of this tile sees are not read.
                end = tl.minimum(end, length - rows + latest + 1)
                visible = length - rows + token
            start = tl.load(starts + span).to(tl.int64)
            query = query_of(q, span, kv_heads, packed, token, within, q_batch, q_head, q_row, dims, real, GROUP, WIDEN)
            highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            weight = tl.zeros([BLOCK_M], tl.float32)
            sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            highest, weight, sums = attended_in_pools(
                query, k_pool + start * DIM, v_pool + start * VALUE_DIM, begin, end, visible, dims, real, value_dims,
                value_real, scale, highest, weight, sums, DIM, VALUE_DIM, WIDEN, BLOCK_N,
            )  # fmt: skip
            store_part(
                parts, extremes, span, rows, packed, within, value_dims, value_real, highest, weight, sums, GROUP,
                VALUE_DIM,
            )  # fmt: skip


@triton.jit
def join_kernel(
    parts,
    extremes,
    counted,
    out,
    lse,
    q,
    key,
    value,
    k_pool,
    v_pool,
    starts,
    lens,
    spans,
    kv_heads,
    rows,
    programs,
    scale,
    out_batch,
    out_head,
    out_row,
    q_batch,
    q_head,
    k_batch,
    k_head,
    v_batch,
    v_head,
    NEW: tl.constexpr,  # noqa: N803
    LSE: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    SPANS: tl.constexpr,  # noqa: N803
    LEAST: tl.constexpr,  # noqa: N803
    BLOCK_S: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """One packed row of one span from its parts and, if NEW is 1, the new token; the lengths grow if it is not 0."""
    # Packed rows first: a part of a prompt has more of them than the second axis of a grid may have.
    packed, span = tl.program_id(0), tl.program_id(1)
    all_spans = tl.arange(0, SPANS)
    held = tl.load(counted + all_spans, mask=all_spans < spans, other=0)
    size = tl.maximum(tl.cdiv(tl.sum(held, 0), programs), LEAST)
    before = tl.sum(tl.where(all_spans < span, held, 0), 0)
    length = tl.load(counted + span)
    first = before // size + span
    # A span without entries has no parts.
    last = tl.where(length > 0, (before + length - 1) // size + span, first - 1)

    dims = tl.arange(0, BLOCK_V)
    highest = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    sums = tl.zeros([BLOCK_V], tl.float32)
    for at in range(first, last + 1, BLOCK_S):
        part = at + tl.arange(0, BLOCK_S)
        inside = part <= last
        slot = part.to(tl.int64) * rows * GROUP + packed
        peak = tl.load(extremes + 2 * slot, mask=inside, other=float("-inf"))
        share = tl.load(extremes + 2 * slot + 1, mask=inside, other=0.0)
        part_sums = tl.load(
            parts + slot[:, None] * VALUE_DIM + dims[None, :],
            mask=inside[:, None] & (dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        new = tl.maximum(highest, tl.max(peak, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink, factor = tl.exp2(highest - base), tl.exp2(peak - base)
        weight = weight * shrink + tl.sum(share * factor, 0)
        sums = sums * shrink + tl.sum(part_sums * factor[:, None], 0)
        highest = new
    batch, kv_head = (span // kv_heads).to(tl.int64), span % kv_heads
    head = kv_head * GROUP + packed % GROUP
    if NEW == 1:
        channels = tl.arange(0, BLOCK_D)
        query = tl.load(q + batch * q_batch + head * q_head + channels, mask=channels < DIM, other=0.0)
        fresh = tl.load(key + batch * k_batch + kv_head * k_head + channels, mask=channels < DIM, other=0.0)
        fresh_value = tl.load(value + batch * v_batch + kv_head * v_head + dims, mask=dims < VALUE_DIM, other=0.0)
        score = tl.sum(query.to(tl.float32) * fresh.to(tl.float32), 0) * scale
        new = tl.maximum(highest, score)
        shrink, factor = tl.exp2(highest - new), tl.exp2(score - new)
        weight = weight * shrink + factor
        sums = sums * shrink + fresh_value.to(tl.float32) * factor
        if packed == 0:
            end = (tl.load(starts + span) + length).to(tl.int64)
            tl.store(k_pool + end * DIM + channels, fresh, mask=channels < DIM)
            tl.store(v_pool + end * VALUE_DIM + dims, fresh_value, mask=dims < VALUE_DIM)
            # Nothing in this launch reads `lens`, so that programs of any order agree.
            tl.store(lens + span, length + 1)
    elif NEW == 2:  # noqa: SIM102
        if packed == 0:
            tl.store(lens + span, length)
    if LSE:
        # Of a span without entries: 0, with a logarithm of -inf.
        row = ((span // kv_heads) * kv_heads * GROUP + head) * rows + packed // GROUP
        weight = tl.where(weight == 0.0, 1.0, weight)
        tl.store(lse + row + tl.arange(0, 1), (highest + tl.log2(weight)) * LN_2)
    slot = out + batch * out_batch + head * out_head + (packed // GROUP) * out_row
    tl.store(slot + dims, (sums / weight).to(out.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit
def append_kernel(
    key,
    value,
    k_pool,
    v_pool,
    starts,
    lens,
    kv_heads,
    rows,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    BLOCK_T: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """New entries of one span, copied to its end; `lens` stays as it is."""
    span, tile = tl.program_id(0), tl.program_id(1)
    batch, head = (span // kv_heads).to(tl.int64), span % kv_heads
    end = (tl.load(starts + span) + tl.load(lens + span)).to(tl.int64)
    row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    inside = (row[:, None] < rows) & (dims[None, :] < DIM)
    new = tl.load(key + batch * k_batch + head * k_head + row[:, None] * k_row + dims[None, :], mask=inside)
    tl.store(k_pool + (end + row[:, None]) * DIM + dims[None, :], new, mask=inside)
    inside = (row[:, None] < rows) & (value_dims[None, :] < VALUE_DIM)
    new = tl.load(value + batch * v_batch + head * v_head + row[:, None] * v_row + value_dims[None, :], mask=inside)
    tl.store(v_pool + (end + row[:, None]) * VALUE_DIM + value_dims[None, :], new, mask=inside)
