"""What must be fast: help, reports and typing errors without torch, and imports that print nothing."""

import os
import subprocess
import sys

import pytest

import lkv
from lkv.cli.main import COMMANDS

WATCHED = """
import sys
{}
if heavy := {{"torch", "transformers"}} & set(sys.modules):
    sys.exit(f"loads {{heavy}}")
"""
LIGHT = ["lkv", "lkv.config", "lkv.errors", "lkv.policy.shipped", "lkv.cli.main"]
HELP = [["--help"], ["--version"], ["data", "build", "--help"], *([name, "--help"] for name in COMMANDS)]
# Wrong values, methods, tasks and paths, each refused before torch is imported.
MISTAKES = [
    "ask nowhere.txt why?", "ask book.txt why? --method snapvk", "ask book.txt why? --retention 2",
    "ask book.txt why? --policy nowhere", "ask book.txt why? --bits 3", "serve --port 0", "serve --method full",
    "inspect bok.txt", "inspect book.txt --method snapvk", "data build --out out --share 2",
    "train --data nowhere --out out", "train --data . --out out --steps 0", "train --data . --out out --config none",
    "eval ruler --out x --methods snapvk", "eval ruler --out x --tasks vtt", "eval ruler --out x --retention 15",
    "eval ruler --out x --lengths 0", "eval ruler --out x --policy a=nowhere", "profile --out x.txt",
    "profile --out x.json --methods snapvk", "profile --out x.json --memory-limit 0", "report none.jsonl",
]  # fmt: skip


def run(program: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_no_torch_and_prints_nothing(module):
    done = run(WATCHED.format(f"import {module}"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_help_and_mistakes_load_no_torch(tmp_path):
    """All in one process: only the first command that imports torch needs to be named."""
    program = f"""
import os, sys
from lkv.cli.main import main
os.chdir({str(tmp_path)!r})
open("book.txt", "w").write("A book.")
for words in {HELP}:
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, words
    assert "torch" not in sys.modules, words
for line in {MISTAKES}:
    assert main(line.split()) == 2, line
    assert "torch" not in sys.modules, line
assert main(["policies"]) == 0
assert "torch" not in sys.modules, "policies"
"""
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: lkv") == len(HELP) - 1 and f"lkv {lkv.__version__}" in done.stdout
    assert "HuggingFaceTB/SmolLM2-135M-Instruct, in any storage" in done.stdout
    errors = done.stderr.splitlines()
    assert len(errors) == len(MISTAKES) and all(line.startswith("lkv: ") for line in errors)


def test_commands_keep_what_transformers_imports_to_itself():
    """torchao, where it is installed, warns of its own kernels."""
    done = run("from lkv.cli.main import main; main(['inspect']); import transformers.modeling_utils")
    assert done.returncode == 0 and not done.stderr and "share of the tokens" in done.stdout


@pytest.mark.parametrize(("variable", "enabled"), [(None, False), ("0", True)])
def test_logs_have_no_bars_of_transformers(variable, enabled, monkeypatch):
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    if variable:
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", variable)
    program = (
        "from lkv.cli.main import main; main(['policies']); from transformers.utils.logging import {0}; print({0}())"
    )
    assert run(program.format("is_progress_bar_enabled")).stdout.endswith(f"{enabled}\n")


def test_help_takes_less_than_half_a_second():
    def seconds() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "lkv", "--help"], capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(3)) < 0.5  # processor time, the best of three: others use the machine too


def test_every_public_name_is_there_and_no_other():
    for name in lkv.__all__:
        assert getattr(lkv, name) is not None and name in dir(lkv)
    with pytest.raises(AttributeError, match="module 'lkv' has no attribute 'nothing'"):
        lkv.nothing  # noqa: B018
