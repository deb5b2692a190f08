"""Work killed at random moments, as a power cut would end it: what it wrote is whole, and it goes on to the same end.

The work runs in processes forked from one that has done the imports, which take long, and nothing else: where a test of
the stand-in GPU has run, PyTorch refuses a backward pass in a fork of the tests' own process.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from experiments.journal import open_journal
from experiments.result_file import write_results
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import UnknownContextError
from lkv.evaluation.runner import EvaluationConfig, evaluate
from lkv.hf.conversion import convert_once, is_complete
from lkv.hf.spec import inspect_model
from lkv.policy.policy import Policy
from tests import fake_suite
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.training.test_training import trainer

Work = Callable[[Path], None]
LONGEST = 120.0  # seconds that a piece of work may take on a machine that does much else


def run_and_kill(work: Work, folder: Path, after: float, has_begun: Callable[[Path], bool]) -> bool:
    """Begin `work` in a process of its own, kill it `after` seconds from when it has `has_begun`.

    Whether it was killed, and had not ended before."""
    child = _start(work, folder)
    end = time.monotonic() + LONGEST
    # One look decides: the first file may be the trial of whether the folder can be written to, soon gone.
    while not (begun := has_begun(folder)) and child.is_alive() and time.monotonic() < end:
        time.sleep(0.002)
    if begun:
        time.sleep(after)
    child.kill()
    child.join()
    assert begun or has_begun(folder), f"{work.__name__} in {folder} did not begin\n{_said(folder)}"
    assert child.exitcode in (0, -signal.SIGKILL), f"{work.__name__} in {folder} ended with {child.exitcode}"
    return child.exitcode == -signal.SIGKILL


def run_to_end(work: Work, folder: Path) -> None:
    """`work` in a process of its own, to its end."""
    child = _start(work, folder)
    child.join()
    assert child.exitcode == 0, f"{work.__name__} in {folder} ended with {child.exitcode}\n{_said(folder)}"


def _error_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.error")


def _said(folder: Path) -> str:
    """The error that ended the work, if one did."""
    error = _error_file(folder)
    return error.read_text(encoding="utf-8") if error.exists() else ""


def _start(work: Work, folder: Path) -> ForkServerProcess:
    """A process that does `work`, and nothing after it."""
    child = _forks().Process(target=_do, args=(work, folder), daemon=True)
    child.start()
    return child


@cache
def _forks() -> ForkServerContext:
    """Where processes are forked from one that has imported this module."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([__name__])
    return forks


def _do(work: Work, folder: Path) -> None:
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1), os.dup2(quiet, 2)
    try:
        work(folder)
    except BaseException:
        _error_file(folder).write_text(traceback.format_exc(), encoding="utf-8")
        raise


def save_contexts(folder: Path) -> None:
    """Two contexts, one over the other, without end."""
    model = tiny_llama()
    contexts = [compress(model, Words(), TEXT, method="knorm", retention=retention) for retention in (0.2, 0.8)]
    while True:
        for context in contexts:
            context.save(folder / "context.kv")


STORED = [" ".join(f"{letter}{number}" for number in range(60)) for letter in "abc"]


def put_context(store: Any, model: Any, text: str) -> str:
    """Compress a text into a store; its id."""
    from lkv.serving.inputs import CompressionSettings, context_id
    from lkv.serving.stored_context import StoredContext

    settings = CompressionSettings("knorm", 0.4, None, "model", "tokenizer")
    context = compress(model, Words(), text, method="knorm", retention=0.4)
    stored = StoredContext.describe(context_id(text, settings), "", context, settings)
    store.put(stored, context)
    return stored.id


def store_contexts(folder: Path) -> None:
    """Three contexts put into a store, read and deleted, without end."""
    from lkv.serving.store import ContextStore

    model = tiny_llama()
    store = ContextStore(str(folder), model, Words(), None, 0)
    while True:
        for name in [put_context(store, model, text) for text in STORED]:
            with suppress(UnknownContextError):  # deleted by another process
                store.get(name)
        store.delete(name)


def stored_answers() -> dict[str, str]:
    """What `store_contexts` stores, by id, with the answer to a question."""
    from lkv.serving.inputs import CompressionSettings, context_id

    model, settings = tiny_llama(), CompressionSettings("knorm", 0.4, None, "model", "tokenizer")
    answers = (compress(model, Words(), text, method="knorm", retention=0.4).ask("what ?", 3) for text in STORED)
    return {context_id(text, settings): answer for text, answer in zip(STORED, answers, strict=True)}


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


