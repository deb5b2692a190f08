"""Result files: one JSON format for benchmarks, evaluations and the demo. Does not import torch."""

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
    """Write a result file: `rows` with command, seed, date, machine and package versions.

    Args:
        path: The JSON file; it is replaced in one step.
        name: What was measured.
        rows: One flat mapping per row; floats are rounded to 5 digits.
        seed: The seed of the measurement.
        command: The command that repeats it (default: this process's command line).
        measured: Further keys, such as the policy. Keys of `collect_provenance` take the place of today's values,
            where the rows were measured elsewhere or earlier.

    Raises:
        DataError: The file cannot be written.
    """
    document = {
        "name": name,
        "command": command or shlex.join(["python", *_make_relative(sys.argv)]),
        "seed": seed,
        **collect_provenance(),
        **(measured or {}),
        "rows": [
            {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()} for row in rows
        ],
    }
    write_text(path, format_results(document), DataError, "the results")


def format_results(document: Mapping[str, Any]) -> str:
    """Return a result file's text: the header indented, then `rows` with one row a line."""
    header = json.dumps({key: value for key, value in document.items() if key != "rows"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in document["rows"])
    return f'{header[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def collect_provenance(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return today's date, this machine, and the versions of Python, of the core packages and of `packages`."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in (*_PACKAGES, *packages)}},
    }


def describe_machine() -> str:
    """Return the processor's name and the number of usable cores."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def _make_relative(arguments: Sequence[str]) -> list[str]:
    # Result files should not contain this machine's folders.
    return [os.path.relpath(argument) if os.path.isabs(argument) else argument for argument in arguments]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
