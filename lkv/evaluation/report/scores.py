"""Averages over the samples that all methods of a table share."""

from collections.abc import Sequence
from math import inf

import numpy as np
import pandas as pd

from lkv.errors import ReportError
from lkv.evaluation.report.names import CATEGORIES, FULL, is_lkv, sort_methods
from lkv.evaluation.report.results import Results, join_some
from lkv.evaluation.report.tables import Cell
from lkv.utils.journal import ROW_METRICS
from lkv.utils.statistics import macro_mean, ratio_of_macro_means

DEFAULT_RETENTION = 0.15  # the paper's
_RANGES = {"score": (0, 100), "kl": (0, inf), "agreement": (0, 1), "hidden_error": (0, inf)}
_FULL = (FULL, 1.0)

Pair = tuple[str, float]  # (method, retention)
Unit = tuple[str, int | None]  # (task, length): what an average counts once


def method_pairs(results: Results, methods: Sequence[str] = (), retentions: Sequence[float] = ()) -> list[Pair]:
    """The measured (method, retention) pairs of the given methods and retentions, by default of all.

    The full cache comes first and always, LKV last.

    Raises:
        ReportError: For a method or retention that was not measured.
    """
    measured = list(dict.fromkeys(zip(results.frame.method, results.frame.retention, strict=True)))
    names = sort_methods(method for method, _ in measured)
    amounts = sorted({retention for method, retention in measured if method != FULL}, reverse=True)
    for name in methods:
        if name not in names:
            raise ReportError(f"the files hold no method {name!r}; they hold {', '.join(names)}.")
    for retention in retentions:
        if retention not in amounts:
            raise ReportError(
                f"the files hold no retention {retention:g}; they hold {', '.join(f'{a:g}' for a in amounts)}."
            )
    return [
        (method, retention)
        for method in names
        for retention in sorted((r for m, r in measured if m == method), reverse=True)
        if method == FULL or ((not methods or method in methods) and (not retentions or retention in retentions))
    ]


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
        self.suite, self.pairs, self.notes = str(results.header["suite"]), list(pairs), list[str]()
        self.against = against or next((method for method, _ in pairs if is_lkv(method)), "")
        if against and against not in (methods := dict.fromkeys(method for method, _ in pairs)):
            raise ReportError(f"there is no method {against!r} to compare with; there are {', '.join(methods)}.")
        self._samples: dict[Unit, pd.DataFrame] = {}  # a row a sample, columns (metric, method, retention)
        self._able: dict[Unit, list[Pair]] = {}
        missing: dict[Pair, int] = {}
        for unit, own in _by_unit(results.frame, self.suite).items():
            has = {pair: own[[(metric, *pair) for metric in metrics]].notna().all(axis=1) for pair in pairs}
            able = [pair for pair in pairs if has[pair].any()]
            for pair in able:
                missing[pair] = missing.get(pair, 0) + int((~has[pair]).sum())
            shared = own[np.logical_and.reduce([has[pair] for pair in able])] if able else own[:0]
            if len(shared):
                self._samples[unit], self._able[unit] = shared, able
        if not self._samples:
            raise ReportError(
                f"no sample has the {' and '.join(metrics)} of all of {', '.join(map(_format_pair, pairs))}; choose "
                "fewer with --methods or --retention."
            )
        self._note_missing(results.frame.key.nunique(), missing)
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
        return {name: own for name, own in units.items() if own}

    def value(self, pair: Pair, units: Sequence[Unit], metric: str = "score") -> Cell | None:
        """The macro mean of `pair` over `units`, with the difference to `against` at the same retention.

        The full cache is compared where `against` was measured at one retention only. None where `pair` could not run.
        """
        if not self._ran([pair], units):
            return None
        low, high = _RANGES[metric]
        values = self._values(metric, pair, units)
        cell = Cell.of(macro_mean(values), (low, high))._replace(realised=self.realised([pair], units))
        references = [p for p in self.pairs if p[0] == self.against and (pair[0] == FULL or p[1] == pair[1])]
        if len(references) != 1 or references[0] == pair or not self._ran(references, units):
            return cell
        pairs = zip(values, self._values(metric, references[0], units), strict=True)
        difference = Cell.of(macro_mean([own - other for own, other in pairs]), (low - high, high - low))
        return cell._replace(
            difference=difference.value, difference_low=difference.low, difference_high=difference.high
        )

    def combine(self, pairs: Sequence[Pair], units: Sequence[Unit], weights: Sequence[float]) -> Cell | None:
        """The macro mean of the weighted sum of scores, sample by sample: marginal means and gains."""
        if not self._ran(pairs, units):
            return None
        values = [self._values("score", pair, units) for pair in pairs]
        groups = [sum(w * own for w, own in zip(weights, groups, strict=True)) for groups in zip(*values, strict=True)]
        low, high = _RANGES["score"]
        least, most = (sum(w * (a if w > 0 else b) for w in weights) for a, b in ((low, high), (high, low)))
        return Cell.of(macro_mean(groups), (least, most))

    def share_of_full(self, pair: Pair, units: Sequence[Unit]) -> Cell | None:
        """The average over that of the full cache, in per cent; None where the full cache averages 0."""
        if not self._ran([pair, _FULL], units):
            return None
        mean = ratio_of_macro_means(self._values("score", pair, units), self._values("score", _FULL, units))
        if mean is None:
            return None
        percent = mean._replace(value=100 * mean.value, low=100 * mean.low, high=100 * mean.high)
        return Cell.of(percent, (0.0, inf))

    def realised(self, pairs: Sequence[Pair], units: Sequence[Unit]) -> float | None:
        """Kept / all KV entries: the mean of the pairs, each over the samples of those `units` where it ran."""
        found = []
        for pair in pairs:
            ran = [unit for unit in units if self._ran([pair], [unit])]
            if not ran:
                return None
            values = np.concatenate(self._values("realised", pair, ran)).tolist()
            found.append(sum(values) / len(values))
        return sum(found) / len(found)

    def _ran(self, pairs: Sequence[Pair], units: Sequence[Unit]) -> bool:
        return all(pair in self._able[unit] for unit in units for pair in pairs)

    def _values(self, metric: str, pair: Pair, units: Sequence[Unit]) -> list[np.ndarray]:
        return [self._samples[unit][metric, *pair].to_numpy() for unit in units]

    def _note_missing(self, total: int, missing: dict[Pair, int]) -> None:
        for pair in self.pairs:
            if units := [unit for unit in self.units if pair not in self._able[unit]]:
                where = join_some([task if at is None else f"{task} at {at:,}" for task, at in units])
                self.notes.append(f"{_format_pair(pair)} is not there for {where}, and in no average that counts them.")
        if left := total - sum(self.sizes):
            short = ", ".join(f"{_format_pair(pair)} {missing[pair]}" for pair in self.pairs if missing.get(pair))
            self.notes.append(f"{left} of {total} samples left out, which not all methods have (missing: {short}).")

    def _drop_hard_tasks(self, min_full: float) -> None:
        full = {unit: own.get(("score", *_FULL)) for unit, own in self._samples.items()}
        if any(scores is None or scores.isna().any() for scores in full.values()):
            raise ReportError("--min-full needs the full cache's score of every sample; run `lkv eval` with it.")
        # The same tasks at every length, or the lengths could not be compared.
        hard = {task for (task, _), scores in full.items() if scores is not None and scores.mean() < min_full}
        self._samples = {unit: own for unit, own in self._samples.items() if unit[0] not in hard}
        if not self._samples:
            raise ReportError(
                f"the full cache scores at least {min_full:g} on no task at every length; lower --min-full."
            )
        self.notes.append(
            f"Only tasks where the full cache scores at least {min_full:g} at every length: "
            f"{', '.join(dict.fromkeys(task for task, _ in self._samples))}."
        )


