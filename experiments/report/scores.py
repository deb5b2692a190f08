"""Averages over the samples that the methods of a table share."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import numpy as np
import pandas as pd

from experiments.bootstrap import ratio_of_macro_means
from experiments.report.names import CATEGORIES, FULL, is_lkv, sort_methods
from experiments.report.results_frame import Pair, Results, format_pair, join_some
from experiments.report.tables import Cell
from lkv.errors import DEFAULT_RETENTION, ReportError
from lkv.evaluation.statistics import Mean, macro_mean
from lkv.utils.journal import ROW_METRICS

Unit = tuple[str, int | None]  # (task, length): what an average counts once

_RANGES = {"score": (0, 100), "kl": (0, inf), "agreement": (0, 1), "hidden_error": (0, inf)}
_FULL = (FULL, 1.0)


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
        full = self._values("score", _FULL, units)
        mean = ratio_of_macro_means(self._values("score", pair, units), full)
        most = 100 * _RANGES["score"][1] / np.mean([group.mean() for group in full]) if mean else 0.0
        return mean and Cell.of(Mean(100 * mean.value, 100 * mean.low, 100 * mean.high, mean.n), (0.0, most))

    def realised(self, pairs: Sequence[Pair], units: Sequence[Unit]) -> float | None:
        """Kept / all KV entries: the mean of the pairs, each over the samples of those `units` where it ran."""
        values = [self._values("realised", pair, [u for u in units if pair in self._able[u]]) for pair in pairs]
        means = [sum(numbers := np.concatenate(groups).tolist()) / len(numbers) for groups in values if groups]
        return sum(means) / len(means) if len(means) == len(pairs) else None

    def _format(self, pair: Pair) -> str:
        return format_pair(pair, self.amount)

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
