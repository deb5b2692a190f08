"""The Triton kernels of attention over a frozen prompt under a mask and over a causal tail: forward, q, log m.

Conventions are those of `triton_kernels`, whose `key_gradient` gives the gradients of the tail's k and v. Several rows
of the batch may read one prompt, which is copied for none of them: `owners` [B] are the numbers of their prompts.
Every row of the tail sees the whole prompt, and the tail up to itself.
"""

import triton
import triton.language as tl

from lkv.kernels.soft_mask_attention.triton_kernels import (
    _dot,
    _forward_columns,
    _load,
    _load_vector,
    _output_gradient,
    _query_block,
    _query_gradient_columns,
    _store,
)
from lkv.kernels.triton_helpers import LOG2_E


@triton.jit
def forward(
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
    # The longest loop comes last, see `triton_kernels.forward`.
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
def query_gradient(
    q, k, v, tail_mask, prompt_k, prompt_v, log_mask, owners, out, d_out, lse, delta, d_q, scale,
    rows: tl.int32, columns: tl.int32, heads: tl.int32, kv_heads: tl.int32,
    q_batch: tl.int64, q_head: tl.int64, q_row: tl.int32, k_batch: tl.int64, k_head: tl.int64, k_row: tl.int32,
    v_batch: tl.int64, v_head: tl.int64, v_row: tl.int32, prompt_k_batch: tl.int64, prompt_k_head: tl.int64,
    prompt_k_row: tl.int32, prompt_v_batch: tl.int64, prompt_v_head: tl.int64, prompt_v_row: tl.int32,
    block_rows: tl.constexpr, block_columns: tl.constexpr, dim: tl.constexpr, width: tl.constexpr,
):
    """Grid as in `forward`. Also stores delta = sum(out d_out) of each row, which the other gradients read."""
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
