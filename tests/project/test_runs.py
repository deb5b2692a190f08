"""The scripts that make the paper's tables and figures."""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.report.names import RULES, SELECTORS
from experiments.runs import budget_policies, rehearse, small
from lkv.cli.eval import Eval
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.budgets import Ada
from lkv.methods.registry import METHODS
from lkv.methods.selectors import SnapKV
from tests.commands import PROGRAMS, parse_arguments
from tests.commands import main as lkv

RUNS = Path(small.__file__).parent


def test_shares_are_what_each_head_keeps(model, policy):
    ids = torch.randint(3, 60, (1, 480), generator=torch.Generator().manual_seed(0))[0].tolist()
    pattern = [[1.0, 0.0], [0.5, 0.2], [0.1, 0.9]]
    found = {
        name: np.array(table)
        for name, table in budget_policies.shares(
            model.float(), ids, policy, 0.9, pattern, budget_policies.METHODS
        ).items()
    }
    assert set(found) == set(budget_policies.METHODS)
    assert (found["snapkv"] == 0.9).all()
    np.testing.assert_allclose(found["lkv"], np.floor(policy.inference_ratios(0.9).numpy() * 480 + 1e-6) / 480)
    assert (np.diff(found["pyramidkv"].mean(1)) < 0).all()  # lower layers keep more
    prompt = read_prompt(model, torch.tensor([ids]), queries=True)
    for layer, own in enumerate(prompt):  # Ada: as its rule counts SnapKV's scores
        scores = SnapKV().scores(layer, own)
        np.testing.assert_allclose(found["adakv-snapkv"][layer], np.array(Ada(0.9).counts(layer, scores)[0]) / 480)


@pytest.mark.parametrize(
    "script",
    [*sorted(RUNS.glob("*_*.sh")), *(RUNS / f"{name}.sh" for name in ("preflight", "data", "train"))],
    ids=lambda path: path.name,
)
def test_the_scripts_ask_for_what_they_need(script, tmp_path):
    """Each runs to its end with a stand-in for python that writes down how it was called, and `lkv` understands it."""
    log, stand_in = tmp_path / "log", tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    (tmp_path / "a.txt").write_text("A long text.")
    stand_in.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "POLICY": "org/policy", "PATTERN": "heads.tsv", "TEXT": "a.txt",
        "TRAIN": "python -m lkv",
    }  # fmt: skip
    for model, name in (("llama", "meta-llama/Llama-3.1-8B-Instruct"), ("qwen", "Qwen/Qwen3-8B")):
        subprocess.run([script, model], env=environment, check=True, cwd=tmp_path)
        said = log.read_text()
        commands = [item.split() for item in said.splitlines()]
        names = [words[1].removeprefix("experiments.") for words in commands]
        understood = [
            parse_arguments(words[2:] if own == "lkv" else [own, *words[2:]])
            for own, words in zip(names, commands, strict=True)
            if own in ("lkv", *PROGRAMS)
        ]
        for options in understood:
            if isinstance(options, Eval):
                assert set(options.methods) <= set(METHODS) | {f"{r}+{s}" for r in RULES for s in SELECTORS}
                assert (options.pattern is not None) == ("duo-kvpress" in options.methods)
        assert understood or f"--text {tmp_path / 'a.txt'}" in said  # a path of the caller's folder
        assert name in said or "--config" in said
        log.unlink()
        reports = [item.split() for item in said.splitlines() if "experiments.report" in item]
        for item in reports:  # what they report they have made
            made = item[item.index("--profile") + 1] if "--profile" in item else item[2]
            assert f"--out {made}" in said
    failed = subprocess.run([script, "gpt"], env=environment, capture_output=True, text=True)
    assert failed.returncode == 2 and "llama|qwen" in failed.stderr


@pytest.mark.parametrize(("failing", "status", "made"), [("none", 0, 6), ("table2", 1, 6), ("train", 1, 0)])
def test_a_table_that_fails_keeps_no_other_from_being_made(tmp_path, failing, status, made):
    """all.sh beside stand-ins for its steps, which write down their names; one fails."""
    runs = tmp_path / "experiments" / "runs"
    runs.mkdir(parents=True)
    for script in RUNS.glob("*.sh"):
        (runs / script.name).write_text(f"echo {script.stem} >>done\n[[ {script.stem} != {failing}* ]]\n")
    for name in ("all.sh", "common.sh"):
        (runs / name).write_text((RUNS / name).read_text())
    ran = subprocess.run(["bash", runs / "all.sh", "llama"], capture_output=True, text=True)
    names = (tmp_path / "done").read_text().split()
    assert ran.returncode == status and names[:2] == ["preflight", "data"]
    assert sum(name.startswith(("table", "figure")) for name in names) == made
    assert ("failed: table2_ablation;" in ran.stderr) == (failing == "table2")


@pytest.mark.parametrize("name", rehearse.ARCHITECTURES)
def test_the_rehearsal_s_models_and_data_are_read_as_real_ones(name, tmp_path, capsys):
    rehearse.make_data(tmp_path)
    rehearse.make_model(name, tmp_path / name)
    settings = rehearse.environment(name, tmp_path)
    words = ["--model", str(tmp_path / name), "--data", settings["DATA"], "--out", str(tmp_path / "built")]
    assert lkv(["data", "build", *words, *settings["DATA_OPTIONS"].split()]) == 0
    said = capsys.readouterr().out
    assert re.search(r"train-hotpotqa +12 +12 +30\.0%", said), said
    assert (
        "unrecognised" not in said and json.loads((tmp_path / "built" / "build.json").read_text())["recipe"] == "loom"
    )
