"""The Triton kernels compiled ahead of time for GPUs that are not there: what they take of each."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lkv.kernels import FP8

pytest.importorskip("triton")


@functools.cache
def compiled(arch, dim, dtype, *kernels):
    """The rows of `compile_kernels`, in a process of its own, because here the kernels are interpreted."""
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.kernels.compile_kernels",
            "--arch", str(arch), "--dim", str(dim), "--dtype", dtype, "--kernels", *kernels,
        ],
        env=os.environ | {"TRITON_INTERPRET": "0"}, cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [row for row in rows if row["problems"]]
    return rows


def compile_attention(arch, dim, dtype, kernels):
    """The rows of `kernels`, or of those of both slow tests where both compile for a GPU, so that one process does."""
    return compiled(arch, dim, dtype, *(("attention", "decode") if (arch, dim) == (89, 128) else (kernels,)))


# One head size a GPU and precision, the ones nearest to a limit; `python -m tests.kernels.compile_kernels` takes all.
NEAR_A_LIMIT = [
    (100, 128, "float32"), (100, 128, "bfloat16"), (89, 128, "bfloat16"), (90, 128, "float32"), (90, 256, "bfloat16"),
    (90, 128, "bfloat16"), (80, 96, "float16"), (80, 256, "float32"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dim", "dtype"), NEAR_A_LIMIT)
def test_kernels_fit_the_gpu_that_they_are_compiled_for(arch, dim, dtype):
    names = {row["kernel"] for row in compile_attention(arch, dim, dtype, "attention")}
    assert names == {"slice_kernel", "append_kernel", "restore_kernel"}
    training = [row["kernel"] for row in compiled(arch, dim, dtype, "training")]
    assert training[:3] == ["forward", "query_gradient", "key_gradient"]
    assert training[3:] == ["continuation_forward", "continuation_query_gradient", "key_gradient", "mask_gradient"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dim"),
    [(90, 128), (80, 128), (89, 128), (90, 64)],
)
def test_attention_over_pools_keeps_everything_in_registers(arch, dim):
    """Of 1, 16 and 64 new tokens of an 8B model's heads, after compilation: what the machine code says."""
    rows = compile_attention(arch, dim, "bfloat16", "decode")
    steps = [row for row in rows if row["kernel"] == "slice_kernel"][-3:]
    assert [row["grid"][1] for row in steps] == [1, 1, 4]
    for new, row in zip((1, 16, 64), steps, strict=True):
        # Joining the parts, once a head, may spill a few registers before sm_90.
        assert row["stack"] <= (0 if arch >= 90 else 40) and row["local"] <= row["stack"]
        # Warp instructions of an entry; 4 warps share 64 entries.
        assert (arch, dim) != (90, 128) or new > 1 or round(row["loops"][0]["instructions"] / 16) <= 20
        # All entries are copied asynchronously, 16 bytes at a time.
        assert row["copies"] == row["wide_copies"] >= 32
        # With 100 KiB of shared memory a multiprocessor holds one program of many tokens.
        assert row["programs"] == (1 if arch == 89 and new > 1 else 2)
        # Blocks of 128 entries in three stages would take 136 KiB, of one program.
        assert arch != 90 or row["programs"] * row["shared"] > 200 * 1024
        assert row["barriers"] <= 40


# Warp instructions of an entry of 256 values, by the bits of k and v; 87 to 156 without restoring in registers.
MOST = {(8, 8): 32, (FP8, FP8): 28, (8, 4): 32, (4, 4): 30, (4, 3): 31, (3, 3): 31}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "kernels"), [(80, "tiers"), (90, "attention"), (100, "attention"), (120, "tiers")], ids=str
)
def test_codes_are_restored_in_registers(arch, kernels):
    """What the loops over tiers and pools execute on each generation of GPUs."""
    rows = [row for row in compile_attention(arch, 128, "bfloat16", kernels) if row["bits"]]
    rows = [row for row in rows if row["kernel"] == "slice_kernel"]
    assert [len(row["bits"]) for row in rows] == ([4] if kernels == "tiers" else [4, 4, 4])
    for row in rows:
        *tiers, pools = row["loops"]
        for at, loop in enumerate(tiers):
            # A warp attends to 32 entries at once, and 16 of the pools.
            assert loop["instructions"] / 32 <= MOST[tuple(row["bits"][2 * at : 2 * at + 2])]
        assert len(tiers) == len(row["bits"]) // 2 and pools["instructions"] / 16 <= 24
        assert not any(sum(loop.values()) > loop["instructions"] for loop in row["loops"])
        # Outside the loops.
        assert row["stack"] <= (0 if arch >= 90 else 96) and row["programs"] >= 2


@pytest.mark.slow
def test_eviction_fits_the_gpu_that_it_is_compiled_for():
    """Where most registers would spill."""
    rows = compiled(80, 128, "bfloat16", "eviction")
    assert {row["kernel"] for row in rows} == {"score_kernel", "select_kernel", "measure_kernel", "quantise_kernel"}
    for row in rows:
        # Of the selection's cases the one that ranks the last tokens first keeps a predicate there, once a block.
        assert row["stack"] <= (8 if row["kernel"] == "select_kernel" else 0) and row["local"] <= row["stack"] / 4
        assert row["kernel"] == "select_kernel" or row["programs"] >= 2


@pytest.mark.slow
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
