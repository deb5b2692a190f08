"""Work killed at random moments, as a power cut would end it: what it wrote is whole, and it goes on to the same end.

The work runs in forked processes: what takes long, the imports, is done once.
"""

import json
import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from lkv.context.context import Context, compress
from lkv.evaluation.runner import EvaluationConfig, evaluate
from lkv.integrations.transformers.spec import inspect_model
from lkv.models.conversion import convert_once, is_complete
from lkv.policy.policy import Policy
from lkv.utils.journal import open_journal
from lkv.utils.results import write_results
from tests import fake_suite
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.training.test_training import trainer

Work = Callable[[Path], None]
LONGEST = 120.0  # seconds that a piece of work may take on a machine that does much else


def run_and_kill(work: Work, folder: Path, after: float, has_begun: Callable[[Path], bool]) -> bool:
    """Begin `work` in a process of its own, kill it `after` seconds from when it has `has_begun`; whether it worked."""
    child = _start(work, folder)
    end = time.monotonic() + LONGEST
    while not has_begun(folder) and time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.002)
    time.sleep(after)
    # It may have ended, but until it is waited for its number is no other process's.
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def run_to_end(work: Work, folder: Path) -> None:
    """`work` in a process of its own, to its end."""
    child = _start(work, folder)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"{work.__name__} in {folder} ended with {status}"


def _start(work: Work, folder: Path) -> int:
    """The number of a forked process that does `work`, and nothing after it."""
    with warnings.catch_warnings():
        # Python warns of threads that a forked process does not have; the work needs none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        # Progress bars lock a semaphore that forked processes share: who is killed within it would stop all after it.
        tqdm.set_lock(threading.RLock())
        work(folder)
        status = 0
    finally:
        os._exit(status)


def save_contexts(folder: Path) -> None:
    """Two contexts, one over the other, without end."""
    model = tiny_llama()
    contexts = [compress(model, Words(), TEXT, method="knorm", retention=retention) for retention in (0.2, 0.8)]
    while True:
        for context in contexts:
            context.save(folder / "context.kv")


def policies() -> list[Policy]:
    """Two policies of one model."""
    found, spec = [], inspect_model(tiny_llama())
    for seed in range(2):
        torch.manual_seed(seed)
        found.append(Policy(spec))
    return found


def save_policies(folder: Path) -> None:
    """Two policies, one over the other, without end."""
    both = policies()
    while True:
        for policy in both:
            policy.save_pretrained(folder / "policy")


def train(folder: Path) -> None:
    """A small training, or the rest of it."""
    run, policy = trainer(folder)
    run.run()
    policy.save_pretrained(folder / "policy")


def measure(folder: Path) -> None:
    """A small evaluation, or the rest of it."""
    config = EvaluationConfig(
        ["knorm", "snapkv"], [0.3], score=fake_suite.score, make_prompt=fake_suite.make_prompt, model_name="tiny"
    )
    evaluate(tiny_llama(), fake_suite.Letters(), fake_suite.make_examples(3), config, folder / "out.jsonl")


def collect(folder: Path) -> None:
    """A benchmark's rows, made one by one and then written to one file."""
    with open_journal(folder / "rows.jsonl", {"seed": "1"}) as done:
        for number in range(60):
            if str(number) not in done:
                time.sleep(0.002)
                done.add(str(number), {"value": number**2})
        write_results(folder / "rows.json", "rows", [done[str(number)] for number in range(60)], 1, "make rows")


def convert(folder: Path) -> None:
    """A GGUF file made into a folder of safetensors."""
    from contextlib import nullcontext

    convert_once(folder / "model", lambda: nullcontext(folder.parent / "tiny.gguf"), torch.float32)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "policy" / "policy.safetensors")


def _rows(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()[1:]]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def _are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


KINDS = ("contexts saved", "policies saved", "trainings", "evaluations", "results collected", "conversions")


class Kills:
    """The kinds of work, each with what must hold of its folder after a kill."""

    def __init__(self, folder: Path, kinds: Sequence[str] = KINDS):
        """Does the work of `kinds` once to its end in `folder`, to compare with."""
        self._folder, self._model = folder, tiny_llama()
        self._digests = {policy.digest() for policy in policies()}
        self._whole = folder / "whole"
        self._whole.mkdir()
        if "conversions" in kinds:
            from tests.models.test_gguf import write_gguf

            write_gguf(folder / "tiny.gguf")
        for kind, work in {"trainings": train, "evaluations": measure, "conversions": convert}.items():
            if kind in kinds:
                run_to_end(work, self._whole)
        checks = (self.contexts, self.policies, self.trainings, self.evaluations, self.collections, self.conversions)
        self.kinds: dict[str, Callable[[random.Random], bool]] = {
            kind: try_one for kind, try_one in zip(KINDS, checks, strict=True) if kind in kinds
        }

    def contexts(self, chance: random.Random) -> bool:
        path = self._empty_folder() / "context.kv"
        was_killed = run_and_kill(save_contexts, path.parent, chance.random() * 0.1, lambda _: path.exists())
        context = Context.load(path, self._model, Words())
        assert context.metadata["retention"] in (0.2, 0.8) and context.ask("what ?", 3)
        return was_killed

    def policies(self, chance: random.Random) -> bool:
        folder = self._empty_folder()
        was_killed = run_and_kill(
            save_policies, folder, chance.random() * 0.1, lambda f: (f / "policy" / "config.json").exists()
        )
        assert Policy.from_pretrained(folder / "policy").digest() in self._digests
        return was_killed

    def trainings(self, chance: random.Random) -> bool:
        folder = self._empty_folder()
        was_killed = run_and_kill(
            train, folder, chance.random() * 0.5, lambda f: (f / "curve.jsonl").exists() or _has_files(f)
        )
        run_to_end(train, folder)
        assert _are_equal(_weights(folder), _weights(self._whole))
        assert (folder / "curve.jsonl").read_text() == (self._whole / "curve.jsonl").read_text()
        return was_killed

    def evaluations(self, chance: random.Random) -> bool:
        folder = self._empty_folder()
        was_killed = run_and_kill(measure, folder, chance.random() * 0.5, lambda f: (f / "out.jsonl").exists())
        run_to_end(measure, folder)
        assert _rows(folder) == _rows(self._whole)
        return was_killed

    def collections(self, chance: random.Random) -> bool:
        folder = self._empty_folder()
        was_killed = run_and_kill(collect, folder, chance.random() * 0.15, lambda f: (f / "rows.jsonl").exists())
        run_to_end(collect, folder)
        rows = json.loads((folder / "rows.json").read_text())["rows"]
        assert rows == [{"value": number**2} for number in range(60)] and not (folder / "rows.jsonl").exists()
        return was_killed

    def conversions(self, chance: random.Random) -> bool:
        folder = self._empty_folder()
        was_killed = run_and_kill(convert, folder, chance.random() * 0.5, _has_files)
        run_to_end(convert, folder)
        assert is_complete(folder / "model")
        assert _are_equal(*(load_file(f / "model" / "model.safetensors") for f in (folder, self._whole)))
        return was_killed

    def _empty_folder(self) -> Path:
        """An empty folder; the one before goes, with whatever the kill left there."""
        shutil.rmtree(self._folder / "run", ignore_errors=True)
        (self._folder / "run").mkdir()
        return self._folder / "run"


def _has_files(folder: Path) -> bool:
    return any(folder.iterdir())
