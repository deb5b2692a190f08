"""Hours of what the tests do for seconds: `python -m tests.soak --minutes 30`, or `make soak MINUTES=30`.

Each part runs for its share of the time, with seeds that are printed, so that a failure can be made again. The counts
and the seed go to a JSON file at the end.
"""

import argparse
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from safetensors.torch import load_file

from lkv import context_file
from lkv.context import Context, compress
from lkv.errors import LkvError
from lkv.evals.journal import SharedJournal
from lkv.evals.processes import Process
from lkv.policy import Policy
from lkv.report.reading import read_results
from lkv.training.checkpoint import read_checkpoint
from tests.conftest import tiny_llama
from tests.machine import CacheMachine
from tests.results import many, write
from tests.test_compression import TEXT, Words
from tests.test_training import SCRIPT, train_for, trainer
from tests.test_trust import QUESTIONS, in_threads

Counts = dict[str, int]


def operations(until: float, start: int) -> Counts:
    """Random operations on caches against the dense reference."""
    counts = {"examples": 0, "operations": 0, "rows": 0}

    class Counted(CacheMachine):
        def teardown(self):
            counts["examples"] += 1
            counts["rows"] += self.steps

        def check_invariants(self, *arguments, **options):
            counts["operations"] += 1
            return super().check_invariants(*arguments, **options)

    plan = settings(
        max_examples=25, stateful_step_count=30, deadline=None, database=None, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    number = start
    while time.monotonic() < until:
        run_state_machine_as_test(seed(number)(Counted), settings=plan)
        number += 1
    return counts


def threads(until: float, start: int) -> Counts:
    """Four threads asking one context, against the answers of one."""
    asks = 0
    while time.monotonic() < until:
        model = tiny_llama(seed=start + asks, dtype=torch.float32)
        context = compress(model, Words(), TEXT, "knorm", 0.4)
        expected = {question: context.ask(question, 6) for question in QUESTIONS}

        def work(question, context=context, expected=expected):
            for _ in range(50):
                assert context.ask(question, 6) == expected[question]

        in_threads(work, QUESTIONS)
        asks += 50 * len(QUESTIONS)
    return {"asks": asks}


def leaks(until: float, start: int) -> Counts:
    """Contexts compressed, asked, forked, saved, loaded and dropped: as many tensors at the end as before."""
    model, rounds, before = tiny_llama(dtype=torch.float32), 0, (0, 0)
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until:
            context = compress(model, Words(), TEXT, "tova", 0.4)
            context.ask("what ?", 4)
            context.fork().ask("who ?", 4)
            context.save(Path(folder) / "context.kv")
            Context.load(Path(folder) / "context.kv", model, Words()).ask("why ?", 4)
            del context
            rounds += 1
            if rounds > 1:
                before = before if before[0] else held()
                assert held() == before, f"{held()} tensors and bytes instead of {before} after {rounds} rounds"
    return {"contexts": rounds}


def held() -> tuple[int, int]:
    """Tensors alive and the bytes behind them."""
    gc.collect()
    # By its type: to ask an object itself wakes up lazy ones.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return len(found), sum(tensor.untyped_storage().nbytes() for tensor in found)


def fuzz(until: float, start: int) -> Counts:
    """Files of all four formats with random damage: refused by an LkvError, or read as they were."""
    chance, counts = random.Random(start), {"files": 0, "refused": 0, "equal": 0}
    with tempfile.TemporaryDirectory() as name:
        readers = _samples(Path(name))
        while time.monotonic() < until:
            path, read = chance.choice(readers)
            whole, expected = path.read_bytes(), read()
            path.write_bytes(damaged(whole, chance))
            counts["files"] += 1
            try:
                if same(read(), expected):
                    counts["equal"] += 1
                elif path.suffix == ".kv" or path.parent.name == "policy":
                    raise AssertionError(f"{path} was read otherwise than it was written (seed {start})")
            except LkvError:
                counts["refused"] += 1
            finally:
                path.write_bytes(whole)
    return counts


def _samples(folder: Path) -> list[tuple[Path, Callable[[], object]]]:
    """A file of each format and what reads it."""
    model = tiny_llama(dtype=torch.float32)
    context = compress(model, Words(), TEXT, "knorm", 0.4)
    context.save(folder / "context.kv")
    run, policy = trainer(folder / "run")
    train_for(run, 2)
    policy.save_pretrained(folder / "policy")
    results = write(folder / "results.jsonl", many())
    journal = folder / "journal.jsonl"
    SharedJournal(journal, {"format": 1}, Process(0, 1)).add({"key": "a", "rows": []})
    return [
        (folder / "context.kv", lambda: context_file.read(folder / "context.kv")),
        (folder / "context.kv", lambda: Context.load(folder / "context.kv", model, Words()).ask("what ?", 4)),
        (folder / "policy" / "policy.safetensors", lambda: Policy.from_pretrained(folder / "policy").digest()),
        (folder / "policy" / "config.json", lambda: Policy.from_pretrained(folder / "policy").digest()),
        (folder / "run" / "checkpoint.safetensors", lambda: read_checkpoint(folder / "run")[0]),
        (results, lambda: len(read_results([results]).samples)),
        (journal, lambda: SharedJournal(journal, {"format": 1}, Process(0, 1)).done),
    ]


def damaged(data: bytes, chance: random.Random) -> bytes:
    """`data` with bytes flipped, cut out, doubled or put in."""
    place, size = chance.randrange(len(data)), chance.randrange(1, 40)
    return {
        "flip": data[:place] + bytes([data[place] ^ chance.randrange(1, 256)]) + data[place + 1 :],
        "cut": data[:place],
        "drop": data[:place] + data[place + size :],
        "double": data[:place] + data[place : place + size] + data[place:],
        "insert": data[:place] + chance.randbytes(size) + data[place:],
        "zero": data[:place] + bytes(size) + data[place + size :],
    }[chance.choice(["flip", "cut", "drop", "double", "insert", "zero"])]


def same(one: object, other: object) -> bool:
    """Equality that also looks into tensors."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


SAVING = """
import sys
from pathlib import Path
from tests.test_compression import TEXT, Words
from tests.conftest import tiny_llama
from lkv.context import compress
model = tiny_llama()
contexts = [compress(model, Words(), TEXT, "knorm", retention) for retention in (0.2, 0.8)]
print("ready", flush=True)
while True:
    for context in contexts:
        context.save(Path(sys.argv[1]) / "context.kv")
"""


def kills(until: float, start: int) -> Counts:
    """Savings and trainings killed at random moments: the file is always whole, the weights are always the same."""
    chance, counts = random.Random(start), {"savings": 0, "trainings": 0}
    model = tiny_llama()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder / "whole")
        expected = load_file(folder / "whole" / "policy" / "policy.safetensors")
        while time.monotonic() < until:
            child = subprocess.Popen([sys.executable, "-c", SAVING, name], stdout=subprocess.PIPE)
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            time.sleep(chance.random() * 0.2)
            kill(child)
            if (folder / "context.kv").exists():
                Context.load(folder / "context.kv", model, Words())
            counts["savings"] += 1
            run = folder / f"run-{counts['trainings']}"
            child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(run), "0.02"], stderr=subprocess.DEVNULL)
            while child.poll() is None and not (run / "checkpoint.safetensors").exists():
                time.sleep(0.01)
            time.sleep(chance.random())
            kill(child)
            train(run)
            assert same(load_file(run / "policy" / "policy.safetensors"), expected)
            counts["trainings"] += 1
    return counts


def train(folder: Path) -> None:
    """A whole training in a process of its own, or the rest of one."""
    subprocess.run([sys.executable, "-c", SCRIPT, str(folder), "0"], check=True, stderr=subprocess.DEVNULL)


def kill(child: subprocess.Popen) -> None:
    """End one process as a power cut would."""
    if child.poll() is None:
        os.kill(child.pid, signal.SIGKILL)
    child.wait()


# What runs, and its share of the time.
PARTS: dict[str, tuple[Callable[[float, int], Counts], float]] = {
    "operations": (operations, 0.5),
    "fuzz": (fuzz, 0.15),
    "threads": (threads, 0.1),
    "leaks": (leaks, 0.1),
    "kills": (kills, 0.15),
}


def main() -> None:
    """Run all parts, or those named, and write what was counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    total = sum(PARTS[name][1] for name in options.parts)
    found: dict[str, object] = {"minutes": options.minutes, "seed": options.seed}
    for name in options.parts:
        part, share = PARTS[name]
        print(f"{name}, seed {options.seed} ...", flush=True)
        found[name] = part(time.monotonic() + 60 * options.minutes * share / total, options.seed)
        print(f"{name}: {found[name]}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
