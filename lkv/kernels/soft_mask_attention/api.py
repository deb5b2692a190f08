"""Validation and choice of the backend for soft-masked attention (App. B)."""

import functools
import logging
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from lkv.errors import BackendError
from lkv.kernels.checks import check_storage, check_tensor
from lkv.utils import devices

_NAMES = ("reference", "sdpa", "triton")


def soft_mask_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_mask: Tensor,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention in which key i counts m_i times: p_i ~ m_i exp(scale q k_i) (App. B, Sec. 3.5).

    A row that sees no key with m > 0 is zero, and so are the gradients through it.

    Args:
        q: Queries [B, Hq, Tq, d], the last Tq positions; Hq is a multiple of Hkv.
        k: Keys [B, Hkv, Tk, d], Tk >= Tq.
        v: Values [B, Hkv, Tk, dv].
        log_mask: Logarithm of the mask [B, Hkv, Tk]: 0 leaves a key as it is, -inf removes it.
        scale: What scores are multiplied by, d ** -0.5 by default.
        backend: "auto" takes Triton on CUDA where it can run (else the reason is logged once), SDPA elsewhere.
            "triton", "sdpa" and "reference" by name never fall back.

    Returns:
        Outputs [B, Hq, Tq, dv], differentiable in `q`, `k`, `v` and `log_mask`.

    Raises:
        ValueError: Shapes, dtypes, devices or masks do not fit. NaN and +inf in `log_mask` are looked for on the CPU
            only, because elsewhere reading the answer waits for the device.
        BackendError: The backend given by name cannot run.
    """
    for name, x, ndim in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("log_mask", log_mask, 3)):
        check_tensor(name, x, ndim)
        check_storage(name, x)
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {q.device}.")
    batch, kv_heads, length, head_dim = k.shape
    if v.shape[:3] != k.shape[:3] or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"v {list(v.shape)} {v.dtype} does not fit k {list(k.shape)} {k.dtype} and q of {q.dtype}: batch, heads, "
            "length and dtype must be the same."
        )
    if log_mask.shape != (batch, kv_heads, length):
        raise ValueError(f"Expected log_mask of shape {[batch, kv_heads, length]} but got {list(log_mask.shape)}.")
    if q.shape[0] != batch or q.shape[3] != head_dim or q.shape[1] % kv_heads or not 1 <= q.shape[2] <= length:
        raise ValueError(f"q has shape {tuple(q.shape)}, which does not fit k of shape {tuple(k.shape)}.")
    if log_mask.device.type == "cpu" and not bool((log_mask < torch.inf).all()):
        raise ValueError(
            "log_mask contains NaN or +inf, but it must be the logarithm of a finite mask m >= 0 (-inf where m = 0)."
        )
    chosen = _chosen(backend, q.device, q.dtype, head_dim, v.shape[3])
    return _module(chosen).attend(q, k, v, log_mask, head_dim**-0.5 if scale is None else scale)


@functools.cache
def _chosen(backend: str, device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str:
    """The name of the backend to use; cached, so that a fallback is logged once."""
    if backend not in ("auto", *_NAMES):
        raise ValueError(f"backend is {backend!r}, but it must be 'auto' or one of {_NAMES}.")
    if backend not in ("auto", "triton"):
        return backend
    if backend == "auto" and not devices.is_gpu(device):
        return "sdpa"
    reason = _refusal(device, dtype, dim, value_dim)
    if reason is None:
        return "triton"
    if backend == "triton":
        raise BackendError("triton", reason)
    logging.getLogger(__name__).warning("soft-masked attention goes without 'triton': %s", reason)
    return "sdpa"


def _refusal(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Why Triton cannot run, in one sentence; None where it can."""
    try:
        module = _module("triton")
    except ImportError as error:
        return f"{error.name or 'triton'} cannot be imported ({error})."
    return module.refusal(device, dtype, dim, value_dim)


@functools.cache
def _module(name: str) -> ModuleType:
    return import_module(f"lkv.kernels.soft_mask_attention.{name}")
