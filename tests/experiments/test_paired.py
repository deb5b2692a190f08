"""Paired tests of methods on the samples that a result file keeps."""

import argparse
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from experiments import common, paired
from experiments.samples import read_kept_samples, samples_path
from lkv.errors import DataError


def test_a_p_value_counts_the_signs_that_are_as_extreme():
    own, baseline = [0.1, 0.3, 0.2, 0.5, 0.1, 0.4], [0.4, 0.5, 0.1, 0.9, 0.6, 0.5]
    difference = np.array(own) - baseline
    means = [abs(np.dot(signs, difference)) for signs in itertools.product((1, -1), repeat=6)]
    expected = np.mean([mean >= abs(difference.sum()) - 1e-12 for mean in means])
    found = paired.compare(own, baseline)
    assert found.p == pytest.approx(expected) and found.n == 6
    test = stats.ttest_rel(own, baseline)
    assert (found.difference, found.low, found.high) == pytest.approx((difference.mean(), *test.confidence_interval()))


def test_half_of_a_baseline_is_compared_with_half_of_it():
    rng = np.random.default_rng(1)
    baseline = rng.lognormal(size=30)
    own = 0.4 * baseline * rng.lognormal(0, 0.1, 30)
    assert paired.compare(own, baseline, 0.5).verdict(0.01) == "lower"
    assert paired.compare(own, baseline, 0.3).verdict(0.01) == "higher"


def test_equal_differences_need_no_interval():
    assert paired.compare([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]) == (-1.0, -1.0, -1.0, 0.25, 3)
    assert paired.compare([1.0, 2.0], [1.0, 2.0]).verdict(1.0) == "undecided"
    with pytest.raises(DataError, match="at least 2 contexts"):
        paired.compare([1.0], [2.0])


def test_what_is_undecided_says_how_many_contexts_would_decide():
    """The number of the textbook: ((z of the level + z of the power) * deviation / difference) ** 2."""
    difference = np.array([-2.0, 1.0, -1.5, 0.8, -0.2, 0.6, -1.1, 0.9])
    expected = ((1.959964 + 0.841621) * difference.std(ddof=1) / difference.mean()) ** 2
    verdict = paired.compare(difference, np.zeros(8)).verdict(0.5)
    assert verdict == f"undecided: about {round(expected)} contexts would decide"


def test_p_values_of_a_family_are_adjusted_by_holm():
    assert paired.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert paired.holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize(("contexts", "least"), [(10, 0.88), (24, 0.89)])
def test_intervals_of_skewed_differences_cover_their_mean(contexts, least):
    """Of 300 draws like those of KL, log-normal with a deviation of 0.8, about 95% should."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(300):
        difference = rng.lognormal(0, 0.8, contexts) - 2 * rng.lognormal(0, 0.8, contexts)
        found = paired.compare(difference, np.zeros(contexts))
        covered += found.low <= -np.exp(0.32) <= found.high
    assert least <= covered / 300 <= 0.99


@pytest.fixture
def result(tmp_path):
    """A result of three contexts, of which one was measured without the baseline."""
    options = argparse.Namespace(out=tmp_path / "some.json", seed=0)
    kls = {"a": [[[1.0, 0], [2.0, 0]], [[2.0, 0], [6.0, 0]]], "b": [[[1.0, 0], [1.5, 0]]], "c": [[[9.0, 0]]]}
    rows = {"a": [["lkv", 0.1], ["snapkv", 0.1]], "b": [["lkv", 0.1], ["snapkv", 0.1]], "c": [["lkv", 0.1]]}
    common.run_cases(
        "experiments.some", options, "some", {key: (key,) for key in kls},
        lambda key: {"rows": rows[key], "measured": kls[key]}, lambda samples: [], SimpleNamespace(digest=lambda: "p"),
    )  # fmt: skip
    return options.out


def test_a_finished_run_keeps_its_samples_and_their_digest(result, capsys):
    assert not result.with_suffix(".jsonl").exists()
    assert list(read_kept_samples(result)) == ["a", "b", "c"]
    means = paired.paired_means(read_kept_samples(result).values(), "lkv", "snapkv")
    assert means == {0.1: ([1.5, 1.0], [4.0, 1.5])}
    paired.main([str(result), "lkv:snapkv"])
    assert "0.1 lkv - snapkv: -1.5000" in capsys.readouterr().out
    for pair, message in (
        ("lkv:kvzip", "no sample has 'lkv' and 'kvzip' at one budget; there are lkv, snapkv"),
        ("kvzip", "'kvzip' is not a pair"),
    ):
        with pytest.raises(SystemExit):
            paired.main([str(result), pair])
        assert message in capsys.readouterr().err


def test_samples_of_another_run_are_refused(result):
    path = samples_path(result)
    document = json.loads(result.read_text())
    result.write_text(json.dumps(document | {"samples": "0" * 64}))
    with pytest.raises(DataError, match="samples of another run"):
        read_kept_samples(result)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        read_kept_samples(result)
    path.unlink()
    with pytest.raises(DataError, match="measure them again"):
        read_kept_samples(result)
