"""Kept entries refitted, so that they answer as all entries did: what eviction took is given back in the same bytes.

Beyond the paper, and nothing is learned. Queries that stand for those to come are the prompt's own, turned to where the
text ends. Of each head, first the kept entries get weights that make up for the attention that the evicted ones had
(least squares, none below zero); a weight's logarithm goes into k along the direction in which all these queries agree,
so that no kernel knows of it. Then v moves, as little as it must, to what gives these queries the full cache's output.
"""

import math

import torch
from torch import Tensor

from lkv.integrations.transformers.prefill import LayerKV, to_fp32
from lkv.utils.devices import full_precision

QUERIES = 256  # a query head, at most
_ROWS = 1024  # a KV head, at most, over the query heads that read it
_RIDGE, _FLAT = 0.1, 0.01  # by the mean of what they are added to
_LEAST = 0.01  # of a weight
_STEPS = 30


def reference_queries(prompt: LayerKV) -> Tensor:
    """Queries [B, H, G n, d] that entries are fitted to, by the KV head that G query heads read: evenly of the second
    half of the prompt, rotated as if they followed its end.

    Raises UnsupportedModelError where q cannot be rotated back, ValueError for a prompt without its queries.
    """
    tokens, heads, rotation = prompt.key.shape[2], prompt.key.shape[1], prompt.required_rotation
    grouped = prompt.query.shape[1] // heads
    second = min(prompt.query.shape[2], tokens - tokens // 2)
    count = min(QUERIES, max(1, _ROWS // grouped), second)
    # The first and the last of them, and what lies evenly between, rounded.
    parts = max(1, count - 1)
    steps = (2 * torch.arange(count, device=prompt.query.device) * (second - 1) + parts) // (2 * parts)
    chosen = prompt.query[:, :, prompt.query.shape[2] - second + steps]
    with full_precision(prompt.key.device):
        places = tokens - second + steps
        ahead = rotation.rerotate(to_fp32(chosen), places, rotation.future_start(prompt.end, count))
    return ahead.unflatten(1, (heads, -1)).flatten(2, 3)


@torch.no_grad()
def compensate(
    query: Tensor, key: Tensor, value: Tensor, kept_key: Tensor, kept_value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """k and v for the kept entries of one head, of their shapes and dtype.

    `query` [n, d] are the references, `key` and `value` [T, d] all entries, the kept ones [m, d].
    """
    with full_precision(key.device):
        query, v = to_fp32(query) * scale, to_fp32(kept_value)
        logits = query @ to_fp32(key).T
        total = logits.logsumexp(-1, keepdim=True)
        target = logits.sub_(total).exp_() @ to_fp32(value)
        del logits  # of a long prompt larger than all that follows
        weights = _weights((query @ to_fp32(kept_key).T - total).exp())
        # As they will be held, so that v makes up for what rounding them takes.
        new_key = (to_fp32(kept_key) + weights.log()[:, None] * _agreed(query)).to(kept_key.dtype)
        attention = (query @ to_fp32(new_key).T).softmax(-1)
        new_value = v + _least_change(attention, target - attention @ v)
    return new_key, new_value.to(kept_value.dtype)


def _weights(share: Tensor) -> Tensor:
    """Weights [m] of at least `_LEAST` with which the shares [n, m] of the full attention sum to 1 in each row, near 1
    where the rows do not say: accelerated projected gradient (FISTA)."""
    ridge = _RIDGE * share.square().sum(0).mean()
    # No eigenvalue of a matrix without negative entries is above the greatest (A x) / x, of any x > 0.
    x = share.sum(1).clamp(min=1e-6)
    for _ in range(3):
        product = (share @ (share.T @ x)).clamp(min=1e-12)
        bound = (product / x).amax()
        x = (product / product.amax()).clamp(min=1e-6)
    step = 1 / (bound + ridge).clamp(min=1e-6)  # where the kept entries have no share at all
    weights = ahead = torch.ones_like(share[0])
    pace = 1.0
    for _ in range(_STEPS):
        slope = share.T @ (share @ ahead - 1) + ridge * (ahead - 1)
        new = (ahead - step * slope).clamp(min=_LEAST)
        faster = (1 + math.sqrt(1 + 4 * pace * pace)) / 2
        ahead = new + (pace - 1) / faster * (new - weights)
        weights, pace = new, faster
    return weights


def _agreed(query: Tensor) -> Tensor:
    """The direction u [d] with q u near 1 for every row of `query` [n, d]."""
    spread = query.T @ query / len(query)
    ridge = (_FLAT * spread.diagonal().mean()).clamp(min=1e-6)
    return _solved(spread, query.mean(0)[:, None], ridge)[:, 0]


def _least_change(attention: Tensor, missing: Tensor) -> Tensor:
    """The least change [m, dv] of v that `attention` [n, m] makes the `missing` [n, dv] of (ridge regression)."""
    rows, entries = attention.shape
    ridge = _RIDGE * attention.square().sum() / rows
    if entries < rows:
        return _solved(attention.T @ attention, attention.T @ missing, ridge)
    return attention.T @ _solved(attention @ attention.T, missing, ridge)


def _solved(matrix: Tensor, right: Tensor, ridge: Tensor) -> Tensor:
    """The solution of (matrix + ridge I) x = right, of a matrix without negative eigenvalues."""
    matrix.diagonal().add_(ridge)
    return torch.cholesky_solve(right, torch.linalg.cholesky_ex(matrix).L)
