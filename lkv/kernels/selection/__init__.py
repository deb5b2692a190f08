"""Eviction on a GPU in few launches (Triton): score the entries, move the best ones, and quantise them.

`triton` launches the kernels of `triton_kernels` and `quantise_kernels`. On other devices `lkv.policy.token_scores`,
`lkv.cache.eviction` and `lkv.cache.tiers` do the same with PyTorch's operators.
"""

import functools
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from lkv.utils import devices

LARGEST_SCORED_DIM = 128  # larger heads would take more shared memory than some GPUs have


class RecentTokens(NamedTuple):
    """The last `window` tokens before position `end`; of a head at most a third of its entries."""

    end: int
    window: int

    def rank_first(self, scores: Tensor, positions: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        """Return `scores` [B * H, n] with these tokens first, the newest before all others.

        Args:
            scores: The scores of the entries, in any order.
            positions: Pool of positions, int32 [P].
            starts: Where each head begins in it, int32 [B, H].
            counts: The entries of each head, int32 [B, H].
        """
        starts, counts = starts.flatten()[:, None], counts.flatten()[:, None]
        steps = torch.arange(scores.shape[1], device=scores.device)
        age = self.end - positions[(starts + steps).clamp_(max=len(positions) - 1)]
        is_recent = (age <= (counts // 3).clamp(max=self.window)) & (steps < counts)
        return torch.where(is_recent, torch.finfo(scores.dtype).max / age, scores)


class ScoreWeights(NamedTuple):
    """The weights of LKV-T in the heads of one layer, with token-independent factors pre-multiplied.

    Attributes:
        weight: [H, 2 d, d] in the dtype of the products: the MLP's first matrix over the deviations.
        bias: float32 [H, d], without the means.
        output: float32 [H, d].
        queries: float32 [H, G + r, d], means and columns of the spread of future queries; None without expected
            attention, as the next two.
        normaliser: float32 [H, G].
        attention: float32 [H], the weight of the expected attention.
        start: float32 [H, K], the knots of the position; None without them, as `end`.
        end: float32 [H, K].
    """

    weight: Tensor
    bias: Tensor
    output: Tensor
    queries: Tensor | None = None
    normaliser: Tensor | None = None
    attention: Tensor | None = None
    start: Tensor | None = None
    end: Tensor | None = None


def kernels_for(key: Tensor, value: Tensor) -> ModuleType | None:
    """Return the module `triton` if its kernels can run on k and v [..., d], else None."""
    if not devices.is_gpu(key.device) or value.dtype != key.dtype:
        return None
    return _kernels_for(key.device, key.dtype, key.shape[-1], value.shape[-1])


def ranking_for(scores: Tensor) -> ModuleType | None:
    """Return the module `triton` if its `rank` supports `scores` [N, T], else None."""
    if not devices.is_gpu(scores.device) or scores.dtype == torch.float64:
        return None
    return _kernels_for(scores.device, torch.float32, 1, 1)


@functools.cache
def _kernels_for(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> ModuleType | None:
    # Without a working Triton, PyTorch's operators are used; attention logs the reason.
    try:
        module = import_module("lkv.kernels.selection.triton")
    except Exception:
        return None
    return None if module.unsupported_reason(device, dtype, dim, value_dim) else module
