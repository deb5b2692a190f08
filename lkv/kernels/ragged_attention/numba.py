"""Ragged attention on a CPU by one compiled function over the spans of all heads at once, where numba is installed.

What a step of the loop costs is mostly calls of PyTorch, some for each head; here it is two calls a layer, whose
threads are PyTorch's own (of the OpenMP runtime that it is linked with): no second pool of threads waits for a core.
"""

import ctypes
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from numba import cfunc
from torch import Tensor

import lkv.kernels.ragged_attention.numba_kernels as kernels
from lkv.kernels.ragged_attention.codes import QuantizedKV

_KINDS = {torch.float32: kernels.FLOAT32, torch.bfloat16: kernels.BFLOAT16, torch.float16: kernels.FLOAT16}
_HALF = (torch.bfloat16, torch.float16)
# Rows of a span that "auto" takes: of more, the products of a matrix library are faster.
MOST_ROWS = 64
# Bytes of both pools below which threads save nothing.
_LEAST_SHARED = 2**18
# Slices a thread: one that was kept waiting leaves some to the others.
_SLICES = 2
_IN_BASE_2 = math.log2(math.e)


class Compiled(NamedTuple):
    """The two functions of a step, the address of the first, and what holds their code."""

    attend: Callable[[int], None]
    join: Callable[[int], None]
    address: int
    code: tuple[Any, ...]


def refusal(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Why this cannot run, in one sentence; None where it can. Compiles at its first use."""
    if device.type != "cpu":
        return f"the pools are on {device.type!r}, but numba compiles for the CPU."
    if dtype not in _KINDS:
        return f"the dtype is {dtype}, but the compiled function takes float32, bfloat16 and float16."
    if min(dim, value_dim) < 1 or dim % kernels.LANES or value_dim % kernels.LANES:
        return (
            f"the head sizes are {dim} and {value_dim}, but the compiled function takes multiples of {kernels.LANES}."
        )
    if _parallel() is None:
        return "PyTorch's threads cannot be asked here (its OpenMP runtime has no GOMP_parallel, as on Linux)."
    try:
        _compiled()
    # Whatever a compiler on an unknown machine may raise.
    except Exception as error:
        logging.getLogger(__name__).warning("ragged attention goes without numba, which could not compile: %s", error)
        return f"numba could not compile ({(str(error).strip() or type(error).__name__).splitlines()[0]})."
    return None


def unfit(
    k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, *more: Tensor, codes: QuantizedKV | None = None
) -> str | None:
    """Why these tensors cannot be given by their addresses, in one sentence; None where they can. `more`: the queries
    and what is to be appended."""
    tensors = (k_pool, v_pool, starts, lens, *more, *(() if codes is None else codes[:7]))
    if not all(type(x) is Tensor and x.is_cpu for x in tensors):
        return "all tensors must be plain ones on the CPU."
    if not all(x.is_contiguous() for x in tensors[:4]):
        return "pools, starts and lens must be contiguous."
    if starts.dtype != torch.int32 or lens.dtype != torch.int32:
        return f"starts and lens must be int32, not {starts.dtype} and {lens.dtype}."
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "it gives no gradients: use torch.no_grad()."
    return None if codes is None else _unfit_codes(codes, k_pool.shape[1], v_pool.shape[1])


def _unfit_codes(codes: QuantizedKV, dim: int, value_dim: int) -> str | None:
    steps, least = (codes.key_scale, codes.value_scale), (codes.key_minimum, codes.value_minimum)
    if not all(x.is_contiguous() for x in codes[:7]) or codes.tables.dtype != torch.int32:
        return "codes must be contiguous, with tables in int32."
    if {x.dtype for x in steps} != {torch.bfloat16} or least[0].dtype not in _HALF or least[0].dtype != least[1].dtype:
        return "steps must be bfloat16, and the least values of k and v of one dtype in half precision."
    halves = kernels.LANES * (8 // codes.bits)
    if codes.group % kernels.LANES or dim % halves or value_dim % halves:
        return f"groups must be of a multiple of {kernels.LANES} values, head sizes of {halves} at {codes.bits} bits."
    return None


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float) -> Tensor:
    """Shapes as in `api.ragged_attention`."""
    return _step(q, k_pool, v_pool, starts, lens, scale)


def attend_with_lse(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`attend` and the log-sum-exp of the scores, [B, Hq, Tq]; without `causal` all entries are visible."""
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="cpu")
    return _step(q, k_pool, v_pool, starts, lens, scale, causal=causal, lse=lse), lse


