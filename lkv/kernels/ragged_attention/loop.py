"""Ragged attention in plain PyTorch, as a loop over KV heads: on any device, with gradients.

A head's entries are one contiguous slice of the pool. Names of shapes: S spans (batch rows times KV heads), G query
heads of a group, R = G * Tq query rows of a span, T entries of a span.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from lkv.kernels.causal_attention import causal_attention
from lkv.kernels.ragged_attention.arguments import RaggedKV
from lkv.kernels.softcap import cap_scores

# Entries converted to float32 at once, so that a step's memory does not grow with the context.
_ENTRIES_IN_FLOAT32 = 4096
# New tokens that attend at once: the mask of a whole chunk would take more memory than eviction saves.
_ROWS = 256
# Below this many entries threads do not pay off, and on a busy machine they wait for one another.
_MIN_SHARED = 2048


def attend(
    q: Tensor, kv: RaggedKV, scale: float, causal: bool = True, with_lse: bool = False, softcap: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Shapes as in `api.ragged_attention`."""
    if not causal or with_lse or softcap is not None:
        return _attend_with_lse(q, kv, scale, causal, softcap)
    k_pool, v_pool, starts, lens, *_ = kv
    batch, heads, tokens, dim = q.shape
    # The query heads of a group become rows, so that a span is read once.
    rows = q.reshape(starts.numel(), -1, dim)
    # Plain products beat SDPA for one row; half-precision products are slower than converting to float32.
    is_half = q.dtype.itemsize < 4
    scaled = (rows.float() if is_half else rows) * scale
    queries = scaled.unbind()
    parts = []
    for first, count, start, step, length in _runs(starts, lens):
        last, end = first + count, start + length
        if tokens == 1 and count == 1:
            product = _attend_one_half if is_half else _attend_one
            parts.append(product(queries[first], k_pool[start:end], v_pool[start:end]))
            continue
        k, v = (_view_spans(pool, start, step, count, length) for pool in (k_pool, v_pool))
        if tokens == 1 and not is_half:
            shares = torch.softmax(torch.bmm(scaled[first:last], k.mT), -1)
            parts.append(torch.bmm(shares, v).flatten(0, 1))
        elif tokens == 1:
            out = scaled_dot_product_attention(rows[None, first:last], k[None], v[None], scale=scale)
            parts.append(out.flatten(0, 2))
        else:
            grouped = rows[first:last].unflatten(1, (-1, tokens))
            parts.append(causal_attention(grouped, k[:, None], v[:, None], scale).flatten(0, 2))
    return torch.cat(parts).to(q.dtype).view(batch, heads, tokens, -1), None


def append(key: Tensor, value: Tensor, kv: RaggedKV) -> None:
    """As `api.append`."""
    k_pool, v_pool, starts, lens, *_ = kv
    new = key.shape[2]
    ends = (starts + lens).long()
    places = (ends if new == 1 else ends[..., None] + torch.arange(new, device=key.device)).flatten()
    k_pool.index_copy_(0, places, key.reshape(-1, key.shape[-1]))
    v_pool.index_copy_(0, places, value.reshape(-1, value.shape[-1]))
    lens += new


