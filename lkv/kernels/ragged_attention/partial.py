"""Partial attentions: over some of the keys, with the log-sum-exp of their scores, and put together again."""

import torch
from torch import Tensor


def merge_attention(left: Tensor, left_lse: Tensor, right: Tensor, right_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from the attention over each.

    `left`, `right` [..., d]; `left_lse`, `right_lse` [...]: natural logarithms of the sum of e^score, -inf where
    nothing was visible. Returns the joined outputs, in the dtype of `left`, and their log-sum-exp. Nothing visible in
    either set gives 0 and -inf.
    """
    total = torch.logaddexp(left_lse, right_lse)
    # Where both are -inf their difference would be no number.
    base = total.where(total > -torch.inf, 0.0)
    joined = left * (left_lse - base).exp()[..., None] + right * (right_lse - base).exp()[..., None]
    return joined.to(left.dtype), total


def masked_attention(q: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of `q` [B, Hq, Tq, d] over `key`, `value` [B, Hkv, Tk, d] where `visible` (bool, broadcast to
    [B, Hkv, Tq, Tk]) allows it: outputs [B, Hq, Tq, dv] and log-sum-exp [B, Hq, Tq]."""
    batch, heads, rows, dim = q.shape
    kv_heads = key.shape[1]
    grouped = exact(q).reshape(batch, kv_heads, -1, rows, dim) * scale
    scores = torch.einsum("bhgqd,bhkd->bhgqk", grouped, exact(key))
    out, lse = weighted(scores.masked_fill_(~visible[:, :, None], -torch.inf), exact(value)[:, :, None])
    return out.reshape(batch, heads, rows, -1).to(q.dtype), lse.reshape(batch, heads, rows)


def weighted(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Means [..., Tq, dv] of `value` [..., Tk, dv] under the softmax of `scores` [..., Tq, Tk], and the log-sum-exp
    [..., Tq] of these; 0 and -inf for a row of -inf, or without keys."""
    if not scores.shape[-1]:
        return torch.matmul(scores, value), scores.new_full(scores.shape[:-1], -torch.inf)
    # PyTorch's softmax is one pass; the largest weight is e^(largest score - lse).
    weights, top = torch.softmax(scores, -1), scores.amax(-1)
    hidden = top == -torch.inf
    weights.masked_fill_(hidden[..., None], 0.0)
    lse = (top - weights.amax(-1).log()).masked_fill_(hidden, -torch.inf)
    return torch.matmul(weights, value), lse


def exact(x: Tensor) -> Tensor:
    """`x` in the dtype that sums are taken in: float32, or its own where that is finer."""
    return x.float() if x.dtype.itemsize < 4 else x
