"""Ragged attention as a loop over KV heads: the fastest way on a CPU, where a head's span is one contiguous slice."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from lkv.kernels.ragged_attention.partial import exact, weighted

# Entries that are widened to float32 at once: what a step allocates must not grow with the context.
_WIDENED = 4096
# New tokens that attend at once: the mask of a whole part of a prompt would outweigh what eviction saves.
_ROWS = 256
# Below this many entries threads save nothing, and where other programs run as well they wait for one another.
_LEAST_SHARED = 2048


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float) -> Tensor:
    """Shapes as in `api.ragged_attention`."""
    batch, heads, rows, dim = q.shape
    spans, value_dim = starts.numel(), v_pool.shape[-1]
    # The query heads of a group become rows, so that a span is read once for all of them.
    q = q.reshape(spans, -1, dim)
    # Plain products beat SDPA for one row; those in half precision are slower than their conversion.
    half = q.dtype.itemsize < 4
    scaled = (q.float() if half else q) * scale
    queries = scaled.unbind()
    parts = []
    for first, count, start, step, length in _runs(starts.flatten().tolist(), lens.flatten().tolist()):
        last, end = first + count, start + length
        if rows == 1 and count == 1:
            product = _widened if half else _plain
            parts.append(product(queries[first], k_pool[start:end], v_pool[start:end]))
            continue
        k = _spans(k_pool, start, step, count, length)
        v = _spans(v_pool, start, step, count, length)
        if rows == 1 and not half:
            parts.append(torch.bmm(torch.softmax(torch.bmm(scaled[first:last], k.mT), -1), v).flatten(0, 1))
        elif rows == 1:
            parts.append(scaled_dot_product_attention(q[None, first:last], k[None], v[None], scale=scale).flatten(0, 2))
        else:
            parts.append(_causal(q[first:last].unflatten(1, (-1, rows)), k, v, scale).flatten(0, 2))
    return torch.cat(parts).to(q.dtype).view(batch, heads, rows, value_dim)


def attend_with_lse(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`attend` and the log-sum-exp of the scores, [B, Hq, Tq]; without `causal` all entries are visible."""
    batch, heads, rows, dim = q.shape
    value_dim = v_pool.shape[-1]
    # The query heads of a group become rows; row m of a span is new token m % rows.
    packed = exact(q).reshape(starts.numel(), -1, dim) * scale
    token = torch.arange(packed.shape[1], device=q.device) % rows
    outs, logarithms = [], []
    for first, count, start, step, length in _runs(starts.flatten().tolist(), lens.flatten().tolist()):
        k = _spans(k_pool, start, step, count, length)
        v = _spans(v_pool, start, step, count, length)
        visible = torch.arange(length, device=q.device) <= length - rows + token[:, None] if causal else None
        out, lse = _in_blocks(packed[first : first + count], exact(k).mT, exact(v), visible)
        outs.append(out.flatten(0, 1))
        logarithms.append(lse.flatten())
    out = torch.cat(outs).to(q.dtype).view(batch, heads, rows, value_dim)
    return out, torch.cat(logarithms).view(batch, heads, rows)


def _spans(pool: Tensor, start: int, step: int, count: int, length: int) -> Tensor:
    """`count` spans of `length` entries of `pool` [N, d], `step` apart, as a view [count, length, d]."""
    row, column = pool.stride()
    strides = (step * row, row, column)
    return pool.as_strided((count, length, pool.shape[1]), strides, pool.storage_offset() + start * row)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Means of `v` [N, length, dv] and log-sum-exps for scaled rows [N, M, d] of spans with k [N, d, length], of whose
    entries each row sees `visible` [M, length]; a block of rows at once."""
    parts = []
    for at in range(0, q.shape[1], _ROWS):
        scores = torch.bmm(q[:, at : at + _ROWS], k)
        if visible is not None:
            scores.masked_fill_(~visible[at : at + _ROWS], -torch.inf)
        parts.append(weighted(scores, v))
    outs, logarithms = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(logarithms, 1)


def append(key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor) -> None:
    """The first half of `api.append_and_attend`: new k and v behind each span, and `lens` longer by them."""
    new = key.shape[2]
    ends = (starts + lens).long()
    places = (ends if new == 1 else ends[..., None] + torch.arange(new, device=key.device)).flatten()
    k_pool.index_copy_(0, places, key.reshape(-1, key.shape[-1]))
    v_pool.index_copy_(0, places, value.reshape(-1, value.shape[-1]))
    lens += new


def _runs(starts: list[int], lens: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """(first, count, start, step, length) of spans of one length at equal distances: one batch (uniform budgets)."""
    first = 0
    while first < len(starts):
        start, length, last = starts[first], lens[first], first + 1
        step = starts[last] - start if last < len(starts) else 0
        while last < len(starts) and lens[last] == length and starts[last] - starts[last - 1] == step:
            last += 1
        yield first, last - first, start, step, length
        first = last


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head with its few queries, shared out among the threads by entries: a product with so few rows is not."""
    threads = torch.get_num_threads()
    if threads == 1 or len(k) < _LEAST_SHARED:
        return torch.mm(torch.softmax(linear(q, k), -1), v)
    shares = torch.softmax(torch.mm(k, q.t()), 0)
    share = len(k) // threads
    even = share * threads
    parts = torch.bmm(shares[:even].view(threads, share, -1).mT, v[:even].view(threads, share, -1))
    return torch.addmm(parts.sum(0), shares[even:].t(), v[even:]) if even < len(k) else parts.sum(0)


def _widened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `_plain`, of float32 queries over k and v in half precision."""
    if len(k) <= _WIDENED:
        return _plain(q, k.float(), v.float())
    shares = torch.softmax(torch.cat([linear(q, part.float()) for part in k.split(_WIDENED)], -1), -1)
    out = q.new_zeros(len(q), v.shape[-1])
    for share, part in zip(shares.split(_WIDENED, -1), v.split(_WIDENED), strict=True):
        out.addmm_(share, part.float())
    return out


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Several new tokens [N, group, rows, d] over spans [N, length, d] that end with them."""
    rows, length = q.shape[2], k.shape[1]
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    parts: list[Tensor] = []
    end = length - rows
    for block in q.split(_ROWS, 2):
        new = block.shape[2]
        end += new
        visible = torch.ones(new, end, dtype=torch.bool, device=q.device).tril(end - new)
        parts.append(scaled_dot_product_attention(block, k[:, :, :end], v[:, :, :end], visible, scale=scale))
    return torch.cat(parts, 2)
