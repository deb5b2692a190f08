"""The samples that all methods of a table share, and averages over them."""

from collections.abc import Sequence
from math import inf

from lkv.errors import ReportError
from lkv.evaluation.report.names import CATEGORIES, FULL, is_lkv, sort_methods
from lkv.evaluation.report.results import MeasuredSample, Results
from lkv.evaluation.report.tables import Cell, from_mean
from lkv.utils.statistics import macro_mean, ratio_of_macro_means

DEFAULT_RETENTION = 0.15  # the paper's

_RANGES = {"score": (0, 100), "kl": (0, inf), "agreement": (0, 1), "hidden_error": (0, inf)}

Pair = tuple[str, float]  # (method, retention)
Unit = tuple[str, int | None]  # (task, length): what an average counts once


def method_pairs(results: Results, methods: Sequence[str] = (), retentions: Sequence[float] = ()) -> list[Pair]:
    """The (method, retention) pairs that occur, of the `methods` and `retentions` named (none named: of all).

    The full cache comes first and always, LKV last. Raises ReportError for a name or retention that does not occur.
    """
    measured = dict.fromkeys(pair for sample in results.samples for pair in sample.rows)
    known = sort_methods(method for method, _ in measured)
    amounts = sorted({retention for method, retention in measured if method != FULL}, reverse=True)
    for name in methods:
        if name not in known:
            raise ReportError(f"the files hold no method {name!r}; they hold {', '.join(known)}.")
    for retention in retentions:
        if retention not in amounts:
            raise ReportError(
                f"the files hold no retention {retention:g}; they hold {', '.join(f'{a:g}' for a in amounts)}."
            )
    return [
        (method, retention)
        for method in known
        for retention in sorted((r for m, r in measured if m == method), reverse=True)
        if method == FULL or ((not methods or method in methods) and (not retentions or retention in retentions))
    ]


class Scores:
    """Averages over the samples on which every one of `pairs` has every one of `measures`.

    A pair that no sample of a task (at one length) has could not run there: it has no average that counts the task, and
    costs no samples.
    """

    def __init__(
        self,
        results: Results,
        pairs: Sequence[Pair],
        measures: Sequence[str] = ("score",),
        min_full: float = 0.0,
        against: str = "",
    ):
        """`min_full`: only tasks where the full cache's mean score is at least this at every length. `against`: the
        method that differences are taken to, by default LKV where it is there.

        Raises ReportError where no sample, or no task, is left.
        """
        self.suite, self.pairs = str(results.header["suite"]), list(pairs)
        self.against = _reference([method for method, _ in pairs], against)
        self.notes: list[str] = []
        by_unit = _by_unit(results.samples, self.suite)
        self._pairs = {unit: _able(samples, pairs, measures) for unit, samples in by_unit.items()}
        self.units = {
            unit: shared
            for unit, samples in by_unit.items()
            if (shared := [s for s in samples if all(_has(s, pair, measures) for pair in self._pairs[unit])])
            and self._pairs[unit]
        }
        if not self.units:
            raise ReportError(
                f"no sample has the {' and '.join(measures)} of all of {', '.join(map(_named, pairs))}; choose fewer "
                "with --methods or --retention."
            )
        self._note_missing(results.samples, measures)
        if min_full > 0:
            self._filter(min_full)

    def value(self, pair: Pair, units: Sequence[Unit], measure: str = "score") -> Cell | None:
        """The macro mean of `pair` over `units`, with the difference to `against` at the same retention.

        The full cache is compared where `against` is there at one retention only. None where `pair` could not run.
        """
        if not self._ran(pair, units):
            return None
        values = self._groups(pair, units, measure)
        references = [p for p in self.pairs if p[0] == self.against and (pair[0] == FULL or p[1] == pair[1])]
        reference = references[0] if len(references) == 1 else None
        difference = None
        if reference and reference != pair and self._ran(reference, units):
            pairs = zip(values, self._groups(reference, units, measure), strict=True)
            low, high = _RANGES[measure]
            apart = macro_mean([[a - b for a, b in zip(*groups, strict=True)] for groups in pairs])
            difference = from_mean(apart, limits=(low - high, high - low))
        return from_mean(macro_mean(values), self.realised(pair, units), difference, _RANGES[measure])

    def combined(self, pairs: Sequence[Pair], units: Sequence[Unit], signs: Sequence[float]) -> Cell | None:
        """The macro mean of sum(sign * value of its pair), sample by sample: marginal means and gains."""
        if not all(self._ran(pair, units) for pair in pairs):
            return None
        groups = [
            [
                sum(sign * _measure(sample, pair, "score") for sign, pair in zip(signs, pairs, strict=True))
                for sample in self.units[unit]
            ]
            for unit in units
        ]
        low, high = _RANGES["score"]
        least, most = (sum(sign * (a if sign > 0 else b) for sign in signs) for a, b in ((low, high), (high, low)))
        return from_mean(macro_mean(groups), limits=(least, most))

    def share_of_full(self, pair: Pair, units: Sequence[Unit]) -> Cell | None:
        """The average over that of the full cache, in per cent; None where the full cache averages 0."""
        full = (FULL, 1.0)
        if not (self._ran(pair, units) and self._ran(full, units)):
            return None
        mean = ratio_of_macro_means(self._groups(pair, units), self._groups(full, units))
        if mean is None:
            return None
        of_hundred = mean._replace(value=100 * mean.value, low=100 * mean.low, high=100 * mean.high)
        return from_mean(of_hundred, limits=(0.0, inf))

    def realised(self, pair: Pair, units: Sequence[Unit]) -> float | None:
        """Kept entries / all entries, mean over the samples of those `units` where `pair` ran."""
        kept = [sample.rows[pair].realised for unit in units if self._ran(pair, [unit]) for sample in self.units[unit]]
        return sum(kept) / len(kept) if kept else None

    def _ran(self, pair: Pair, units: Sequence[Unit]) -> bool:
        return all(pair in self._pairs[unit] for unit in units)

    def _groups(self, pair: Pair, units: Sequence[Unit], measure: str = "score") -> list[list[float]]:
        return [[_measure(sample, pair, measure) for sample in self.units[unit]] for unit in units]

    def _note_missing(self, samples: Sequence[MeasuredSample], measures: Sequence[str]) -> None:
        for pair in self.pairs:
            missing = [unit for unit in self.units if pair not in self._pairs[unit]]
            if missing:
                where = _listed(list(map(_at, missing)))
                self.notes.append(f"{_named(pair)} is not there for {where}, and in no average that counts them.")
        left = len(samples) - sum(map(len, self.units.values()))
        if left:
            short = {
                _named(pair): count
                for pair in self.pairs
                if (count := sum(not _has(s, pair, measures) for s in samples if pair in self._pairs[_unit(s)]))
            }
            missing_ = ", ".join(f"{name} {count}" for name, count in short.items())
            self.notes.append(
                f"{left} of {len(samples)} samples left out, which not all methods have (missing: {missing_})."
            )

    def _filter(self, least: float) -> None:
        full = (FULL, 1.0)
        if not all(_has(sample, full, ["score"]) for samples in self.units.values() for sample in samples):
            raise ReportError("--min-full needs the full cache's score of every sample; run `lkv eval` with it.")
        short = {
            unit[0]
            for unit, samples in self.units.items()
            if sum(_measure(s, full, "score") for s in samples) / len(samples) < least
        }
        # The same tasks at every length, or the lengths could not be compared.
        kept = {unit: samples for unit, samples in self.units.items() if unit[0] not in short}
        if not kept:
            raise ReportError(f"the full cache scores at least {least:g} on no task at every length; lower --min-full.")
        self.notes.append(
            f"Only tasks where the full cache scores at least {least:g} at every length: "
            f"{', '.join(dict.fromkeys(task for task, _ in kept))}."
        )
        self.units = kept


