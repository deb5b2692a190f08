"""How many bytes tensors hold: counted tensor by tensor on a CPU, by the allocator on a GPU."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lkv.utils import devices


class LiveBytes(TorchDispatchMode):
    """Bytes of storage behind the tensors made inside the block: `held` now, and `most` at any one time.

    A storage counts once, whatever views there are of it, until the last of them is gone. What a kernel takes for
    itself while it runs is not seen. Raises MemoryError as soon as more than `limit` bytes are held.
    """

    def __init__(self, limit: int | None = None):
        super().__init__()
        self.current = self.peak = 0
        self._limit = limit
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {_address(x) for x in _tensors((args, tuple(kwargs.values())))}
        result = function(*args, **kwargs)
        for x in _tensors((result,)):
            if _address(x) not in given:
                self._count(x)
        return result

    def _count(self, x: Tensor) -> None:
        storage, address = x.untyped_storage(), _address(x)
        size = storage.nbytes()
        if not size or address in self._counted:
            return
        self._counted.add(address)
        weakref.finalize(storage, self._forget, address, size).atexit = False
        self.current += size
        self.peak = max(self.peak, self.current)
        if self._limit is not None and self.current > self._limit:
            raise MemoryError(f"out of memory: {self.current:,} bytes are held, of {self._limit:,} allowed")

    def _forget(self, address: int, size: int) -> None:
        self._counted.discard(address)
        self.current -= size


class Peak:
    """The most bytes that were held beside what was there before; known when the block of `peak_of` has ended."""

    nbytes = 0


@contextmanager
def measure_peak(device: torch.device, limit: int | None = None) -> Iterator[Peak]:
    """Measure the peak memory of the block on `device`: the allocator's on CUDA, `LiveBytes` elsewhere.

    More than `limit` bytes end the block with an error that `devices.is_out_of_memory` knows.
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


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
