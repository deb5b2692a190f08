"""What the Triton kernels ask of a device. Imported only where Triton is installed."""

import functools
from typing import Any

import torch
import triton

from lkv.utils import devices


def is_interpreted(kernel: Any) -> bool:
    """Whether a kernel runs in Triton's interpreter (TRITON_INTERPRET=1), on any device."""
    return not isinstance(kernel, triton.JITFunction)


def gpu_refusal(device: torch.device) -> str | None:
    """Why a GPU is too old for compiled kernels, in one sentence; None where it is not."""
    gpu = devices.runtime(device).get_device_properties(device)
    if gpu.major >= 8:
        return None
    return f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, but the Triton kernels need 8.0."


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one block may use, as Triton checks them."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
