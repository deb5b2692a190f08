"""Result files: one JSON format for all programs of experiments/ and the demo. Does not import torch."""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lkv.errors import DataError
from lkv.utils.files import write_text
from lkv.utils.provenance import collect_provenance


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
    words = [os.path.relpath(word) if os.path.isabs(word) else word for word in sys.argv]  # no folders of the machine
    document = {
        "name": name,
        "command": command or shlex.join(["python", *words]),
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
