"""lkv doctor: what works, what is not there and why, and what computes wrongly."""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

import lkv
from lkv.cli import doctor
from lkv.cli.main import main
from lkv.kernels.ragged_attention import loop


def found(name: str) -> doctor.Finding:
    return next(finding for finding in doctor.examine() if finding.name == name)


def test_findings_name_versions_devices_and_kernels(capsys):
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    by = {finding["name"]: finding for finding in told["findings"]}
    assert told["ok"] and by["lkv"]["detail"].startswith(lkv.__version__) and by["torch"]["detail"] == torch.__version__
    for kernel in ("ragged attention, loop", "soft-masked attention, sdpa", "LKV-T scores", "Soft-TopK"):
        assert by[kernel]["status"] == "ok" and "reference" in by[kernel]["detail"]
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(told["findings"]) + 1 and lines[-1].startswith("ok: works; -: ")
    assert any(line.startswith("ok  torch") for line in lines)


def test_a_kernel_that_computes_wrongly_is_found(monkeypatch, capsys):
    right = loop.attend
    monkeypatch.setattr(loop, "attend", lambda *given: (right(*given)[0] + 0.01, None))
    assert main(["doctor"]) == 2
    said = capsys.readouterr()
    assert "BAD ragged attention, loop" in said.out and "1.0e-02 from the reference" in said.out
    assert "ragged attention, loop must be fixed first" in said.err

    monkeypatch.setattr(loop, "attend", mock.Mock(side_effect=RuntimeError("illegal instruction\nand more")))
    assert found("ragged attention, loop").detail == "fails on cpu (illegal instruction)"


def test_what_is_missing_comes_with_its_fix(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rouge", None)
    extra = found("extra evals")
    assert extra.status == "off" and extra.fix == "pip install -e '.[evals]'"
    assert extra.detail == "not installed: rouge (only for `lkv eval` and the benchmarks)"
    monkeypatch.setitem(sys.modules, "vllm", None)
    extra = found("extra vllm")
    assert extra.status == "off" and extra.fix == "docs/guides/vllm.md"
    assert extra.detail.startswith("not installed: vllm")
    assert extra.detail.endswith("(only for `lkv serve --engine vllm`)")
    assert doctor.extras().keys() == doctor._PURPOSES.keys()
    monkeypatch.setattr(doctor.metadata, "version", lambda name: {"transformers": "5.1.0"}.get(name, "2.13.0+cpu"))
    assert (found("transformers").status, found("torch").status) == ("bad", "ok")
    monkeypatch.setenv("LKV_CACHE", str(tmp_path / "not" / "yet"))
    assert found("default model").status == "off"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1e6}))
    assert found("cache folder").status == "bad" and "LKV_CACHE" in found("cache folder").fix


@pytest.mark.slow
def test_a_backend_that_cannot_run_says_why():
    """In a process of its own: Triton reads whether to interpret the kernels when it is imported."""
    env = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "lkv", "doctor", "--json"], env=env, capture_output=True, text=True)
    kernels = [row for row in json.loads(done.stdout)["findings"] if row["name"].endswith("attention, triton")]
    assert len(kernels) == 2 and done.returncode == 0
    for kernel in kernels:
        assert kernel["status"] == "off" and ("CUDA device" in kernel["detail"] or "imported" in kernel["detail"])
