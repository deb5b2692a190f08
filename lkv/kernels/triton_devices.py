"""Device requirements of the Triton kernels. Imported only if Triton is installed."""

import functools

import torch
import triton

from lkv.kernels.triton_helpers import IS_INTERPRETED
from lkv.utils import devices

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1), on any device."""
    return IS_INTERPRETED.value


def is_compiled_for(device: torch.device) -> bool:
    """Return whether the kernels run compiled on a GPU."""
    return devices.is_gpu(device) and not is_interpreted()


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no kernel can run on a device in a dtype, in one sentence; None if they can."""
    if not devices.is_gpu(device) and not is_interpreted():
        return f"the tensors are on {device.type!r}, but Triton needs a CUDA device (or TRITON_INTERPRET=1)."
    if dtype not in DTYPES:
        return f"the dtype is {dtype}, but the Triton kernels take float32, bfloat16 and float16."
    if is_compiled_for(device) and (gpu := devices.runtime(device).get_device_properties(device)).major < 8:
        return f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, but the Triton kernels need 8.0."
    return None


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that Triton allows a block."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]


def padded(size: int) -> int:
    """Return the size of a block for `size` numbers; a dot product takes at least 16 of everything."""
    return max(16, triton.next_power_of_2(size))