def at_one_retention(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs of their only retention, or of 0.15 where it is among several, and the full cache.

    Raises:
        ReportError: Where there are several without 0.15.
    """
    amounts = retentions_of(pairs)
    if len(amounts) > 1 and DEFAULT_RETENTION not in amounts:
        raise ReportError(
            f"this table stands at one retention, and the files hold {', '.join(f'{a:g}' for a in amounts)}; choose "
            "one with --retention."
        )
    chosen = DEFAULT_RETENTION if len(amounts) > 1 else amounts[0]
    return [pair for pair in pairs if pair[0] == FULL or pair[1] == chosen]


def retentions_of(pairs: Sequence[Pair]) -> list[float]:
    """The retentions of the compressed methods, falling; 1 where the full cache is alone."""
    return sorted({retention for method, retention in pairs if method != FULL}, reverse=True) or [1.0]


def _by_unit(frame: pd.DataFrame, suite: str) -> dict[Unit, pd.DataFrame]:
    """Samples by (task, length), a row each, in their order: lengths rising, tasks in the suite's order."""
    order = [task for tasks in CATEGORIES.get(suite, {}).values() for task in tasks]
    pairs = list(dict.fromkeys(zip(frame.method, frame.retention, strict=True)))
    columns = pd.MultiIndex.from_tuples([(metric, *pair) for metric in (*ROW_METRICS, "realised") for pair in pairs])
    units = {}
    for (task, length), own in frame.groupby(["task", "length"], dropna=False, sort=False):
        wide = own.pivot(index="key", columns=["method", "retention"], values=[*ROW_METRICS, "realised"])
        units[task, None if pd.isna(length) else int(length)] = wide.reindex(index=own.key.unique(), columns=columns)
    return dict(sorted(units.items(), key=lambda item: (item[0][1] or 0, _position(order, item[0][0]))))


def _position(order: Sequence[str], task: str) -> int:
    return order.index(task) if task in order else len(order)


def _format_pair(pair: Pair) -> str:
    return pair[0] if pair[0] == FULL else f"{pair[0]} at R = {pair[1]:g}"
