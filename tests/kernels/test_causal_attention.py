"""Causal attention without a mask, against a softmax in float64 with one."""

import pytest
import torch

from lkv.kernels.causal_attention import causal_attention


def attend_by_formula(q, k, v, scale, padding):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    tokens, keys = q.shape[2], k.shape[2]
    visible = torch.ones(len(q), 1, tokens, keys, dtype=torch.bool).tril(keys - tokens)
    for row, hidden in enumerate(padding or []):
        visible[row, ..., :hidden] = False
    scores = (q.double() @ k.mT * scale).masked_fill(~visible, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


def check(q, k, v, padding, tolerance):
    """Outputs and gradients against those of the formula."""
    found, expected = causal_attention(q, k, v, 0.3, padding), attend_by_formula(q, k, v, 0.3, padding)
    assert found.dtype == v.dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    grad = torch.randn_like(expected)
    gradients = (torch.autograd.grad((out.double() * grad).sum(), (q, k, v)) for out in (found, expected))
    for own, stock in zip(*gradients, strict=True):
        torch.testing.assert_close(own, stock, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 9), (9, 9), (5, 40), (40, 300)])
@pytest.mark.parametrize("padding", [None, [0, 0, 3], [3, 8, 8]])
@pytest.mark.parametrize(("heads", "widths"), [((4, 4), (16, 16)), ((6, 2), (24, 8)), ((6, 1), (8, 24))])
def test_outputs_and_gradients_are_those_of_the_formula(dtype, tolerance, tokens, keys, padding, heads, widths):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(3, head, length, width).to(dtype).requires_grad_()
        for head, length, width in zip((*heads, heads[1]), (tokens, keys, keys), (widths[0], *widths), strict=True)
    )
    check(q, k, v, padding, tolerance)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_strides_do_not_matter(heads):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, head, 16, length, dtype=torch.float64).mT.requires_grad_()
        for head, length in ((4, 5), (heads, 40), (heads, 40))
    )
    assert {x.stride(-1) for x in (q, k, v)} == {5, 40}
    check(q, k, v, None, 1e-12)


@pytest.mark.parametrize("sizes", [(0, 4, 2, 3, 8), (1, 0, 0, 3, 8), (1, 4, 2, 0, 8), (1, 4, 2, 3, 0)])
def test_empty_tensors_give_empty_outputs(sizes):
    batch, heads, kv_heads, tokens, dim = sizes
    q, kv = torch.randn(batch, heads, tokens, dim), torch.randn(batch, kv_heads, 7, dim)
    assert causal_attention(q, kv, kv, 0.3).shape == (batch, heads, tokens, dim)
