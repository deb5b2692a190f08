"""Result files of `lkv eval`, read and checked: what stands in one table was measured in one way."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lkv.errors import ReportError
from lkv.evaluation.report.names import FULL
from lkv.utils.journal import JOURNAL_FORMAT, ROW_METRICS, read_journal

# What all files of one table must agree in, with the versions of all packages but Python itself.
_COMMON = ("suite", "protocol", "model", "revision", "fingerprint", "policy", "pattern", "dtype", "lkv")
_ONE_WITHOUT = ("policy", "pattern", "fingerprint")  # a file without methods that need one, or of before, agrees


@dataclass(frozen=True)
class Measurement:
    """One method at one retention on one sample; a measure is None where it was not taken."""

    realised: float  # kept entries / all entries
    measures: Mapping[str, float | None]  # score (0..100), kl (nats), agreement (0..1), hidden_error (relative)


@dataclass(frozen=True)
class MeasuredSample:
    """One sample with all that was measured on it, by (method, retention)."""

    key: str
    task: str
    length: int | None
    number: int
    rows: Mapping[tuple[str, float], Measurement]
    text: str | None = None  # digest of what was read


@dataclass(frozen=True)
class Results:
    """Files that belong together; `notes` says what a reader of their tables must know."""

    header: Mapping[str, Any]
    samples: tuple[MeasuredSample, ...]
    notes: tuple[str, ...]


def read_results(paths: Sequence[Path]) -> Results:
    """Read the JSON lines that `lkv eval` wrote to `paths`.

    Files may hold other methods on the same samples. A torn last line (of an interrupted run) is left out and counted
    in the notes. Raises ReportError for a file that is missing or malformed (file, line and field), for files measured
    in different ways, and for a sample that two lines hold with the same method, or with different texts.
    """
    if not paths:
        raise ReportError("there are no result files; give the .jsonl files that `lkv eval` wrote.")
    headers: dict[Path, dict[str, Any]] = {}
    samples: dict[str, MeasuredSample] = {}
    torn, truncated, lost, unusable = 0, 0, 0, 0
    doubled, unfinished = [], []
    for path in paths:
        written: set[str] = set()
        keys: set[str] = set()
        lines, cut = read_journal(path, ReportError, "give a file as `lkv eval` wrote it")
        torn += cut
        headers[path] = _header(path, [line for _, line in lines])
        for number, line in lines[1:]:
            keys.add(str(line.get("key")))
            if line.get("unusable"):
                unusable += 1
                continue
            sample = _sample(path, number, line)
            if earlier := samples.get(sample.key):
                # A run that adds methods writes a sample again, with all it has of it; `finish` leaves one line.
                if sample.key in written and sample.text == earlier.text and sample.rows.keys() > earlier.rows.keys():
                    samples[sample.key] = sample
                    continue
                if sample.text != earlier.text or any(m != FULL for m, _ in earlier.rows.keys() & sample.rows.keys()):
                    doubled.append(f"{sample.key} (again in {path}, line {number})")
                samples[sample.key] = replace(earlier, rows={**sample.rows, **earlier.rows})
                continue
            samples[sample.key] = sample
            written.add(sample.key)
            truncated += bool(line.get("truncated"))
            lost += bool(line.get("answer_lost"))
        if len(keys) < headers[path].get("planned", 0):
            unfinished.append(
                f"UNFINISHED: {path} holds {len(keys)} of {headers[path]['planned']} samples; the command that made it "
                "goes on where it was."
            )
    _agree(headers)
    if doubled:
        raise ReportError(
            f"{len(doubled)} samples are there twice with the same method or with another text, and a table counts "
            f"each once: {_listed(doubled)}. Leave out the file that repeats them."
        )
    if not samples:
        raise ReportError(
            f"there are no finished samples in {_listed([str(path) for path in paths])}; run `lkv eval` on, which also "
            "puts together what several interrupted processes left."
        )
    notes = unfinished
    if torn:
        notes.append(f"{torn} torn last line{'s' * (torn > 1)} of interrupted runs left out.")
    if unusable:
        notes.append(f'{unusable} more could not be made into a prompt, see "unusable" in the file.')
    if truncated:
        notes.append(f"{truncated} of {len(samples)} contexts were truncated; {lost} of them lost their answer.")
    policies = {name: digest for header in headers.values() for name, digest in (header.get("policies") or {}).items()}
    notes += [f"Policy {name}: {str(digest)[:12]}." for name, digest in policies.items()]
    # A file of methods that read no pattern may come first.
    sources = [header["pattern_from"] for header in headers.values() if header.get("pattern_from")]
    header = headers[paths[0]] | {"pattern_from": sources[0] if sources else None}
    return Results(header, tuple(samples.values()), tuple(notes))


def _header(path: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not lines or "format" not in lines[0]:
        raise ReportError(f"{path} does not start with a header line; give a file that `lkv eval` wrote.")
    header = dict(lines[0])
    if header["format"] != JOURNAL_FORMAT:
        raise ReportError(
            f"{path} has format {header['format']!r}, but this version reads {JOURNAL_FORMAT}; make the file anew with "
            "`lkv eval`, or use the lkv-cache version that wrote it."
        )
    for field in ("suite", "protocol", "model", "lkv"):
        if field not in header:
            raise ReportError(f"{path}, line 1: the header has no field {field!r}; make the file anew with `lkv eval`.")
    for field, kind in (("versions", dict), ("methods", list), ("retentions", list), ("planned", int)):
        if not isinstance(header.get(field, kind()), kind):
            raise ReportError(
                f"{path}, line 1: the header's {field!r} is {header[field]!r}; make the file anew with `lkv eval`."
            )
    return header


def _agree(headers: Mapping[Path, Mapping[str, Any]]) -> None:
    apart = []
    for field in _COMMON:
        given = {path: header.get(field) for path, header in headers.items()}
        if field in _ONE_WITHOUT:
            given = {path: value for path, value in given.items() if value is not None}
        apart += _difference(field, given)
    packages = {name: None for header in headers.values() for name in header.get("versions", ()) if name != "python"}
    for name in packages:
        given = {
            path: header["versions"][name] for path, header in headers.items() if name in header.get("versions", ())
        }
        apart += _difference(name, given)
    for name in {name for header in headers.values() for name in header.get("policies") or ()}:
        tagged = {path: (header.get("policies") or {}).get(name) for path, header in headers.items()}
        apart += _difference(f"policy {name}", {path: value for path, value in tagged.items() if value is not None})
    if apart:
        raise ReportError(
            f"these files do not belong in one table; they differ in {'; '.join(apart)}. Report them one by one."
        )


def _difference(field: str, given: Mapping[Path, Any]) -> list[str]:
    if len({json.dumps(value) for value in given.values()}) < 2:
        return []
    return [f"{field} ({', '.join(f'{path}: {value}' for path, value in given.items())})"]


def _sample(path: Path, number: int, line: Mapping[str, Any]) -> MeasuredSample:
    where = f"{path}, line {number}"
    try:
        rows = {}
        for row in line["rows"]:
            pair = (str(row["method"]), _finite(where, "retention", row["retention"]))
            if pair in rows:
                raise ReportError(f"{where}: the method {pair[0]!r} is there twice at retention {pair[1]:g}.")
            measures = {name: _number(where, name, row.get(name)) for name in ROW_METRICS}
            rows[pair] = Measurement(_finite(where, "realised", row["realised"]), measures)
        length = None if line["length"] is None else int(line["length"])
        return MeasuredSample(
            str(line["key"]), str(line["task"]), length, int(line["number"]), rows, line.get("text_sha256")
        )
    except KeyError as error:
        raise ReportError(f"{where} has no field {error}; make the file anew with `lkv eval`.") from None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ReportError(f"{where} is malformed ({error}); make the file anew with `lkv eval`.") from None


def _number(where: str, name: str, value: Any) -> float | None:
    return None if value is None else _finite(where, name, value)


def _finite(where: str, name: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ReportError(f"{where}: {name} is {number}, which cannot be averaged; make the file anew with `lkv eval`.")
    return number


def _listed(items: Sequence[str], most: int = 5) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