def append_and_attend(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    starts: Tensor,
    lens: Tensor,
    scale: float,
    codes: QuantizedKV | None = None,
) -> Tensor:
    """As `api.append_and_attend`."""
    added = key.shape[2]
    if (
        key.shape != (*starts.shape, added, k_pool.shape[1])
        or value.shape != (*starts.shape, added, v_pool.shape[1])
        or not key.dtype == value.dtype == k_pool.dtype
    ):
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} do not fit the pools and starts.")
    return _step(q, k_pool, v_pool, starts, lens, scale, key.contiguous(), value.contiguous(), added, codes=codes)


def _step(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    starts: Tensor,
    lens: Tensor,
    scale: float,
    key: Tensor | None = None,
    value: Tensor | None = None,
    added: int = 0,
    causal: bool = True,
    lse: Tensor | None = None,
    codes: QuantizedKV | None = None,
) -> Tensor:
    batch, heads, tokens, dim = q.shape
    spans, value_dim = starts.numel(), v_pool.shape[1]
    rows = tokens * (heads // starts.shape[1])
    held = k_pool.nbytes + v_pool.nbytes + (0 if codes is None else codes.key.nbytes + codes.value.nbytes)
    threads = torch.get_num_threads() if held >= _LEAST_SHARED else 1
    slices = 1 if threads == 1 else _SLICES * threads
    query = q.contiguous().float()
    out = torch.empty((batch, heads, tokens, value_dim), dtype=torch.float32, device="cpu")
    summed, ranked = (slices + spans) * rows * value_dim, 2 * (slices + spans) * rows
    scratch = slices * (kernels.BLOCK * (rows + max(dim, value_dim)) + 2 * dim)
    buffer = torch.empty(summed + ranked + scratch, dtype=torch.float32, device="cpu")
    parts = buffer.data_ptr()
    arguments = kernels.Arguments(
        0, 0, query.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), starts.data_ptr(), lens.data_ptr(),
        0 if key is None else key.data_ptr(), 0 if value is None else value.data_ptr(), out.data_ptr(),
        0 if lse is None else lse.data_ptr(), parts, parts + 4 * summed, parts + 4 * (summed + ranked),
        _KINDS[k_pool.dtype], k_pool.shape[0], spans, rows, tokens, dim, value_dim, slices, added, causal,
        *_fields_of(codes), scale * _IN_BASE_2,
    )  # fmt: skip
    _run(ctypes.addressof(arguments), threads)
    if arguments.outside:
        raise ValueError("starts and lens reach beyond the pools: a span must lie within them, new entries included.")
    return out.to(q.dtype)


def _fields_of(codes: QuantizedKV | None) -> tuple[int, ...]:
    """The fields of `kernels.Arguments` from `tables` on."""
    if codes is None:
        return (0,) * 12
    addresses = (x.data_ptr() for x in (codes.tables, *codes[:6]))
    least = _KINDS[codes.key_minimum.dtype]
    return (*addresses, codes.bits, codes.group, least, len(codes.key), len(codes.key_scale))


def _run(address: int, threads: int) -> None:
    compiled, parallel = _compiled(), _parallel()
    if threads == 1 or parallel is None:
        compiled.attend(address)
    else:
        parallel(compiled.address, address, threads, 0)
    compiled.join(address)


@functools.cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, its argument, threads, flags)` of the OpenMP runtime that PyTorch is linked with."""
    try:
        # A library's handle finds what it and those that it is linked with define.
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


@functools.cache
def _compiled() -> Compiled:
    """Both functions; compiled once a machine, where there is a folder to keep them in."""
    logging.getLogger(__name__).info("ragged attention is compiled for this CPU, or read from numba's cache")
    code = tuple(_function(python) for python in (kernels.attend_slices, kernels.join_slices))
    attend, join = (ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function.address) for function in code)
    return Compiled(attend, join, code[0].address, code)


def _function(python: Callable[[Any], None]) -> Any:
    try:
        return cfunc(kernels.SIGNATURE, cache=True)(python)
    # No folder can be written to, or what lies there is damaged.
    except Exception:
        return cfunc(kernels.SIGNATURE)(python)
