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
