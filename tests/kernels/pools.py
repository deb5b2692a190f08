"""Random pools of the ragged cache for the tests of its kernels."""

import torch


def pool_of(lengths, slack, dim, value_dim, dtype):
    """Random spans in pools whose slack is NaN."""
    lens = torch.tensor(lengths, dtype=torch.int32)
    ends = (lens.flatten() + slack).cumsum(0)
    starts = (ends - lens.flatten() - slack).view_as(lens).int()
    pools = [torch.full((int(ends[-1]), size), torch.nan, dtype=dtype) for size in (dim, value_dim)]
    for start, length in zip(starts.flatten().tolist(), lens.flatten().tolist(), strict=True):
        for pool in pools:
            pool[start : start + length] = torch.randn(length, pool.shape[1]).to(dtype)
    return *pools, starts, lens
