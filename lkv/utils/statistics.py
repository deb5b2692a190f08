"""Means with intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Mean(NamedTuple):
    """A mean with its 95% bootstrap interval over `n` samples."""

    value: float
    low: float
    high: float
    n: int


def bootstrap(groups: Sequence[Sequence[float]], seed: int = 0, draws: int = 2000) -> Mean:
    """Percentile bootstrap of the mean of all values, drawing whole groups (the values that share one context).

    Raises ValueError for no values.
    """
    if not any(len(group) for group in groups):
        raise ValueError("there are no values to average.")
    sums = np.array([sum(group) for group in groups], dtype=np.float64)
    sizes = np.array([len(group) for group in groups], dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(groups), (draws, len(groups)))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Mean(float(sums.sum() / sizes.sum()), float(low), float(high), int(sizes.sum()))


_DRAWS = 2000
_Z = 1.959964  # the normal distribution's 97.5% point


def macro_mean(groups: Sequence[Sequence[float]], seed: int = 0, draws: int = _DRAWS) -> Mean:
    """The mean of the groups' means, with a 95% percentile bootstrap that draws samples anew within each group.

    A group is one task (at one length). The draws of small groups vary too little, by (n - 1) / n, and so few are no
    normal distribution: the interval is widened by both, the latter as Student's t with Satterthwaite's degrees of
    freedom. Where a group has but one sample, whole groups are drawn instead. Differences of two methods, sample by
    sample, give the paired comparison. Raises ValueError for an empty group.
    """
    point, drawn = _macros([np.asarray(group, np.float64)[:, None] for group in groups], seed, draws)
    return _mean(point[0], drawn[:, 0], groups)


def ratio_of_macro_means(
    values: Sequence[Sequence[float]], full: Sequence[Sequence[float]], seed: int = 0, draws: int = _DRAWS
) -> Mean | None:
    """The macro mean of `values` over that of `full` (same samples in the same groups), with the paired interval.

    None where `full` averages 0, in any draw.
    """
    point, drawn = _macros([np.stack(pair, 1) for pair in zip(values, full, strict=True)], seed, draws)
    if point[1] <= 0 or (drawn[:, 1] <= 0).any():
        return None
    return _mean(point[0] / point[1], drawn[:, 0] / drawn[:, 1], values)


def t_quantile(freedom: float) -> float:
    """The 97.5% point of Student's t (Abramowitz and Stegun 26.7.5), within 1% from 2 degrees of freedom on."""
    z, n = _Z, freedom
    return z + sum(
        (
            (z**3 + z) / (4 * n),
            (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
            (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
        )
    )


def _macros(groups: Sequence[np.ndarray], seed: int, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean over the groups' means [K] and its draws [D, K], for groups of shape [samples, K]."""
    if not groups or not all(len(group) for group in groups):
        raise ValueError("there are no values to average.")
    random = np.random.default_rng(seed)
    means = np.stack([group.mean(0) for group in groups])
    point = means.mean(0)
    if min(map(len, groups)) == 1:
        return point, means[random.integers(0, len(groups), (draws, len(groups)))].mean(1)
    spread = np.zeros((draws, len(point)))
    for group, mean in zip(groups, means, strict=True):
        size = len(group)
        drawn = group[random.integers(0, size, (draws, size))].mean(1)
        spread += (drawn - mean) * np.sqrt(size / (size - 1))
    return point, point + spread / len(groups) * (t_quantile(_freedom(groups)) / _Z)


def _freedom(groups: Sequence[np.ndarray]) -> float:
    """Satterthwaite's degrees of freedom of the mean over the groups' means, by the first column."""
    variances = np.array([group[:, 0].var(ddof=1) / len(group) for group in groups])
    less = np.array([len(group) - 1 for group in groups])
    total = float((variances**2 / less).sum())
    return float(variances.sum()) ** 2 / total if total else float(less.sum())


def _mean(value: float, drawn: np.ndarray, groups: Sequence[Sequence[float]]) -> Mean:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Mean(float(value), float(low), float(high), sum(len(group) for group in groups))
