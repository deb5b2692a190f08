"""Bad inputs by the hundred: kinds of damage times the places where a user's files, options and values come in.

Each must give one sentence: on the command line exit code 2 and one line, in Python an LkvError of one line. What turns
out to be no mistake (a text of zeros is a text) is not counted; anything else is a difference.
"""

import io
import json
import math
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.report.results_frame import read_results
from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import LkvError
from lkv.evaluation.sample_journal import SampleJournal
from lkv.hf.loading import load_model
from lkv.hf.spec import inspect_model
from lkv.methods.budgets import read_pattern
from lkv.policy.lookup import load_policy
from lkv.policy.policy import Policy
from lkv.training.checkpoint import initialize_from, read_checkpoint
from lkv.training.config import TrainingConfig
from tests.commands import main
from tests.conftest import save_model, tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.requests import resolve_method
from tests.results import many, write
from tests.ruler import hotpot_rows, write_lines, write_sources
from tests.training.test_training import train_for, trainer

COMMAND, API = "of the command line", "of the API"
MISFIT = "no model could be loaded from"  # what ends a command that is run without a model


def _turned(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "nothing in it": lambda data: b"",
    "one byte": lambda data: data[:1],
    "cut in half": lambda data: data[: len(data) // 2],
    "without its end": lambda data: data[:-9],
    "without its beginning": lambda data: data[9:],
    "one bit turned": lambda data: _turned(data, len(data) // 3),
    "turned round": lambda data: data[::-1],
    "noise": lambda data: random.Random(0).randbytes(400),
    "zeros": lambda data: bytes(400),
    "deep JSON": lambda data: b"[" * 100_000,
    "an empty list": lambda data: b"[]\n",
    "an empty object": lambda data: b"{}\n",
    "null": lambda data: b"null\n",
    "a number": lambda data: b"3\n",
    "a text": lambda data: b'"text"\n',
    "objects in a list": lambda data: b"[{}, {}]\n",
    "half a character": lambda data: b'{"a": "\\ud800", "format": 1, "text": "\\udfff"}\n',
    "no UTF-8": lambda data: b"\xff\xfe\xfa words of another encoding \x80\n",
    "UTF-16": lambda data: data.decode("latin-1").encode("utf-16"),
    "a page of HTML": lambda data: b"<!DOCTYPE html><html><body>404 Not Found</body></html>\n",
    "a pickle": lambda data: pickle.dumps({"a": [1, 2, 3]}),
    "no number": lambda data: b"NaN\n",
    "a number of 400 digits": lambda data: b"1" + b"0" * 400 + b"\n",
    "numbers without end": lambda data: re.sub(rb"\d+\.\d+", b"1e999", data),
    "numbers for texts": lambda data: re.sub(rb'": "[^"]*"', b'": 3', data),
    "null for numbers": lambda data: re.sub(rb'": \d+', b'": null', data),
}
# What stands in the place of a file, none of it a file that can be read.
PLACES = ("missing", "a folder", "a link to itself", "a long name", "below a file", "no name")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 2, 1.5, -0.5, math.nan, math.inf, 10**30, "", "x", "0.15", "a b", "half \ud800", b"x", [],
    [1], {}, {"a": 1}, (), object(), Path("nowhere"),
)  # fmt: skip
WHOLE = ("0", "-1", "1.5", "x", "", "nan", "1e3", "-", "0x10", "\u0663x")
NUMBER = ("nan", "inf", "-inf", "-1", "x", "", "0", "1e400", "2", "1,5", "15%")
NAMES = (
    "", "x", "lkv+", "+", "snapkv+lkv", "+compensation", "lkv+compensation+compensation", "UNIFORM+snapkv", "a b",
    "\U0001f4a5", "\udcff", "../x", "lkv lkv", "0.15",
)  # fmt: skip


class Inputs:
    """All bad inputs by name, in an order that mixes their kinds."""

    def __init__(self, folder: Path):
        """Makes the good files that the bad ones are made of in `folder`."""
        self._folder, self._work = folder, folder / "work"
        self._good = _good_files(folder / "good")
        self._model, self._context = tiny_llama(), compress(tiny_llama(), Words(), TEXT, method="knorm", retention=0.4)
        self._cases: dict[str, Callable[[], bool]] = {}
        self._kinds: dict[str, str] = {}
        for kind, cases in (
            (COMMAND, self._files()), (COMMAND, self._options()), (COMMAND, self._places()), (API, self._values()),
            (API, self._read()),
        ):  # fmt: skip
            for name, case in cases:
                assert name not in self._cases, name
                self._cases[name], self._kinds[name] = case, kind
        self.names = sorted(self._cases)
        random.Random(0).shuffle(self.names)

    def try_one(self, name: str) -> str | None:
        """Which side refused the input `name`; None where it was no mistake. Raises AssertionError for a difference."""
        try:
            return self._kinds[name] if self._cases[name]() else None
        except BaseException as error:
            raise AssertionError(f"bad input {name!r}: {type(error).__name__}: {error}") from error

    def _commands(self) -> Iterator[tuple[str, Path, Callable[[Path], list[Any]]]]:
        """(name, a good file, the command that reads it at another place)."""
        good, none = self._good, self._good / "no model"
        ask: list[Any] = ["ask", good / "text.txt", "why?", "--max-new-tokens", "2", "--model", good / "model"]
        knorm = [*ask, "--method", "knorm"]
        yield "ask text", good / "text.txt", lambda path: ["ask", path, "why?", "--model", none]
        yield "ask pattern", good / "pattern.tsv", lambda path: [*ask, "--method", "duo", "--pattern", path]
        yield "ask gguf", good / "tiny.gguf", lambda path: [*knorm, "--model", path]
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            inside = partial(self._with, good / "model")
            yield f"ask model {name}", good / "model" / name, lambda p, i=inside: [*knorm, "--model", i(p)]
        for name in ("config.json", "policy.safetensors"):
            inside = partial(self._with, good / "policy")
            yield f"ask policy {name}", good / "policy" / name, lambda p, i=inside: [*ask, "--policy", i(p)]
            yield f"inspect {name}", good / "policy" / name, lambda p, i=inside: ["inspect", i(p)]
        yield "report", good / "results.jsonl", lambda path: ["report", path]
        yield "report profile", good / "profile.json", lambda path: ["report", "--profile", path]
        for name in ("squad_train_subset.jsonl.gz", "story.txt", "tool.py"):
            inside = partial(self._with, good / "data")
            yield f"train {name}", good / "data" / name, lambda p, i=inside: self._training(none, i(p))
        for name in ("curve.jsonl", "checkpoint.safetensors"):
            inside = partial(self._with, good / "run")
            yield f"train over {name}", good / "run" / name, lambda p, i=inside: self._training(
                none, good / "data", i(p)
            )  # fmt: skip
        evaluate = ["--samples", "1", "--methods", "knorm", "--model", none, "--out", self._work / "out.jsonl"]
        yield "eval longbench", good / "longbench" / "hotpotqa.jsonl", lambda path: [
            "eval", "longbench", "--tasks", "hotpotqa", "--data", path.parent, *evaluate,
        ]  # fmt: skip
        yield "eval haystack", good / "text.txt", lambda path: [
            "eval", "ruler", "--tasks", "niah_single_2", "--data", good / "empty", "--haystack", path, *evaluate,
        ]  # fmt: skip
        for name in ("xquad.en.json.gz", "hotpot_dev.jsonl.gz", "PaulGrahamEssays_2.json"):
            inside = partial(self._with, good / "ruler")
            yield f"eval {name}", good / "ruler" / name, lambda p, i=inside: [
                "eval", "ruler", "--tasks", "qa_1", "qa_2", "niah_single_2", "--data", i(p), *evaluate,
            ]  # fmt: skip
        shape = ["profile", "--tokens", "32", "--new-tokens", "1", "--repeats", "1", "--methods", "full"]
        yield "profile", good / "model" / "config.json", lambda path: [
            *shape, "--config", path, "--out", self._work / "profile.json",
        ]  # fmt: skip

    def _files(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        for name, good, command in self._commands():
            for damage, change in DAMAGE.items():
                yield f"{name}: {damage}", partial(self._damaged, good, change, self._run(command))

    def _run(self, command: Callable[[Path], list[Any]]) -> Callable[[Path], bool]:
        return lambda path: self._command(command(path))

    def _damaged(self, good: Path, change: Callable[[bytes], bytes], read: Callable[[Path], bool]) -> bool:
        return self._at(self._work / good.name, lambda path: path.write_bytes(change(good.read_bytes())), read)

    def _at(self, path: Path, make: Callable[[Path], Any], read: Callable[[Path], bool]) -> bool:
        """Whether `read` refuses what `make` puts at `path`."""
        self._work.mkdir(exist_ok=True)
        try:
            make(path)
            return read(path)
        finally:
            _remove(self._work)

    def _places(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        for name, good, command in self._commands():
            for place in PLACES:
                # Files of a folder are copied from where they are; they cannot all be anywhere.
                if place in ("missing", "a folder", "a link to itself") or good.parent == self._good:
                    yield f"{name}: {place}", partial(self._placed, good, place, command)
        for name, command in self._outputs():
            for place in ("a folder", "a long name", "below a file", "a place of the system"):
                yield f"{name}: {place}", partial(self._placed, self._good / "x.json", place, command)

    def _outputs(self) -> Iterator[tuple[str, Callable[[Path], list[Any]]]]:
        good, none = self._good, self._good / "no model"
        yield "report --out", lambda path: ["report", good / "results.jsonl", "--out", path]
        yield "report --figure", lambda path: ["report", good / "results.jsonl", "--figure", path]
        yield "inspect --figure", lambda path: ["inspect", good / "policy", "--figure", path]
        yield "train --out", lambda path: self._training(none, good / "data", path / "below")
        yield "eval --out", lambda path: ["eval", "ruler", "--model", none, "--methods", "knorm", "--out", path]
        yield "profile --out", lambda path: [
            "profile", "--config", good / "model" / "config.json", "--tokens", "32", "--repeats", "1", "--new-tokens",
            "1", "--methods", "full", "--out", path,
        ]  # fmt: skip

    def _placed(self, good: Path, place: str, command: Callable[[Path], list[Any]]) -> bool:
        path = {
            "a long name": self._work / ("x" * 300 + good.suffix), "no name": Path(""),
            "below a file": self._good / "text.txt" / good.name,
            "a place of the system": Path("/proc") / good.name,
        }.get(place, self._work / good.name)  # fmt: skip
        make = {"a folder": Path.mkdir, "a link to itself": lambda path: path.symlink_to(path)}
        return self._at(path, make.get(place, lambda path: None), self._run(command))

    def _options(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        good, none = self._good, self._good / "no model"
        ask: list[Any] = ["ask", good / "text.txt", "why?", "--model", none, "--method", "knorm"]
        evaluate = ["eval", "ruler", "--tasks", "niah_single_1", "--data", good / "empty", "--methods", "knorm"]
        evaluate += ["--model", none, "--out", self._folder / "options" / "out.jsonl"]
        table: list[tuple[list[Any], dict[tuple[str, ...], str]]] = [
            (ask, {WHOLE: "max-new-tokens", NUMBER: "retention", NAMES: "method policy"}),
            (self._training(none, good / "data"), {
                WHOLE: "steps batch seed continuations min-tokens max-tokens warmup",
                NUMBER: "lr lr-end tau-start tau-end", NAMES: "preset hidden-norm data init",
            }),
            (evaluate, {
                WHOLE: "lengths samples rows-at-once seed", NUMBER: "retention",
                NAMES: "methods tasks protocol dtype haystack",
            }),
            (["profile", "--model", none, "--out", self._folder / "options" / "profile.json"], {
                WHOLE: "tokens batch new-tokens repeats chunk", NUMBER: "retention memory-limit",
                NAMES: "device methods dtype config",
            }),
            (["report", good / "results.jsonl"], {
                NUMBER: "retention min-full", NAMES: "table format methods against published figure",
            }),
            (["inspect"], {NUMBER: "retention"}),
        ]  # fmt: skip
        for command, kinds in table:
            for values, options in kinds.items():
                for option in options.split():
                    for value in values:
                        words = [*command, f"--{option}={value}"]
                        yield f"{command[0]} --{option}={value!r}", partial(self._command, words)
        for words in ([], ["nothing"], ["ask"], ["eval"], ["train"], ["--nothing"], ["report"], ["inspect", "", ""]):
            yield f"lkv {words}", partial(self._command, words)
        for question in ("", " ", "\udcff"):
            yield f"question {question!r}", partial(self._command, ["ask", good / "text.txt", question, *ask[3:]])

    def _training(self, model: Path, data: Path, out: Path | None = None) -> list[Any]:
        place = out or self._folder / "options" / "run"
        return ["train", "--model", model, "--data", data, "--out", place, "--preset", "paper-cpu", "--steps", "1"]

    def _with(self, folder: Path, path: Path) -> Path:
        """A copy of `folder` with the file at `path` in the place of its own, or with none where it is missing."""
        copy = self._work / "folder"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(path.name), dirs_exist_ok=True)
        if path.exists() or path.is_symlink():
            path.rename(copy / path.name)
        return copy

    def _command(self, arguments: list[Any]) -> bool:
        """Whether the command was refused, in one sentence."""
        said, out = io.StringIO(), io.StringIO()
        with redirect_stderr(said), redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                code = main([str(argument) for argument in arguments])
            except SystemExit as stop:  # argparse's own way
                code = stop.code
        _remove(self._folder / "options")
        lines = [line for line in re.split(r"[\r\n]+", said.getvalue()) if line.strip()]
        assert "Traceback" not in said.getvalue(), said.getvalue()
        if code == 0:
            return False
        sentences = [line for line in lines if re.match(r"lkv( \w+)?: ", line)]
        assert code == 2 and len(sentences) == 1 and lines[-1] == sentences[0], (code, lines)
        assert not list(self._folder.rglob("*.tmp")), list(self._folder.rglob("*.tmp"))
        return MISFIT not in sentences[0] or "model" in str(arguments[-1])

    def _values(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        model, context = self._model, self._context
        plain = ("x", "0.15", "nowhere")
        named = ("text", "method", "retention", "policy", "chunk", "budget_tokens", "slack", "bits", "memory",
                 "pattern", "streaming", "decode_eviction", "prompt_tokens", "protect", "nothing")  # fmt: skip
        calls: dict[str, Callable[[Any], Any]] = {
            "compress model": lambda value: compress(value, Words(), TEXT, method="knorm"),
            "compress tokenizer": lambda value: compress(model, value, TEXT, method="knorm"),
            "ask": lambda value: context.ask(value, 2),
            "ask max_new_tokens": lambda value: context.ask("what ?", value),
            "ask num_beams": lambda value: context.ask("what ?", 2, num_beams=value),
            "ask nothing": lambda value: context.ask("what ?", 2, nothing=value),
            "predict": lambda value: context.predict(value, "so"),
            "predict answer": lambda value: context.predict("what ?", value),
            "save": lambda value: context.save(value),
            "load": lambda value: Context.load(value, model, Words()),
            "load policy": lambda value: Context.load(self._good / "context.kv", model, Words(), value),
            "crop": lambda value: context.fork().cache.crop(value),
            "repeat": lambda value: context.fork().cache.batch_repeat_interleave(value),
            "load_policy": load_policy,
            "Policy.from_pretrained": Policy.from_pretrained,
            "inference_ratios": lambda value: Policy(inspect_model(model)).inference_ratios(value),
            # A bare name would be looked for on the hub.
            "load_model": lambda value: load_model(self._good / "empty" if str(value) in plain else value),
            "resolve_method": lambda value: resolve_method(value, retention=0.5),
            "resolve_method retention": lambda value: resolve_method("knorm", retention=value),
            "read_pattern": lambda value: read_pattern(value, 3, 2),
        }  # fmt: skip
        for name in named:
            own = {"text": TEXT, "method": "knorm", "retention": None}
            calls[f"compress {name}"] = lambda value, name=name, own=own: compress(
                model, Words(), **own | {name: value}
            )
            if name not in ("text", "chunk", "protect", "nothing"):
                calls[f"RaggedCache {name}"] = lambda value, name=name: RaggedCache(
                    model, **{"method": "knorm", name: value}
                )
        for name in ("steps", "batch", "lr", "tau_end", "retention_end", "hold", "seed", "min_tokens", "hidden_norm"):
            calls[f"TrainingConfig {name}"] = lambda value, name=name: replace(TrainingConfig(), **{name: value})
        for name, call in calls.items():
            for number, value in enumerate(VALUES):
                shown = "an object" if type(value) is object else repr(value)
                yield f"{name}({shown}) {number}", partial(self._refused, call, value)

    def _read(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        """Files read in Python."""
        good, policy = self._good, trainer(self._folder / "trainer")[1]
        readers: dict[str, tuple[Path, Callable[[Path], Any]]] = {
            "Context.load": (good / "context.kv", lambda path: Context.load(path, self._model, Words())),
            "read_results": (good / "results.jsonl", lambda path: read_results([path])),
            "Journal": (good / "journal.jsonl", lambda path: SampleJournal(path, {"format": 1})),
            "read_checkpoint": (good / "run" / "checkpoint.safetensors", lambda path: read_checkpoint(path.parent)),
            "start_from": (good / "run" / "checkpoint.safetensors", lambda path: initialize_from(policy, path.parent)),
            "read_pattern": (good / "pattern.tsv", lambda path: read_pattern(path, 3, 2)),
        }
        for name, (path, read) in readers.items():
            for damage, change in DAMAGE.items():
                yield f"{name}: {damage}", partial(self._damaged, path, change, partial(self._refused, read))

    def _refused(self, call: Callable[[Any], Any], value: Any) -> bool:
        """Whether `call` refused `value`, in one sentence."""
        elsewhere = self._folder / "elsewhere"
        elsewhere.mkdir()
        out = io.StringIO()
        with redirect_stderr(out), redirect_stdout(out), warnings.catch_warnings(), chdir(elsewhere):
            warnings.simplefilter("ignore")
            try:
                call(value)
            except LkvError as error:
                said = str(error)
                assert said.strip() and "\n" not in said.strip(), said
                return True
            finally:
                _remove(elsewhere)
        return False


def _remove(path: Path) -> None:
    """A file, a link or a folder with all that is in it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def _good_files(folder: Path) -> Path:
    """One good file of each kind."""
    from tests.hf.gguf_files import write_gguf

    folder.mkdir()
    (folder / "text.txt").write_text("a few words of text. " * 40)
    (folder / "pattern.tsv").write_text("0.9\t0.1\n" * 3)
    save_model(folder / "model")
    write_gguf(folder / "tiny.gguf")
    torch.manual_seed(0)
    Policy(inspect_model(load_model(str(folder / "model"))[0])).save_pretrained(folder / "policy")
    write(folder / "results.jsonl", many())
    (folder / "profile.json").write_text(json.dumps({"name": "profile", "rows": []}))
    (folder / "data").mkdir()
    write_lines(
        folder / "data" / "squad_train_subset.jsonl.gz",
        [{"title": f"T{i}", "context": f"The key of {i} is {i}. " * 60, "question": f"Which {i}?", "answers": [f"{i}"]}
         for i in range(40)],
    )  # fmt: skip
    (folder / "data" / "story.txt").write_text("It was a day as any other. " * 400)
    (folder / "data" / "tool.py").write_text("def one(x):\n    return x + 1\n\n\n" * 200)
    (folder / "empty").mkdir()
    (folder / "longbench").mkdir()
    row = {"input": "Who?", "context": "Ann wrote it. " * 20, "answers": ["Ann"], "all_classes": None, "_id": "1"}
    (folder / "longbench" / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "ruler").mkdir()
    write_sources(folder / "ruler")
    write_lines(folder / "ruler" / "hotpot_dev.jsonl.gz", hotpot_rows(20))
    compress(tiny_llama(), Words(), TEXT, method="knorm", retention=0.4).save(folder / "context.kv")
    SampleJournal(folder / "journal.jsonl", {"format": 1}).add({"key": "a", "rows": []})
    run, _ = trainer(folder / "run")
    train_for(run, 3)
    return folder
