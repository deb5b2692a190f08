"""Causal attention without a mask, by the fused kernels behind PyTorch's SDPA: padded rows, and chunks of a text."""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, padding: list[int] | None = None) -> Tensor:
    """Attend with the last tokens of a text to all tokens up to their own. Differentiable.

    Args:
        q: Queries [B, Hq, Tq, d] of the last Tq tokens; Hq is a multiple of Hkv.
        k: Keys [B, Hkv, Tk, d] of all tokens.
        v: Values [B, Hkv, Tk, dv] of all tokens.
        scale: What scores are multiplied by.
        padding: How many of its first keys each row hides from all queries; None for none. Neighbouring rows with
            equal padding are computed together, others one after another.

    Returns:
        Outputs [B, Hq, Tq, dv] in the dtype of `v`; 0 for queries that are padding themselves.

    Raises:
        ValueError: Shapes do not fit.
    """
    _check_shapes(q, k, v, padding)
    q, k = q.to(v.dtype), k.to(v.dtype)
    if padding is None:
        return _attend(q, k, v, scale)
    out = q.new_zeros((*q.shape[:3], v.shape[-1]))
    start = 0
    for hidden_keys, group in groupby(padding):
        rows = slice(start, start + len(list(group)))
        start = rows.stop
        hidden_queries = max(0, hidden_keys - (k.shape[2] - q.shape[2]))
        if hidden_queries < q.shape[2]:
            visible_k, visible_v = k[rows, :, hidden_keys:], v[rows, :, hidden_keys:]
            out[rows, :, hidden_queries:] = _attend(q[rows, :, hidden_queries:], visible_k, visible_v, scale)
    return out


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, padding: list[int] | None) -> None:
    """Raise ValueError where the flash kernel, which checks nothing, would read beyond the tensors or divide by 0."""
    fits = q.ndim == k.ndim == v.ndim == 4 and len(q) == len(k) and k.shape[:3] == v.shape[:3]
    if not (fits and q.shape[1] == q.shape[1] // max(k.shape[1], 1) * k.shape[1] and q.shape[3] == k.shape[3]):
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit each other.")
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"There are {q.shape[2]} queries, but {k.shape[2]} keys: each query has a key of its own.")
    if padding is not None and not (len(padding) == len(q) and all(0 <= hidden <= k.shape[2] for hidden in padding)):
        raise ValueError(f"padding is {padding}; give a number from 0 to {k.shape[2]} for each of {len(q)} rows.")


def merge(left: Tensor, left_lse: Tensor, right: Tensor, right_lse: Tensor) -> tuple[Tensor, Tensor]:
    """As `lkv.kernels.ragged_attention.merge_attention`, without its checks."""
    total = torch.logaddexp(left_lse, right_lse)
    # Where both are -inf their difference would be NaN.
    base = total.where(total > -torch.inf, 0.0)
    merged = left * (left_lse - base).exp()[..., None] + right * (right_lse - base).exp()[..., None]
    return merged.to(left.dtype), total


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """`x` [B, Hkv, T, d] once for each query head: [B, Hq, T, d]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """`causal_attention` without padding."""
    tokens, keys = q.shape[2], k.shape[2]
    is_grouped = q.shape[1] != k.shape[1]
    if tokens in (1, keys):
        return scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, scale=scale, enable_gqa=is_grouped)
    if q.device.type != "cpu":
        # No tensor: it selects the flash kernels' own alignment of fewer queries than keys, in one launch.
        bias: Any = causal_lower_right(tokens, keys)
        return scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=is_grouped)
    # On a CPU the bias would become a mask. The flash kernel is called directly instead, which checks nothing.
    value_dim = v.shape[-1]
    q, k, v = (_pad_head(x, max(k.shape[-1], value_dim)) for x in (q, k, v))
    if not (q.numel() and v.numel()):  # by whose sizes it divides
        return q.new_zeros((*q.shape[:3], value_dim))
    return _JoinedAttention.apply(q, k, v, scale)[..., :value_dim]


def _pad_head(x: Tensor, dim: int) -> Tensor:
    """`x` with zeros up to head dimension `dim`, each head vector contiguous."""
    if x.shape[-1] < dim:
        return pad(x, (0, dim - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


class _JoinedAttention(torch.autograd.Function):
    """Attention to earlier keys and to the queries' own tokens, by the CPU's flash kernel, joined by log-sum-exp.

    To earlier keys the query heads of a group are rows of one head, for which k and v are read once. The few own ones
    are repeated for each: before PyTorch 2.9 the kernel reads one KV head for each query head, whether there or not.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        (earlier_k, own_k), (earlier_v, own_v) = (_split_keys(x, q) for x in (k, v))
        left, left_lse = flash(_group(q, k), earlier_k, earlier_v, scale=scale)
        right, right_lse = flash(q, repeat_heads(own_k, q), repeat_heads(own_v, q), is_causal=True, scale=scale)
        out, lse = merge(left.reshape(right.shape), left_lse.reshape(right_lse.shape), right, right_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # With the output and the log-sum-exp over all keys, the gradients of each part are its share of the whole's.
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        (earlier_k, own_k), (earlier_v, own_v) = (_split_keys(x, q) for x in (k, v))
        grouped_grad, grouped_q, grouped_out, grouped_lse = (_group(x, k) for x in (grad, q, out, lse))
        left_q, *left = flash(
            grouped_grad, grouped_q, earlier_k, earlier_v, grouped_out, grouped_lse, 0.0, False, scale=ctx.scale
        )
        right_q, *right = flash(
            grad, q, repeat_heads(own_k, q), repeat_heads(own_v, q), out, lse, 0.0, True, scale=ctx.scale
        )
        grad_k, grad_v = (
            torch.cat([earlier, later.unflatten(1, (k.shape[1], -1)).sum(2)], 2)
            for earlier, later in zip(left, right, strict=True)
        )
        return left_q.reshape(q.shape) + right_q, grad_k, grad_v, None


def _split_keys(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """k or v [B, Hkv, Tk, d] of the earlier tokens, and of those of the queries."""
    earlier = x.shape[2] - q.shape[2]
    return x[:, :, :earlier], x[:, :, earlier:]


def _group(x: Tensor, k: Tensor) -> Tensor:
    """`x` [B, Hq, Tq, ...] with the query heads of a group as rows of one head: [B, Hkv, Hq / Hkv * Tq, ...]."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[3:])
