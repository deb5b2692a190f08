"""Result files: one JSON form for benchmarks, evaluations and the demo. No torch here."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lkv.errors import DataError
from lkv.utils.files import write_text

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

    `measured` tells what else the rows are of (the policy), and date, machine and versions where they were not measured
    here and now. Raises DataError where the system refuses the file.
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
