"""Ragged attention as a loop over KV heads: the fastest way on a CPU, where a head's span is one contiguous slice."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float) -> Tensor:
    """Shapes as in `api.ragged_attention`."""
    batch, heads, rows, dim = q.shape
    kv_heads = starts.shape[1]
    # The query heads of a group become rows, so that a span is read once for all of them.
    q = q.reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    out = q.new_empty((*q.shape[:-1], v_pool.shape[-1]))
    # A plain product beats SDPA for one row in full precision only.
    single = rows == 1 and q.dtype.itemsize >= 4
    if single:
        q = q * scale
    for b, (row_starts, row_lens) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
        for h, (start, length) in enumerate(zip(row_starts, row_lens, strict=True)):
            k, v = k_pool[start : start + length], v_pool[start : start + length]
            if single:
                out[b, h] = torch.softmax(q[b, h] @ k.T, -1) @ v
            else:
                out[b, h] = _several_rows(q[b, h], k, v, rows, scale)
    return out.view(batch, heads, rows, v_pool.shape[-1])


def _several_rows(q: Tensor, k: Tensor, v: Tensor, rows: int, scale: float) -> Tensor:
    mask = None
    if rows > 1:
        length = k.shape[0]
        visible = torch.ones(rows, length, dtype=torch.bool, device=q.device).tril(length - rows)
        mask = visible.repeat(q.shape[0] // rows, 1)
    q, k, v = (x[None, None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0, 0]


def append(key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
    """Shapes as in `api.append`."""
    new = key.shape[2]
    ends = (starts + lens).long()
    places = (ends if new == 1 else ends[..., None] + torch.arange(new, device=key.device)).flatten()
    k_pool.index_copy_(0, places, key.reshape(-1, key.shape[-1]))
    v_pool.index_copy_(0, places, value.reshape(-1, value.shape[-1]))
    return lens + new
