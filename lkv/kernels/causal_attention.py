"""Causal attention without a mask, by the fused kernels behind PyTorch's SDPA: padded rows, and chunks of a text."""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
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
    """
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


def merge(left: Tensor, left_lse: Tensor, right: Tensor, right_lse: Tensor) -> tuple[Tensor, Tensor]:
    """As `lkv.kernels.ragged_attention.merge_attention`, without its checks."""
    total = torch.logaddexp(left_lse, right_lse)
    # Where both are -inf their difference would be NaN.
    base = total.where(total > -torch.inf, 0.0)
    merged = left * (left_lse - base).exp()[..., None] + right * (right_lse - base).exp()[..., None]
    return merged.to(left.dtype), total


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
    choice = torch._fused_sdp_choice(q, k, v, scale=scale, enable_gqa=is_grouped)
    if is_grouped and choice != SDPBackend.FLASH_ATTENTION.value:
        # Before PyTorch 2.9 the kernel reads one KV head for each query head.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return _JoinedAttention.apply(q, k, v, scale)[..., :value_dim]


def _pad_head(x: Tensor, dim: int) -> Tensor:
    """`x` with zeros up to head dimension `dim`, each head vector contiguous."""
    if x.shape[-1] < dim:
        return pad(x, (0, dim - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


class _JoinedAttention(torch.autograd.Function):
    """Attention to earlier keys and to the queries' own tokens, by the CPU's flash kernel, joined by log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        (left, left_lse), (right, right_lse) = (
            flash(q, key, value, 0.0, is_causal, scale=scale) for key, value, is_causal in _parts(q, k, v)
        )
        out, lse = merge(left, left_lse, right, right_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # With the output and the log-sum-exp over all keys, the gradients of each part are its share of the whole's.
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        parts = [
            flash(grad, q, key, value, out, lse, 0.0, is_causal, scale=ctx.scale)
            for key, value, is_causal in _parts(q, k, v)
        ]
        (earlier_q, earlier_k, earlier_v), (own_q, own_k, own_v) = parts
        return earlier_q + own_q, torch.cat([earlier_k, own_k], 2), torch.cat([earlier_v, own_v], 2), None


def _parts(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """(k, v, whether attention to them is causal) of the earlier keys and of the queries' own tokens."""
    earlier = k.shape[2] - q.shape[2]
    return [(k[:, :, :earlier], v[:, :, :earlier], False), (k[:, :, earlier:], v[:, :, earlier:], True)]
