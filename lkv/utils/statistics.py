"""Means with 95% intervals: over contexts, over tasks, and of methods compared on the same samples."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Groups = Sequence[Sequence[float] | np.ndarray]


class Mean(NamedTuple):
    """A mean with its 95% bootstrap interval over `n` samples."""

    value: float
    low: float
    high: float
    n: int


def bootstrap(groups: Groups) -> Mean:
    """The mean of all values, with a percentile bootstrap that draws whole groups, such as one context's values.

    Raises:
        ValueError: For no values.
    """
    if not any(len(group) for group in groups):
        raise ValueError("there are no values to average.")
    sums, sizes = np.array([(sum(group), len(group)) for group in groups], np.float64).T
    return _ratio_of_sums(sums, sizes, int(sizes.sum()))


def bootstrap_ratio(groups: Groups, baseline: Groups) -> Mean:
    """The mean of all values by that of `baseline`, positive values of the same samples, drawn as in `bootstrap`."""
    sums, sums_of_baseline = (np.array([sum(group) for group in each], np.float64) for each in (groups, baseline))
    return _ratio_of_sums(sums, sums_of_baseline, sum(map(len, groups)))


def _ratio_of_sums(sums: np.ndarray, others: np.ndarray, samples: int) -> Mean:
    """The sum over groups of `sums` by that of `others`, drawing groups."""
    drawn = np.random.default_rng(0).integers(0, len(sums), (2000, len(sums)))
    return _interval(sums.sum() / others.sum(), sums[drawn].sum(1) / others[drawn].sum(1), samples)


def macro_mean(groups: Groups, draws: int = 2000) -> Mean:
    """The mean of the groups' means, with a percentile bootstrap that draws samples within each group.

    The draws of small groups vary too little, by (n - 1) / n, and so few samples are not normally distributed: the
    interval is widened by both, the latter as Student's t with Satterthwaite's degrees of freedom. A group of one
    sample is drawn as if it varied as the others do, about their means; where all have one, whole groups are drawn.
    Differences of two methods, sample by sample, give the paired comparison. Needs scipy.

    Args:
        groups: The samples of each task (at one length).
        draws: How many.

    Raises:
        ValueError: For an empty group.
    """
    point, drawn = _draw_macro_means([np.asarray(group, np.float64)[:, None] for group in groups], draws)
    return _interval(point[0], drawn[:, 0], sum(map(len, groups)))


def ratio_of_macro_means(values: Groups, baseline: Groups) -> Mean | None:
    """The macro mean of `values` over that of `baseline` (the same samples in the same groups), with its interval.

    None where `baseline` averages 0, in any draw.
    """
    point, drawn = _draw_macro_means([np.stack(pair, 1) for pair in zip(values, baseline, strict=True)], 2000)
    if point[1] <= 0 or (drawn[:, 1] <= 0).any():
        return None
    return _interval(point[0] / point[1], drawn[:, 0] / drawn[:, 1], sum(map(len, values)))


def _draw_macro_means(groups: Sequence[np.ndarray], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean over the groups' means [K] and its draws [draws, K], for groups of shape [samples, K]."""
    from scipy.stats import norm, t

    if not groups or not all(len(group) for group in groups):
        raise ValueError("there are no values to average.")
    random = np.random.default_rng(0)
    means = np.stack([group.mean(0) for group in groups])
    point = means.mean(0)
    # What each sample is away from its group's mean, for groups that have more than one.
    residuals = [
        (group - mean) * np.sqrt(len(group) / (len(group) - 1))
        for group, mean in zip(groups, means, strict=True)
        if len(group) > 1
    ]
    if not residuals:
        return point, means[random.integers(0, len(groups), (draws, len(groups)))].mean(1)
    singles, pooled = len(groups) - len(residuals), np.concatenate(residuals)
    spread = pooled[random.integers(0, len(pooled), (draws, singles))].sum(1)
    for each in residuals:
        spread += each[random.integers(0, len(each), (draws, len(each)))].mean(1)
    # Satterthwaite's degrees of freedom, by the first column; the singles share those of the others.
    variances = [each[:, 0].var() / len(each) for each in residuals] + [singles * pooled[:, 0].var()] * bool(singles)
    degrees = [len(each) - 1 for each in residuals] + [len(pooled) - len(residuals)] * bool(singles)
    total = sum(variance**2 / degree for variance, degree in zip(variances, degrees, strict=True))
    freedom = sum(variances) ** 2 / total if total else sum(degrees)
    return point, point + spread / len(groups) * (t.ppf(0.975, freedom) / norm.ppf(0.975))


def _interval(value: float, drawn: np.ndarray, samples: int) -> Mean:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Mean(float(value), float(low), float(high), samples)
