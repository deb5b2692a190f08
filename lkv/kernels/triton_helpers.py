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


@triton.constexpr_function
def _bits_of(number):
    return number.bit_length() - 1


@triton.jit
def rotate(x, rotation, step_in, step_out, WIDTH: tl.constexpr):  # noqa: N803 (constants are in capitals)
    """Return rows [ROWS, BLOCK] times a rotation [WIDTH, WIDTH] of `cache.tiers`, in float32.

    That is a Hadamard matrix, applied as butterflies in registers, times a matrix for the odd factor of WIDTH, of which
    alone, with the factor that norms the butterflies, `rotation` is read.
    """
    power: tl.constexpr = WIDTH & -WIDTH
    rows: tl.constexpr = x.shape[0]
    block: tl.constexpr = x.shape[1]
    x = x.to(tl.float32)
    for _ in tl.static_range(_bits_of(power)):
        # Transforms the lowest bit of channel numbers, which becomes the highest one.
        first, second = tl.split(tl.reshape(x, (rows, block // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (rows, block))
    odd = tl.arange(0, block // power)
    x = tl.reshape(x, (rows, power, block // power))
    turned = tl.zeros_like(x)
    for number in range(WIDTH // power):
        part = tl.sum(tl.where(odd[None, None, :] == number, x, 0.0), 2)
        at = power * (number * step_in + odd * step_out)
        turned += part[:, :, None] * tl.load(rotation + at, mask=odd < WIDTH // power, other=0.0)[None, None, :]
    return tl.reshape(tl.permute(turned, (0, 2, 1)), (rows, block))
