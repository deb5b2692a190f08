"""Journals: files of finished samples, one JSON line each after a header that tells the settings. No torch here.

`lkv eval` and the benchmarks write them and go on from them after an interruption; `lkv report` reads them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lkv.errors import DataError, LkvError
from lkv.utils.files import check_writable_file, error_reason, write_text

JOURNAL_FORMAT = 1  # of what `lkv eval` writes
FIDELITY_METRICS = ("kl", "agreement", "hidden_error")
ROW_METRICS = ("score", *FIDELITY_METRICS)  # what a row of a sample holds, of one method at one retention

Record = dict[str, Any]


class Lines(NamedTuple):
    """What a journal holds: its objects with their line numbers, the header first, and whether a last one was torn."""

    rows: list[tuple[int, Record]]
    torn: bool


def read_journal(path: Path, error: type[LkvError], mend: str) -> Lines:
    """The lines of the journal at `path`; blank ones do not count, and a torn last line is left out.

    Raises `error`, which ends with `mend`, for a file that cannot be read or a line that is no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is no text ({problem}); {mend}.") from problem
    except OSError as problem:
        raise error(f"{path} cannot be read ({error_reason(problem)}); {mend}.") from problem
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows: list[tuple[int, Record]] = []
    for number, line in lines:
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"but a {type(row).__name__}")
        except (ValueError, RecursionError) as problem:
            # An interruption tears a line before its end; a line that was written whole is damaged otherwise.
            if number == lines[-1][0] and not text.endswith("\n"):
                return Lines(rows, True)
            raise error(f"{path}, line {number} is no JSON object ({problem}); {mend}.") from problem
        rows.append((number, row))
    return Lines(rows, False)


def read_samples(path: Path) -> tuple[Record | None, list[Record]]:
    """Header and samples of a journal to go on from, no header for a file without any. Raises DataError."""
    mend = "delete what is damaged to measure it again, or give another file"
    lines = read_journal(path, DataError, mend).rows
    for number, row in lines:
        if (number != lines[0][0]) != isinstance(row.get("key"), str):
            raise DataError(f"{path}, line {number} is neither a header nor a sample; {mend}.")
    return (lines[0][1] if lines else None), [row for _, row in lines[1:]]


def write_journal(path: Path, rows: Iterable[Record]) -> None:
    """Write header and samples, whole or not at all. Raises DataError."""
    write_text(path, "".join(map(_line, rows)), DataError, "the samples")


def append(path: Path, row: Record) -> None:
    """Add one sample to the journal at `path`. Raises DataError where the system refuses."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
    except OSError as problem:
        raise DataError(
            f"{path} takes no more samples ({error_reason(problem)}); what it holds is good: mend that and run the "
            "same command to go on."
        ) from problem


def check_header(path: Path, written: Mapping[str, Any], header: Mapping[str, Any], free: Sequence[str] = ()) -> None:
    """Raise DataError unless `written`, the header of `path`, says what `header` says of everything but `free`."""
    differing = [
        f"{name} {json.dumps(written.get(name))} instead of {json.dumps(header.get(name))}"
        for name in {**written, **header}
        if name not in free and written.get(name) != header.get(name)
    ]
    if differing:
        raise DataError(
            f"{path} holds samples of other settings ({', '.join(differing)}); give the same ones to resume it, or "
            "another file."
        )


class Journal(dict[str, Record]):
    """Finished samples by key, each written to its journal as it comes."""

    def __init__(self, path: Path, settings: Record):
        """Raises DataError if the file holds samples of other settings."""
        self._path = path
        header, samples = read_samples(path) if path.exists() else (None, [])
        check_header(path, settings if header is None else header, settings)
        write_journal(path, [settings, *samples])  # without a torn line: that sample is measured again
        super().__init__({row["key"]: {name: row[name] for name in row if name != "key"} for row in samples})

    def add(self, key: str, row: Record) -> None:
        """Append one sample. Raises DataError where the system refuses."""
        self[key] = row
        append(self._path, {"key": key} | row)


@contextmanager
def open_journal(path: Path, settings: Record) -> Iterator[Journal]:
    """Samples already finished; the file goes when the block ends well, and stays to resume from otherwise."""
    check_writable_file(path, DataError, "the samples")
    yield Journal(path, settings)
    path.unlink(missing_ok=True)


def _line(row: Record) -> str:
    """One line of JSON; what is no valid text (half a character that a model broke off) is escaped."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(row, allow_nan=False)
    return text + "\n"
