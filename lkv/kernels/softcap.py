"""Capped attention scores, as in Gemma-2: one tanh before the softmax."""

import functools
import math

import torch
from torch import Tensor

_NODES = 32  # of the quadrature: logarithms come out to 0.01 for deviations up to 6 and caps from 5 on


def cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(scores / softcap), or `scores` if `softcap` is None."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def log_expected_exp(mean: Tensor, variance: Tensor, softcap: float | None) -> Tensor:
    """Compute log E[exp(score)] of a score that is normal before it is capped; shapes of `mean` and `variance` match.

    Without a cap it is mean + variance / 2, with one it is computed by Gauss-Hermite quadrature.
    """
    if softcap is None:
        return mean + variance / 2
    deviation = variance.clamp(min=0).sqrt()
    total: Tensor | None = None
    for node, log_weight in _quadrature():
        part = cap_scores(mean + deviation * node, softcap) + log_weight
        total = part if total is None else torch.logaddexp(total, part)
    assert total is not None
    return total


@functools.cache
def _quadrature() -> list[tuple[float, float]]:
    """Return nodes and logarithms of weights for the mean over a standard normal variable (Golub and Welsch)."""
    off = torch.arange(1, _NODES, dtype=torch.float64, device="cpu").sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return [(node, 2 * math.log(abs(first))) for node, first in zip(nodes.tolist(), vectors[0].tolist(), strict=True)]
