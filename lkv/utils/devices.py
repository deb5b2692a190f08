"""Devices: capabilities, memory, graphs and dtypes."""

import gc
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from lkv.errors import LkvError
from lkv.utils.extras import optional_import

if TYPE_CHECKING:
    from accelerate import PartialState

STEPS_OF_CAPTURE = 3  # how often `capture` calls its function
_DTYPE_PROBE = 384  # rows of the matrices that are timed


def is_gpu(device: torch.device) -> bool:
    """Return whether `device` is a GPU that LKV's kernels are written for."""
    return device.type == "cuda"


def runtime(device: torch.device) -> Any:
    """Return the device module of a GPU: `torch.cuda`, or what replaces it."""
    return torch.get_device_module(device)


def exact_products(dtype: torch.dtype) -> str:
    """Return the precision by which Triton's kernels multiply float32 beside values of `dtype`.

    Three parts of TF32 are as exact, and faster, where the rest of a kernel leaves registers for them; AMD's GPUs have
    none.
    """
    return "ieee" if dtype == torch.float32 or torch.version.hip else "tf32x3"


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU `device` current in the block: Triton launches on the current device, not on the tensors'."""
    return runtime(device).device(device) if is_gpu(device) else nullcontext()


def can_capture(device: torch.device) -> bool:
    """Return whether work on `device` can be captured and replayed as a graph."""
    return device.type == "cuda"


def capture(step: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Capture the launches of `step`; return a function that replays them, and the result of `step`.

    Every replay overwrites the returned tensors. `step` is called a few times before, and once more for the capture,
    which computes nothing.
    """
    cuda = runtime(device)
    with device_guard(device):
        # Libraries initialise and kernels compile first, on a stream of their own, as PyTorch's documentation says.
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            for _ in range(STEPS_OF_CAPTURE - 1):
                step()
        cuda.current_stream().wait_stream(stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, capture_error_mode="thread_local"):
            output = step()
    return graph.replay, output


def synchronised_clock(device: torch.device) -> float:
    """Return the time in seconds, once a GPU `device` has finished its work."""
    if is_gpu(device):
        runtime(device).synchronize(device)
    return time.perf_counter()


def stack_to_device(device: torch.device, *counts: torch.Tensor) -> torch.Tensor:
    """Stack CPU tables of one shape as int32 on `device`, by one asynchronous copy."""
    return copy_to_device(torch.stack(counts).int(), device)


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device` asynchronously."""
    return (tensor.pin_memory() if is_gpu(device) else tensor).to(device, non_blocking=True)


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Turn autocast off for the block: products are computed in the dtype of their factors."""
    able = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if able else nullcontext()


def has_float64(device: torch.device) -> bool:
    """Return whether tensors on `device` can be float64."""
    return device.type != "mps"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error` or its cause is an out-of-memory error of the device."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False


def release(device: torch.device) -> None:
    """Free the memory of dead tensors, reference cycles and the allocator's pools."""
    gc.collect()
    if is_gpu(device):
        runtime(device).empty_cache()


def distributed_state(extra: str, purpose: str) -> "PartialState":
    """Return this process among those that Accelerate started. Raises MissingPackageError without Accelerate."""
    with optional_import(extra, purpose):
        from accelerate import PartialState
    # Without a GPU, Accelerate treats a launched process as a single one unless told to use the CPU.
    is_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" or not torch.accelerator.is_available()
    # Shares of work take different times, and the first process to finish waits for the last.
    return PartialState(cpu=is_cpu, timeout=timedelta(days=30))


def torch_dtype(name: str | None) -> Any:
    """Return the dtype that --dtype names, None for the one that is stored."""
    return None if name is None else getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name by which --dtype calls a dtype."""
    return str(dtype).removeprefix("torch.")


def find_device(name: str | None) -> torch.device | None:
    """Return the device that --device names, None for none. Raises LkvError if PyTorch has no such device."""
    try:
        return None if name is None else torch.zeros(1, device="cpu").to(name).device
    except (RuntimeError, AssertionError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise LkvError(f"the model cannot be put on the device {name!r} ({first}); `lkv doctor` lists them.") from error


def available_memory() -> float:
    """Return the bytes that the machine can still give without swapping; infinity where Linux does not tell."""
    with suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return math.inf


def faster_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which `device` multiplies matrices faster: bfloat16, unless the processor emulates it."""
    if device.type != "cpu":
        return torch.bfloat16
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(_DTYPE_PROBE, _DTYPE_PROBE, dtype=dtype, device="cpu")
        times = []
        for _ in range(4):  # the first call is a warm-up
            start = time.perf_counter()
            (matrix @ matrix).sum().item()
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return torch.bfloat16 if seconds[torch.bfloat16] * 1.2 < seconds[torch.float32] else torch.float32
