"""Soft-TopK (Sec. 3.2, App. A): n scores become a mask in (0, 1)^n that sums to k, exactly and differentiably.

Shapes: x is [..., n]; k is [...] (broadcast against the leading dimensions of x) or a number.
"""

import functools
import logging
import math
from typing import NamedTuple

import torch
from torch import Tensor

from lkv.kernels.checks import check_storages
from lkv.utils import devices

_LOG2 = math.log(2.0)
# exp(80) is finite in float32; beyond it the mask's gradient with respect to k underflows anyway.
_MAX_EXPONENT = 80.0


class SoftTopK(NamedTuple):
    """A soft mask and its logarithm, both [..., n]; `log_mask` is computed without ever dividing by the mask."""

    mask: Tensor
    log_mask: Tensor


def soft_topk(x: Tensor, k: Tensor | float, temperature: float = 1.0) -> SoftTopK:
    """Apply Soft-TopK to the last dimension of `x` (Sec. 3.2).

    Computed in float64, on the CPU where the device of `x` has none. Gradients reach `x` and `k` by the implicit
    formula of App. A.

    Args:
        x: Scores [..., n] of any floating-point dtype.
        k: How many entries to keep, in [0, n]: a number, or a tensor that broadcasts against x.shape[:-1]. Values at
            the ends are moved inside by a relative 1e-12, as App. A demands.
        temperature: tau > 0, by which the scores are divided.

    Returns:
        Mask and log-mask [..., n] in the dtype of `x`, or in float32 where `x` has half precision (a mask in half
        precision could not sum to k).

    Raises:
        ValueError: The last dimension is empty, the scores are integers, `k` does not broadcast, or tau <= 0.
    """
    if not x.is_floating_point():
        raise ValueError(f"soft_topk needs floating-point scores, got {x.dtype}; convert them with .float().")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"soft_topk needs at least one score in the last dimension, got shape {tuple(x.shape)}.")
    check_storages(x=x)
    if isinstance(k, Tensor):
        check_storages(k=k)
        if any(n != m for n, m in zip(k.shape[::-1], x.shape[-2::-1], strict=False) if 1 not in (n, m)):
            raise ValueError(f"k has shape {list(k.shape)}, which does not broadcast against {list(x.shape[:-1])}.")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, but it must be positive.")
    if not devices.has_float64(x.device):
        _warn_that_the_cpu_computes(x.device.type)
        k = k.cpu() if isinstance(k, Tensor) else k
        return SoftTopK(*(part.to(x.device) for part in soft_topk(x.cpu(), k, temperature)))
    k = torch.as_tensor(k, dtype=torch.float64 if not isinstance(k, Tensor) else None, device=x.device)
    k = k.expand(torch.broadcast_shapes(k.shape, x.shape[:-1]))
    x = x.expand(*k.shape, x.shape[-1])
    return SoftTopK(*_SoftTopK.apply(x, k, float(temperature)))


@functools.cache
def _warn_that_the_cpu_computes(kind: str) -> None:
    """Once a kind of device."""
    logging.getLogger(__name__).warning("soft_topk needs float64, which %r has not: it is computed on the CPU.", kind)


def threshold(x: Tensor, k: Tensor) -> Tensor:
    """Find the lambda of Sec. 3.2 for float64 scores `x` [..., n] and `k` [...]: sum f(x - lambda) = k. Returns [...].

    Everything is kept in logarithms and relative to the split score x_m, so nothing overflows when scores spread over
    thousands (tau = 0.001). Unlike App. A it allows m = 0 (small k, root above the largest score) and m = n.
    """
    n = x.shape[-1]
    k = k.clamp(n * 1e-12, n * (1 - 1e-12))
    x = x.sort(dim=-1, descending=True).values
    none = torch.full_like(x[..., :1], -math.inf)
    # log S1 of the first j scores and log S2 of the rest, for every j in 0..n.
    log_s1 = torch.cat([none, torch.logcumsumexp(-x, -1)], -1)
    log_s2 = torch.cat([torch.logcumsumexp(x.flip(-1), -1).flip(-1), none], -1)
    # F(x_j), the sum at lambda = x_j, grows with j; the split m is the last j with F(x_j) <= k.
    count = torch.arange(1, n + 1, dtype=x.dtype, device=x.device)
    at_score = count - 0.5 * (log_s1[..., 1:] + x).exp() + 0.5 * (log_s2[..., 1:] - x).exp()
    m = (at_score <= k[..., None]).sum(-1, keepdim=True)
    x_m = x.gather(-1, (m - 1).clamp(min=0)).squeeze(-1)
    log_s1 = log_s1.gather(-1, m).squeeze(-1) + x_m
    log_s2 = log_s2.gather(-1, m).squeeze(-1) - x_m
    # Positive root of S1 y^2 + 2 d y - S2 = 0 with d = k - m; the conjugate form where d > 0 would cancel.
    d = k - m.squeeze(-1)
    log_d, half = d.abs().log(), 0.5 * (log_s1 + log_s2)
    scale = torch.maximum(log_d, half)
    log_sum = scale + ((log_d - scale).exp() + ((2 * (log_d - scale)).exp() + (2 * (half - scale)).exp()).sqrt()).log()
    return x_m + torch.where(d > 0, log_s2 - log_sum, log_sum - log_s1)


def laplace_cdf(z: Tensor) -> Tensor:
    """Return f(z) of App. A."""
    tail = 0.5 * (-z.abs()).exp()
    return torch.where(z < 0, tail, 1 - tail)


def log_laplace_cdf(z: Tensor) -> Tensor:
    """Return log f(z), exact in both tails."""
    return torch.where(z < 0, z - _LOG2, torch.log1p(-0.5 * (-z.abs()).exp()))


class _SoftTopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, k: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        out_dtype = torch.promote_types(x.dtype, torch.float32)
        scaled = x.double() / temperature
        z = scaled - threshold(scaled, k.double())[..., None]
        ctx.save_for_backward(z.to(out_dtype))
        ctx.temperature, ctx.x_dtype, ctx.k_dtype = temperature, x.dtype, k.dtype
        return laplace_cdf(z).to(out_dtype), log_laplace_cdf(z).to(out_dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_mask, grad_log = grads
        (z,) = ctx.saved_tensors
        tail = 0.5 * (-z.abs()).exp()  # f'(z)
        # d log f = 1 below the threshold and f'/f above it, where f >= 1/2: no small divisor anywhere.
        log_slope = torch.where(z < 0, torch.ones_like(z), tail / (1 - tail))
        grad_z = grad_mask * tail + grad_log * log_slope
        weight = torch.softmax(-z.abs(), -1)  # d lambda / d x
        grad_x = (grad_z - weight * grad_z.sum(-1, keepdim=True)) / ctx.temperature
        # d lambda / d k = -1 / sum f'. For the mask, f' / sum f' is the softmax weight. For the log-mask the factor is
        # unbounded and is applied in logarithms, entry by entry.
        log_density = torch.logsumexp(-z.abs(), -1, keepdim=True) - _LOG2
        growth = (log_slope.log() - log_density).clamp(max=_MAX_EXPONENT).exp()
        grad_k = (grad_mask * weight + grad_log * growth).sum(-1)
        return grad_x.to(ctx.x_dtype), grad_k.to(ctx.k_dtype), None
