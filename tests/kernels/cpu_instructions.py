"""Instructions of the CPU attention function an entry over codes, counted by single steps of a child process.

python -m tests.kernels.cpu_instructions    (prints a line a width; ATEN_CPU_CAPABILITY=avx2 for those without AVX-512)
"""

import ctypes
import json
import os
import signal
from collections.abc import Callable
from functools import partial

import torch

from lkv.kernels.ragged_attention import cpp, ragged_attention
from tests.kernels.pools import coded_pools

_TRACE_ME, _SINGLE_STEP, _KILL = 0, 9, 8  # of ptrace
WIDTHS = ((8, 8), (8, 4), (4, 4), (4, 3), (3, 3))
_LENGTHS = (128, 384)  # multiples of a block


def steps_of(call: Callable[[], object]) -> int:
    """Instructions between two stops of a forked child around `call`. Raises PermissionError without ptrace."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes, ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
    child = os.fork()
    if child == 0:
        if ptrace(_TRACE_ME, 0, 0, 0):
            os._exit(1)
        os.kill(os.getpid(), signal.SIGSTOP)
        call()
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    if not os.WIFSTOPPED(os.waitpid(child, 0)[1]):
        raise PermissionError("ptrace is not permitted")
    steps = 0
    while True:
        ptrace(_SINGLE_STEP, child, 0, 0)
        if os.WSTOPSIG(os.waitpid(child, 0)[1]) == signal.SIGSTOP:
            break
        steps += 1
    ptrace(_KILL, child, 0, 0)
    os.waitpid(child, 0)
    return steps


@torch.no_grad()
def instructions(bits: tuple[int, int], dim: int = 64, group: int = 3) -> float:
    """Of an entry of `bits` (k, v), for all query heads of its group: by the difference of two lengths."""
    counts = []
    for entries in _LENGTHS:
        kv = coded_pools([[[entries]], [[1]]], (bits,), 1, dim, dim, torch.float32).kv
        q = torch.randn(1, group, 1, dim)
        ragged_attention(q, kv, dim**-0.5, "cpp")  # what a first call looks up
        counts.append(steps_of(partial(cpp.attend, q, kv, dim**-0.5)))
    return (counts[1] - counts[0]) / (_LENGTHS[1] - _LENGTHS[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps({f"{k}/{v}": round(instructions((k, v)), 1) for k, v in WIDTHS}))
