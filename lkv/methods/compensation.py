"""Least-squares compensation: adjust the kept keys and values to reproduce the attention output of the full cache.

Beyond the paper; without training and at no extra memory. Future queries are approximated by reference queries: the
prompt's own, rotated to the positions after the text. For each head, first the kept entries get weights that replace
the attention of the evicted ones (non-negative least squares). The logarithm of a weight is added to k along the
direction common to all reference queries, so that kernels need no change. Then v is changed by the least amount that
gives these queries the full cache's output (ridge regression).
"""

import math

import torch
from torch import Tensor

from lkv.hf.prompt_kv import LayerKV, to_fp32
from lkv.kernels.softcap import cap_scores
from lkv.utils.devices import full_precision

MAX_QUERIES = 256  # reference queries per query head
_MAX_ROWS = 1024  # reference queries per KV head, over its query heads
_RIDGE, _DIRECTION_RIDGE = 0.1, 0.01  # relative to the mean of the diagonal
_MIN_WEIGHT = 0.01
_FISTA_STEPS = 30


def reference_queries(prompt: LayerKV) -> Tensor:
    """Return evenly spaced queries of the prompt's second half, rotated to positions after it: [B, H, G n, d].

    Raises UnsupportedModelError if queries cannot be rotated back, and CacheError if the prompt has none.
    """
    tokens, heads, rotation = prompt.key.shape[2], prompt.key.shape[1], prompt.required_rotation
    grouped = prompt.query.shape[1] // heads
    second = min(prompt.query.shape[2], tokens - tokens // 2)
    count = min(MAX_QUERIES, max(1, _MAX_ROWS // grouped), second)
    # The first, the last and evenly spaced ones between them, rounded.
    parts = max(1, count - 1)
    steps = (2 * torch.arange(count, device=prompt.query.device) * (second - 1) + parts) // (2 * parts)
    chosen = prompt.query[:, :, prompt.query.shape[2] - second + steps]
    with full_precision(prompt.key.device):
        positions = tokens - second + steps
        future = rotation.rerotate(to_fp32(chosen), positions, rotation.future_start(prompt.end, count))
    return future.unflatten(1, (heads, -1)).flatten(2, 3)


@torch.no_grad()
def compensate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept_key: Tensor,
    kept_value: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute new k and v for the kept entries of one head.

    Args:
        query: The head's reference queries, [n, d].
        key: k of all entries, [T, d].
        value: v of all entries, [T, dv].
        kept_key: k of the kept entries, [m, d].
        kept_value: v of the kept entries, [m, dv].
        scale: The attention scaling factor.
        sinks: The attention sink of each reference query, [n].
        softcap: The cap of attention scores.

    Returns:
        New k and v, in the shapes and dtypes of the kept entries.
    """
    with full_precision(key.device):
        query, v = to_fp32(query) * scale, to_fp32(kept_value)
        logits = cap_scores(query @ to_fp32(key).T, softcap)
        total = logits.logsumexp(-1, keepdim=True)
        sink = None if sinks is None else to_fp32(sinks)[:, None]
        # The share of all entries: with a sink less than 1.
        whole = 1.0 if sink is None else (total - sink).sigmoid()[:, 0]
        total = total if sink is None else torch.logaddexp(total, sink)
        target = logits.sub_(total).exp_() @ to_fp32(value)
        del logits  # for a long prompt larger than all later tensors
        weights = _entry_weights((cap_scores(query @ to_fp32(kept_key).T, softcap) - total).exp(), whole)
        # In the stored dtype, so that v compensates for the rounding of k.
        new_key = (to_fp32(kept_key) + weights.log()[:, None] * _common_direction(query)).to(kept_key.dtype)
        logits = cap_scores(query @ to_fp32(new_key).T, softcap)
        attention = logits.softmax(-1)
        if sink is not None:
            attention = attention * (logits.logsumexp(-1, keepdim=True) - sink).sigmoid()
        new_value = v + _smallest_change(attention, target - attention @ v)
    return new_key, new_value.to(kept_value.dtype)


def _entry_weights(share: Tensor, whole: Tensor | float = 1.0) -> Tensor:
    """Return weights [m] with which the attention shares [n, m] sum to about `whole` (a number, or [n]) in each row.

    Non-negative least squares by accelerated projected gradient (FISTA); no weight is below `_MIN_WEIGHT`.
    """
    ridge = _RIDGE * share.square().sum(0).mean()
    # The eigenvalues of a non-negative matrix are bounded by the greatest (A x) / x, for any x > 0.
    x = share.sum(1).clamp(min=1e-6)
    for _ in range(3):
        product = (share @ (share.T @ x)).clamp(min=1e-12)
        bound = (product / x).amax()
        x = (product / product.amax()).clamp(min=1e-6)
    step = 1 / (bound + ridge).clamp(min=1e-6)  # for kept entries without any attention
    weights = lookahead = torch.ones_like(share[0])
    momentum = 1.0
    for _ in range(_FISTA_STEPS):
        gradient = share.T @ (share @ lookahead - whole) + ridge * (lookahead - 1)
        new = (lookahead - step * gradient).clamp(min=_MIN_WEIGHT)
        next_momentum = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
        lookahead = new + (momentum - 1) / next_momentum * (new - weights)
        weights, momentum = new, next_momentum
    return weights


def _common_direction(query: Tensor) -> Tensor:
    """Return the direction u [d] with q u near 1 for every row of `query` [n, d]."""
    spread = query.T @ query / len(query)
    ridge = (_DIRECTION_RIDGE * spread.diagonal().mean()).clamp(min=1e-6)
    return _solve_ridge(spread, query.mean(0)[:, None], ridge)[:, 0]


def _smallest_change(attention: Tensor, missing: Tensor) -> Tensor:
    """Find the least change [m, dv] of v so that `attention` [n, m] gives `missing` [n, dv] (ridge regression)."""
    rows, entries = attention.shape
    ridge = _RIDGE * attention.square().sum() / rows
    if entries < rows:
        return _solve_ridge(attention.T @ attention, attention.T @ missing, ridge)
    return attention.T @ _solve_ridge(attention @ attention.T, missing, ridge)


def _solve_ridge(matrix: Tensor, right: Tensor, ridge: Tensor) -> Tensor:
    """Solve (matrix + ridge I) x = right for a positive semi-definite matrix."""
    matrix.diagonal().add_(ridge)
    return torch.cholesky_solve(right, torch.linalg.cholesky_ex(matrix).L)
