"""Result files: one JSON form for benchmarks, evaluations and the demo, and runs that can be resumed. No torch here."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lkv.errors import DataError
from lkv.files import check_place, reason, write_text

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy")


def write_results(
    path: Path,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    seed: int,
    command: str = "",
    measured: Mapping[str, Any] | None = None,
) -> None:
    """Write `rows` with command, seed, date, machine and versions, to a temporary name first.

    `measured` tells date, machine and versions where the rows were not measured here and now. Raises DataError where
    the system refuses the file.
    """
    document = {
        "name": name,
        "command": command or shlex.join(["python", *_relative(sys.argv)]),
        "seed": seed,
        **provenance(),
        **(measured or {}),
        "rows": [{key: _rounded(value) for key, value in row.items()} for row in rows],
    }
    write_text(path, json.dumps(document, indent=1) + "\n", DataError, "the results")


def provenance(more: Sequence[str] = ()) -> dict[str, Any]:
    """Today's date, this machine, and `versions`."""
    return {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": machine(), "versions": versions(more)}


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Of Python, of the packages that results depend on, and of `more`."""
    return {"python": platform.python_version()} | {name: _version(name) for name in (*_PACKAGES, *more)}


def machine() -> str:
    """The processor and how many cores may be used."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def _relative(arguments: Sequence[str]) -> list[str]:
    """Arguments with paths below the current folder made relative: results name no machine's folders."""
    return [os.path.relpath(a) if os.path.isabs(a) else a for a in arguments]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value


class Done(dict[str, Any]):
    """Finished samples by key, each written to a JSON-lines file as it comes; its first line is the run's settings."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        """Raises DataError if the file holds samples of other settings."""
        super().__init__()
        self._path = path
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            if not lines:
                lines = [json.dumps(settings) + "\n"]
            found = json.loads(lines[0])
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path} holds no samples to resume from ({error}); delete it or move it away.") from error
        if found != settings:
            raise DataError(f"{path} holds samples of other settings; give the same ones to resume, or delete it.")
        # An interruption may have torn the last line: that sample is measured again.
        lines = [line for line in lines if line.endswith("\n")]
        write_text(path, "".join(lines), DataError, "the samples")
        for number, line in enumerate(lines[1:], 2):
            try:
                row = json.loads(line)
                self[row.pop("key")] = row
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number}, is damaged ({error}); delete it to measure it again."
                ) from error

    def add(self, key: str, row: dict[str, Any]) -> None:
        self[key] = row
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key} | row) + "\n")
        except OSError as error:
            raise DataError(
                f"{self._path} takes no more samples ({reason(error)}); mend that and run it again."
            ) from error


@contextmanager
def resumable(path: Path, settings: dict[str, Any]) -> Iterator[Done]:
    """Samples already finished; the file goes when the block ends well, and stays to resume from otherwise."""
    check_place(path, DataError, "the samples")
    yield Done(path, settings)
    path.unlink(missing_ok=True)
