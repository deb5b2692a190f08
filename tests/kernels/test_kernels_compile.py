"""The Triton kernels compiled ahead of time for GPUs that are not there: what they take of each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


# One head size a GPU and precision, the ones nearest to a limit; `python -m tests.kernels.compile_kernels` takes all.
@pytest.mark.parametrize(
    ("arch", "dim", "dtype"),
    [
        (100, 128, "float32"),
        (100, 128, "bfloat16"),
        (89, 128, "bfloat16"),
        pytest.param(90, 128, "float32", marks=pytest.mark.slow),
        (90, 256, "bfloat16"),
        pytest.param(90, 128, "bfloat16", marks=pytest.mark.slow),
        pytest.param("90 --eviction", 128, "bfloat16", marks=pytest.mark.slow),
        (80, 96, "float16"),
        (80, 256, "float32"),
    ],
)
def test_kernels_fit_the_gpu_that_they_are_compiled_for(arch, dim, dtype):
    """In a process of its own, because here the kernels are interpreted."""
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.kernels.compile_kernels",
            "--arch", *str(arch).split(), "--dim", str(dim), "--dtype", dtype,
        ],
        env=os.environ | {"TRITON_INTERPRET": "0"}, cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {row["kernel"] for row in rows}
    expected = {"slice_kernel", "append_kernel", "forward", "query_gradient", "key_gradient"}
    assert kernels == ({"score_kernel", "rank_kernel", "move_kernel"} if "eviction" in str(arch) else expected)
    assert not [row for row in rows if row["problems"]]


@pytest.mark.parametrize("tiers", [[], ["84", "43"]], ids=str)
def test_later_steps_launch_what_the_first_one_compiled(tiers):
    """With the same arguments as through Triton's own launch code; the measurement asserts it."""
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.cache.host_time",
            "--steps", "10", "--layers", "2", "--tokens", "200", "--tiers", *tiers,
        ],
        env=os.environ | {"TRITON_INTERPRET": "0"}, cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["least"] > 0
