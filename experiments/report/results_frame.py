"""Result files of `lkv eval`: read into one DataFrame, checked, and averaged over the samples that methods share."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.bootstrap import ratio_of_macro_means
from experiments.report.names import CATEGORIES, FULL, is_lkv, sort_methods
from experiments.report.tables import Cell
from lkv.errors import ReportError
from lkv.evaluation.statistics import Mean, macro_mean
from lkv.utils.journal import JOURNAL_FORMAT, MEMORY, ROW_METRICS, read_journal

DEFAULT_RETENTION = 0.15  # the paper's
Pair = tuple[str, float]  # (method, retention)
Unit = tuple[str, int | None]  # (task, length): what an average counts once

# Files of one table agree in these and in the versions of all packages but Python itself.
_COMMON = ("suite", "protocol", "model", "revision", "fingerprint", "policy", "pattern", "dtype", "lkv")
_REQUIRED = ("suite", "protocol", "model", "revision", "dtype", "lkv")  # the others may be absent from some files
_COLUMNS = ("key", "task", "length", "number", "method", "retention", "realised", "bytes", *ROW_METRICS)
_RANGES = {"score": (0, 100), "kl": (0, inf), "agreement": (0, 1), "hidden_error": (0, inf)}
_FULL = (FULL, 1.0)


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
    repeated, notes = [], []
    skipped: dict[Pair, Counter[str]] = {}
    for path in paths:
        lines, torn = read_journal(path, ReportError, "give a file as `lkv eval` wrote it")
        counts["torn"] += torn
        headers[path] = _check_header(path, lines[0][1] if lines else {})
        rows_of_file: dict[str, dict[Pair, Any]] = {}  # of each sample
        for number, line in lines[1:]:
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
        finished, planned = {str(line.get("key")) for _, line in lines[1:]}, headers[path].get("planned", [])
        # Older files have the number of planned samples alone.
        missing = planned - len(finished) if isinstance(planned, int) else len({*map(str, planned)} - finished)
        if missing > 0:
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
        f"{_format_pair(pair, results.amount)} ran on no sample: {reason.rstrip('.')}."
        for pair, reason in reasons.items()
    ]
    return replace(results, notes=tuple(notes))


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
    kinds = {"versions": (dict,), "methods": (list,), "retentions": (list,), "planned": (list, int)}
    for name, allowed in kinds.items():
        if name in header and not isinstance(header[name], allowed):
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


def method_pairs(results: Results, methods: Sequence[str] = (), retentions: Sequence[float] = ()) -> list[Pair]:
    """The measured pairs of the given methods and retentions, by default of all; the full cache first, LKV last."""
    measured = set(zip(results.frame.method, results.frame.retention, strict=True))
    names = sort_methods(results.frame.method)
    amounts = retentions_of(measured)
    for name in methods:
        if name not in names:
            reasons = [reason for (method, _), reason in results.reasons.items() if method == name]
            raise ReportError(
                f"{name!r} ran on no sample: {reasons[0]}" if reasons
                else f"the files hold no method {name!r}; they hold {', '.join(names)}."
            )  # fmt: skip
    for retention in retentions:
        if retention not in amounts:
            listing = ", ".join(f"{amount:g}" for amount in amounts)
            raise ReportError(f"the files hold no {results.option[2:]} {retention:g}; they hold {listing}.")
    return [
        (method, retention)
        for method, retention in sorted(measured, key=lambda pair: (names.index(pair[0]), -pair[1]))
        if method == FULL or ((not methods or method in methods) and (not retentions or retention in retentions))
    ]


def at_one_retention(pairs: Sequence[Pair], option: str = "--retention") -> list[Pair]:
    """The pairs of their only retention, or of 0.15 where it is among several, and the full cache."""
    amounts = retentions_of(pairs)
    if len(amounts) > 1 and DEFAULT_RETENTION not in amounts:
        raise ReportError(
            f"this table shows one {option[2:]}, and the files hold {', '.join(f'{a:g}' for a in amounts)}; choose one "
            f"with {option} {amounts[0]:g}, or all of them with --table sweep."
        )
    chosen = DEFAULT_RETENTION if len(amounts) > 1 else amounts[0]
    return [pair for pair in pairs if pair[0] == FULL or pair[1] == chosen]


def retentions_of(pairs: Iterable[Pair]) -> list[float]:
    """The retentions of the compressed methods, falling; 1 where the full cache is alone."""
    return sorted({retention for method, retention in pairs if method != FULL}, reverse=True) or [1.0]


class Scores:
    """Averages over the samples on which every one of `pairs` has every one of `metrics`.

    A pair that no sample of a task (at one length) has could not run there: it has no average that counts the task, and
    excludes no samples.
    """

    def __init__(
        self,
        results: Results,
        pairs: Sequence[Pair],
        metrics: Sequence[str] = ("score",),
        min_full: float = 0.0,
        against: str = "",
    ):
        """Select the samples.

        Args:
            results: What was measured.
            pairs: The methods and retentions to compare.
            metrics: What the samples must have.
            min_full: Only tasks where the full cache's mean score is at least this at every length.
            against: The method that differences are taken to; by default LKV where it is among the methods.

        Raises:
            ReportError: Where no sample, or no task, is left.
        """
        self.suite, self.notes, self.amount = str(results.header["suite"]), list[str](), results.amount
        self.pairs, self.metrics = list(pairs), tuple(metrics)
        self.against = against or next((method for method, _ in pairs if is_lkv(method)), "")
        if against and against not in (methods := dict.fromkeys(method for method, _ in pairs)):
            raise ReportError(f"there is no method {against!r} to compare with; there are {', '.join(methods)}.")
        self._samples: dict[Unit, pd.DataFrame] = {}  # a row a sample, columns (metric, method, retention)
        self._able: dict[Unit, list[Pair]] = {}
        missing = dict.fromkeys(pairs, 0)
        for unit, table in _by_unit(results.frame, self.suite).items():
            has = pd.DataFrame({pair: table[[(m, *pair) for m in metrics]].notna().all(axis=1) for pair in pairs})
            able = [pair for pair in pairs if has[pair].any()]
            for pair in able:
                missing[pair] += int((~has[pair]).sum())
            if able and len(shared := table[has[able].all(axis=1)]):
                self._samples[unit], self._able[unit] = shared, able
        if not self._samples:
            raise ReportError(
                f"no sample has the {' and '.join(metrics)} of all of {', '.join(map(self._format, pairs))}; choose "
                "fewer with --methods or --retention."
            )
        for pair in pairs:
            if units := [unit for unit in self.units if pair not in self._able[unit]]:
                where = join_some([task if at is None else f"{task} at {at:,}" for task, at in units])
                self.notes.append(f"{self._format(pair)} is not there for {where}, and in no average that counts them.")
        total = results.frame.key.nunique()
        if left_out := total - sum(self.sizes):
            short = ", ".join(f"{self._format(pair)} {count}" for pair, count in missing.items() if count)
            self.notes.append(f"{left_out} of {total} samples left out, which not all methods have (missing: {short}).")
        if min_full > 0:
            self._drop_hard_tasks(min_full)

    @property
    def units(self) -> list[Unit]:
        """Tasks at one length: lengths rising, tasks in the suite's order."""
        return list(self._samples)

    @property
    def sizes(self) -> list[int]:
        """The samples of each unit."""
        return [len(samples) for samples in self._samples.values()]

    def categories(self) -> dict[str, list[Unit]]:
        """The units of each category of the suite that has any."""
        categories = CATEGORIES.get(self.suite, {})
        units = {name: [unit for unit in self.units if unit[0] in tasks] for name, tasks in categories.items()}
        return {name: members for name, members in units.items() if members}

    def value(self, pair: Pair, units: Sequence[Unit], metric: str = "score") -> Cell | None:
        """The macro mean of `pair` over `units`, with the difference to `against` at the same retention.

        The full cache is compared where `against` was measured at one retention only. None where `pair` could not run.
        """
        cell = self.combine({pair: 1.0}, units, metric)
        references = [p for p in self.pairs if p[0] == self.against and (pair[0] == FULL or p[1] == pair[1])]
        if not cell:
            return None
        cell = cell._replace(realised=self.realised([pair], units))
        if len(references) != 1 or references[0] == pair:
            return cell
        gap = self.combine({pair: 1.0, references[0]: -1.0}, units, metric)
        return cell._replace(difference=gap.value, difference_low=gap.low, difference_high=gap.high) if gap else cell

    def combine(self, weights: Mapping[Pair, float], units: Sequence[Unit], metric: str = "score") -> Cell | None:
        """The macro mean of the weighted sum of the pairs, sample by sample: differences, marginal means and gains."""
        if not self._ran(weights, units):
            return None
        values = [(weight, self._values(metric, pair, units)) for pair, weight in weights.items()]
        groups = [np.asarray(sum(weight * parts[i] for weight, parts in values)) for i in range(len(units))]
        low, high = _RANGES[metric]
        least = sum(weight * (low if weight > 0 else high) for weight in weights.values())
        most = sum(weight * (high if weight > 0 else low) for weight in weights.values())
        return Cell.of(macro_mean(groups), (least, most))

    def share_of_full(self, pair: Pair, units: Sequence[Unit]) -> Cell | None:
        """The average over that of the full cache, in per cent; None where the full cache averages 0."""
        if not self._ran([pair, _FULL], units):
            return None
        mean = ratio_of_macro_means(self._values("score", pair, units), self._values("score", _FULL, units))
        return mean and Cell.of(Mean(100 * mean.value, 100 * mean.low, 100 * mean.high, mean.n), (0.0, inf))

    def realised(self, pairs: Sequence[Pair], units: Sequence[Unit]) -> float | None:
        """Kept / all KV entries: the mean of the pairs, each over the samples of those `units` where it ran."""
        values = [self._values("realised", pair, [u for u in units if pair in self._able[u]]) for pair in pairs]
        means = [sum(numbers := np.concatenate(groups).tolist()) / len(numbers) for groups in values if groups]
        return sum(means) / len(means) if len(means) == len(pairs) else None

    def _format(self, pair: Pair) -> str:
        return _format_pair(pair, self.amount)

    def _ran(self, pairs: Iterable[Pair], units: Sequence[Unit]) -> bool:
        return all(pair in self._able[unit] for pair in pairs for unit in units)

    def _values(self, metric: str, pair: Pair, units: Sequence[Unit]) -> list[np.ndarray]:
        return [self._samples[unit][metric, *pair].to_numpy() for unit in units]

    def _drop_hard_tasks(self, min_full: float) -> None:
        full = {unit: table.get(("score", *_FULL)) for unit, table in self._samples.items()}
        if any(scores is None or scores.isna().any() for scores in full.values()):
            raise ReportError("--min-full needs the full cache's score of every sample; run `lkv eval` with it.")
        # The same tasks at every length, or the lengths could not be compared.
        hard = {task for (task, _), scores in full.items() if scores is not None and scores.mean() < min_full}
        self._samples = {unit: table for unit, table in self._samples.items() if unit[0] not in hard}
        if not self._samples:
            raise ReportError(
                f"the full cache scores at least {min_full:g} on no task at every length; lower --min-full."
            )
        self.notes.append(
            f"Only tasks where the full cache scores at least {min_full:g} at every length: "
            f"{', '.join(dict.fromkeys(task for task, _ in self._samples))}."
        )


def _by_unit(frame: pd.DataFrame, suite: str) -> dict[Unit, pd.DataFrame]:
    """Samples by (task, length), a row each, in their order: lengths rising, tasks in the suite's order."""
    order = [task for tasks in CATEGORIES.get(suite, {}).values() for task in tasks]
    pairs = list(dict.fromkeys(zip(frame.method, frame.retention, strict=True)))
    columns = pd.MultiIndex.from_tuples([(metric, *pair) for metric in (*ROW_METRICS, "realised") for pair in pairs])
    units = {}
    for (task, length), rows in frame.groupby(["task", "length"], dropna=False, sort=False):
        wide = rows.pivot(index="key", columns=["method", "retention"], values=[*ROW_METRICS, "realised"])
        units[task, None if pd.isna(length) else int(length)] = wide.reindex(index=rows.key.unique(), columns=columns)
    places = {task: place for place, task in enumerate(order)}
    return dict(sorted(units.items(), key=lambda item: (item[0][1] or 0, places.get(item[0][0], len(order)))))


def _format_pair(pair: Pair, amount: str) -> str:
    return pair[0] if pair[0] == FULL else f"{pair[0]} at {amount} = {pair[1]:g}"