def attend_masked(
    q: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """As `api.masked_attention`."""
    batch, heads, rows, dim = q.shape
    kv_heads = key.shape[1]
    grouped = _at_least_float32(q).reshape(batch, kv_heads, -1, rows, dim) * scale
    scores = cap_scores(torch.einsum("bhgqd,bhkd->bhgqk", grouped, _at_least_float32(key)), softcap)
    scores = scores.masked_fill_(~visible[:, :, None], -torch.inf)
    out, lse = _softmax_product(scores, _at_least_float32(value)[:, :, None])
    return out.reshape(batch, heads, rows, -1).to(q.dtype), lse.reshape(batch, heads, rows)


def _attend_with_lse(
    q: Tensor, kv: RaggedKV, scale: float, causal: bool, softcap: float | None
) -> tuple[Tensor, Tensor]:
    k_pool, v_pool, starts, lens, *_ = kv
    batch, heads, tokens, dim = q.shape
    rows = _at_least_float32(q).reshape(starts.numel(), -1, dim) * scale
    # Row m of a span is new token m % Tq.
    token = torch.arange(rows.shape[1], device=q.device) % tokens
    outs, lses = [], []
    for first, count, start, step, length in _runs(starts, lens):
        k, v = (_at_least_float32(_view_spans(pool, start, step, count, length)) for pool in (k_pool, v_pool))
        visible = torch.arange(length, device=q.device) <= length - tokens + token[:, None] if causal else None
        parts = []
        for at in range(0, rows.shape[1], _ROWS):
            scores = cap_scores(torch.bmm(rows[first : first + count, at : at + _ROWS], k.mT), softcap)
            if visible is not None:
                scores.masked_fill_(~visible[at : at + _ROWS], -torch.inf)
            parts.append(_softmax_product(scores, v))
        out, lse = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        outs.append(out.flatten(0, 1))
        lses.append(lse.flatten())
    out = torch.cat(outs).to(q.dtype).view(batch, heads, tokens, -1)
    return out, torch.cat(lses).view(batch, heads, tokens)


def _runs(starts: Tensor, lens: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (first, count, start, step, length) of evenly spaced spans of equal length, which form a batch."""
    begins, lengths = starts.flatten().tolist(), lens.flatten().tolist()
    first = 0
    while first < len(begins):
        start, length, last = begins[first], lengths[first], first + 1
        step = begins[last] - start if last < len(begins) else 0
        while step >= 0 and last < len(begins) and lengths[last] == length and begins[last] - begins[last - 1] == step:
            last += 1
        yield first, last - first, start, max(step, 0), length
        first = last


def _view_spans(pool: Tensor, start: int, step: int, count: int, length: int) -> Tensor:
    """Return `count` spans of `length` entries of `pool` [P, d], `step` entries apart, as a view [count, length, d]."""
    row, column = pool.stride()
    strides = (step * row, row, column)
    return pool.as_strided((count, length, pool.shape[1]), strides, pool.storage_offset() + start * row)


def _softmax_product(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(scores) @ value and the log-sum-exp of the scores; 0 and -inf for a row of -inf, or without keys."""
    if not scores.shape[-1]:
        return torch.matmul(scores, value), scores.new_full(scores.shape[:-1], -torch.inf)
    # PyTorch's softmax is one pass; the largest weight is e^(largest score - lse).
    weights, top = torch.softmax(scores, -1), scores.amax(-1)
    is_hidden = top == -torch.inf
    fill = weights.masked_fill if weights.requires_grad else weights.masked_fill_
    weights = fill(is_hidden[..., None], 0.0)
    lse = (top - weights.amax(-1).log()).masked_fill_(is_hidden, -torch.inf)
    return torch.matmul(weights, value), lse


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


def _attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute one head with few queries, splitting entries among threads, which a product of few rows does not do."""
    threads = torch.get_num_threads()
    if threads == 1 or len(k) < _MIN_SHARED:
        return torch.mm(torch.softmax(linear(q, k), -1), v)
    shares = torch.softmax(torch.mm(k, q.t()), 0)
    share = len(k) // threads
    even = share * threads
    parts = torch.bmm(shares[:even].view(threads, share, -1).mT, v[:even].view(threads, share, -1))
    return torch.addmm(parts.sum(0), shares[even:].t(), v[even:]) if even < len(k) else parts.sum(0)


def _attend_one_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `_attend_one`, of float32 queries over k and v in half precision."""
    if len(k) <= _ENTRIES_IN_FLOAT32:
        return _attend_one(q, k.float(), v.float())
    shares = torch.softmax(torch.cat([linear(q, part.float()) for part in k.split(_ENTRIES_IN_FLOAT32)], -1), -1)
    out = q.new_zeros(len(q), v.shape[-1])
    for share, part in zip(shares.split(_ENTRIES_IN_FLOAT32, -1), v.split(_ENTRIES_IN_FLOAT32), strict=True):
        out.addmm_(share, part.float())
    return out
