"""Rows of data files as people have them (JSON, JSON lines, Parquet, CSV, gzip), each with its position in the file."""

import csv
import gzip
import io
import json
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lkv.errors import DataError
from lkv.utils.extras import optional_import
from lkv.utils.text_decoding import decode_text

Row = dict[str, Any]
_MAX_FIELD_CHARS = 2**31 - 1  # a context may be a book
_PARQUET_ROWS = 64  # at a time: one row can hold a whole book
_MAX_LINE = 2**26  # bytes or characters
# A compressed text is a third to a thirtieth of it; a file that was made to fill memory, a thousandth.
_MAX_RATIO, _MAX_SMALL = 200, 2**26


def read_records(path: Path) -> Iterator[tuple[str, Row]]:
    """Read (position, row) pairs of a .parquet, .csv, .jsonl or .json file, gzipped or not. Raises DataError."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        unit, rows = "row", _read_parquet(path)
    elif name.endswith(".csv"):
        unit, rows = "row", iter(_read_csv(path))
    elif name.endswith(".jsonl"):
        unit, rows = "line", read_json_lines(path)
    else:
        unit, content = "entry", read_json(path)
        if not isinstance(content, list):
            raise DataError(f"{path} must hold a JSON list of questions, but holds a {type(content).__name__}.")
        rows = iter(content)
    for i, row in enumerate(rows, 1):
        position = f"{path}, {unit} {i}"
        if not isinstance(row, dict):
            raise DataError(
                f"{position}: not a JSON object but a {type(row).__name__}; give the official file of the data set."
            )
        yield position, row


def read_json_lines(path: Path) -> Iterator[Row]:
    """Read the objects of a JSON-lines file, gzipped or not. Raises DataError naming file and line."""
    _check_file(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(read_lines(file, path), 1):
                try:
                    yield replace_lone_surrogates(json.loads(line))
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}, line {number}: not a JSON object ({error}).") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a readable gzip file ({error}).") from error


def read_lines(file: Any, path: Path) -> Iterator[Any]:
    """Yield the lines of an open `file`, bytes or text, with path `path`. Raises DataError for one that no text has."""
    while line := file.readline(_MAX_LINE + 1):
        if len(line) > _MAX_LINE:
            raise DataError(f"{path} has a line of more than {_MAX_LINE:,} characters; get the file again.")
        yield line


def read_json(path: Path) -> Any:
    """Read a JSON file, gzipped or not. Raises DataError."""
    try:
        return replace_lone_surrogates(json.loads(_read_bytes(path)))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}).") from error


def replace_lone_surrogates(value: object) -> Any:
    """Copy a value of JSON with "?" for halves of surrogate pairs, which JSON can escape and no tokenizer can read."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [replace_lone_surrogates(part) for part in value]
    if isinstance(value, dict):
        return {key: replace_lone_surrogates(part) for key, part in value.items()}
    return value


def read_text(path: Path, encoding: str | None = None) -> str:
    """Read a text file, gzipped or not, in `encoding` or the one that is detected; a guess is reported on stderr.

    Raises DataError for a file that cannot be read, DocumentError for one that is not text.
    """
    data = _read_bytes(path)
    if encoding is not None:
        return data.decode(encoding, errors="replace")
    text, uncertain = decode_text(data, str(path))
    if uncertain:
        print(f"{path}: uncertain: {'; '.join(uncertain)}", file=sys.stderr)
    return text


def read_member(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """Read a file of the zip archive at `path`. Raises DataError for one that no text compresses to."""
    info = archive.getinfo(name)
    _check_size(info.file_size, info.compress_size, path)
    return archive.read(name)


def split_lines(content: str) -> list[str]:
    """Return the lines of a file, split at newlines only: JSON strings may contain other separators."""
    return [line.removesuffix("\r") for line in content.removesuffix("\n").split("\n")] if content else []


def require_field(row: object, name: str, kind: type | tuple[type, ...], position: str) -> Any:
    """row[name], a value of `kind`. Raises DataError if it is missing or of another kind."""
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, kind):
        kinds = " or a ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        state = "is missing" if value is None else f"is not a {kinds}"
        raise DataError(f"{position}: field {name!r} {state}; give the official file of the data set.")
    return value


def require_texts(row: Row, position: str, *names: str) -> list[str]:
    """Return the texts of some fields. Raises DataError if one is missing or no text."""
    return [require_field(row, name, str, position) for name in names]


def require_pair(value: object, name: str, position: str) -> tuple[Any, Any]:
    """Return the two items of an entry of the field `name`. Raises DataError for anything else."""
    if not isinstance(value, list) or len(value) != 2:
        raise DataError(f"{position}: field {name!r} must hold pairs, but has {value!r:.60}.")
    return value[0], value[1]


def _read_csv(path: Path) -> list[Row]:
    content, default = read_text(path), csv.field_size_limit(_MAX_FIELD_CHARS)
    try:
        return list(csv.DictReader(io.StringIO(content)))
    except csv.Error as error:
        raise DataError(f"{path} is not a readable CSV file ({error}).") from error
    finally:
        csv.field_size_limit(default)


def _read_parquet(path: Path) -> Iterator[Row]:
    _check_file(path)
    with optional_import("data", str(path)):
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(_PARQUET_ROWS):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file ({error}).") from error


def _read_bytes(path: Path) -> bytes:
    _check_file(path)
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        size = path.stat().st_size
        with gzip.open(path, "rb") as file:
            data = file.read(max(_MAX_SMALL, _MAX_RATIO * size) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
    _check_size(len(data), size, path)
    return data


def _check_size(size: int, compressed: int, path: Path) -> None:
    if size > max(_MAX_SMALL, _MAX_RATIO * compressed):
        raise DataError(f"{path} holds more than {_MAX_RATIO} bytes for each of its own; get the file again.")


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of a file that exists.")
