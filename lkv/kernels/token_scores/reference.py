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
    return attention_of(key, value, attention_rows(ahead.to(dtype), scale, mean, spread), weight, normaliser)


def attention_rows(ahead: Tensor, scale: float, mean: Tensor, spread: Tensor) -> Tensor:
    """What `attention` multiplies k by, [H, G + r, d], in the precision of `ahead`."""
    mean, spread = mean.to(ahead.dtype), spread.to(ahead.dtype)
    return torch.cat([mean, spread.transpose(-1, -2)], -2) @ ahead * scale


def attention_of(key: Tensor, value: Tensor, rows: Tensor, weight: Tensor, normaliser: Tensor) -> Tensor:
    """`attention` of some tokens, from its `rows`."""
    dtype, group = rows.dtype, normaliser.shape[1]
    # E[exp(q k)] of a normal q is exp(mean k + k cov k / 2); one product serves the means and the spread.
    products = rows @ key.to(dtype).transpose(-1, -2)
    logits = products[..., :group, :] + products[..., group:, :].square().sum(-2, keepdim=True) / 2
    norm = torch.linalg.vector_norm(value.to(dtype), dim=-1).clamp(min=_LEAST_NORM)
    return weight[:, None] * ((logits - normaliser[..., None]).logsumexp(-2) + norm.log())


def knots(table: Tensor, places: Tensor) -> Tensor:
    """The piecewise linear functions `table` [H, K] of log2(places), places [T] >= 1: [H, T]."""
    knot = torch.arange(table.shape[-1], dtype=table.dtype, device=table.device)[:, None]
    x = places.to(table.dtype).log2().clamp(max=table.shape[-1] - 1)
    # What each knot weighs at each place; as a product its gradient needs no scattering.
    return table @ (1 - (x - knot).abs_()).clamp_(min=0)
