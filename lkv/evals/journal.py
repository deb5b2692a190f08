"""The file of finished samples: JSON lines that survive interruptions and are shared out over processes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lkv.errors import DataError
from lkv.evals.processes import Process
from lkv.files import check_place, reason, write_text

_FREE = ("machine", "date")  # may differ between the runs that fill one file


class Journal:
    """Finished samples of one run, one JSON line each after a header that tells the settings.

    A process alone appends to `out` itself. Several write to a part each beside it, which the first process merges into
    `out` at the end, or when the run is taken up again by any number of processes.
    """

    def __init__(self, out: Path, header: dict[str, Any], process: Process):
        """Raises DataError if `out` or a part holds samples of other settings, or is no file of samples."""
        self._out, self._header, self._process = out, header, process
        self._path = out if process.size == 1 else _part(out, process.rank)
        check_place(out, DataError, "the samples")
        for path in self._files():
            self._check(path)
        process.wait()
        self._merge()
        process.wait()
        self.done = {row["key"]: row for row in _read(out)[1:]}
        if self._path != out:
            _write(self._path, [self._header])

    def add(self, row: dict[str, Any]) -> None:
        """Append one sample; `row["key"]` names it."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(row))
        except OSError as error:
            raise DataError(
                f"{self._path} takes no more samples ({reason(error)}); what it holds is good: mend that and run the "
                "same command to go on."
            ) from error

    def finish(self, order: Sequence[str]) -> None:
        """Once every process has come here: all samples in `out`, in the order of their keys."""
        self._process.wait()
        self._merge(order)
        self._process.wait()

    def _files(self) -> list[Path]:
        return [path for path in [self._out, *_parts(self._out)] if path.is_file()]

    def _check(self, path: Path) -> None:
        found = (_read(path) or [self._header])[0]
        differing = [
            f"{name} {json.dumps(found.get(name))} instead of {json.dumps(self._header.get(name))}"
            for name in {**found, **self._header}
            if name not in _FREE and found.get(name) != self._header.get(name)
        ]
        if differing:
            raise DataError(
                f"{path} holds samples of another run ({', '.join(differing)}); give the same settings to resume it, "
                "or another file."
            )

    def _merge(self, order: Sequence[str] = ()) -> None:
        """All samples into `out`, those of `order` first; a line that an interruption tore is dropped."""
        if self._process.rank:
            return
        rows: dict[str, dict[str, Any]] = {}
        headers = []
        for path in self._files():
            headers += _read(path)[:1]
            for row in _read(path)[1:]:
                rows.setdefault(row["key"], row)
        place = {key: number for number, key in enumerate(order)}
        ordered = sorted(rows.values(), key=lambda row: place.get(row["key"], len(place)))
        _write(self._out, [*(headers or [self._header])[:1], *ordered])
        for part in _parts(self._out):
            part.unlink()


def _part(out: Path, rank: int) -> Path:
    return out.with_name(f"{out.stem}.part{rank}{out.suffix}")


def _parts(out: Path) -> list[Path]:
    start = f"{out.stem}.part"
    found = [path for path in out.parent.iterdir() if path.name.startswith(start) and path.suffix == out.suffix]
    return sorted(path for path in found if path.stem.removeprefix(start).isdigit())


def _read(path: Path) -> list[dict[str, Any]]:
    """Header and samples. A last line without its end is left out: that sample is measured again."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        rows = []
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            if not isinstance(row, dict) or (number > 1) != isinstance(row.get("key"), str):
                raise ValueError("it is neither a header nor a sample")
            rows.append(row)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text ({error}); delete it, or give another file.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({reason(error)}); give another file.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}, line {number}, is damaged ({error}); delete that line to measure its sample again, or give "
            "another file."
        ) from error
    return rows


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_text(path, "".join(map(_line, rows)), DataError, "the samples")


def _line(row: dict[str, Any]) -> str:
    """One line of JSON; what is no valid text (half a character that a model broke off) is escaped."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(row, allow_nan=False)
    return text + "\n"
