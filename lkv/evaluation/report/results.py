"""Result files of `lkv eval`, read into one DataFrame and checked: one table holds only comparable measurements."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lkv.errors import ReportError
from lkv.evaluation.report.names import FULL
from lkv.utils.journal import JOURNAL_FORMAT, ROW_METRICS, read_journal

# Files of one table agree in these and in the versions of all packages but Python itself.
_COMMON = ("suite", "protocol", "model", "revision", "fingerprint", "policy", "pattern", "dtype", "lkv")
_REQUIRED = ("suite", "protocol", "model", "revision", "dtype", "lkv")  # the others may be absent from some files
_COLUMNS = ("key", "task", "length", "number", "method", "retention", "realised", *ROW_METRICS)


@dataclass(frozen=True)
class Results:
    """Files that belong together.

    Attributes:
        header: The first file's settings.
        frame: One row a sample, method and retention: key, task, length (tokens, or missing), number, method,
            retention, realised (kept / all KV entries), score (0..100), kl (nats), agreement (0..1), hidden_error.
        notes: What a reader of the tables must know.
    """

    header: Mapping[str, Any]
    frame: pd.DataFrame
    notes: tuple[str, ...]


def read_results(paths: Sequence[Path]) -> Results:
    """Read the JSON lines that `lkv eval` wrote to `paths`.

    Files may hold other methods on the same samples. A torn last line (of an interrupted run) is left out and counted
    in the notes.

    Raises:
        ReportError: For a missing or malformed file (with file, line and field), for files measured in different ways,
            and for a sample that two lines hold with the same method or with different texts.
    """
    if not paths:
        raise ReportError("there are no result files; give the .jsonl files that `lkv eval` wrote.")
    headers: dict[Path, dict[str, Any]] = {}
    samples: dict[str, dict[str, Any]] = {}
    counts = dict.fromkeys(("torn", "unusable", "truncated", "answer_lost"), 0)
    repeated, notes = [], []
    for path in paths:
        lines, torn = read_journal(path, ReportError, "give a file as `lkv eval` wrote it")
        counts["torn"] += torn
        headers[path] = _check_header(path, lines[0][1] if lines else {})
        introduced: set[str] = set()
        for number, line in lines[1:]:
            if line.get("unusable"):
                counts["unusable"] += 1
                continue
            sample = _read_sample(f"{path}, line {number}", line)
            key = sample["key"]
            earlier = samples.setdefault(key, sample)
            if earlier is sample:
                introduced.add(key)
                counts["truncated"] += bool(line.get("truncated"))
                counts["answer_lost"] += bool(line.get("answer_lost"))
                continue
            same_text = sample["text"] == earlier["text"]
            # A run that adds methods writes a sample again with all its rows; a finished run leaves one line.
            if key in introduced and same_text and sample["rows"].keys() > earlier["rows"].keys():
                samples[key] = sample
                continue
            if not same_text or any(method != FULL for method, _ in earlier["rows"].keys() & sample["rows"].keys()):
                repeated.append(f"{key} (again in {path}, line {number})")
            samples[key] = earlier | {"rows": sample["rows"] | earlier["rows"]}
        finished, planned = len({str(line.get("key")) for _, line in lines[1:]}), headers[path].get("planned", 0)
        if finished < planned:
            notes.append(
                f"UNFINISHED: {path} holds {finished} of {planned} samples; run the command that made it again to "
                "finish it."
            )
    _check_agreement(headers)
    if repeated:
        raise ReportError(
            f"{len(repeated)} samples occur twice with the same method or with another text, and a table counts each "
            f"once: {join_some(repeated, 5)}. Leave out the file that repeats them."
        )
    if not samples:
        raise ReportError(
            f"there are no finished samples in {join_some([str(path) for path in paths], 5)}; run `lkv eval` again, "
            "which also merges what several interrupted processes left."
        )
    if counts["torn"]:
        notes.append(f"{counts['torn']} torn last line{'s' * (counts['torn'] > 1)} of interrupted runs left out.")
    if counts["unusable"]:
        notes.append(f'{counts["unusable"]} more could not be made into a prompt, see "unusable" in the file.')
    if counts["truncated"]:
        notes.append(
            f"{counts['truncated']} of {len(samples)} contexts were truncated; {counts['answer_lost']} of them lost "
            "their answer."
        )
    policies = {name: digest for header in headers.values() for name, digest in (header.get("policies") or {}).items()}
    notes += [f"Policy {name}: {str(digest)[:12]}." for name, digest in policies.items()]
    # A file whose methods read no pattern may come first.
    sources = [header["pattern_from"] for header in headers.values() if header.get("pattern_from")]
    header = headers[paths[0]] | {"pattern_from": sources[0] if sources else None}
    rows = [
        {"method": method, "retention": retention, **sample, **values}
        for sample in samples.values()
        for (method, retention), values in sample["rows"].items()
    ]
    frame = pd.DataFrame(rows, columns=list(_COLUMNS))
    return Results(header, frame.astype(dict.fromkeys(("realised", *ROW_METRICS), float)), tuple(notes))


def join_some(items: Sequence[str], most: int = 6) -> str:
    """The first `most` items, and how many more there are."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _check_header(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    if "format" not in header:
        raise ReportError(f"{path} does not start with a header line; give a file that `lkv eval` wrote.")
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


def _check_agreement(headers: Mapping[Path, Mapping[str, Any]]) -> None:
    values: dict[str, dict[Path, Any]] = {}
    for path, header in headers.items():
        facts = {field: header.get(field) for field in _COMMON}
        facts |= {name: version for name, version in header.get("versions", {}).items() if name != "python"}
        facts |= {f"policy {name}": digest for name, digest in (header.get("policies") or {}).items()}
        for field, value in facts.items():
            if value is not None or field in _REQUIRED:
                values.setdefault(field, {})[path] = value
    differences = [
        f"{field} ({', '.join(f'{path}: {value}' for path, value in found.items())})"
        for field, found in values.items()
        if len({json.dumps(value) for value in found.values()}) > 1
    ]
    if differences:
        raise ReportError(
            f"these files do not belong in one table; they differ in {'; '.join(differences)}. Report them separately."
        )


def _read_sample(where: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """A sample of a file with its `rows` by (method, retention); `where` is named in errors."""

    def finite(name: str, value: Any) -> float:
        if not math.isfinite(number := float(value)):
            raise ReportError(
                f"{where}: {name} is {number}, which cannot be averaged; make the file anew with `lkv eval`."
            )
        return number

    try:
        rows: dict[tuple[str, float], dict[str, float | None]] = {}
        for row in line["rows"]:
            pair = (str(row["method"]), finite("retention", row["retention"]))
            if pair in rows:
                raise ReportError(f"{where}: the method {pair[0]!r} occurs twice at retention {pair[1]:g}.")
            rows[pair] = {"realised": finite("realised", row["realised"])}
            rows[pair] |= {name: None if row.get(name) is None else finite(name, row[name]) for name in ROW_METRICS}
        return {
            "key": str(line["key"]),
            "task": str(line["task"]),
            "length": None if line["length"] is None else int(line["length"]),
            "number": int(line["number"]),
            "text": line.get("text_sha256"),
            "rows": rows,
        }
    except KeyError as error:
        raise ReportError(f"{where} has no field {error}; make the file anew with `lkv eval`.") from None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ReportError(f"{where} is malformed ({error}); make the file anew with `lkv eval`.") from None
