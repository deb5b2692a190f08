"""Averages over tasks and the comparison of methods on the same samples, with intervals."""

from collections.abc import Sequence

import numpy as np

from lkv.evals.metrics import Mean

_DRAWS = 2000


def macro(groups: Sequence[Sequence[float]], seed: int = 0, draws: int = _DRAWS) -> Mean:
    """The mean of the groups' means, with a 95% percentile bootstrap that draws samples anew within each group.

    A group is one task (at one length). For one group this is `lkv.evals.metrics.bootstrap` over single samples.
    Differences of two methods, sample by sample, give the paired comparison. Raises ValueError for an empty group.
    """
    point, drawn = _macros([np.asarray(group, np.float64)[:, None] for group in groups], seed, draws)
    return _mean(point[0], drawn[:, 0], groups)


def share_of(
    own: Sequence[Sequence[float]], full: Sequence[Sequence[float]], seed: int = 0, draws: int = _DRAWS
) -> Mean | None:
    """The macro mean of `own` over that of `full` (same samples in the same groups), with the paired interval.

    None where `full` averages 0, in any draw.
    """
    point, drawn = _macros([np.stack(pair, 1) for pair in zip(own, full, strict=True)], seed, draws)
    if point[1] <= 0 or (drawn[:, 1] <= 0).any():
        return None
    return _mean(point[0] / point[1], drawn[:, 0] / drawn[:, 1], own)


def _macros(groups: Sequence[np.ndarray], seed: int, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean over the groups' means [K] and its draws [D, K], for groups of shape [samples, K]."""
    if not groups or not all(len(group) for group in groups):
        raise ValueError("there are no values to average.")
    random = np.random.default_rng(seed)
    point = np.mean([group.mean(0) for group in groups], 0)
    drawn = np.zeros((draws, groups[0].shape[1]))
    for group in groups:
        drawn += group[random.integers(0, len(group), (draws, len(group)))].mean(1)
    return point, drawn / len(groups)


def _mean(value: float, drawn: np.ndarray, groups: Sequence[Sequence[float]]) -> Mean:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Mean(float(value), float(low), float(high), sum(len(group) for group in groups))
