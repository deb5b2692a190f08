"""The expectation of the exponential of capped scores, against integration over a fine grid."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lkv.kernels.softcap import cap_scores, log_expected_exp


@given(st.floats(-60, 60), st.floats(0, 6), st.floats(5, 50))
def test_the_expectation_of_capped_scores(mean, deviation, softcap):
    x = torch.linspace(-14, 14, 20_001, dtype=torch.float64)
    scores = softcap * torch.tanh((mean + deviation * x) / softcap)
    density = -x.square() / 2 + torch.log((x[1] - x[0]) / (2 * torch.pi) ** 0.5)
    found = log_expected_exp(*torch.tensor([mean, deviation**2], dtype=torch.float64), softcap)
    assert float(found) == pytest.approx(float((scores + density).logsumexp(0)), abs=0.01)


def test_without_a_cap_it_is_the_moment_of_a_normal_variable():
    mean, variance = torch.randn(2, 5, dtype=torch.float64).abs()
    torch.testing.assert_close(log_expected_exp(mean, variance, None), mean + variance / 2)
    torch.testing.assert_close(log_expected_exp(mean, variance, 1e6), mean + variance / 2, atol=1e-9, rtol=1e-9)
    assert cap_scores(mean, None) is mean
