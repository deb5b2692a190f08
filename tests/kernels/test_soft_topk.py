"""Soft-TopK against a bisection in float64 and against its defining properties (Sec. 3.2, App. A)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lkv.kernels.soft_topk import soft_topk


def bisected_mask(x: torch.Tensor, k: float, tau: float) -> torch.Tensor:
    """The mask by bisection on the threshold: an oracle that shares no formula with the closed form."""
    x = x.double() / tau
    low, high = float(x.min()) - 60.0, float(x.max()) + 60.0

    def mask(threshold: float) -> torch.Tensor:
        z = x - threshold
        return torch.where(z >= 0, 1 - 0.5 * torch.exp(-z.clamp(min=0)), 0.5 * torch.exp(z.clamp(max=0)))

    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float(mask(middle).sum()) > k else (low, middle)
    return mask((low + high) / 2)


scores = st.lists(st.floats(-50, 50, allow_nan=False, width=32), min_size=1, max_size=40)


@given(scores, st.floats(1e-3, 1 - 1e-3), st.sampled_from([1.0, 0.3, 0.05]))
def test_equals_bisection(values, share, tau):
    x = torch.tensor(values, dtype=torch.float64)
    k = share * len(values)
    mask, log_mask = soft_topk(x, k, tau)
    torch.testing.assert_close(mask, bisected_mask(x, k, tau), atol=1e-9, rtol=0)
    torch.testing.assert_close(log_mask.exp(), mask, atol=1e-12, rtol=1e-12)
    assert abs(float(mask.sum()) - k) < 1e-9 * len(values)


@given(scores, st.integers(0, 10**6), st.sampled_from([1.0, 0.01, 0.001]))
def test_properties_and_finite_gradients(values, draw, tau):
    """Sum, order, translation invariance; gradients finite for integer k, ties and wide gaps."""
    x = torch.tensor(values, requires_grad=True)
    k = torch.tensor(float(draw % (len(values) + 1)), requires_grad=True)
    soft = soft_topk(x, k, tau)
    mask, log_mask = soft.mask.detach(), soft.log_mask.detach()
    assert abs(float(mask.sum()) - float(k.detach())) < 1e-5 * len(values)
    assert not bool(log_mask.isnan().any())
    assert float(mask.min()) >= 0 and float(mask.max()) <= 1
    order = x.argsort()
    assert bool((mask[order].diff() >= -1e-6).all())
    shifted = soft_topk(x.detach() + 7.0, k.detach(), tau).mask
    if tau == 1.0:
        torch.testing.assert_close(shifted, mask, atol=2e-5, rtol=0)
    (soft.mask.square().sum() + (soft.log_mask.clamp(min=-30) * mask).sum()).backward()
    assert bool(x.grad.isfinite().all()) and bool(k.grad.isfinite())


@pytest.mark.parametrize(
    ("x", "k"),
    [
        ([3.0, 3.0, 3.0, 3.0], 2.0),  # all equal
        ([5.0, 1.0, 1.0, 1.0], 1.0),  # integer k, ties below
        ([0.0, 5000.0, -5000.0], 1.0),  # gaps that overflow a plain exponential
        ([0.0, 1.0], 1e-9),  # m = 0: the root lies above the largest score
        ([0.0, 1.0], 2 - 1e-9),  # m = n
        ([4.0], 0.25),
        ([4.0], 0.75),
    ],
)
def test_edges(x, k):
    mask, log_mask = soft_topk(torch.tensor(x, dtype=torch.float64), k)
    assert float(mask.sum()) == pytest.approx(k, rel=1e-9, abs=1e-11)
    assert not bool(log_mask.isnan().any())


@pytest.mark.parametrize("tau", [1.0, 0.2])
def test_gradients_against_finite_differences(tau):
    torch.manual_seed(0)
    x = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([0.2, 2.0, 5.5, 8.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: tuple(soft_topk(a, b, tau)), (x, k))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_keep_the_budget(dtype):
    x = (torch.randn(3, 1000) * 4).to(dtype).requires_grad_()
    k = torch.tensor([1.0, 150.0, 999.0])
    mask, _ = soft_topk(x, k, 0.01)
    assert mask.dtype == torch.float32
    torch.testing.assert_close(mask.sum(-1), k, atol=1e-3, rtol=0)
    mask.square().sum().backward()
    assert x.grad.dtype == dtype and bool(x.grad.isfinite().all())


def test_batch_dimensions_are_independent():
    x = torch.randn(2, 3, 4, 11, dtype=torch.float64)
    k = torch.rand(3, 1, dtype=torch.float64) * 10 + 0.5
    mask = soft_topk(x, k.expand(3, 4)).mask
    for index in [(0, 0, 0), (1, 2, 3), (1, 0, 2)]:
        torch.testing.assert_close(mask[index], soft_topk(x[index], k[index[1], 0]).mask)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="at least one score"):
        soft_topk(torch.zeros(3, 0), 1.0)
    with pytest.raises(ValueError, match="positive"):
        soft_topk(torch.zeros(3), 1.0, 0.0)
    with pytest.raises(ValueError, match="floating-point"):
        soft_topk(torch.zeros(3, dtype=torch.long), 1.0)
