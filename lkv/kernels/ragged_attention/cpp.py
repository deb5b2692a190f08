"""Ragged attention on a CPU in C++ (`cpu_kernel.cpp`): append and attend to all spans of a layer in one call.

The file is compiled for the processor at its first use. It runs on PyTorch's own threads; there is no second pool of
threads that would compete for the cores.
"""

import functools
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lkv.kernels.ragged_attention.arguments import RaggedKV
from lkv.utils.cpp_compiler import build_library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_SOURCE = Path(__file__).with_name("cpu_kernel.cpp")
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
_FLAGS = {  # by `torch.backends.cpu.get_cpu_capability()`: what at::vec is compiled with in PyTorch itself
    "AVX2": ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"],
    "AVX512": [*_AVX512, "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"],
}
_loading = threading.Lock()


def unsupported_reason(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Return why this cannot run, in one sentence; None if it can. Compiles at its first use."""
    if device.type != "cpu":
        return f"the pools are on {device.type!r}, but it is compiled for the CPU."
    if dtype not in DTYPES:
        return f"the dtype is {dtype}, but it takes float32, bfloat16 and float16."
    with _loading:
        return _load()


@functools.cache
def _load() -> str | None:
    """Compile and load the library; returns why that is not possible."""
    if sys.platform != "linux":
        return f"it is compiled on Linux alone, not on {sys.platform}."
    flags = ["-O3", "-fopenmp", *_FLAGS.get(torch.backends.cpu.get_cpu_capability(), [])]
    logger = logging.getLogger(__name__)
    try:
        logger.info("Ragged attention for this CPU is compiled (once, about 10 seconds) or read from the cache.")
        try:
            torch.ops.load_library(build_library(_SOURCE, flags))
        except OSError:  # a damaged file
            torch.ops.load_library(build_library(_SOURCE, flags, rebuild=True))
    except (OSError, RuntimeError) as error:
        logger.warning("Ragged attention goes without 'cpp', decoding is slower: %s", error)
        return f"{error}."
    return None


def attend(
    q: Tensor, kv: RaggedKV, scale: float, causal: bool = True, with_lse: bool = False, softcap: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Shapes as in `api.ragged_attention`."""
    return torch.ops.lkv.ragged_attention(q, *kv[:4], scale, causal, with_lse, None, None, *_lists(kv), softcap)


def append_and_attend(
    q: Tensor, key: Tensor, value: Tensor, kv: RaggedKV, scale: float, buffers: dict[Any, Any] | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """As `api.append_and_attend`; there are no `buffers` to keep."""
    return torch.ops.lkv.ragged_attention(q, *kv[:4], scale, True, False, key, value, *_lists(kv), softcap)[0]


def _lists(kv: RaggedKV) -> tuple[list[Tensor], list[int], list[Tensor]]:
    """Tensors and bits of all codes, and the tensors of the basis, as the operator takes them."""
    codes = [x for part in kv.quantized for x in part[:5]]
    return codes, [bits for part in kv.quantized for bits in part[5:]], list(kv.basis or ())
