"""Which of several processes this one is."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

from lkv.errors import IntegrationError


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Process:
    """One of `size` processes that share the samples; `wait` returns once all have called it."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"  # the one that Accelerate gives this process
    wait: Callable[[], None] = _nothing
    end: Callable[[], None] = _nothing  # leave the group

    @classmethod
    def current(cls) -> "Process":
        """As Accelerate started this process. Raises IntegrationError if Accelerate is missing."""
        try:
            from accelerate import PartialState
        except ImportError as error:
            raise IntegrationError(
                f"several processes and GPUs need Accelerate ({error}); run `pip install 'lkv-cache[evals]'`."
            ) from error
        # Accelerate must be told of the CPU: it takes a launched process without an accelerator for one alone.
        cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" or not torch.accelerator.is_available()
        # Shares take unequal time, and the first process to finish waits for the last.
        state = PartialState(cpu=cpu, timeout=timedelta(days=30))
        return cls(
            state.process_index,
            state.num_processes,
            str(state.device),
            state.wait_for_everyone,
            state.destroy_process_group,
        )
