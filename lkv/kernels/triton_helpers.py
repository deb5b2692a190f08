"""What all Triton kernels share: device requirements and helpers. Imported only if Triton is installed."""

import functools

import torch
import triton
import triton.language as tl
from triton import knobs

from lkv.utils import devices

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOG2_E = tl.constexpr(1.4426950408889634)
# Triton's interpreter (TRITON_INTERPRET=1) knows bfloat16 as bits, and would multiply those.
IS_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


def is_interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1), on any device."""
    return IS_INTERPRETED.value


def is_compiled_for(device: torch.device) -> bool:
    """Return whether the kernels run compiled on a GPU."""
    return devices.is_gpu(device) and not is_interpreted()


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
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


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return devices.runtime(device).get_device_properties(device).multi_processor_count


def padded(size: int) -> int:
    """Return the size of a block for `size` numbers; a dot product takes at least 16 of everything."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def split_heads(number, heads):
    """Split a flat head index over all rows into batch row and head, in 64 bits."""
    return (number // heads).to(tl.int64), (number % heads).to(tl.int64)


@triton.jit
def load_rows(x, row_at, is_row, channel_at, is_channel):
    """Return rows of `x` as [rows, channels], 0 beyond its ends."""
    return tl.load(x + row_at[:, None] + channel_at[None, :], mask=is_row[:, None] & is_channel[None, :], other=0.0)


@triton.jit
def store_rows(x, row_at, rows, is_row, channel_at, is_channel):
    """Store `rows` [rows, channels] in the dtype of `x`."""
    rows = rows.to(x.dtype.element_ty)
    tl.store(x + row_at[:, None] + channel_at[None, :], rows, mask=is_row[:, None] & is_channel[None, :])


@triton.jit
def cap(scores, SOFTCAP: tl.constexpr):  # noqa: N803 (constants are in capitals)
    """Return SOFTCAP tanh(scores / SOFTCAP), or `scores` if it is 0."""
    return SOFTCAP * (2 * tl.sigmoid(scores * (2 / SOFTCAP)) - 1) if SOFTCAP > 0 else scores
