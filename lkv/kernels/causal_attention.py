"""Causal attention without a mask, by the fused kernels behind PyTorch's SDPA: padded rows, and chunks of a text."""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, padding: list[int] | None = None) -> Tensor:
    """Compute causal attention from the last tokens of a text to the whole text. Differentiable.

    Args:
        q: Queries [B, Hq, Tq, d] of the last Tq tokens; Hq is a multiple of Hkv.
        k: Keys [B, Hkv, Tk, d] of all tokens.
        v: Values [B, Hkv, Tk, dv] of all tokens.
        scale: The attention scaling factor.
        padding: The left padding of each row; None for none. Neighbouring rows with equal padding are computed
            together, others one after another.

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
    """Raise ValueError if the flash kernel, which has no checks, would read out of bounds or divide by 0."""
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
    # If both are -inf, their difference would be NaN.
    base = total.where(total > -torch.inf, 0.0)
    merged = left * (left_lse - base).exp()[..., None] + right * (right_lse - base).exp()[..., None]
    return merged.to(left.dtype), total


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Return `x` [B, Hkv, T, d] once for each query head: [B, Hq, T, d]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """`causal_attention` without padding."""
    tokens, keys = q.shape[2], k.shape[2]
    is_grouped = q.shape[1] != k.shape[1]
    if tokens in (1, keys):
        return scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, scale=scale, enable_gqa=is_grouped)
    if q.device.type != "cpu":
        # Not a tensor: it selects the flash kernels' bottom-right alignment, in one launch.
        bias = causal_lower_right(tokens, keys)
        return scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=is_grouped)
    if not (q.numel() and v.numel()):
        return q.new_zeros((*q.shape[:3], v.shape[-1]))
    # On a CPU the bias would become a mask, so the flash kernel is called directly; it has no checks.
    return _JoinedAttention.apply(q, k, v, scale)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Run the CPU's flash kernel over at least one key; return outputs and log-sum-exp.

    Args:
        q: Queries [B, Hq, Tq, d].
        k: Keys [B, Hq, Tk, d], for each query head.
        v: Values [B, Hq, Tk, dv].
        scale: The attention scaling factor.
        is_causal: Whether query i sees the first i + 1 keys only.
    """
    value_dim = v.shape[-1]
    if not q.numel():  # it divides by sizes
        wide = torch.promote_types(q.dtype, torch.float32)
        return q.new_empty((*q.shape[:3], value_dim)), q.new_empty(q.shape[:3], dtype=wide)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(*pad_heads(q, k, v), is_causal=is_causal, scale=scale)
    return out[..., :value_dim], lse


def flash_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, is_causal: bool = False
) -> list[Tensor]:
    """Return the gradients of q, k and v through `flash_attention`, whose arguments the others are.

    Args:
        d_out: The gradient of the outputs.
        q: As all below, an argument of `flash_attention`.
        k: Keys.
        v: Values.
        out: Its outputs; with those over more keys, the gradients are these keys' part of the total ones.
        lse: Its log-sum-exps, likewise.
        scale: The attention scaling factor.
        is_causal: As there.
    """
    if not q.numel():
        return [torch.zeros_like(x) for x in (q, k, v)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = flash(*pad_heads(d_out, q, k, v, out), lse, 0.0, is_causal, scale=scale)
    return [x[..., : like.shape[-1]] for x, like in zip(gradients, (q, k, v), strict=True)]


def pad_heads(*tensors: Tensor) -> list[Tensor]:
    """Zero-pad the tensors to a common head size, a multiple of 8, as flash kernels require."""
    width = max(x.shape[-1] for x in tensors)
    width += -width % 8
    padded = [pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


class _JoinedAttention(torch.autograd.Function):
    """Attention to earlier keys and to the queries' own tokens, by the CPU's flash kernel, joined by log-sum-exp.

    For earlier keys the query heads of a group are rows of one head, so that k and v are read once. The few own keys
    are repeated for each head: before PyTorch 2.9 the kernel has no grouped-query attention.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        (earlier_k, own_k), (earlier_v, own_v) = (_split_keys(x, q) for x in (k, v))
        left, left_lse = flash_attention(_group(q, k), earlier_k, earlier_v, scale)
        right, right_lse = flash_attention(q, repeat_heads(own_k, q), repeat_heads(own_v, q), scale, is_causal=True)
        out, lse = merge(left.reshape(right.shape), left_lse.reshape(right_lse.shape), right, right_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        (earlier_k, own_k), (earlier_v, own_v) = (_split_keys(x, q) for x in (k, v))
        grouped_grad, grouped_q, grouped_out, grouped_lse = (_group(x, k) for x in (grad, q, out, lse))
        left_q, *left = flash_gradients(
            grouped_grad, grouped_q, earlier_k, earlier_v, grouped_out, grouped_lse, ctx.scale
        )
        right_q, *right = own_gradients(grad, q, own_k, own_v, out, lse, ctx.scale)
        grad_k, grad_v = (torch.cat(parts, 2) for parts in zip(left, right, strict=True))
        return left_q.reshape(q.shape) + right_q, grad_k, grad_v, None


def own_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> list[Tensor]:
    """`flash_gradients` of causal attention to the queries' own tokens, k and v [B, Hkv, Tq, .]."""
    repeated = repeat_heads(k, q), repeat_heads(v, q)
    d_q, *d_own = flash_gradients(d_out, q, *repeated, out, lse, scale, is_causal=True)
    return [d_q, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in d_own)]


def _split_keys(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return k or v [B, Hkv, Tk, d] of the earlier tokens, and of those of the queries."""
    earlier = x.shape[2] - q.shape[2]
    return x[:, :, :earlier], x[:, :, earlier:]


def _group(x: Tensor, k: Tensor) -> Tensor:
    """Return `x` [B, Hq, Tq, ...] with the query heads of a group as rows of one head: [B, Hkv, Hq / Hkv * Tq, ...]."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[3:])
