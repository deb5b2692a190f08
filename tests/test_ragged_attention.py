"""Attention over the ragged pool against the float64 reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lkv.ops.ragged_attention import ragged_attention


def pool(lengths: list[list[int]], slack: int, dim: int, dtype: torch.dtype):
    """Random spans in a pool whose slack is poisoned with NaN."""
    lens = torch.tensor(lengths, dtype=torch.int32)
    ends = (lens.flatten() + slack).cumsum(0)
    starts = (ends - lens.flatten() - slack).view_as(lens).int()
    pools = [torch.full((int(ends[-1]), dim), torch.nan, dtype=dtype) for _ in "kv"]
    for start, length in zip(starts.flatten().tolist(), lens.flatten().tolist(), strict=True):
        for one in pools:
            one[start : start + length] = torch.randn(length, dim).to(dtype)
    return *pools, starts, lens


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=2, max_size=2), min_size=1, max_size=3),
    st.integers(1, 3), st.integers(1, 6), st.sampled_from([torch.float64, torch.float32]),
)  # fmt: skip
def test_loop_equals_reference(older, groups, rows, dtype):
    torch.manual_seed(1)
    lengths = [[count + rows for count in row] for row in older]
    k, v, starts, lens = pool(lengths, 3, 16, dtype)
    q = torch.randn(len(older), 2 * groups, rows, 16).to(dtype)
    ours = ragged_attention(q, k, v, starts, lens, 0.25)
    exact = ragged_attention(q, k, v, starts, lens, 0.25, backend="reference")
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(ours, exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5])
def test_half_precision(dtype, rows):
    torch.manual_seed(1)
    k, v, starts, lens = pool([[rows, 40 + rows]], 4, 32, dtype)
    q = torch.randn(1, 6, rows, 32).to(dtype)
    ours = ragged_attention(q, k, v, starts, lens, 32**-0.5)
    exact = ragged_attention(q, k, v, starts, lens, 32**-0.5, backend="reference")
    torch.testing.assert_close(ours, exact, atol=2e-2, rtol=2e-2)


def test_bad_arguments_are_named():
    k, v, starts, lens = pool([[4, 5]], 0, 8, torch.float32)
    with pytest.raises(ValueError, match="backend"):
        ragged_attention(torch.zeros(1, 2, 1, 8), k, v, starts, lens, 1.0, backend="magic")
    with pytest.raises(ValueError, match="do not fit"):
        ragged_attention(torch.zeros(1, 3, 1, 8), k, v, starts, lens, 1.0)
