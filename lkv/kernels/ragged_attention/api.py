"""Validation and choice of the backend for attention over the ragged cache (Sec. 4.5)."""

import functools
import logging
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from lkv.errors import BackendError
from lkv.kernels.ragged_attention.codes import QuantizedKV
from lkv.utils import devices

_NAMES = ("loop", "numba", "reference", "triton", "varlen")
_ON_CUDA = ("triton", "varlen", "loop")


@overload
def ragged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float, backend: str = "auto",
    *, causal: bool = True, lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def ragged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float, backend: str = "auto",
    *, causal: bool = True, lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def ragged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    starts: Tensor,
    lens: Tensor,
    scale: float,
    backend: str = "auto",
    *,
    causal: bool = True,
    lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new tokens over what each KV head holds, the new tokens' own k and v included.

    `q` [B, Hq, Tq, d]; `k_pool` [P, d], `v_pool` [P, dv]: the spans of all heads one after another; `starts`, `lens`
    [B, Hkv] int32: where the span of each head begins and how many entries it has, of which the last Tq are the new
    tokens (causal among themselves; everything older is visible). Returns [B, Hq, Tq, dv].

    Without `causal` the new tokens' k and v lie elsewhere, and every one of the Tq sees the whole span. `lse`: returns
    the logarithm of the sum of e^score as well, [B, Hq, Tq] in float32 (float64 for float64), for `merge_attention`
    to put two partial attentions together. A span without entries then has outputs of 0 and a logarithm of -inf.

    `backend`: "auto" (on CUDA the first of "triton", "varlen" and "loop" that can run, the reason logged once; on a
    CPU "numba" where it can run and few rows attend; "loop" else) or one of these or "reference" by name, which never
    falls back. "triton" and "varlen" never wait for the device; "numba" gives no gradients. Raises ValueError for
    shapes or dtypes that do not fit, BackendError where the named backend cannot run.
    """
    _check(q, k_pool, v_pool, starts, lens)
    chosen = _backend_for(backend, k_pool, v_pool, starts, lens, q)
    module = _module(chosen)
    if causal and not lse:
        return module.attend(q, k_pool, v_pool, starts, lens, scale)
    out, logarithm = module.attend_with_lse(q, k_pool, v_pool, starts, lens, scale, causal)
    return (out, logarithm) if lse else out


def append_and_attend(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    starts: Tensor,
    lens: Tensor,
    scale: float,
    backend: str = "auto",
    buffers: dict[Any, Any] | None = None,
    quantized: QuantizedKV | None = None,
) -> Tensor:
    """Append new `key` [B, Hkv, Tq, d] and `value` [B, Hkv, Tq, dv] to the spans, then attend as `ragged_attention`.

    There must be room for Tq entries behind the `lens` [B, Hkv] of each span. Changes the pools, and `lens` in place: a
    replay of what was launched appends once more. Returns [B, Hq, Tq, dv]. `buffers`: a dictionary in which a backend
    keeps what it needs from step to step; for the layers of one cache, which take turns. `quantized`: the first entries
    of each span, which the pools lack: entry i of a span is at place starts + i of the pools only where it is none of
    these, so that `starts` may be below 0. Raises as `ragged_attention`, and BackendError for codes where
    `can_attend_quantized` says no.
    """
    _check(q, k_pool, v_pool, starts, lens)
    chosen = _backend_for(backend, k_pool, v_pool, starts, lens, q, key, value, quantized=quantized)
    if chosen == "triton":
        return _module(chosen).append_and_attend(q, key, value, k_pool, v_pool, starts, lens, scale, buffers, quantized)
    if chosen == "numba":
        return _module(chosen).append_and_attend(q, key, value, k_pool, v_pool, starts, lens, scale, quantized)
    if quantized is not None:
        raise BackendError(chosen, "it reads no codes, as 'triton' and 'numba' do: restore the entries.")
    _module("loop").append(key, value, k_pool, v_pool, starts, lens)
    return _module(chosen).attend(q, k_pool, v_pool, starts, lens, scale)


def can_attend_quantized(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    starts: Tensor,
    lens: Tensor,
    quantized: QuantizedKV,
) -> bool:
    """Whether `append_and_attend` attends to entries in 8 or 4 bits as they are, given these tensors."""
    return _backend_for("auto", k_pool, v_pool, starts, lens, q, key, value, quantized=quantized) in ("triton", "numba")


def append(key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor) -> None:
    """The first half of `append_and_attend`, by plain index assignment on any device; waits for nothing."""
    _module("loop").append(key, value, k_pool, v_pool, starts, lens)


def _check(q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor) -> None:
    if starts.shape != lens.shape or starts.ndim != 2 or starts.shape[0] != q.shape[0] or q.shape[1] % starts.shape[1]:
        raise ValueError(f"starts {tuple(starts.shape)} and lens {tuple(lens.shape)} do not fit q {tuple(q.shape)}.")
    if (
        k_pool.shape[-1] != q.shape[-1]
        or k_pool.shape[0] != v_pool.shape[0]
        or not q.dtype == k_pool.dtype == v_pool.dtype
    ):
        raise ValueError(
            f"k_pool {tuple(k_pool.shape)} {k_pool.dtype} and v_pool {tuple(v_pool.shape)} {v_pool.dtype} do not fit "
            f"q {tuple(q.shape)} {q.dtype} and each other."
        )


def _backend_for(
    backend: str,
    k_pool: Tensor,
    v_pool: Tensor,
    starts: Tensor,
    lens: Tensor,
    q: Tensor,
    *new: Tensor,
    quantized: QuantizedKV | None = None,
) -> str:
    """The name of the backend for these tensors; `_chosen` does not know how they lie."""
    chosen = _chosen(backend, q.device, q.dtype, k_pool.shape[-1], v_pool.shape[-1])
    if chosen != "numba":
        return chosen
    numba, rows = _module("numba"), q.shape[2] * (q.shape[1] // starts.shape[1])
    reason = numba.unfit(k_pool, v_pool, starts, lens, q, *new, codes=quantized)
    if backend == "auto":
        return "loop" if reason or rows > numba.MOST_ROWS else "numba"
    if reason:
        raise BackendError("numba", reason)
    return chosen


@functools.cache
def _chosen(backend: str, device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str:
    """The name of the backend to use; cached, so that a fallback is logged once and a step decides nothing."""
    if backend != "auto":
        if backend not in _NAMES:
            raise ValueError(f"backend is {backend!r}, but it must be 'auto' or one of {_NAMES}.")
        if reason := _refusal(backend, device, dtype, dim, value_dim):
            raise BackendError(backend, reason)
        return backend
    if not devices.is_gpu(device):
        return "loop" if _refusal("numba", device, dtype, dim, value_dim) else "numba"
    reasons = {name: _refusal(name, device, dtype, dim, value_dim) for name in _ON_CUDA}
    chosen = next(name for name in _ON_CUDA if reasons[name] is None)
    for name in _ON_CUDA[: _ON_CUDA.index(chosen)]:
        logging.getLogger(__name__).warning("ragged attention goes without %r: %s", name, reasons[name])
    return chosen


def _refusal(backend: str, device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Why a backend cannot run, in one sentence; None where it can."""
    if backend in ("loop", "reference"):
        return None
    try:
        module = _module(backend)
    except ImportError as error:
        return f"{error.name or backend} cannot be imported ({error})."
    # A package that is broken or does not go with another one must not take the rest with it.
    except Exception as error:
        return f"{backend} cannot be imported ({type(error).__name__}: {error})."
    return module.refusal(device, dtype, dim, value_dim)


@functools.cache
def _module(name: str) -> ModuleType:
    return import_module(f"lkv.kernels.ragged_attention.{name}")
