"""Journals: JSON-lines files with a header of settings, then one line a finished sample. Imports no torch.

`lkv eval` and the benchmarks append to them and resume from them after an interruption; experiments.report reads them.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lkv.errors import DataError, LkvError
from lkv.utils.file_lock import exclusive_lock
from lkv.utils.files import check_writable_file, error_reason, write_text

JOURNAL_FORMAT = 1  # of the files that `lkv eval` writes
MEMORY = "memory"  # `budget` of a header whose retentions are shares of the 16-bit cache's bytes
FIDELITY_METRICS = ("kl", "agreement", "hidden_error")
ROW_METRICS = ("score", *FIDELITY_METRICS)  # of one method at one retention on one sample

Record = dict[str, Any]

_ADVICE = "delete the damaged line to measure that sample again, or give another file"


class JournalLines(NamedTuple):
    """The JSON objects of a journal with their line numbers, header first."""

    rows: list[tuple[int, Record]]
    is_truncated: bool  # an incomplete last line was dropped


def read_journal(path: Path, error: type[LkvError], advice: str) -> JournalLines:
    """Read the lines of a journal, without blank ones and an incomplete last one.

    Raises `error`, whose message ends with `advice`, if the file cannot be read or a line is not a JSON object.
    """
    try:
        data = path.read_bytes()
        text = data.decode()
    except UnicodeDecodeError as problem:
        if problem.reason != "unexpected end of data":
            raise error(f"{path} is not text ({problem}); {advice}.") from problem
        text = data[: problem.start].decode()  # the last line ends within a character
    except OSError as problem:
        raise error(f"{path} cannot be read ({error_reason(problem)}); {advice}.") from problem
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows: list[tuple[int, Record]] = []
    for number, line in lines:
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"but a {type(row).__name__}")
        except (ValueError, RecursionError) as problem:
            # An interrupted write leaves a line without its end; any other broken line is damage.
            if number == lines[-1][0] and not text.endswith("\n"):
                return JournalLines(rows, True)
            raise error(f"{path}, line {number} is not a JSON object ({problem}); {advice}.") from problem
        rows.append((number, row))
    return JournalLines(rows, False)


def read_samples(path: Path) -> tuple[Record | None, list[Record]]:
    """Read the header (None if the file is empty) and the samples of a journal. Raises DataError."""
    lines = read_journal(path, DataError, _ADVICE).rows
    for number, row in lines:
        if (number != lines[0][0]) != isinstance(row.get("key"), str):
            raise DataError(f"{path}, line {number} is neither a header nor a sample; {_ADVICE}.")
    return (lines[0][1] if lines else None), [row for _, row in lines[1:]]


def write_journal(path: Path, rows: Iterable[Record]) -> None:
    """Write header and samples to `path` in one atomic step. Raises DataError."""
    try:
        text = "".join(map(_json_line, rows))
    except ValueError as error:
        raise DataError(f"the samples of {path} hold numbers that JSON does not have ({error}); {_ADVICE}.") from error
    write_text(path, text, DataError, "the samples")


def append_sample(path: Path, row: Record) -> None:
    """Append one sample to the journal at `path`. Raises DataError if the system refuses."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(_json_line(row))
    except OSError as problem:
        raise DataError(
            f"{path} takes no more samples ({error_reason(problem)}); those already written are intact: fix the cause "
            "and run the same command again to resume."
        ) from problem


def check_header(
    path: Path, written: Mapping[str, Any], header: Mapping[str, Any], ignored: Sequence[str] = ()
) -> None:
    """Raise DataError unless `written`, the header of `path`, equals `header` in everything but `ignored`."""
    differences = [
        f"{name} {json.dumps(written.get(name))} instead of {json.dumps(header.get(name))}"
        for name in {**written, **header}
        if name not in ignored and written.get(name) != header.get(name)
    ]
    if differences:
        raise DataError(
            f"{path} holds samples of other settings ({', '.join(differences)}); use the same settings to resume, or "
            "another file."
        )


@contextmanager
def lock_journal(path: Path) -> Iterator[None]:
    """Keep other processes from writing to the journal at `path` while the block runs.

    Raises DataError if another process holds it.
    """
    check_writable_file(path, DataError, "the samples")
    # A short name of fixed length: names of files may be as long as the system allows.
    lock = path.with_name(f".{zlib.crc32(os.fsencode(path.name)):08x}.lock")
    busy = f"another evaluation is writing to {path}; wait for it to finish, or give another file."
    with exclusive_lock(lock, DataError, busy):
        yield


def _json_line(row: Record) -> str:
    """Return one line of JSON; lone surrogates, which a model can generate, are escaped."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(row, allow_nan=False)
    return text + "\n"
