"""On a machine with a GPU: correctness against float64, then the times, into a folder with the GPU's name.

    python -m dev.gpu_check [--model llama-3.2-1b] [--out gpu-results]        (make gpu-check)

Nothing is timed where something is wrong. A measurement that fails does not keep the others from being taken. Prints
what was done, and how long it took; under 15 minutes on a GPU of 24 GB or more.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
CHECKS = [
    "tests/kernels/test_ragged_triton.py",
    "tests/kernels/test_soft_mask_triton.py",
    "tests/gpu/test_cuda.py",
]
Run = Callable[[list[str], float], int]


def timings(model: str, out: Path) -> list[list[str]]:
    """The commands that measure, each with the file or folder that it writes."""
    decode = ["--device", "cuda", "--config", model, "--dtype", "bfloat16", "--tokens", "16384", "65536"]
    profile = ["--config", model, "--tokens", "8192", "32768", "--methods", "full", "lkv", "snapkv"]
    return [
        ["benchmarks.ragged_attention", "--out", f"{out}/ragged_attention.json"],
        ["benchmarks.soft_mask_attention", "--device", "cuda", "--out", str(out)],
        ["benchmarks.quantised_decode", *decode, "--out", f"{out}/quantised_decode.json"],
        ["lkv", "profile", *profile, "--out", f"{out}/profile.json"],
    ]


def run(arguments: list[str], limit: float) -> int:
    """The exit status of a command of this Python; 124 where it took more than `limit` seconds."""
    print("$ python", *arguments, flush=True)
    try:
        # Kernels run on the GPU, whatever the shell says of Triton's interpreter.
        return subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, timeout=limit
        ).returncode
    except subprocess.TimeoutExpired:
        return 124


def check(name: str, model: str, out: Path, run: Run = run) -> int:
    """Check and time the GPU `name`; 0 where all went well, 1 where something is wrong or could not be timed."""
    out = out / re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-")
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    # Every assertion, and no more: a first run also compiles all kernels.
    if run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *CHECKS], 480):
        print(f"{name}: something is wrong, see above; nothing was timed.")
        return 1
    failed = [command[0] for command in timings(model, out) if run(["-m", *command], 240)]
    print(f"{name}: correct; {4 - len(failed)} of 4 measurements in {out}, {time.monotonic() - started:.0f} s")
    for command in failed:
        print(f"{command} could not be measured, see above.")
    return int(bool(failed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", help="a shape with random weights, as in lkv profile")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "PyTorch sees no CUDA device here; run this where it does, with a PyTorch built for CUDA (in .venv: "
            "`.venv/bin/pip install torch` of your CUDA version)."
        )
    sys.exit(check(torch.cuda.get_device_name(), options.model, options.out.resolve()))


if __name__ == "__main__":
    main()
