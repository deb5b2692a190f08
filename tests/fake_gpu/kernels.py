"""Triton's kernels on the fake GPU: interpreted, and held to what a real launch may ask."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

import lkv.kernels.ragged_attention.api as ragged_api
import lkv.kernels.ragged_attention.triton as ragged
import lkv.kernels.selection as selection_api
import lkv.kernels.selection.triton as selection
import lkv.kernels.soft_mask_attention.api as soft_api
import lkv.kernels.soft_mask_attention.triton as soft
from lkv.kernels import triton_helpers
from lkv.utils import devices
from tests.fake_gpu.device import NAME, load, logs, watched

_GRID = (2**31 - 1, 65_535, 65_535)
_KERNELS = (
    (ragged.kernels, ("slice_kernel", "append_kernel")),
    (ragged.tier_kernels, ("restore_kernel",)),
    (selection.kernels, ("select_kernel", "score_kernel")),
    (selection.quantise_kernels, ("measure_kernel", "quantise_kernel")),
    (soft.kernels, ("forward", "query_gradient", "key_gradient", "mask_gradient")),
    (soft.kernels, ("continuation_forward", "continuation_query_gradient")),
)
_CACHED = (
    ragged_api._available_backend,
    selection_api._kernels_for,
    soft_api._available_backend,
    ragged._launch,
    soft.tiles_on,
)


class FakeKernel:
    """In place of one kernel: checks grid and current device, logs the launch, and computes unless `stubbed`."""

    def __init__(self, kernel: Any, name: str, launches: list[str], stubbed: bool):
        self._kernel, self._name, self._launches, self._stubbed = kernel, name, launches, stubbed

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self._check(grid, [x for x in (*args, *options.values()) if isinstance(x, Tensor)])
            self._launches.append(self._name)
            for log in logs():
                log.add("launch", self._name)
            if not self._stubbed:
                # The interpreter copies what lies on a device: none of the program's doing.
                with watched():
                    self._kernel[grid](*args, **options)

        return launch

    def _check(self, grid: tuple[int, ...], tensors: list[Tensor]) -> None:
        """Raise where CUDA would refuse the launch, or run it on another device than its tensors'."""
        (place,) = {x.device for x in tensors}
        is_current = place.type != NAME or load().fake_gpu_current() == place.index
        assert is_current, f"{self._name} was launched away from its tensors on {place}"
        fits = all(0 < n <= most for n, most in zip(grid, _GRID, strict=False))
        assert fits, f"{self._name} cannot have the grid {grid}"


@contextmanager
def fake_gpus(stubbed: bool = False) -> Iterator[list[str]]:
    """In the block the fake devices count as GPUs; yields names of launched kernels, which compute unless `stubbed`."""
    load()
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_gpu", lambda device: device.type in ("cuda", NAME))
        for module, names in _KERNELS:
            for name in names:
                patch.setattr(module, name, FakeKernel(getattr(module, name), name, made, stubbed))
        patch.setattr(triton_helpers, "is_interpreted", lambda: True)
        _forget()
        yield made
    _forget()


def _forget() -> None:
    for cached in _CACHED:
        cached.cache_clear()
