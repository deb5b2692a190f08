"""`make gpu-check` as far as it goes without a GPU: what it runs, in which order, and what it does with failures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import quantised_decode
from dev import gpu_check
from tests.conftest import tiny_llama


def checked(tmp_path, statuses):
    """The exit status, and the commands run, where they end with `statuses` in turn."""
    left, commands = list(statuses), []

    def run(arguments, limit):
        commands.append((arguments, limit))
        return left.pop(0)

    return gpu_check.check("NVIDIA H100 80GB HBM3", "llama-3.2-1b", tmp_path, run), commands


def test_all_is_checked_and_then_timed_within_a_quarter_of_an_hour(tmp_path, capsys):
    status, commands = checked(tmp_path, [0] * 5)
    assert status == 0 and sum(limit for _, limit in commands) <= 1500
    assert commands[0][0][-len(gpu_check.CHECKS) :] == gpu_check.CHECKS
    folder = tmp_path / "NVIDIA-H100-80GB-HBM3"
    assert folder.is_dir() and all(str(folder) in " ".join(arguments) for arguments, _ in commands[1:])
    assert "correct; 4 of 4 measurements" in capsys.readouterr().out


def test_what_is_wrong_is_not_timed(tmp_path, capsys):
    status, commands = checked(tmp_path, [1])
    assert status == 1 and len(commands) == 1 and "nothing was timed" in capsys.readouterr().out


def test_a_measurement_that_fails_keeps_no_other_from_being_taken(tmp_path, capsys):
    status, commands = checked(tmp_path, [0, 0, 124, 0, 0])
    assert status == 1 and len(commands) == 5
    assert "3 of 4" in (out := capsys.readouterr().out) and "benchmarks.soft_mask_attention could not" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "dev.gpu_check"], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.returncode == 1 and "PyTorch sees no CUDA device" in done.stderr


def test_decoding_over_codes_is_measured(tmp_path, monkeypatch):
    """The command that `gpu_check` runs, on a CPU and a tiny shape."""
    monkeypatch.setattr(quantised_decode, "read_config", lambda name: tiny_llama().config)
    out = tmp_path / "quantised_decode.json"
    words = "--config tiny --tokens 64 --dtype float32 --threads 1 --repeats 2 --out"
    quantised_decode.main([*words.split(), str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["bits"] for row in rows] == [None, 8, 4, 3]
    sizes = [row["nbytes"] for row in rows]
    assert sizes == sorted(set(sizes), reverse=True) and all(row["device"] == "cpu" for row in rows)
