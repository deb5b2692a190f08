"""Means with 95% intervals: over contexts, and of methods compared on the same samples."""

from typing import Any

import numpy as np

from lkv.evaluation.statistics import Groups, Mean, draw_macro_means, to_interval


def bootstrap(groups: Groups) -> Mean:
    """The mean of all values, with a percentile bootstrap that draws whole groups, such as one context's values.

    Raises:
        ValueError: For no values.
    """
    if not any(len(group) for group in groups):
        raise ValueError("there are no values to average.")
    sums, sizes = np.array([(sum(group), len(group)) for group in groups], np.float64).T
    return _ratio_of_sums(sums, sizes, int(sizes.sum()))


def named_interval(name: str, mean: Any) -> dict[str, Any]:
    """A mean and its interval as `name`, `name_low` and `name_high`, beside the `value` of a row."""
    return {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}


def bootstrap_ratio(groups: Groups, baseline: Groups) -> Mean:
    """The mean of all values by that of `baseline`, positive values of the same samples, drawn as in `bootstrap`."""
    sums, sums_of_baseline = (np.array([sum(group) for group in each], np.float64) for each in (groups, baseline))
    return _ratio_of_sums(sums, sums_of_baseline, sum(map(len, groups)))


def _ratio_of_sums(sums: np.ndarray, others: np.ndarray, samples: int) -> Mean:
    """The sum over groups of `sums` by that of `others`, drawing groups."""
    drawn = np.random.default_rng(0).integers(0, len(sums), (2000, len(sums)))
    return to_interval(sums.sum() / others.sum(), sums[drawn].sum(1) / others[drawn].sum(1), samples)


def ratio_of_macro_means(values: Groups, baseline: Groups) -> Mean | None:
    """The macro mean of `values` over that of `baseline` (the same samples in the same groups), with its interval.

    None where `baseline` averages 0, in any draw.
    """
    point, drawn = draw_macro_means([np.stack(pair, 1) for pair in zip(values, baseline, strict=True)], 2000)
    if point[1] <= 0 or (drawn[:, 1] <= 0).any():
        return None
    return to_interval(point[0] / point[1], drawn[:, 0] / drawn[:, 1], sum(map(len, values)))
