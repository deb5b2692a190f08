"""What the benchmark scripts share."""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lkv.budget import Uniform
from lkv.errors import DataError
from lkv.methods import Method, make_method
from lkv.policy import Policy
from lkv.selection import LearnedScores

_FOLDERS = ("data", "out")
RESULTS = Path(__file__).parent / "results"


def methods_of(names: Sequence[str], policy: Policy, retention: float, model: Any = None) -> list[Method]:
    """Methods by name, with "full" keeping everything."""
    full = Method("full", Uniform(1.0), LearnedScores(policy))
    layers = policy.spec.layers
    return [
        full if name == "full" else make_method(name, retention, policy, model=model, layers=layers) for name in names
    ]


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a result depends on: every option but the folders."""
    return {key: str(value) for key, value in vars(options).items() if key not in _FOLDERS and value is not None}


def command_of(module: str, options: argparse.Namespace) -> str:
    """The command that makes a result again."""
    given = " ".join(f"--{key} {value}" for key, value in settings_of(options).items())
    return f"python -m {module} --data EVAL_FOLDER {given}"


class Done(dict[str, Any]):
    """Finished samples by key, each written to a JSON-lines file as it comes; its first line is the run's settings."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        """Raises DataError if the file holds samples of other settings."""
        super().__init__()
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        if not lines:
            lines = [json.dumps(settings) + "\n"]
        if json.loads(lines[0]) != settings:
            raise DataError(f"{path} holds samples of other settings; give the same ones to resume, or delete it.")
        # An interruption may have torn the last line: that sample is measured again.
        lines = [line for line in lines if line.endswith("\n")]
        path.write_text("".join(lines), encoding="utf-8")
        for line in lines[1:]:
            row = json.loads(line)
            self[row.pop("key")] = row

    def add(self, key: str, row: dict[str, Any]) -> None:
        self[key] = row
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key} | row) + "\n")


@contextmanager
def resumable(path: Path, settings: dict[str, Any]) -> Iterator[Done]:
    """Samples already finished; the file goes when the block ends well, and stays to resume from otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    yield Done(path, settings)
    path.unlink(missing_ok=True)
