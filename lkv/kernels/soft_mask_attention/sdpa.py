"""Soft-masked attention through PyTorch's stock kernels: the mask rides along as one more column of k.

With q' = [q, 1/scale] and k' = [k, log m] the stock kernel computes softmax(scale q k + log m) and its backward gives
the gradient of log m as that of a key: no T x T bias, and no 1/m.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

# Small enough that exp gives zero next to any real score, far enough from overflow in float32 and bfloat16.
_LOWEST = -1e30


def attend(q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor, scale: float) -> Tensor:
    """Shapes and empty rows as in `api.soft_mask_attention`."""
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    columns = _mask_columns(log_mask, k.dtype)
    # Flash kernels want one head size for q, k and v, a multiple of 8.
    width = max(head_dim + columns.shape[-1], value_dim)
    width += -width % 8
    ones = q.new_full((*q.shape[:-1], columns.shape[-1]), 1.0 / scale)
    q = _widen(torch.cat([q, ones], -1), width)
    k = _widen(torch.cat([k, columns], -1), width)
    v = _widen(v, width)
    batch, heads, rows, _ = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    groups = heads // kv_heads
    if rows == length:
        out = scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True, enable_gqa=heads != kv_heads)
    else:
        # The query heads of a group become rows of one head, so that k and v need no repetition.
        visible = torch.ones(rows, length, dtype=torch.bool, device=q.device).tril(length - rows).repeat(groups, 1)
        q = q.reshape(batch, kv_heads, groups * rows, width)
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
        out = out.reshape(batch, heads, rows, width)
    empty = (log_mask > -torch.inf).cumsum(-1)[..., length - rows :] == 0
    return out[..., :value_dim].masked_fill(empty.repeat_interleave(groups, 1)[..., None], 0.0)


def _mask_columns(log_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """log m as columns [..., T, c] in `dtype`; half precision gets the rounding error as a second column.

    Finite everywhere: q' has the factor 1/scale, and infinity times zero would reach its gradient.
    """
    log_mask = log_mask.clamp(min=max(torch.finfo(dtype).min, _LOWEST))
    if dtype.itemsize >= 4:
        return log_mask.to(dtype)[..., None]
    high = log_mask.to(dtype)
    low = (log_mask - high.to(log_mask.dtype)).detach().to(dtype)
    return torch.stack([high, low], -1)


def _widen(x: Tensor, width: int) -> Tensor:
    return pad(x, (0, width - x.shape[-1]))
