"""Soft-masked attention: the augmented column against the formula of App. B, values and gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lkv.kernels.soft_mask_attention import soft_mask_attention


def inputs(batch, kv_heads, groups, rows, length, dim, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(batch, kv_heads * groups, rows, dim, dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, length, dim, dtype=dtype) for _ in "kv")
    log_mask = -torch.rand(batch, kv_heads, length, dtype=torch.promote_types(dtype, torch.float32)) * 12
    return [x.requires_grad_() for x in (q, k, v, log_mask)]


shapes = st.tuples(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(0, 20),
    st.sampled_from([8, 12, 64]),
)  # fmt: skip


@given(shapes)
def test_values_and_gradients_equal_the_reference(shape):
    batch, kv_heads, groups, rows, older, dim = shape
    arguments = inputs(batch, kv_heads, groups, rows, rows + older, dim)
    outs = [soft_mask_attention(*arguments, backend=backend) for backend in ("sdpa", "reference")]
    torch.testing.assert_close(*outs, atol=1e-12, rtol=1e-12)
    grads = [torch.autograd.grad(out.sin().sum(), arguments) for out in outs]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)


def test_is_the_multiplicative_form_of_the_paper():
    """App. B: raw softmax, times m, renormalised."""
    q, k, v, log_mask = inputs(1, 1, 1, 1, 6, 8)
    raw = torch.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1) * log_mask.exp()[:, :, None]
    expected = raw / raw.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(soft_mask_attention(q, k, v, log_mask), expected)


def test_mask_gradient_has_no_small_divisor():
    """With m = e^-300 (zero in float32) the gradient with respect to log m is finite, and zero."""
    q, k, v, _ = inputs(1, 2, 2, 3, 10, 8, torch.float32)
    log_mask = torch.zeros(1, 2, 10)
    log_mask[..., :4] = -300.0
    log_mask.requires_grad_()
    soft_mask_attention(q, k, v, log_mask).square().sum().backward()
    assert bool(log_mask.grad.isfinite().all())
    assert float(log_mask.grad[..., :4].abs().max()) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_is_that_of_eager_attention(dtype):
    exact = inputs(2, 3, 3, 16, 80, 64)
    half = [x.detach().to(dtype) for x in exact[:3]]
    log_mask = exact[3].detach()
    truth = soft_mask_attention(*(x.double() for x in half), log_mask, backend="reference")
    ours = (soft_mask_attention(*half, log_mask.float()).double() - truth).abs().max()
    eager = (soft_mask_attention(*half, log_mask.to(dtype), backend="reference").double() - truth).abs().max()
    assert float(ours) <= 1.5 * float(eager)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [10, 3])
def test_empty_rows_are_zero_and_pass_no_gradient(dtype, rows):
    """The first 8 keys of head 1 have m = 0: all its rows but the last 2 are empty."""
    q, k, v, log_mask = (x.detach() for x in inputs(1, 2, 2, rows, 10, 8, dtype))
    log_mask[0, 1, :8] = -torch.inf
    arguments = [x.requires_grad_() for x in (q, k, v, log_mask)]
    empty = rows - 2
    results = []
    for backend in ("sdpa", "reference"):
        out = soft_mask_attention(*arguments, backend=backend)
        grads = torch.autograd.grad(out.sum() + out.square().sum(), arguments)
        for x in (out[:, 2:, :empty], grads[0][:, 2:, :empty], *(x[:, 1, :8] for x in grads[1:])):
            assert not bool(x.any())
        results.append([out, *grads])
    tolerance = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)
