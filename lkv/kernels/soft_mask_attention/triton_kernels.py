"""The Triton kernels of soft-masked attention (App. B): forward, gradient of q, gradients of k, v and log m.

Scores live in base 2: exp(s + log m) = 2 ** (log2(e) (s + log m)). A key with m = 0 has score -inf, and so has a column
beyond the end, so that neither needs a branch. A row in which no key is left has log-sum-exp +inf, which makes all its
probabilities zero in the backward pass too. `out` and every gradient but the mask's is laid out [B, T, H, d].

Those of continuations attend to a frozen prompt under a mask and to a causal tail, whose k and v `key_gradient` serves.
Several rows of the batch may read one prompt, which is copied for none of them: `owners` [B] are the numbers of their
prompts. Every row of the tail sees the whole prompt, and the tail up to itself.
"""

import triton
import triton.language as tl

from lkv.kernels.triton_helpers import IS_INTERPRETED, LOG2_E


@triton.jit
def _dot(a, b, total):
    """Return a b + total; float32 as three TF32 products, which keeps its precision on tensor cores."""
    if IS_INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="tf32x3")


@triton.jit
def _load(
    base, start, row_stride, limit, bounded: tl.constexpr, block: tl.constexpr, dim: tl.constexpr, width: tl.constexpr
):
    """Load rows from `start` on as [block, width]; 0 beyond `dim` and, if `bounded`, from row `limit` on."""
    row, column = tl.arange(0, block)[:, None], tl.arange(0, width)[None, :]
    pointers = base + start * row_stride.to(tl.int64) + (row * row_stride + column)
    if bounded and dim < width:
        x = tl.load(pointers, mask=(start + row < limit) & (column < dim), other=0.0)
    elif bounded:
        x = tl.load(pointers, mask=start + row < limit, other=0.0)
    elif dim < width:
        x = tl.load(pointers, mask=column < dim, other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def _store(out, x, start, batch, head, rows, heads, block: tl.constexpr, dim: tl.constexpr, width: tl.constexpr):
    """Store rows `start` ... `start + block` of one head in `out` [B, T, H, d]."""
    row_stride = heads * dim
    base = out + (batch * rows).to(tl.int64) * row_stride + head * dim
    row, column = tl.arange(0, block)[:, None], tl.arange(0, width)[None, :]
    pointers = base + start * row_stride.to(tl.int64) + (row * row_stride + column)
    tl.store(pointers, x.to(out.dtype.element_ty), mask=(start + row < rows) & (column < dim))


@triton.jit
def _load_vector(base, start, limit, fill: tl.constexpr, bounded: tl.constexpr, block: tl.constexpr):
    index = start + tl.arange(0, block)
    return tl.load(base + index, mask=index < limit, other=fill) if bounded else tl.load(base + index)


@triton.jit
def _query_block(q, strides, rows, heads, kv_heads, block_rows: tl.constexpr, dim: tl.constexpr, width: tl.constexpr):
    """First row (the longest blocks come first), batch row, head, KV head and queries of this program's block."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_rows
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    q += batch * strides[0] + head * strides[1]
    queries = _load(q, start, strides[2], rows, True, block_rows, dim, width)
    return start, batch, head, head // (heads // kv_heads), queries


@triton.jit
def _output_gradient(
    out, d_out, lse, delta, place, rows, heads, block_rows: tl.constexpr, dim: tl.constexpr, width: tl.constexpr
):
    """Gradient of the output, log-sum-exp and sum(out d_out), which goes into `delta`, of a block of rows."""
    start, batch, head = place
    offset = (batch * rows).to(tl.int64) * (heads * dim) + head * dim
    gradient = _load(d_out + offset, start, heads * dim, rows, True, block_rows, dim, width)
    outs = _load(out + offset, start, heads * dim, rows, True, block_rows, dim, width)
    product = tl.sum(outs.to(tl.float32) * gradient.to(tl.float32), 1)
    vector, index = tl.program_id(1).to(tl.int64) * rows, start + tl.arange(0, block_rows)
    tl.store(delta + vector + index, product, mask=index < rows)
    return gradient, _load_vector(lse + vector, start, rows, float("inf"), True, block_rows), product


@triton.jit
def _forward_columns(
    acc, top, total, q, k, v, log_mask, position, start, end, columns, k_row: tl.int32, v_row: tl.int32, scale,
    edge: tl.constexpr, block: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
):
    """Online softmax over columns `start` ... `end`; only at the `edge` may a column be invisible or beyond the end."""
    for column in range(start, end, block):
        keys = _load(k, column, k_row, columns, edge, block, dim, width)
        bias = _load_vector(log_mask, column, columns, -float("inf"), edge, block) * LOG2_E
        scores = _dot(q, tl.trans(keys), tl.zeros([q.shape[0], block], tl.float32)) * scale + bias[None, :]
        if edge:
            scores = tl.where(column + tl.arange(0, block)[None, :] <= position[:, None], scores, -float("inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(highest == -float("inf"), 0.0, highest)
        p = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(p, 1)
        values = _load(v, column, v_row, columns, edge, block, dim, width)
        acc = _dot(p.to(values.dtype), values, acc * decay[:, None])
        top = highest
    return acc, top, total


@triton.jit
def forward(
    q, k, v, log_mask, out, lse, scale,
    rows: tl.int32, columns: tl.int32, heads: tl.int32, kv_heads: tl.int32,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int32, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int32,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int32,
    block_rows: tl.constexpr, block_columns: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
):
    """One block of rows of one query head. Grid: row blocks (the longest first), B Hq."""
    start, batch, head, kv_head, queries = _query_block(
        q, (q_batch, q_head, q_row), rows, heads, kv_heads, block_rows, dim, width
    )
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    log_mask += (batch * kv_heads + kv_head).to(tl.int64) * columns
    older = columns - rows
    position = start + older + tl.arange(0, block_rows)
    acc = tl.zeros([block_rows, width], tl.float32)
    top = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    # All rows of the block see the columns before `seen`. The edge comes first: the other way round ptxas cannot prove
    # the accumulator untouched between the loops, and runs the matrix products of both one after another.
    seen = (start + older + 1) // block_columns * block_columns
    acc, top, total = _forward_columns(
        acc, top, total, queries, k, v, log_mask, position, seen, tl.minimum(start + block_rows + older, columns),
        columns, k_row, v_row, scale * LOG2_E, True, block_columns, dim, width,
    )
    acc, top, total = _forward_columns(
        acc, top, total, queries, k, v, log_mask, position, 0, seen, columns, k_row, v_row, scale * LOG2_E,
        False, block_columns, dim, width,
    )
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    _store(out, acc, start, batch, head, rows, heads, block_rows, dim, width)
    index = start + tl.arange(0, block_rows)
    log_sum = tl.where(empty, float("inf"), top + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + tl.program_id(1).to(tl.int64) * rows + index, log_sum, mask=index < rows)


@triton.jit
def _query_gradient_columns(
    acc, q, d_out, lse, delta, k, v, log_mask, position, start, end, columns, k_row: tl.int32, v_row: tl.int32, scale,
    edge: tl.constexpr, block: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
):
    for column in range(start, end, block):
        keys = _load(k, column, k_row, columns, edge, block, dim, width)
        values = _load(v, column, v_row, columns, edge, block, dim, width)
        bias = _load_vector(log_mask, column, columns, -float("inf"), edge, block) * LOG2_E
        zero = tl.zeros([q.shape[0], block], tl.float32)
        scores = _dot(q, tl.trans(keys), zero) * scale + bias[None, :]
        if edge:
            scores = tl.where(column + tl.arange(0, block)[None, :] <= position[:, None], scores, -float("inf"))
        p = tl.exp2(scores - lse[:, None])
        d_scores = p * (_dot(d_out, tl.trans(values), zero) - delta[:, None])
        acc = _dot(d_scores.to(keys.dtype), keys, acc)
    return acc


@triton.jit
def query_gradient(
    q, k, v, log_mask, out, d_out, lse, delta, d_q, scale,
    rows: tl.int32, columns: tl.int32, heads: tl.int32, kv_heads: tl.int32,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int32, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int32,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int32,
    block_rows: tl.constexpr, block_columns: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
):
    """Grid as in `forward`. Also stores delta = sum(out d_out) of each row, which `key_gradient` reads."""
    start, batch, head, kv_head, queries = _query_block(
        q, (q_batch, q_head, q_row), rows, heads, kv_heads, block_rows, dim, width
    )
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    log_mask += (batch * kv_heads + kv_head).to(tl.int64) * columns
    gradient, log_sum, product = _output_gradient(
        out, d_out, lse, delta, (start, batch, head), rows, heads, block_rows, dim, width
    )
    older = columns - rows
    position = start + older + tl.arange(0, block_rows)
    acc = tl.zeros([block_rows, width], tl.float32)
    seen = (start + older + 1) // block_columns * block_columns
    acc = _query_gradient_columns(
        acc, queries, gradient, log_sum, product, k, v, log_mask, position, seen,
        tl.minimum(start + block_rows + older, columns), columns, k_row, v_row,
        scale * LOG2_E, True, block_columns, dim, width,
    )
    acc = _query_gradient_columns(
        acc, queries, gradient, log_sum, product, k, v, log_mask, position, 0, seen, columns, k_row, v_row,
        scale * LOG2_E, False, block_columns, dim, width,
    )
    _store(d_q, acc * scale, start, batch, head, rows, heads, block_rows, dim, width)


@triton.jit
def _key_gradient_rows(
    d_k, d_v, d_mask, keys, values, bias, position, q, d_out, lse, delta, start, end, rows, older,
    q_row: tl.int32, d_out_row: tl.int32, scale,
    edge: tl.constexpr, bounded: tl.constexpr, block: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
):
    """Add the gradients from rows `start` ... `end` of one query head; scores are transposed, [columns, rows]."""
    for row in range(start, end, block):
        queries = _load(q, row, q_row, rows, bounded, block, dim, width)
        log_sum = _load_vector(lse, row, rows, float("inf"), bounded, block)
        zero = tl.zeros([keys.shape[0], block], tl.float32)
        scores = _dot(keys, tl.trans(queries), zero) * scale + bias[:, None]
        if edge:
            scores = tl.where(position[:, None] <= row + older + tl.arange(0, block)[None, :], scores, -float("inf"))
        p = tl.exp2(scores - log_sum[None, :])
        gradient = _load(d_out, row, d_out_row, rows, bounded, block, dim, width)
        d_v = _dot(p.to(gradient.dtype), gradient, d_v)
        product = _load_vector(delta, row, rows, 0.0, bounded, block)
        d_scores = p * (_dot(values, tl.trans(gradient), zero) - product[None, :])
        d_mask += tl.sum(d_scores, 1)
        d_k = _dot(d_scores.to(queries.dtype), queries, d_k)
    return d_k, d_v, d_mask


@triton.jit
def key_gradient(
    q, k, v, log_mask, d_out, lse, delta, d_k, d_v, d_mask, scale,
    rows: tl.int32, columns: tl.int32, heads: tl.int32, kv_heads: tl.int32,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int32, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int32,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int32,
    bounded: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, dim: tl.constexpr,
    width: tl.constexpr,
):
    """One block of columns of one KV head over all heads of its group, so no atomics. Grid: column blocks, B Hkv."""
    start = tl.program_id(0) * block_columns
    batch, kv_head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    groups = heads // kv_heads
    keys = _load(k + batch * k_batch + kv_head * k_head, start, k_row, columns, True, block_columns, dim, width)
    values = _load(v + batch * v_batch + kv_head * v_head, start, v_row, columns, True, block_columns, dim, width)
    mask_offset = tl.program_id(1).to(tl.int64) * columns
    bias = _load_vector(log_mask + mask_offset, start, columns, -float("inf"), True, block_columns) * LOG2_E
    older = columns - rows
    position = start + tl.arange(0, block_columns)
    # Rows before `first` see none of these columns, rows from `seen` on see them all.
    first = tl.maximum(start - older, 0) // block_rows * block_rows
    seen = tl.cdiv(tl.maximum(start + block_columns - 1 - older, 0), block_rows) * block_rows
    k_acc = tl.zeros([block_columns, width], tl.float32)
    v_acc = tl.zeros([block_columns, width], tl.float32)
    mask_acc = tl.zeros([block_columns], tl.float32)
    d_out_row = heads * dim
    for group in range(groups):
        head = kv_head * groups + group
        head_q = q + batch * q_batch + head * q_head
        head_d_out = d_out + (batch * rows).to(tl.int64) * d_out_row + head * dim
        vector = (batch * heads + head).to(tl.int64) * rows
        k_acc, v_acc, mask_acc = _key_gradient_rows(
            k_acc, v_acc, mask_acc, keys, values, bias, position, head_q, head_d_out, lse + vector, delta + vector,
            first, tl.minimum(seen, rows), rows, older, q_row, d_out_row, scale * LOG2_E,
            True, bounded, block_rows, dim, width,
        )
        k_acc, v_acc, mask_acc = _key_gradient_rows(
            k_acc, v_acc, mask_acc, keys, values, bias, position, head_q, head_d_out, lse + vector, delta + vector,
            seen, rows, rows, older, q_row, d_out_row, scale * LOG2_E,
            False, bounded, block_rows, dim, width,
        )
    _store(d_k, k_acc * scale, start, batch, kv_head, columns, kv_heads, block_columns, dim, width)
    _store(d_v, v_acc, start, batch, kv_head, columns, kv_heads, block_columns, dim, width)
    tl.store(d_mask + mask_offset + position, mask_acc, mask=position < columns)


@triton.jit
def continuation_forward(
    q, k, v, tail_mask, prompt_k, prompt_v, log_mask, owners, out, lse, scale,
    rows: tl.int32, columns: tl.int32, heads: tl.int32, kv_heads: tl.int32,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int32, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int32,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int32, prompt_k_batch: tl.int64, prompt_k_head: tl.int64,
    prompt_k_row: tl.int32, prompt_v_batch: tl.int64, prompt_v_head: tl.int64, prompt_v_row: tl.int32,
    block_rows: tl.constexpr, block_columns: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
):
    """One block of rows of one query head over `columns` of the prompt and the tail. Grid: row blocks, B Hq."""
    start, batch, head, kv_head, queries = _query_block(
        q, (q_batch, q_head, q_row), rows, heads, kv_heads, block_rows, dim, width
    )
    owner = tl.load(owners + batch)
    mask_row = (batch * kv_heads + kv_head).to(tl.int64)
    index = start + tl.arange(0, block_rows)
    acc = tl.zeros([block_rows, width], tl.float32)
    top = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    # The longest loop comes last, see `forward`.
    acc, top, total = _forward_columns(
        acc, top, total, queries, k + batch * k_batch + kv_head * k_head, v + batch * v_batch + kv_head * v_head,
        tail_mask + mask_row * rows, index, 0, tl.minimum(start + block_rows, rows), rows, k_row, v_row,
        scale * LOG2_E, True, block_columns, dim, width,
    )
    prompt_k += owner * prompt_k_batch + kv_head * prompt_k_head
    prompt_v += owner * prompt_v_batch + kv_head * prompt_v_head
    log_mask += mask_row * columns
    full = columns // block_columns * block_columns
    acc, top, total = _forward_columns(
        acc, top, total, queries, prompt_k, prompt_v, log_mask, index + columns, full, columns, columns, prompt_k_row,
        prompt_v_row, scale * LOG2_E, True, block_columns, dim, width,
    )
    acc, top, total = _forward_columns(
        acc, top, total, queries, prompt_k, prompt_v, log_mask, index + columns, 0, full, columns, prompt_k_row,
        prompt_v_row, scale * LOG2_E, False, block_columns, dim, width,
    )
    # Every row sees itself, so that none is empty.
    _store(out, acc / total[:, None], start, batch, head, rows, heads, block_rows, dim, width)
    tl.store(lse + tl.program_id(1).to(tl.int64) * rows + index, top + tl.log2(total), mask=index < rows)


@triton.jit
def continuation_query_gradient(
    q, k, v, tail_mask, prompt_k, prompt_v, log_mask, owners, out, d_out, lse, delta, d_q, scale,
    rows: tl.int32, columns: tl.int32, heads: tl.int32, kv_heads: tl.int32,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int32, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int32,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int32, prompt_k_batch: tl.int64, prompt_k_head: tl.int64,
    prompt_k_row: tl.int32, prompt_v_batch: tl.int64, prompt_v_head: tl.int64, prompt_v_row: tl.int32,
    block_rows: tl.constexpr, block_columns: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
):
    """Grid as in `continuation_forward`. Also stores delta = sum(out d_out) of each row, for the other gradients."""
    start, batch, head, kv_head, queries = _query_block(
        q, (q_batch, q_head, q_row), rows, heads, kv_heads, block_rows, dim, width
    )
    owner = tl.load(owners + batch)
    mask_row = (batch * kv_heads + kv_head).to(tl.int64)
    gradient, log_sum, product = _output_gradient(
        out, d_out, lse, delta, (start, batch, head), rows, heads, block_rows, dim, width
    )
    index = start + tl.arange(0, block_rows)
    acc = tl.zeros([block_rows, width], tl.float32)
    acc = _query_gradient_columns(
        acc, queries, gradient, log_sum, product, k + batch * k_batch + kv_head * k_head,
        v + batch * v_batch + kv_head * v_head, tail_mask + mask_row * rows, index, 0,
        tl.minimum(start + block_rows, rows), rows, k_row, v_row, scale * LOG2_E, True, block_columns, dim, width,
    )
    prompt_k += owner * prompt_k_batch + kv_head * prompt_k_head
    prompt_v += owner * prompt_v_batch + kv_head * prompt_v_head
    log_mask += mask_row * columns
    full = columns // block_columns * block_columns
    acc = _query_gradient_columns(
        acc, queries, gradient, log_sum, product, prompt_k, prompt_v, log_mask, index + columns, full, columns, columns,
        prompt_k_row, prompt_v_row, scale * LOG2_E, True, block_columns, dim, width,
    )
    acc = _query_gradient_columns(
        acc, queries, gradient, log_sum, product, prompt_k, prompt_v, log_mask, index + columns, 0, full, columns,
        prompt_k_row, prompt_v_row, scale * LOG2_E, False, block_columns, dim, width,
    )
    _store(d_q, acc * scale, start, batch, head, rows, heads, block_rows, dim, width)


@triton.jit
def mask_gradient(
    q, prompt_k, prompt_v, log_mask, owners, d_out, lse, delta, d_mask, scale,
    rows: tl.int32, columns: tl.int32, heads: tl.int32, kv_heads: tl.int32,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int32, prompt_k_batch: tl.int64, prompt_k_head: tl.int64,
    prompt_k_row: tl.int32, prompt_v_batch: tl.int64, prompt_v_head: tl.int64, prompt_v_row: tl.int32,
    block_rows: tl.constexpr, block_columns: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
):
    """One block of the prompt's columns for one KV head over all rows of its group. Grid: column blocks, B Hkv."""
    start = tl.program_id(0) * block_columns
    batch, kv_head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    owner, groups = tl.load(owners + batch), heads // kv_heads
    keys_at = prompt_k + owner * prompt_k_batch + kv_head * prompt_k_head
    values_at = prompt_v + owner * prompt_v_batch + kv_head * prompt_v_head
    keys = _load(keys_at, start, prompt_k_row, columns, True, block_columns, dim, width)
    values = _load(values_at, start, prompt_v_row, columns, True, block_columns, dim, width)
    offset = tl.program_id(1).to(tl.int64) * columns
    bias = _load_vector(log_mask + offset, start, columns, -float("inf"), True, block_columns) * LOG2_E
    zero = tl.zeros([block_rows, block_columns], tl.float32)
    total = tl.zeros([block_columns], tl.float32)
    d_out_row = heads * dim
    for group in range(groups):
        head = kv_head * groups + group
        vector = (batch * heads + head).to(tl.int64) * rows
        head_q = q + batch * q_batch + head * q_head
        head_d_out = d_out + (batch * rows).to(tl.int64) * d_out_row + head * dim
        for row in range(0, rows, block_rows):
            queries = _load(head_q, row, q_row, rows, True, block_rows, dim, width)
            gradient = _load(head_d_out, row, d_out_row, rows, True, block_rows, dim, width)
            log_sum = _load_vector(lse + vector, row, rows, float("inf"), True, block_rows)
            product = _load_vector(delta + vector, row, rows, 0.0, True, block_rows)
            scores = _dot(queries, tl.trans(keys), zero) * (scale * LOG2_E) + bias[None, :]
            p = tl.exp2(scores - log_sum[:, None])
            total += tl.sum(p * (_dot(gradient, tl.trans(values), zero) - product[:, None]), 0)
    position = start + tl.arange(0, block_columns)
    tl.store(d_mask + offset + position, total, mask=position < columns)
