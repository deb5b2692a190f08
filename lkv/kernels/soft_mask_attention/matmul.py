"""Attention of continuations over a frozen prompt under a mask, by matrix products: for CPUs.

The stock kernel would copy the prompt for each continuation, and compute gradients of it that nobody reads. Here the
prompt is read in place, and of the scores nothing is saved for the backward pass, which computes them again.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import threshold

from lkv.kernels.causal_attention import merge
from lkv.utils.devices import full_precision

_MOST_SCORES = 2**19  # held at a time: few enough for a core's cache, enough for full speed
_LEAST, _LEAST_EXPONENT = 1e-20, -50.0  # probabilities up to the first count as 0; the exponential of the second is one
# A log-mask whose exponential is 0 beside any score, far from overflow in float32 and bfloat16; a difference of two is
# not NaN.
LOWEST = -1e30


def attend(
    q: Tensor, key: Tensor, value: Tensor, prompt_key: Tensor, prompt_value: Tensor, log_mask: Tensor,
    owners: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Shapes as in `api.continuation_attention`; scores are in float32 or better."""
    numbers = [0] * len(q) if owners is None else owners.tolist()
    with full_precision(q.device):
        return _ContinuationAttention.apply(q, key, value, prompt_key, prompt_value, log_mask, numbers, scale)


class _ContinuationAttention(torch.autograd.Function):
    """One continuation after another; the query heads of a group are rows [H, G t, d] of their KV head."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, key: Tensor, value: Tensor, prompt_key: Tensor, prompt_value: Tensor, log_mask: Tensor,
        owners: list[int], scale: float,
    ) -> Tensor:  # fmt: skip
        out = q.new_empty((*q.shape[:3], value.shape[-1]))
        lse = torch.empty(q.shape[:3], dtype=_wide(q), device=q.device)
        for number, owner in enumerate(owners):
            rows = _as_rows(q[number], key)
            results = [
                _attend(_own_scores(rows, key[number], part, scale), value[number, :, part])
                for part in _parts(rows, key)
            ]
            for part in _parts(rows, prompt_key):
                scores = _scores(rows, prompt_key[owner, :, part], scale, log_mask[number, :, part])
                results.append(_attend(scores, prompt_value[owner, :, part]))
            result, total = functools.reduce(lambda left, right: merge(*left, *right), results)
            out[number], lse[number] = result.view(out.shape[1:]), total.view(lse.shape[1:])
        ctx.save_for_backward(q, key, value, prompt_key, prompt_value, log_mask, out, lse)
        ctx.owners, ctx.scale = owners, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        with full_precision(d_out.device):
            return _ContinuationAttention._gradients(ctx, d_out)

    @staticmethod
    def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, key, value, prompt_key, prompt_value, log_mask, out, lse = ctx.saved_tensors
        d_q, d_key, d_value, d_mask = (torch.empty_like(x) for x in (q, key, value, log_mask))
        for number, owner in enumerate(ctx.owners):
            rows, d_rows, total = (_as_rows(x[number], key) for x in (q, d_out, lse[..., None]))
            delta = (d_rows.to(total.dtype) * _as_rows(out[number], key)).sum(-1, keepdim=True)
            d_query = torch.zeros(rows.shape, dtype=total.dtype, device=rows.device)
            for part in _parts(rows, key):
                p = _exponential(_own_scores(rows, key[number], part, ctx.scale).sub_(total))
                d_value[number, :, part] = p.to(d_rows.dtype).mT @ d_rows
                d_scores = _d_scores(p, d_rows, value[number, :, part], delta).to(rows.dtype)
                d_key[number, :, part] = (d_scores.mT @ rows).mul_(ctx.scale)
                d_query += d_scores @ key[number, :, part]
            for part in _parts(rows, prompt_key):
                part_key = prompt_key[owner, :, part]
                p = _exponential(_scores(rows, part_key, ctx.scale, log_mask[number, :, part]).sub_(total))
                d_scores = _d_scores(p, d_rows, prompt_value[owner, :, part], delta)
                d_mask[number, :, part] = d_scores.sum(1)
                d_query += d_scores.to(rows.dtype) @ part_key
            d_q[number] = d_query.mul_(ctx.scale).view(q.shape[1:])
        return d_q, d_key, d_value, None, None, d_mask, None, None


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of scores and sums."""
    return torch.promote_types(x.dtype, torch.float32)


def _as_rows(x: Tensor, key: Tensor) -> Tensor:
    """`x` [Hq, t, d] of one continuation as rows of KV heads, of which `key` has H: [H, G t, d]."""
    return x.reshape(key.shape[1], -1, x.shape[-1])


def _parts(rows: Tensor, key: Tensor) -> Iterator[slice]:
    """Slices of the tokens of `key` [., H, T, d], for each of which there are no more scores than fit."""
    tokens = key.shape[2]
    length = max(1, _MOST_SCORES // max(1, rows.shape[0] * rows.shape[1]))
    return (slice(start, min(start + length, tokens)) for start in range(0, tokens, length))


def _scores(rows: Tensor, key: Tensor, scale: float, log_mask: Tensor) -> Tensor:
    """scale q k + log m [H, G t, T] of rows and keys [H, T, d] under `log_mask` [H, T]."""
    wide = _wide(rows)
    log_mask = log_mask.to(wide).clamp(min=LOWEST)[:, None]
    return torch.baddbmm(log_mask, rows.to(wide), key.to(wide).mT, alpha=scale)


def _own_scores(rows: Tensor, key: Tensor, part: slice, scale: float) -> Tensor:
    """Causal scores [H, G t, n] of rows and `part` of their own keys [H, t, d]."""
    tokens = torch.arange(key.shape[1], device=key.device)
    key = key[:, part]
    scores = _scores(rows, key, scale, key.new_zeros(key.shape[:2]))
    is_later = tokens[part] > tokens[:, None]
    return scores.view(len(key), -1, *is_later.shape).masked_fill_(is_later, LOWEST).view_as(scores)


def _attend(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [H, R, dv] and log-sum-exp [H, R] of scores [H, R, T], which are overwritten, and values [H, T, dv]."""
    highest = scores.amax(-1, keepdim=True)
    p = _exponential(scores.sub_(highest))
    total = p.sum(-1, keepdim=True)
    return (p.to(value.dtype) @ value).to(total.dtype) / total, (highest + total.log())[..., 0]


def _exponential(x: Tensor) -> Tensor:
    """exp(x) in place for x <= 0, and 0 where that is too small to count.

    Where it underflows, `torch.exp` takes a hundred times as long on some CPUs, and so do products of what it gives.
    """
    return threshold(x.clamp_(min=_LEAST_EXPONENT).exp_(), _LEAST, 0.0, inplace=True)


def _d_scores(p: Tensor, d_out: Tensor, value: Tensor, delta: Tensor) -> Tensor:
    """Gradient of scores from their probabilities `p` and the outputs' gradient."""
    return (d_out @ value.mT).to(p.dtype).sub_(delta).mul_(p)