def _are_equal(one: Path, other: Path, name: str) -> bool:
    """Whether two folders have files of equal tensors under `name`."""
    mine, theirs = load_file(one / name), load_file(other / name)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def _has_files(folder: Path) -> bool:
    return any(folder.iterdir())


class Kills:
    """The kinds of work, each with what must hold of its folder after a kill."""

    def __init__(self, folder: Path, kinds: Sequence[str] = ()):
        """Does the work of `kinds` (none: all) once to its end in `folder`, to compare with."""
        self._folder, self._model = folder, tiny_llama()
        self._digests = {policy.digest() for policy in policies()}
        self._whole = folder / "whole"
        self._whole.mkdir()
        # Work, when it has begun, the longest time to the kill in seconds, and what holds of the folder afterwards.
        table: dict[str, tuple[Work, Callable[[Path], bool], float, Callable[[Path], bool]]] = {
            "contexts saved": (save_contexts, lambda f: (f / "context.kv").exists(), 0.1, self._has_context),
            "contexts stored": (store_contexts, lambda f: any(f.glob("*.json")), 0.1, self._has_store),
            "policies saved": (save_policies, lambda f: (f / "policy/config.json").exists(), 0.1, self._has_policy),
            "trainings": (train, _has_files, 0.5, self._has_training),
            "evaluations": (measure, lambda f: (f / "out.jsonl").exists(), 0.5, self._has_evaluation),
            "results collected": (collect, lambda f: (f / "rows.jsonl").exists(), 0.15, self._has_results),
            "conversions": (convert, _has_files, 0.5, self._has_conversion),
        }
        kinds = kinds or tuple(table)
        if "conversions" in kinds:
            from tests.hf.gguf_files import write_gguf

            write_gguf(folder / "tiny.gguf")
        for kind in ("trainings", "evaluations", "conversions"):
            if kind in kinds:
                run_to_end(table[kind][0], self._whole)
        self.kinds = {kind: partial(self._try_one, *table[kind]) for kind in table if kind in kinds}

    def _try_one(
        self,
        work: Work,
        has_begun: Callable[[Path], bool],
        longest: float,
        is_whole: Callable[[Path], bool],
        chance: random.Random,
    ) -> bool:
        """Kill a piece of work at a random moment, finish it if it has an end, and check it; whether it was killed."""
        folder = self._folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        was_killed = run_and_kill(work, folder, chance.random() * longest, has_begun)
        if work not in (save_contexts, store_contexts, save_policies):
            run_to_end(work, folder)
        assert is_whole(folder)
        return was_killed

    def _has_context(self, folder: Path) -> bool:
        context = Context.load(folder / "context.kv", self._model, Words())
        return context.metadata["retention"] in (0.2, 0.8) and bool(context.ask("what ?", 3))

    def _has_store(self, folder: Path) -> bool:
        from lkv.serving.store import ContextStore

        store, right = ContextStore(str(folder), self._model, Words(), None, 0), stored_answers()
        found = {stored.id: store.get(stored.id).ask("what ?", 3) for stored in store.list_contexts()}
        for file in folder.iterdir():
            os.utime(file, (1, 1))
        store.expire(None)  # what the kill left
        return found.items() <= right.items() and len(list(folder.iterdir())) == 2 * len(found)

    def _has_policy(self, folder: Path) -> bool:
        return Policy.from_pretrained(folder / "policy").digest() in self._digests

    def _has_training(self, folder: Path) -> bool:
        curves = {(each / "curve.jsonl").read_text() for each in (folder, self._whole)}
        return len(curves) == 1 and _are_equal(folder, self._whole, "policy/policy.safetensors")

    def _has_evaluation(self, folder: Path) -> bool:
        lines = [(each / "out.jsonl").read_text().splitlines()[1:] for each in (folder, self._whole)]
        rows = [[json.loads(line) | {"seconds": 0} for line in each] for each in lines]
        return rows[0] == rows[1]

    def _has_results(self, folder: Path) -> bool:
        rows = json.loads((folder / "rows.json").read_text())["rows"]
        return rows == [{"value": number**2} for number in range(60)] and not (folder / "rows.jsonl").exists()

    def _has_conversion(self, folder: Path) -> bool:
        return is_complete(folder / "model") and _are_equal(folder, self._whole, "model/model.safetensors")
