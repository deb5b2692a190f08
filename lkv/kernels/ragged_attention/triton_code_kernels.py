"""The slice kernel of `triton` over spans whose older entries are held in 8 or 4 bits a value."""

import triton
import triton.language as tl

from lkv.kernels.ragged_attention.triton_parts import (
    attended,
    attended_in_pools,
    query_of,
    rows_of,
    slice_of,
    store_part,
)


@triton.jit
def _restored(codes, step, least, HALF: tl.constexpr):  # noqa: N803
    """code * step + least in float32; within the range of float16 if HALF."""
    values = codes.to(tl.float32) * step.to(tl.float32) + least.to(tl.float32)
    return tl.minimum(tl.maximum(values, -65504.0), 65504.0) if HALF else values


@triton.jit
def code_slice_kernel(
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
    k_codes,
    k_step,
    k_least,
    v_codes,
    v_step,
    v_least,
    tables,
    GROUP: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    SPANS: tl.constexpr,  # noqa: N803
    LEAST: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    BITS: tl.constexpr,  # noqa: N803
    SHARING: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    BLOCK_V: tl.constexpr,  # noqa: N803
):
    """As the slice kernel, where the first entries of each span are codes: code * step + least.

    `tables` [3, spans]: how many entries of a span are codes, its first one among all codes, its first group of k.
    SHARING values share a step: entries of one channel in k (BLOCK_N divides them), channels of one entry in v. Two
    codes of 4 bits lie in a byte, those of the first half of the channels below; the axes of the blocks are so ordered
    that they come apart.
    """
    low, high, held, ends = slice_of(lens, counted, spans, added, SPANS, LEAST)
    packed, token, within, latest = rows_of(rows, GROUP, BLOCK_M)
    all_spans = tl.arange(0, SPANS)
    # Channels in the order of the blocks, the bytes that hold their codes, and where in the byte.
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    byte, value_byte = dims, value_dims
    shift, value_shift = dims * 0, value_dims * 0
    real, value_real = dims < DIM, value_dims < VALUE_DIM
    if BITS == 4:
        byte, value_byte = dims % (BLOCK_D // 2), value_dims % (BLOCK_V // 2)
        above, value_above = dims // (BLOCK_D // 2), value_dims // (BLOCK_V // 2)
        dims, value_dims = byte + above * ((DIM + 1) // 2), value_byte + value_above * ((VALUE_DIM + 1) // 2)
        real = (byte < (DIM + 1) // 2) & (dims < DIM)
        value_real = (value_byte < (VALUE_DIM + 1) // 2) & (value_dims < VALUE_DIM)
        shift, value_shift = above * 4, value_above * 4
    width: tl.constexpr = (DIM * BITS + 7) // 8
    value_width: tl.constexpr = (VALUE_DIM * BITS + 7) // 8
    value_groups: tl.constexpr = (VALUE_DIM + SHARING - 1) // SHARING

    if low < high:
        first = tl.sum((ends <= low).to(tl.int32), 0)
        last = tl.sum((ends < high).to(tl.int32), 0)
        for span in range(first, last + 1):
            length = tl.load(lens + span) + added
            before = tl.sum(tl.where(all_spans < span, held, 0), 0)
            begin = tl.maximum(low - before, 0)
            # New tokens that no row of this tile sees are not read.
            end = tl.minimum(tl.minimum(high - before, length), length - rows + latest + 1)
            coded = tl.load(tables + span)
            first_code = tl.load(tables + spans + span).to(tl.int64)
            first_group = tl.load(tables + 2 * spans + span).to(tl.int64)
            start = tl.load(starts + span).to(tl.int64)
            query = query_of(q, span, kv_heads, packed, token, within, q_batch, q_head, q_row, dims, real, GROUP, WIDEN)
            visible = length - rows + token
            highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            weight = tl.zeros([BLOCK_M], tl.float32)
            sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            # Every block is of one group of k, within which a slice may begin.
            codes_end = tl.minimum(end, coded)
            for at in range(begin // BLOCK_N * BLOCK_N, codes_end, BLOCK_N):
                entry = at + tl.arange(0, BLOCK_N)
                inside = (entry >= begin) & (entry < codes_end)
                code_at = first_code + entry
                key_here, value_here = inside[None, :] & real[:, None], inside[:, None] & value_real[None, :]
                key = tl.load(k_codes + code_at[None, :] * width + byte[:, None], mask=key_here, other=0)
                group = (first_group + at // SHARING) * DIM + dims
                key = _restored(
                    (key >> shift[:, None]) & (2**BITS - 1),
                    tl.load(k_step + group, mask=real, other=0.0)[:, None],
                    tl.load(k_least + group, mask=real, other=0.0)[:, None],
                    HALF,
                ).to(query.dtype)
                value = tl.load(
                    v_codes + code_at[:, None] * value_width + value_byte[None, :], mask=value_here, other=0
                )
                value_group = code_at[:, None] * value_groups + (value_dims // SHARING)[None, :]
                value = _restored(
                    (value >> value_shift[None, :]) & (2**BITS - 1),
                    tl.load(v_step + value_group, mask=value_here, other=0.0),
                    tl.load(v_least + value_group, mask=value_here, other=0.0),
                    HALF,
                ).to(query.dtype)
                highest, weight, sums = attended(query, key, value, inside[None, :], scale, highest, weight, sums)
            highest, weight, sums = attended_in_pools(
                query, k_pool + start * DIM, v_pool + start * VALUE_DIM, tl.maximum(begin, coded), end, visible, dims,
                real, value_dims, value_real, scale, highest, weight, sums, DIM, VALUE_DIM, WIDEN, BLOCK_N,
            )  # fmt: skip
            store_part(
                parts, extremes, span, rows, packed, within, value_dims, value_real, highest, weight, sums, GROUP,
                VALUE_DIM,
            )  # fmt: skip
