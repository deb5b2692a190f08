"""Result files of `lkv eval`, checked and read into one DataFrame."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.report.names import FULL
from lkv.errors import ReportError
from lkv.utils.journal import JOURNAL_FORMAT, MEMORY, ROW_METRICS, read_journal

Pair = tuple[str, float]  # (method, retention)

# Files of one table agree in these and in the versions of all packages but Python itself.
_COMMON = ("suite", "protocol", "model", "revision", "fingerprint", "policy", "pattern", "dtype", "lkv")
_REQUIRED = ("suite", "protocol", "model", "revision", "dtype", "lkv")  # the others may be absent from some files
_COLUMNS = ("key", "task", "length", "number", "method", "retention", "realised", "bytes", *ROW_METRICS)


@dataclass(frozen=True)
class Results:
    """Files that belong together.

    Attributes:
        header: The first file's settings.
        frame: One row a sample, method and retention: key, task, length (tokens, or missing), number, method,
            retention, realised (kept / all KV entries), bytes (of k and v, by the full cache's), score (0..100), kl
            (nats), agreement (0..1), hidden_error.
        notes: What a reader of the tables must know.
        reasons: Why a method at a retention ran on no sample, for those that did not.
    """

    header: Mapping[str, Any]
    frame: pd.DataFrame
    notes: tuple[str, ...]
    reasons: Mapping[Pair, str] = field(default_factory=dict)

    @property
    def amount(self) -> str:
        """What `retention` is called in tables: R, or memory where methods were measured at equal bytes."""
        return MEMORY if self.header.get("budget") == MEMORY else "R"

    @property
    def option(self) -> str:
        """The option of `python -m experiments.report` that chooses among its budgets."""
        return "--memory" if self.amount == MEMORY else "--retention"


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
    repeated, notes = list[str](), list[str]()
    skipped: dict[Pair, Counter[str]] = {}
    for path in paths:
        lines, torn = read_journal(path, ReportError, "give a file as `lkv eval` wrote it")
        counts["torn"] += torn
        headers[path] = _check_header(path, lines[0][1] if lines else {})
        repeated += _merge_samples(path, lines[1:], samples, counts, skipped)
        finished, planned = {str(line.get("key")) for _, line in lines[1:]}, headers[path].get("planned", [])
        if missing := len({*map(str, planned)} - finished):
            notes.append(
                f"UNFINISHED: {path} holds {len(finished)} of {len(finished) + missing} samples; run the command that "
                "made it again to finish it."
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
    notes += _describe_counts(counts, len(samples))
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
    measured = set(zip(frame.method, frame.retention, strict=True))
    reasons = {pair: counter.most_common(1)[0][0] for pair, counter in skipped.items() if pair not in measured}
    results = Results(header, frame.astype(dict.fromkeys(("realised", "bytes", *ROW_METRICS), float)), (), reasons)
    notes += [
        f"{format_pair(pair, results.amount)} ran on no sample: {reason.rstrip('.')}."
        for pair, reason in reasons.items()
    ]
    return replace(results, notes=tuple(notes))


def _merge_samples(
    path: Path,
    lines: Sequence[tuple[int, dict[str, Any]]],
    samples: dict[str, dict[str, Any]],
    counts: dict[str, int],
    skipped: dict[Pair, Counter[str]],
) -> list[str]:
    """Add the numbered lines of a file to `samples`; return the samples that earlier files have otherwise."""
    repeated = []
    rows_of_file: dict[str, dict[Pair, Any]] = {}  # of each sample
    for number, line in lines:
        if line.get("unusable"):
            counts["unusable"] += 1
            continue
        sample = _read_sample(f"{path}, line {number}", line)
        for pair, reason in _read_skipped(f"{path}, line {number}", line):
            skipped.setdefault(pair, Counter())[reason] += 1
        key, rows = sample["key"], sample["rows"]
        previous_rows = rows_of_file.get(key, {})
        rows_of_file[key] = rows
        earlier = samples.setdefault(key, sample)
        if earlier is sample:
            counts["truncated"] += bool(line.get("truncated"))
            counts["answer_lost"] += bool(line.get("answer_lost"))
            continue
        # A run that adds methods writes a sample again with all its rows, even where it could add none; a finished
        # run leaves one line.
        if previous_rows.items() <= rows.items():
            rows = {pair: values for pair, values in rows.items() if pair not in previous_rows}
        if sample["text"] != earlier["text"] or any(m != FULL for m, _ in earlier["rows"].keys() & rows.keys()):
            repeated.append(f"{key} (again in {path}, line {number})")
        samples[key] = earlier | {"rows": rows | earlier["rows"]}
    return repeated


def _describe_counts(counts: Mapping[str, int], num_samples: int) -> list[str]:
    """Notes on samples that were left out or truncated."""
    notes = []
    if counts["torn"]:
        notes.append(f"{counts['torn']} torn last line{'s' * (counts['torn'] > 1)} of interrupted runs left out.")
    if counts["unusable"]:
        notes.append(f'{counts["unusable"]} more could not be made into a prompt, see "unusable" in the file.')
    if counts["truncated"]:
        notes.append(
            f"{counts['truncated']} of {num_samples} contexts were truncated; {counts['answer_lost']} of them lost "
            "their answer."
        )
    return notes


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
    for name in ("suite", "protocol", "model", "lkv"):
        if name not in header:
            raise ReportError(f"{path}, line 1: the header has no field {name!r}; make the file anew with `lkv eval`.")
    kinds = {"versions": dict, "methods": list, "retentions": list, "planned": list}
    for name, kind in kinds.items():
        if name in header and not isinstance(header[name], kind):
            raise ReportError(
                f"{path}, line 1: the header's {name!r} is {header[name]!r}; make the file anew with `lkv eval`."
            )
    return header


def _check_agreement(headers: Mapping[Path, Mapping[str, Any]]) -> None:
    values: dict[str, dict[Path, Any]] = {}
    for path, header in headers.items():
        facts = {name: header.get(name) for name in _COMMON}
        facts["budget"], facts["tiers"] = header.get("budget", "retention"), header.get("tiers") or "default"
        facts |= {name: version for name, version in header.get("versions", {}).items() if name != "python"}
        facts |= {f"policy {name}": digest for name, digest in (header.get("policies") or {}).items()}
        for name, value in facts.items():
            if value is not None or name in _REQUIRED:
                values.setdefault(name, {})[path] = value
    differences = [
        f"{name} ({', '.join(f'{path}: {value}' for path, value in by_path.items())})"
        for name, by_path in values.items()
        if len({json.dumps(value) for value in by_path.values()}) > 1
    ]
    if differences:
        raise ReportError(
            f"these files do not belong in one table; they differ in {'; '.join(differences)}. Report them separately."
        )


def _read_skipped(where: str, line: Mapping[str, Any]) -> list[tuple[Pair, str]]:
    """The methods and retentions that could not run on a file's sample, each with the reason."""
    try:
        rows = line.get("skipped") or ()
        return [((str(row["method"]), float(row["retention"])), str(row.get("reason", "unknown"))) for row in rows]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ReportError(f"{where} is malformed ({error!r}); make the file anew with `lkv eval`.") from None


def _read_sample(where: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """A sample of a file with its `rows` by (method, retention); `where` is named in errors."""

    def finite(name: str, value: Any) -> float:
        if not isfinite(number := float(value)):
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
            if row.get("full_nbytes"):
                rows[pair]["bytes"] = finite("nbytes", row["nbytes"]) / finite("full_nbytes", row["full_nbytes"])
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


def format_pair(pair: Pair, amount: str) -> str:
    return pair[0] if pair[0] == FULL else f"{pair[0]} at {amount} = {pair[1]:g}"
