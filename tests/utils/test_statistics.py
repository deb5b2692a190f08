"""Bootstrap intervals."""

import pytest

from lkv.utils.statistics import bootstrap


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
