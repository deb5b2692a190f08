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


def bootstrap(values: Sequence[float], seed: int = 0, draws: int = 2000) -> Mean:
    """Percentile bootstrap of the mean. Raises ValueError for no values."""
    if not len(values):
        raise ValueError("there are no values to average.")
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = data[rng.integers(0, len(data), (draws, len(data)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Mean(float(data.mean()), float(low), float(high), len(data))
