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
import lkv.kernels.soft_mask_attention.continuation as continuation
import lkv.kernels.soft_mask_attention.triton as soft
from lkv.kernels import triton_devices
from lkv.utils import devices
from tests.fake_gpu.device import NAME, load, logs, watched

_GRID = (2**31 - 1, 65_535, 65_535)
_KERNELS = (
    (ragged.kernels, ("slice_kernel", "enter_kernel", "leave_kernel")),
    (selection.kernels, ("rank_kernel", "move_kernel", "score_kernel")),
    (soft.kernels, ("forward", "query_gradient", "key_gradient")),
    (continuation.kernels, ("forward", "query_gradient", "mask_gradient")),
)
_CACHED = (ragged_api._chosen, selection_api._kernels_for, soft_api._chosen, ragged._launch, soft.tiles_on)


class Launches:
    """In place of one kernel: checks grid and current device, logs the launch, and computes unless `stubbed`."""

    def __init__(self, kernel: Any, name: str, made: list["Launch"], stubbed: bool):
        self._kernel, self._name, self._made, self._stubbed = kernel, name, made, stubbed

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            made = Launch(self._kernel, self._name, grid, args, options)
            made.check()
            self._made.append(made)
            for log in logs():
                log.add("launch", self._name)
            if not self._stubbed:
                made.run()

        return launch


class Launch:
    """One launch of a kernel over tensors of one device."""

    def __init__(self, kernel: Any, name: str, grid: tuple[int, ...], args: Any, options: Any):
        self.name, self.grid = name, grid
        self._kernel, self._args, self._options = kernel, args, options

    def check(self) -> None:
        """Raise where CUDA would refuse the launch, or run it on another device than its tensors'."""
        places = {x.device for x in (*self._args, *self._options.values()) if isinstance(x, Tensor)}
        assert len(places) == 1, f"{self.name} got tensors on {places}"
        (place,) = places
        if place.type == NAME:
            assert load().fake_gpu_current() == place.index, (
                f"{self.name} was launched away from its tensors on {place}"
            )
        assert all(0 < n <= most for n, most in zip(self.grid, _GRID, strict=False)), (
            f"{self.name} cannot have the grid {self.grid}"
        )

    def run(self) -> None:
        # The interpreter copies what lies on a device: none of the program's doing.
        with watched():
            self._kernel[self.grid](*self._args, **self._options)


@contextmanager
def fake_gpus(stubbed: bool = False) -> Iterator[list[Launch]]:
    """In the block the fake devices count as GPUs; yields the launches of kernels, which compute unless `stubbed`."""
    load()
    made: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_gpu", lambda device: device.type in ("cuda", NAME))
        for module, names in _KERNELS:
            for name in names:
                patch.setattr(module, name, Launches(getattr(module, name), name, made, stubbed))
        patch.setattr(triton_devices, "is_interpreted", lambda: True)
        _forget()
        yield made
    _forget()


def _forget() -> None:
    for cached in _CACHED:
        cached.cache_clear()
