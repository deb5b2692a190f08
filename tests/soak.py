"""Hours of what the tests do for seconds: `python -m tests.soak --minutes 30`, or `make soak MINUTES=30`.

All parts take turns. After each turn the counts go to experiments/results/soak.json, with machine, versions and the
seeds of what was run; another run goes on with the next seeds and adds to the counts, where machine and versions are
the same, or counts into a file of its own (--out, or OUT=FILE for make). The first difference found ends it, and the
command that finds it again is printed.
"""

import argparse
import gc
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from experiments.report.results_frame import read_results
from experiments.result_file import write_results
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.context.saved_context import CONTEXT_FILE
from lkv.errors import LkvError
from lkv.evaluation.sample_journal import SampleJournal
from lkv.policy.policy import Policy
from lkv.training.checkpoint import read_checkpoint
from lkv.utils import tensor_file
from lkv.utils.provenance import collect_provenance
from tests.cache_machine import CacheMachine
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.inputs import Inputs
from tests.kills import Kills
from tests.results import many, write
from tests.soak_trials import documents, models, options, requests
from tests.test_trust import QUESTIONS
from tests.training.test_training import train_for, trainer

OUT = Path(__file__).parents[1] / "experiments" / "results" / "soak.json"
Counts = dict[str, int]


def operations(seconds: float, start: int) -> tuple[Counts, int]:
    """Random operations on caches against the dense reference.

    Like every part it takes `seconds` after its set-up, and gives what it counted and the seed that comes next.
    """
    counts = {"operations": 0, "caches": 0, "rows of logits": 0, "caches left off at a tie": 0}

    class Counted(CacheMachine):
        def teardown(self):
            counts["caches"] += 1
            counts["operations"] += self.operations
            counts["rows of logits"] += self.steps
            counts["caches left off at a tie"] += self.cache is not None and not self.reference.is_decided

    plan = settings(
        max_examples=10, stateful_step_count=50, deadline=None, database=None, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        run_state_machine_as_test(seed(start)(Counted), settings=plan)
        start += 1
    return counts, start


def threads(seconds: float, start: int) -> tuple[Counts, int]:
    """Four threads asking one context, against the answers of one."""
    asks = 0
    model = tiny_llama(seed=start, dtype=torch.float32)
    context = compress(model, Words(), TEXT, method="knorm", retention=0.4)
    expected = {question: context.ask(question, 6) for question in QUESTIONS}

    questions = [*QUESTIONS] * 10
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        while time.monotonic() < until:
            answers = pool.map(lambda question: context.ask(question, 6), questions)
            assert list(answers) == [expected[question] for question in questions]
            asks += len(questions)
    return {"asks of 4 threads": asks}, start + 1


def leaks(seconds: float, start: int) -> tuple[Counts, int]:
    """Contexts compressed, asked, forked, saved, loaded and dropped: as many tensors at the end as before."""
    model, rounds, before = tiny_llama(seed=start, dtype=torch.float32), 0, (0, 0)
    kinds: list[dict[str, Any]] = [{}, {"decode_eviction": True, "slack": 2}, {"chunk": 9}, {"bits": 4}]
    kinds = [{"retention": 0.4} | options for options in kinds] + [{"memory": 0.2}]
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        # The first round makes what stays, and the second is what later ones are compared with.
        while rounds < 3 or time.monotonic() < until:
            for options in kinds:
                context = compress(model, Words(), TEXT, method="knorm", **options)
                context.ask("what ?", 4)
                context.fork().ask("who ?", 4)
                context.save(Path(folder) / "context.kv")
                Context.load(Path(folder) / "context.kv", model, Words()).ask("why ?", 4)
                del context
            rounds += 1
            if rounds > 1:
                before = before if before[0] else live_tensors()
                assert live_tensors() == before, (
                    f"{live_tensors()} tensors and bytes instead of {before} after {rounds} rounds"
                )
    return {"contexts": rounds * len(kinds), "asks": 3 * rounds * len(kinds)}, start + 1


def live_tensors() -> tuple[int, int]:
    """Tensors alive and the bytes behind them."""
    while gc.collect():  # finalizers may free more
        pass
    # By its type: to ask an object itself wakes up lazy ones.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return len(found), sum(x.untyped_storage().nbytes() for x in found if x.layout == torch.strided)


def fuzz(seconds: float, start: int) -> tuple[Counts, int]:
    """Files of all four formats with random damage: refused by an LkvError, or read as they were."""
    chance, counts = random.Random(start), {"damaged files": 0, "refused": 0, "read as they were": 0}
    with tempfile.TemporaryDirectory() as name:
        readers = _samples(Path(name))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            path, read = chance.choice(readers)
            whole, expected = path.read_bytes(), read()
            path.write_bytes(damaged(whole, chance))
            counts["damaged files"] += 1
            try:
                if read() == expected:
                    counts["read as they were"] += 1
                elif path.suffix == ".kv" or path.parent.name == "policy":
                    raise AssertionError(f"{path} was read otherwise than it was written (seed {start})")
            except LkvError:
                counts["refused"] += 1
            finally:
                path.write_bytes(whole)
    return counts, start + 1


def _samples(folder: Path) -> list[tuple[Path, Callable[[], object]]]:
    """A file of each format and what reads it."""
    model = tiny_llama(dtype=torch.float32)
    context = compress(model, Words(), TEXT, method="knorm", retention=0.4)
    context.save(folder / "context.kv")
    run, policy = trainer(folder / "run")
    train_for(run, 2)
    policy.save_pretrained(folder / "policy")
    results = write(folder / "results.jsonl", many())
    journal = folder / "journal.jsonl"
    SampleJournal(journal, {"format": 1}).add({"key": "a", "rows": []})

    def content(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, list[Any]]]:
        return {key: (tensor.dtype, tensor.tolist()) for key, tensor in tensors.items()}

    def read_context() -> object:
        tensors, header = tensor_file.read(folder / "context.kv", CONTEXT_FILE)
        return content(tensors), header

    return [
        (folder / "context.kv", read_context),
        (folder / "context.kv", lambda: Context.load(folder / "context.kv", model, Words()).ask("what ?", 4)),
        (folder / "policy" / "policy.safetensors", lambda: Policy.from_pretrained(folder / "policy").digest()),
        (folder / "policy" / "config.json", lambda: Policy.from_pretrained(folder / "policy").digest()),
        (folder / "run" / "checkpoint.safetensors", lambda: content(read_checkpoint(folder / "run").tensors)),
        (results, lambda: read_results([results]).frame.key.nunique()),
        (journal, lambda: SampleJournal(journal, {"format": 1}).done),
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


def kills(seconds: float, start: int) -> tuple[Counts, int]:
    """Work killed at random moments: what it left is whole, and it ends as work that nothing killed."""
    chance = random.Random(start)
    with tempfile.TemporaryDirectory() as name:
        work = Kills(Path(name))
        counts = {"kills": 0, **dict.fromkeys(work.kinds, 0)}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for kind, try_one in work.kinds.items():
                # A process that ended first was not killed: it is tried again in the next round.
                if try_one(chance):
                    counts[kind] += 1
                    counts["kills"] += 1
    return counts, start + 1


def inputs(seconds: float, start: int) -> tuple[Counts, int]:
    """Bad inputs to the commands and the API, the seed saying from which on: one sentence each."""
    with tempfile.TemporaryDirectory() as name:
        every = Inputs(Path(name))
        counts = {"bad inputs": 0, "of the command line": 0, "of the API": 0}
        until = time.monotonic() + seconds
        while time.monotonic() < until and start < len(every.names):
            kind = every.try_one(every.names[start])
            if kind:
                counts["bad inputs"] += 1
                counts[kind] += 1
            start += 1
    return counts, start


# What runs, its share of the time, and after how many of what it counts first there is enough of it.
PARTS: dict[str, tuple[Callable[[float, int], tuple[Counts, int]], float, int]] = {
    "operations": (operations, 0.35, 100_000),
    "inputs": (inputs, 0.15, 500),
    "kills": (kills, 0.15, 100),
    "fuzz": (fuzz, 0.05, 1000),
    "threads": (threads, 0.05, 4000),
    "leaks": (leaks, 0.05, 200),
    "documents": (documents, 0.05, 100),
    "models": (models, 0.05, 10),
    "requests": (requests, 0.05, 100),
    "options": (options, 0.05, 100),
}


class Tally:
    """The counts so far, one row each in the result file."""

    def __init__(self, path: Path, first: int, command: str):
        """Goes on with what `path` holds. Raises ValueError where it was counted elsewhere, or with other versions."""
        self.path, self.command, self.first = path, command, first
        self.counts: dict[str, Counts] = {}
        self.seeds: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        same_place = {key: found.get(key) for key in ("machine", "versions")}
        if found and same_place != {key: collect_provenance(["hypothesis"])[key] for key in same_place}:
            raise ValueError(f"{path} holds counts of another machine or other versions: name another file with --out")
        if found:
            self.first = found["seed"]
            for row in found["rows"]:
                self.counts.setdefault(row["part"], {})[row["unit"]] = row["value"]
                self.seeds[row["part"]], self.seconds[row["part"]] = row["next_seed"], row["seconds"]

    def add(self, part: str, counts: Counts, following: int, seconds: float) -> None:
        """Add what a turn counted, and write everything."""
        own = self.counts.setdefault(part, {})
        for unit, value in counts.items():
            own[unit] = own.get(unit, 0) + value
        self.seeds[part], self.seconds[part] = following, self.seconds.get(part, 0.0) + seconds
        rows = [
            {"part": name, "value": value, "unit": unit, "differences": 0, "next_seed": self.seeds[name],
             "seconds": round(self.seconds[name])}
            for name, units in self.counts.items() for unit, value in units.items()
        ]  # fmt: skip
        write_results(self.path, "soak", rows, self.first, self.command, collect_provenance(["hypothesis"]))

    def next_seed(self, part: str) -> int:
        return self.seeds.get(part, 0 if part == "inputs" else self.first)


def main() -> None:
    """Take turns until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--turn", type=float, default=5, help="minutes for a turn of all parts")
    parser.add_argument("--seed", type=int, default=1, help="of the first turn; a run that goes on has its own")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        tally = Tally(arguments.out, arguments.seed, "make soak")
    except ValueError as error:
        parser.error(str(error))
    end, total = time.monotonic() + 60 * arguments.minutes, sum(PARTS[name][1] for name in arguments.parts)
    for name in itertools.cycle(arguments.parts):
        began, start, (part, share, _) = time.monotonic(), tally.next_seed(name), PARTS[name]
        if began >= end:
            return
        try:
            counts, following = part(60 * min(arguments.turn, arguments.minutes) * share / total, start)
        except BaseException:
            again = f"python -m tests.soak --parts {name} --seed {start} --out /tmp/soak.json"
            print(f"{name}: a difference, or an interruption, from seed {start} on; again: {again}", file=sys.stderr)
            raise
        tally.add(name, counts, following, time.monotonic() - began)
        print(f"{name}: {tally.counts[name]}", flush=True)


if __name__ == "__main__":
    main()