def in_categories(scores: Scores) -> dict[str, list[Unit]]:
    """The units of each category of the suite that has any."""
    categories = CATEGORIES.get(scores.suite, {})
    by_category = {name: [unit for unit in scores.units if unit[0] in tasks] for name, tasks in categories.items()}
    return {name: units for name, units in by_category.items() if units}


def _reference(methods: Sequence[str], against: str) -> str:
    if against and against not in methods:
        raise ReportError(
            f"there is no method {against!r} to compare with; there are {', '.join(dict.fromkeys(methods))}."
        )
    return against or next((method for method in methods if is_lkv(method)), "")


def _has(sample: MeasuredSample, pair: Pair, measures: Sequence[str]) -> bool:
    return pair in sample.rows and all(sample.rows[pair].measures[measure] is not None for measure in measures)


def _measure(sample: MeasuredSample, pair: Pair, measure: str) -> float:
    value = sample.rows[pair].measures[measure]
    assert value is not None  # shared samples have it
    return value


def _able(samples: Sequence[MeasuredSample], pairs: Sequence[Pair], measures: Sequence[str]) -> list[Pair]:
    """The pairs that any of the samples has."""
    return [pair for pair in pairs if any(_has(sample, pair, measures) for sample in samples)]


def _unit(sample: MeasuredSample) -> Unit:
    return sample.task, sample.length


def _at(unit: Unit) -> str:
    return unit[0] if unit[1] is None else f"{unit[0]} at {unit[1]:,}"


def _named(pair: Pair) -> str:
    return pair[0] if pair[0] == FULL else f"{pair[0]} at R = {pair[1]:g}"


def _listed(items: Sequence[str], most: int = 6) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _by_unit(samples: Sequence[MeasuredSample], suite: str) -> dict[Unit, list[MeasuredSample]]:
    """Samples by (task, length): lengths rising, tasks in the suite's order, unknown ones after them."""
    order = [task for tasks in CATEGORIES.get(suite, {}).values() for task in tasks]

    def order_of(unit: Unit) -> tuple[int, int]:
        return unit[1] or 0, order.index(unit[0]) if unit[0] in order else len(order)

    units = sorted(dict.fromkeys(map(_unit, samples)), key=order_of)
    return {unit: [s for s in samples if _unit(s) == unit] for unit in units}


def at_one_retention(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs of the one retention that they have, or of 0.15 where it is among several (and the full cache).

    Raises ReportError where there are several without it.
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
    """The retentions of the compressed methods, falling; that of the full cache where it is alone."""
    return sorted({retention for method, retention in pairs if method != FULL}, reverse=True) or [1.0]
