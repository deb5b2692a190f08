"""Parts of the kernels that read one slice of the flat axis; Triton compiles them into each."""

import triton
import triton.language as tl


@triton.jit
def slice_of(lens, counted, spans, added, SPANS: tl.constexpr, LEAST: tl.constexpr):  # noqa: N803
    """Where this program's slice begins and ends, how many entries each span has, and where each ends.

    `added` entries a span are in the pools, but not counted in `lens` yet; `counted` gets the lengths that were read.
    """
    all_spans = tl.arange(0, SPANS)
    held = tl.load(lens + all_spans, mask=all_spans < spans, other=-added) + added
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(counted + all_spans, held, mask=all_spans < spans)
    total = tl.sum(held, 0)
    size = tl.maximum(tl.cdiv(total, tl.num_programs(0)), LEAST)
    low = tl.program_id(0) * size
    return low, tl.minimum(low + size, total), held, tl.cumsum(held, 0)


@triton.jit
def rows_of(rows, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):  # noqa: N803
    """The packed rows of this program's tile, the new token of each, whether it is one, and the tile's last token."""
    first = tl.program_id(1) * BLOCK_M
    packed = first + tl.arange(0, BLOCK_M)
    latest = tl.minimum((first + BLOCK_M - 1) // GROUP, rows - 1)
    return packed, packed // GROUP, packed < rows * GROUP, latest


@triton.jit
def query_of(
    q,
    span,
    kv_heads,
    packed,
    token,
    within,
    q_batch,
    q_head,
    q_row,
    dims,
    real,
    GROUP: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
):
    """The queries of a span's packed rows, for the channels `dims` that are `real`."""
    head = (span % kv_heads) * GROUP + packed % GROUP
    query_at = q + (span // kv_heads).to(tl.int64) * q_batch + head * q_head + token * q_row
    query = tl.load(query_at[:, None] + dims[None, :], mask=within[:, None] & real[None, :], other=0.0)
    return query.to(tl.float32) if WIDEN else query


@triton.jit
def attended(query, key, value, seen, scale, highest, weight, sums):
    """Running maximum, weight and sums of rows with one more block of entries."""
    scores = tl.dot(query, key, input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(highest, tl.max(scores, 1))
    # A row that sees nothing yet would give inf - inf.
    base = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2(highest - base)
    share = tl.exp2(scores - base[:, None])
    sums = sums * shrink[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
    return new, weight * shrink + tl.sum(share, 1), sums


@triton.jit
def attended_in_pools(
    query,
    k_span,
    v_span,
    begin,
    end,
    visible,
    dims,
    real,
    value_dims,
    value_real,
    scale,
    highest,
    weight,
    sums,
    DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
):
    """`attended` with the entries `begin` to `end` of a span, of which each row sees those up to `visible`."""
    for at in range(begin, end, BLOCK_N):
        entry = at + tl.arange(0, BLOCK_N)
        inside = entry < end
        key = tl.load(
            k_span + entry[None, :].to(tl.int64) * DIM + dims[:, None],
            mask=inside[None, :] & real[:, None],
            other=0.0,
        )
        value = tl.load(
            v_span + entry[:, None].to(tl.int64) * VALUE_DIM + value_dims[None, :],
            mask=inside[:, None] & value_real[None, :],
            other=0.0,
        )
        key, value = (key.to(tl.float32), value.to(tl.float32)) if WIDEN else (key, value)
        seen = inside[None, :] & (entry[None, :] <= visible[:, None])
        highest, weight, sums = attended(query, key, value, seen, scale, highest, weight, sums)
    return highest, weight, sums


@triton.jit
def store_part(
    parts,
    extremes,
    span,
    rows,
    packed,
    within,
    value_dims,
    value_real,
    highest,
    weight,
    sums,
    GROUP: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
):
    """Write what this program's slice gave for one span."""
    # Programs and spans rise together, so their sum is a place that no other pair has.
    slot = ((tl.program_id(0) + span) * rows * GROUP).to(tl.int64) + packed
    tl.store(extremes + 2 * slot, highest, mask=within)
    tl.store(extremes + 2 * slot + 1, weight, mask=within)
    tl.store(
        parts + slot[:, None] * VALUE_DIM + value_dims[None, :],
        sums,
        mask=within[:, None] & value_real[None, :],
    )
