"""Attention of continuations over a frozen prompt under a mask: for CPUs.

The forward pass uses PyTorch's flash kernel over the prompt and over a continuation's own tokens, merged by
log-sum-exp. Its backward pass would compute unused gradients of the prompt, so that part uses matrix products, which
recompute the scores.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, threshold

from lkv.kernels.causal_attention import flash_attention, merge, own_gradients, repeat_heads
from lkv.utils.devices import full_precision

_MOST_SCORES = 2**19  # held at a time: few enough for a core's cache, enough for full speed
_LEAST, _LEAST_EXPONENT = 1e-20, -50.0  # probabilities up to the first count as 0; the exponential of the second is one
# A log-mask whose exponential is 0 beside any score, far from overflow in float32 and bfloat16; a difference of two is
# not NaN.
LOWEST = -1e30


def attend(scale: float, q: Tensor, *tensors: Tensor | None) -> Tensor:
    """As `api.continuation_attention`, with its tensors from q to `owners`; scores are in float32 or better."""
    with full_precision(q.device):
        return _ContinuationAttention.apply(scale, q, *tensors)


def append_mask(q: Tensor, k: Tensor, log_mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return q' = [q, 1] and k' = [k, log m / scale], of which scale q' k' = scale q k + log m.

    Half precision gets the rounding error as a second column. Finite everywhere: infinity times zero would reach the
    gradient of the ones.

    Args:
        q: Queries [..., Tq, d].
        k: Keys [..., T, d].
        log_mask: The logarithm of the mask, [..., T].
        scale: The attention scaling factor.
    """
    column = (log_mask / scale).clamp(min=max(torch.finfo(k.dtype).min, LOWEST))
    columns = [column.to(k.dtype)]
    if k.dtype.itemsize < 4:
        columns.append((column - columns[0].to(column.dtype)).detach().to(k.dtype))
    ones = q.new_ones((*q.shape[:-1], len(columns)))
    return torch.cat([q, ones], -1), torch.cat([k, torch.stack(columns, -1)], -1)


class _ContinuationAttention(torch.autograd.Function):
    """The query heads of a group are rows [H, G t, d] of their KV head; backward, one continuation after another."""

    @staticmethod
    def forward(ctx: Any, scale: float, *tensors: Any) -> Tensor:
        q, key, value, prompt_key, prompt_value, log_mask, owners = tensors
        out, lse = flash_attention(q, repeat_heads(key, q), repeat_heads(value, q), scale, is_causal=True)
        if prompt_key.shape[2]:
            out, lse = merge(*_attend_to_prompt(q, prompt_key, prompt_value, log_mask, owners, scale), out, lse)
        if log_mask is None:
            log_mask = lse.new_zeros((len(q), *prompt_key.shape[1:3]))
        ctx.save_for_backward(q, key, value, prompt_key, prompt_value, log_mask, out, lse)
        ctx.owners, ctx.scale = [0] * len(q) if owners is None else owners.tolist(), scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        with full_precision(d_out.device):
            return _ContinuationAttention._gradients(ctx, d_out)

    @staticmethod
    def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        dtype, scale, (*tensors, log_mask, out, lse) = d_out.dtype, ctx.scale, ctx.saved_tensors
        # In half precision CPUs are no faster at this, and those without its instructions ten times as slow.
        d_out, out, q, key, value, prompt_key, prompt_value = (x.to(lse.dtype) for x in (d_out, out, *tensors))
        d_q, d_key, d_value = own_gradients(d_out, q, key, value, out, lse, scale)
        # One product each: scale q k + log m - lse, and d_out v - delta.
        delta = (d_out * out).sum(-1)
        rows = torch.cat([q * scale, torch.ones_like(lse)[..., None], -lse[..., None]], -1)
        d_rows = torch.cat([d_out, -delta[..., None]], -1)
        rows, d_rows = (x.unflatten(1, (key.shape[1], -1)).flatten(2, 3) for x in (rows, d_rows))
        prompt_key, prompt_value = pad(prompt_key, (0, 2), value=1.0), pad(prompt_value, (0, 1), value=1.0)
        d_mask, d_query = torch.empty_like(log_mask), torch.zeros_like(rows[..., :-2])
        for number, owner in enumerate(ctx.owners):
            k, v = prompt_key[owner], prompt_value[owner]
            k[..., -2] = log_mask[number].clamp(min=LOWEST)
            for part in _parts(rows[number], k):
                p = _exponential(rows[number] @ k[:, part].mT)
                d_scores = (d_rows[number] @ v[:, part].mT).mul_(p)
                d_mask[number, :, part] = d_scores.sum(1)
                d_query[number] += d_scores @ k[:, part, :-2]
        d_q, d_key, d_value = (x.to(dtype) for x in (d_q + d_query.mul_(scale).view(q.shape), d_key, d_value))
        return None, d_q, d_key, d_value, None, None, d_mask if ctx.needs_input_grad[6] else None, None


def _attend_to_prompt(
    q: Tensor, key: Tensor, value: Tensor, log_mask: Tensor | None, owners: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return outputs [n, Hq, t, dv] and log-sum-exp [n, Hq, t] over the prompts' tokens alone.

    Without a mask one prompt is read in place; with one it is copied for each continuation, whose columns k gets.
    """
    rows = q.unflatten(1, (key.shape[1], -1))
    is_shared = log_mask is None and owners is None
    if is_shared:  # the rows of all continuations are rows of one
        rows = rows.transpose(0, 1)[None]
    else:
        key, value = (x.expand(len(q), -1, -1, -1) if owners is None else x[owners] for x in (key, value))
    flat = rows.flatten(2, -2)
    if log_mask is not None:
        flat, key = append_mask(flat, key, log_mask, scale)
    out, lse = (x.unflatten(2, rows.shape[2:-1]) for x in flash_attention(flat, key, value, scale))
    if is_shared:
        out, lse = out[0].transpose(0, 1), lse[0].transpose(0, 1)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _parts(rows: Tensor, key: Tensor) -> Iterator[slice]:
    """Yield slices of the tokens of `key` [H, T, d], for each of which there are no more scores than fit."""
    tokens = key.shape[1]
    length = max(1, _MOST_SCORES // max(1, rows.shape[0] * rows.shape[1]))
    return (slice(start, min(start + length, tokens)) for start in range(0, tokens, length))


def _exponential(x: Tensor) -> Tensor:
    """Compute exp(x) in place for x <= 0, and 0 where that is too small to count.

    Where it underflows, `torch.exp` takes a hundred times as long on some CPUs, and so do products of what it gives.
    """
    return threshold(x.clamp_(min=_LEAST_EXPONENT).exp_(), _LEAST, 0.0, inplace=True)
