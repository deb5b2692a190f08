"""What the benchmark scripts share."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lkv.budget import Uniform
from lkv.methods import Method, make_method
from lkv.policy import Policy
from lkv.selection import LearnedScores

RESULTS = Path(__file__).parent / "results"


def methods_of(names: Sequence[str], policy: Policy, retention: float) -> list[Method]:
    """Methods by name, with "full" keeping everything."""
    full = Method("full", Uniform(1.0), LearnedScores(policy))
    return [full if name == "full" else make_method(name, retention, policy) for name in names]


class Done(dict[str, Any]):
    """Finished samples by key, each written to a JSON-lines file as it comes."""

    def __init__(self, path: Path):
        super().__init__()
        self._path = path
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self[row.pop("key")] = row

    def add(self, key: str, row: dict[str, Any]) -> None:
        self[key] = row
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key} | row) + "\n")


@contextmanager
def resumable(path: Path) -> Iterator[Done]:
    """Samples already finished; the file goes when the block ends well, and stays to resume from otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    yield Done(path)
    path.unlink(missing_ok=True)
