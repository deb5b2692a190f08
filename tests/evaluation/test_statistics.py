"""Means with intervals, against numpy, scipy and the rate at which intervals hold the mean."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiments.bootstrap import bootstrap, ratio_of_macro_means
from lkv.evaluation.statistics import macro_mean


def test_bootstrap_interval_covers_the_mean():
    singles = [[0.0], [1.0]] * 50
    mean = bootstrap(singles)
    assert mean.value == 0.5 and mean.n == 100
    # The normal approximation: 1.96 * 0.5 / sqrt(100).
    assert mean.low == pytest.approx(0.5 - 0.098, abs=0.02) and mean.high == pytest.approx(0.5 + 0.098, abs=0.02)
    assert bootstrap(singles) == mean
    # Values that share a context count once: 100 groups of three copies have the interval of 100 values.
    copies = bootstrap([[x[0]] * 3 for x in singles])
    assert copies.n == 300 and copies.high - copies.low == pytest.approx(mean.high - mean.low)
    with pytest.raises(ValueError, match="no values"):
        bootstrap([])


@given(st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=6), min_size=1, max_size=4))
def test_macro_counts_every_task_once(groups):
    mean = macro_mean(groups, draws=50)
    assert mean.value == pytest.approx(np.mean([np.mean(group) for group in groups]))
    assert mean.n == sum(map(len, groups))
    assert mean.low <= mean.high
    if all(min(group) == max(group) for group in groups) and min(map(len, groups)) > 1:
        assert (mean.low, mean.high) == pytest.approx((mean.value, mean.value))


@pytest.mark.parametrize(("tasks", "size"), [(1, 3), (5, 2), (5, 3), (13, 2)])
def test_intervals_of_few_samples_hold_the_mean_as_often_as_they_say(tasks, size):
    random = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        means = random.uniform(0, 1, tasks)
        found = macro_mean(random.normal(means[:, None], 0.3, (tasks, size)), draws=200)
        held += found.low <= means.mean() <= found.high
    assert 0.91 <= held / 200 <= 0.99  # 0.95 with its own error; a plain bootstrap: 0.5 to 0.83


def test_one_sample_a_task_is_drawn_by_whole_tasks():
    values = [3.0, 7.0, 8.0, 20.0]
    assert macro_mean([[v] for v in values]) == pytest.approx(bootstrap([[v] for v in values]))


def test_a_task_of_one_sample_varies_as_the_others_do():
    """The whole of it: one mean of 80 values, and one value of the same spread, each counting half."""
    random = np.random.default_rng(1)
    many, one = random.normal(50, 10, 80), [120.0]
    mean = macro_mean([many, one], draws=20_000)
    error = 0.5 * np.sqrt(many.var(ddof=1) * (1 + 1 / 80))
    assert mean.value == pytest.approx((many.mean() + 120) / 2)
    assert mean.high - mean.low == pytest.approx(2 * stats.t.ppf(0.975, 79) * error, rel=0.1)
    hits = 0
    for _ in range(400):
        means = random.uniform(0, 1, 5)
        groups = [random.normal(own, 0.3, size) for own, size in zip(means, (1, 4, 4, 4, 4), strict=True)]
        found = macro_mean(groups, draws=200)
        hits += found.low <= means.mean() <= found.high
    assert 0.9 <= hits / 400 <= 0.98  # 0.93 to 0.94 in 1,500 draws; drawing whole tasks: 1.0


def test_share_of_the_full_cache_draws_both_together():
    own, full = [[10.0, 30.0], [50.0]], [[20.0, 60.0], [100.0]]
    assert ratio_of_macro_means(own, full)[:3] == pytest.approx((0.5, 0.5, 0.5))  # paired: half in every draw
    assert ratio_of_macro_means(own, [[0.0, 0.0], [0.0]]) is None


def test_no_values_are_refused():
    with pytest.raises(ValueError, match="no values"):
        macro_mean([[1.0], []])


def test_macro_interval_is_student_s_and_wider_than_scipy_s_bootstrap():
    values = np.random.default_rng(5).normal(50, 10, 12)
    mean = macro_mean([values], draws=20_000)
    plain = stats.bootstrap((values,), np.mean, n_resamples=20_000, method="percentile", rng=0).confidence_interval
    widened = np.sqrt(12 / 11) * stats.t.ppf(0.975, 11) / stats.norm.ppf(0.975)
    assert mean.high - mean.low == pytest.approx(widened * (plain.high - plain.low), rel=0.02)
    assert mean.high - mean.low == pytest.approx(
        np.diff(stats.t.interval(0.95, 11, loc=0, scale=stats.sem(values)))[0], rel=0.05
    )
