"""Use fewer of PyTorch's threads on a CPU while other programs use its cores."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VALID_SECONDS = 10.0  # how long a measurement holds
_PROBE_SECONDS = 0.01  # for each number of threads
_GRAIN = 32768  # elements for each thread of an operation, as PyTorch divides them
# An operation takes 100 times as long as on one thread where threads wait for each other, and half as long elsewhere.
_TOO_SLOW = 3.0
_LOG = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class _ThreadCount:
    """The number of threads that was last measured to be worth using."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._measured_at = -_VALID_SECONDS
        self._allowed = self._useful = 0

    def useful(self, allowed: int) -> int:
        """Return how many of `allowed` threads to use."""
        with self._lock:
            if time.monotonic() - self._measured_at < _VALID_SECONDS and allowed == self._allowed:
                return self._useful
            useful = _measure(allowed)
            if useful < allowed and self._useful != useful:
                _LOG.info("other programs use the cores: computing with %d threads, not %d", useful, allowed)
            self._allowed, self._useful, self._measured_at = allowed, useful, time.monotonic()
            return useful


_COUNT = _ThreadCount()


@contextmanager
def adapted_threads(device: torch.device | None) -> Iterator[None]:
    """Use as many threads in the block as are worth it beside other programs, and the previous number after it.

    PyTorch's threads wait for each other after every operation. If another program has the core of one of them, all
    others spin meanwhile, and everything takes many times as long as on one thread.

    Args:
        device: Where the block computes; nothing changes unless it is the CPU.
    """
    allowed = torch.get_num_threads()
    is_cpu = device is not None and device.type == "cpu"
    useful = _COUNT.useful(allowed) if is_cpu and allowed > 1 else allowed
    if useful == allowed:
        yield
        return
    torch.set_num_threads(useful)
    try:
        yield
    finally:
        torch.set_num_threads(allowed)


def adapt_threads(
    function: "Callable[Concatenate[PreTrainedModel, P], T]",
) -> "Callable[Concatenate[PreTrainedModel, P], T]":
    """Decorate a function of a model to run in `adapted_threads`."""

    @functools.wraps(function)
    def run(model: "PreTrainedModel", *args: P.args, **kwargs: P.kwargs) -> T:
        with adapted_threads(getattr(model, "device", None)):  # wrappers have none
            return function(model, *args, **kwargs)

    return run


def _measure(allowed: int) -> int:
    """Return the largest of `allowed`, a half, a quarter ... that is not slowed down as by waiting for cores."""
    numbers = torch.zeros(allowed * _GRAIN, device="cpu")

    def seconds_of_operations(threads: int) -> list[float]:
        torch.set_num_threads(threads)
        torch.neg(numbers, out=numbers)  # starts the threads
        seconds: list[float] = []
        while sum(seconds) < _PROBE_SECONDS:
            start = time.perf_counter()
            torch.neg(numbers, out=numbers)
            seconds.append(time.perf_counter() - start)
        return seconds

    try:
        useful, single = allowed, min(seconds_of_operations(1))  # other programs may interrupt this thread, too
        while useful > 1 and fmean(seconds_of_operations(useful)) > _TOO_SLOW * single:
            useful //= 2
        return useful
    finally:
        torch.set_num_threads(allowed)
