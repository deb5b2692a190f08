"""How many bytes tensors hold: counted tensor by tensor on a CPU, by the allocator on a GPU."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lkv.utils import devices


class LiveBytes(TorchDispatchMode):
    """Bytes of storage behind the tensors made inside the block: `current` now, and `peak` at any one time.

    A storage counts once, whatever views there are of it, until the last of them is gone. What a kernel allocates for
    itself while it runs is not seen. Raises MemoryError as soon as more than `limit` bytes are held.
    """

    def __init__(self, limit: int | None = None):
        """Count from 0, up to `limit` bytes."""
        super().__init__()
        self.current = self.peak = 0
        self._limit = limit
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and _address(x) not in inputs:
                self._count(x)
        return result

    def _count(self, x: Tensor) -> None:
        storage, address = x.untyped_storage(), _address(x)
        size = storage.nbytes()
        if size and address not in self._counted:
            self._counted.add(address)
            weakref.finalize(storage, self.release, address, size).atexit = False
            self.add(address, size)

    def add(self, address: int, size: int) -> None:
        """Count a new storage."""
        self.current += size
        self.peak = max(self.peak, self.current)
        if self._limit is not None and self.current > self._limit:
            raise MemoryError(f"out of memory: {self.current:,} bytes are held, but {self._limit:,} are allowed")

    def release(self, address: int, size: int) -> None:
        """Count a storage no longer."""
        self._counted.discard(address)
        self.current -= size


class Peak:
    """The most bytes held beyond those from before; set when the block of `measure_peak` ends."""

    nbytes = 0


@contextmanager
def measure_peak(device: torch.device, limit: int | None = None) -> Iterator[Peak]:
    """Measure the peak memory of the block on `device`: the allocator's on a GPU, `LiveBytes` elsewhere.

    More than `limit` bytes end the block with an error that `devices.is_out_of_memory` recognises.
    """
    peak = Peak()
    if not devices.is_gpu(device):
        with LiveBytes(limit) as live:
            yield peak
        peak.nbytes = live.peak
        return
    gpu = devices.runtime(device)
    gpu.synchronize(device)
    gpu.reset_peak_memory_stats(device)
    before = gpu.memory_allocated(device)
    if limit is not None:
        total = gpu.get_device_properties(device).total_memory
        gpu.set_per_process_memory_fraction(min(1.0, (before + limit) / total), device)
    try:
        yield peak
        gpu.synchronize(device)
    finally:
        if limit is not None:
            gpu.set_per_process_memory_fraction(1.0, device)
    peak.nbytes = gpu.max_memory_allocated(device) - before


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # unique on the meta device too, where every data_ptr is 0
