"""On a machine with a GPU: correctness against float64, then the times, into a folder with the GPU's name.

    python -m dev.gpu_check [--model llama-3.1-8b] [--out gpu-results]        (make gpu-check)

The sanitizer of the CUDA toolkit comes first, where it is installed: memory, races, and memory that was never written.
Nothing is timed where something is wrong. A measurement that fails does not keep the others from being taken. Prints
what was done, and how long it took: less than 15 minutes, after which nothing more is begun.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
CHECKS = [
    "tests/kernels/test_ragged_triton.py",
    "tests/kernels/test_soft_mask_triton.py",
    "tests/kernels/test_selection.py",
    "tests/kernels/test_ragged_attention.py",
    "tests/gpu/test_cuda.py",
]
# The sanitizer slows down tenfold and more: a few launches of every kernel.
SANITIZED = [*CHECKS[:3], "-k", "much_shorter or tiles_in_use or continuations or highest or move or scores"]
TOOLS = ("memcheck", "racecheck", "initcheck")
SECONDS = 900
_PROCESSES = 14  # that share the GPU's memory
_LARGE = 40 * 2**30  # bytes of a GPU that holds 8 billion weights and their caches
Run = Callable[[list[str], float], int]


def timings(model: str, out: Path) -> list[tuple[list[str], float]]:
    """The commands that measure, each with the file or folder that it writes, and the seconds that it may take."""
    decode = ["--device", "cuda", "--config", "llama-3.2-1b", "--dtype", "bfloat16", "--tokens", "16384", "65536"]
    return [
        (["experiments.gpu_steps", "--config", model, "--out", f"{out}/gpu_steps.json"], 360),
        (["experiments.ragged_attention", "--out", f"{out}/ragged_attention.json"], 120),
        (
            [
                "experiments.soft_mask_attention",
                "--device",
                "cuda",
                "--out",
                f"{out}/soft_mask_attention.json",
            ],
            120,
        ),
        (["experiments.quantised_decode", *decode, "--out", f"{out}/quantised_decode.json"], 120),
    ]


def pytest_runtest_logreport(report: Any) -> None:
    """As a plugin of pytest: print why a test failed as soon as it has, because the limit may end the run."""
    if report.failed:
        print(f"\n{report.longreprtext[-3000:]}", flush=True)


def run(command: list[str], limit: float) -> int:
    """The exit status of a command; 124 where it took more than `limit` seconds."""
    print("$", *command, flush=True)
    # Kernels run on the GPU, whatever the shell says of Triton's interpreter.
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    if command[0] != sys.executable:
        # The sanitizer sees the ends of tensors only where each has memory of its own.
        environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return 124


class Check:
    """One run on the GPU `name`, which ends within SECONDS."""

    def __init__(self, name: str, model: str, out: Path, run: Run = run, sanitizer: str | None = None):
        self._name, self._model, self._run, self._sanitizer = name, model, run, sanitizer
        self._out = out / re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-")
        self._started = time.monotonic()

    def run(self) -> int:
        """Check and time; 0 where all went well, 1 where something is wrong or could not be timed."""
        self._out.mkdir(parents=True, exist_ok=True)
        if self._sanitizer is None:
            print("compute-sanitizer is not installed (it comes with the CUDA toolkit): memory is not checked.")
        # Warnings are not errors: PyTorch may be of any version, and warns once a process, whichever test comes first.
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "dev.gpu_check", "-W", "default"]
        for tool in TOOLS if self._sanitizer else ():
            options = ["--tool", tool, "--error-exitcode", "9"]
            if self._call([str(self._sanitizer), *options, *pytest, "-q", *SANITIZED], 90):
                return self._stop(f"{tool} found something")
        # Every assertion, and no more. A first run also compiles all kernels, in several processes; each test is named
        # as it ends, also where the time does not suffice for all.
        if self._call([*pytest, "-v", "-n", str(min(_PROCESSES, os.cpu_count() or 1)), *CHECKS], 420):
            return self._stop("something is wrong")
        commands = timings(self._model, self._out)
        failed = [words[0] for words, limit in commands if self._call([sys.executable, "-m", *words], limit)]
        done = len(commands) - len(failed)
        print(f"{self._name}: correct; {done} of {len(commands)} measurements in {self._out}, {self._seconds:.0f} s")
        for command in failed:
            print(f"{command} could not be measured, see above.")
        return int(bool(failed))

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _call(self, command: list[str], limit: float) -> int:
        left = SECONDS - self._seconds
        return self._run(command, min(limit, left)) if left > 0 else 124

    def _stop(self, problem: str) -> int:
        print(f"{self._name}: {problem}, see above; nothing was timed.")
        return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="a shape with random weights, as in experiments.profile (default: 8b from 40 GiB on, else 1b)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "PyTorch sees no CUDA device here; run this where it does, with a PyTorch built for CUDA (in .venv: "
            "`.venv/bin/pip install torch` of your CUDA version)."
        )
    is_large = torch.cuda.get_device_properties(0).total_memory >= _LARGE
    model = options.model or ("llama-3.1-8b" if is_large else "llama-3.2-1b")
    sanitizer = shutil.which("compute-sanitizer")
    sys.exit(Check(torch.cuda.get_device_name(), model, options.out.resolve(), sanitizer=sanitizer).run())


if __name__ == "__main__":
    main()
