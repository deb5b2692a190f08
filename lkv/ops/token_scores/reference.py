"""The terms as their formulas stand, differentiable, in float32 or in the precision of their input if it is higher."""

import torch
from torch import Tensor
from torch.nn.functional import silu

_LEAST_NORM = 1e-12


def content(
    key: Tensor, value: Tensor, mean: Tensor, std: Tensor, hidden: Tensor, bias: Tensor, output: Tensor
) -> Tensor:
    """The MLP over [k; v] normalised by mean and std: [B, H, T]."""
    dtype = torch.promote_types(key.dtype, torch.float32)
    # The normalisation is folded into the first matrix, so that k and v are read once and never copied whole.
    weight = hidden.to(dtype) / std[..., None].to(dtype)
    inside = bias - (mean[..., None, :].to(dtype) @ weight).squeeze(-2)
    d = key.shape[-1]
    units = key.to(dtype) @ weight[:, :d] + value.to(dtype) @ weight[:, d:] + inside[:, None]
    return (silu(units) @ output[..., None].to(dtype)).squeeze(-1)


def attention(
    key: Tensor,
    value: Tensor,
    ahead: Tensor,
    scale: float,
    weight: Tensor,
    mean: Tensor,
    spread: Tensor,
    normaliser: Tensor,
) -> Tensor:
    """weight * log(sum over the group's heads of E[exp(q k scale)] / normaliser, times ||v||): [B, H, T]."""
    dtype = torch.promote_types(key.dtype, torch.float32)
    ahead = ahead.to(dtype)
    # E[exp(q k)] of a normal q is exp(mean k + k cov k / 2); one product serves the means and the spread.
    columns = torch.cat([(mean.to(dtype) @ ahead).transpose(-1, -2), ahead.T @ spread.to(dtype)], -1) * scale
    products = key.to(dtype) @ columns
    group = mean.shape[1]
    logits = products[..., :group] + products[..., group:].square().sum(-1, keepdim=True) / 2 - normaliser[:, None]
    norm = torch.linalg.vector_norm(value.to(dtype), dim=-1).clamp(min=_LEAST_NORM)
    return weight[:, None] * (logits.logsumexp(-1) + norm.log())


def knots(table: Tensor, places: Tensor) -> Tensor:
    """The piecewise linear functions `table` [H, K] of log2(places), places [T] >= 1: [H, T]."""
    knot = torch.arange(table.shape[-1], dtype=table.dtype, device=table.device)[:, None]
    x = places.to(table.dtype).log2().clamp(max=table.shape[-1] - 1)
    # What each knot weighs at each place; as a product its gradient needs no scattering.
    return table @ (1 - (x - knot).abs_()).clamp_(min=0)
