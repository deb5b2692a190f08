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
LIGHT = ["lkv", "lkv.training.config", "lkv.errors", "lkv.policy.shipped", "lkv.cli.main"]
HELP = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
# Wrong values, methods, tasks and paths with the words of the error; each is refused before torch is imported.
MISTAKES = {
    "ask nowhere.txt why?": "nowhere.txt does not exist",
    "ask --method knorm": "give a file to read",
    "ask -": "a chat cannot be typed",
    "ask why? --load x.kv --method knorm": "leave --method out",
    "ask --load x.kv book.txt who?": "--load reads the saved text",
    "ask book.txt why? --save x.kv --method full": "the uncompressed cache of 'full' cannot be saved",
    "ask book.txt why? --method snapvk": "there is no method 'snapvk'; did you mean 'snapkv'",
    "ask book.txt why? --retention 1.5": "must lie in (0, 1]",
    "ask book.txt why? --policy nowhere": "there is no policy folder 'nowhere'",
    "ask book.txt why? --memory 0": "memory is '0'; give a share",
    "ask book.txt why? --memory 5TB": "memory is '5TB'; give a share",
    "ask book.txt why? --memory 110%": "memory is '110%', more than the 16-bit cache",
    "ask why? --load x.kv --memory 10%": "leave --memory out",
    "ask book.txt --chunk 1.5": "--chunk is 1.5, but must be a valid integer",
    "ask book.txt --dtype int8": "--dtype is int8, but must be 'float32', 'bfloat16' or 'float16'",
    "serve --port 0": "--port is 0, but must be greater than or equal to 1",
    "serve --port 70000": "--port is 70000, but must be less than or equal to 65535",
    "serve --method full": "uncompressed contexts cannot be stored",
    "inspect bok.txt": "there is no file or folder 'bok.txt'",
    "inspect book.txt --method snapvk": "did you mean 'snapkv'",
    "inspect --retention 0": "must lie in (0, 1]",
    "train --data nowhere --out out": "there is no data folder nowhere",
    "train --data . --out out --steps 0": "--steps is 0, but must be greater than or equal to 1",
    "train --data . --out out --lr nan": "--lr is nan, but must be a finite number",
    "train --data . --out out --seed -1": "--seed is -1, but must be greater than or equal to 0",
    "train --data . --out out --preset big": "--preset is big, but must be 'cpu'",
    "train --data . --out out --config none": "none cannot be read as TOML",
    "eval ruler --out x --methods snapvk": "did you mean 'snapkv'",
    "eval ruler --out x --tasks niah_singel_1": "RULER has no task 'niah_singel_1'; did you mean niah_single_1",
    "eval longbench --out x --tasks hotpotq": "did you mean hotpotqa?",
    "eval ruler --out x --retention 15": "must lie in (0, 1]",
    "eval ruler --out x --lengths 0": "--lengths is 0, but must be greater than or equal to 1",
    "eval ruler --out x --dtype int8": "--dtype is int8, but must be 'float32', 'bfloat16' or 'float16'",
    "eval ruler --out x --policy a=nowhere": "there is no policy folder 'nowhere'",
    "eval ruler --out x --ladder --retention 0.3": "--ladder sets the retentions",
    "eval ruler --out x --preset kvpress --retention 0.3": "leave --retention and --protocol out",
    "eval ruler --out x --preset kvpress --protocol longbench": "leave --retention and --protocol out",
    "eval ruler --out .": "is a folder; give a file",
}


def run(program: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)


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
for line in {list(MISTAKES)}:
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
    for error, (words, message) in zip(errors, MISTAKES.items(), strict=True):
        assert error.startswith("lkv: ") and message in error, words


@pytest.mark.slow
def test_commands_keep_what_transformers_imports_to_itself():
    """torchao, where it is installed, warns of its own kernels."""
    done = run("from lkv.cli.main import main; main(['inspect']); import transformers.modeling_utils")
    assert done.returncode == 0 and not done.stderr and "share of the tokens" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("load", "setting", "spins"), [(0.2, None, "None"), (99.0, None, "20000"), (99.0, "7", "7")])
def test_beside_other_programs_threads_that_wait_for_work_soon_leave_their_core(load, setting, spins, monkeypatch):
    """GNU's OpenMP reads the variable when PyTorch loads it."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if setting:
        monkeypatch.setenv("GOMP_SPINCOUNT", setting)
    program = """
import os, sys
from lkv.cli import main as command_line
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.meta_path.remove(self)
sys.meta_path.insert(0, Finder())
os.cpu_count, os.getloadavg = lambda: 4, lambda: (LOAD, 0.0, 0.0)
command_line.main(["inspect"])
"""
    assert run(program.replace("LOAD", str(load))).stdout.startswith(f"{spins}\n")


@pytest.mark.slow
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
