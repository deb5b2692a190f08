"""Paired tests of two methods on the samples of a result file: is one better, or how many contexts would tell?

python -m experiments.paired memory-MODEL lkv:kvzip lkv:snapkv    (any result with KL that has samples)

A pair METHOD:BASELINE tests the KL of the method minus `--times` that of the baseline: --times 0.5 tests whether it is
below half of the baseline's. A context counts once, with the mean over its continuations, so that contexts are
independent. P-values are of the permutation test that swaps the methods of a context, adjusted by Holm over all rows of
one call. Intervals are of Student's t below 20 contexts, else BCa.
"""

import argparse
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy import stats

from experiments.common import RESULTS
from experiments.samples import read_kept_samples
from lkv.errors import DataError
from lkv.utils.journal import Record

FEW = 20  # contexts, below which intervals are of Student's t
LEVEL = 0.05


class Paired(NamedTuple):
    """A mean difference over `n` contexts with its 95% interval, the p-value and the verdict."""

    difference: float
    low: float
    high: float
    p: float
    n: int

    def verdict(self, p: float) -> str:
        """Lower or higher by the adjusted `p`; else the number of contexts that would decide."""
        if p < LEVEL:
            return "lower" if self.difference < 0 else "higher"
        if not self.difference:
            return "undecided"
        # Half the width of an interval at n contexts stands for its standard error; power of 80%.
        error = (self.high - self.low) / 2 / stats.t.ppf(1 - LEVEL / 2, self.n - 1)
        needed = self.n * ((stats.norm.ppf(1 - LEVEL / 2) + stats.norm.ppf(0.8)) * error / self.difference) ** 2
        return f"undecided: about {max(self.n + 1, round(needed))} contexts would decide"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each pair and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", help="a result file, or the name of one in experiments/results/")
    parser.add_argument("pairs", nargs="+", metavar="METHOD:BASELINE")
    parser.add_argument("--times", type=float, default=1.0, help="the part of the baseline's KL to compare with")
    options = parser.parse_args(arguments)
    named = Path(options.result)
    path = named if named.suffix == ".json" else RESULTS / f"{named.name}.json"
    try:
        rows = compare_all(read_kept_samples(path).values(), options.pairs, options.times)
    except DataError as error:
        parser.error(str(error))
    times = "" if options.times == 1 else f"{options.times:g} x "
    for budget, method, baseline, paired, p in rows:
        interval = f"{paired.difference:+.4f} [{paired.low:+.4f}, {paired.high:+.4f}]"
        print(f"{budget:6} {method} - {times}{baseline}: {interval} p {p:.4f} n {paired.n} {paired.verdict(p)}")


def compare_all(
    samples: Collection[Record], pairs: Sequence[str], times: float = 1.0
) -> list[tuple[float, str, str, Paired, float]]:
    """Compare METHOD with BASELINE at each budget: (budget, method, baseline, difference, adjusted p-value).

    Raises:
        DataError: As `paired_means` and `compare`, or for a pair without ":".
    """
    if unclear := [pair for pair in pairs if ":" not in pair]:
        raise DataError(f"{unclear[0]!r} is not a pair; write METHOD:BASELINE, such as lkv:snapkv.")
    rows = [
        (budget, method, baseline, compare(own, other, times))
        for method, baseline in (pair.split(":", 1) for pair in pairs)
        for budget, (own, other) in paired_means(samples, method, baseline).items()
    ]
    adjusted = holm([paired.p for *_, paired in rows])
    return [(*row, p) for row, p in zip(rows, adjusted, strict=True)]


def paired_kls(
    samples: Iterable[Record], method: str, baseline: str
) -> dict[float, tuple[list[list[float]], list[list[float]]]]:
    """The KL of both methods over the continuations of each context that has both, by budget, the largest first."""
    kls: dict[float, tuple[list[list[float]], list[list[float]]]] = {}
    for sample in samples:
        places = {tuple(row): index for index, row in enumerate(sample["rows"])}
        for budget in {budget for name, budget in places if name == method and (baseline, budget) in places}:
            for groups, name in zip(kls.setdefault(budget, ([], [])), (method, baseline), strict=True):
                groups.append([continuation[places[name, budget]][0] for continuation in sample["measured"]])
    return dict(sorted(kls.items(), reverse=True))


def paired_means(
    samples: Collection[Record], method: str, baseline: str
) -> dict[float, tuple[list[float], list[float]]]:
    """The KL of both methods in each context that has both, the mean over its continuations, by budget.

    Raises:
        DataError: No sample has both at one budget.
    """
    if not (kls := paired_kls(samples, method, baseline)):
        names = ", ".join(sorted({name for sample in samples for name, _ in sample["rows"]}))
        raise DataError(f"no sample has {method!r} and {baseline!r} at one budget; there are {names}.")
    return {budget: ([*map(fmean, own)], [*map(fmean, other)]) for budget, (own, other) in kls.items()}


def compare(own: Sequence[float], baseline: Sequence[float], times: float = 1.0) -> Paired:
    """Test whether the mean of `own` differs from `times` that of `baseline`, context by context.

    Raises:
        DataError: For fewer than two contexts.
    """
    difference = np.array(own) - times * np.array(baseline)
    n, mean = len(difference), float(difference.mean())
    if n < 2:
        raise DataError("a paired test takes at least 2 contexts; measure more.")
    if not difference.std():
        return Paired(mean, mean, mean, float(mean == 0) or 2.0 ** (1 - n), n)
    if n < FEW:
        low, high = stats.t.interval(1 - LEVEL, n - 1, mean, stats.sem(difference))
    else:
        low, high = stats.bootstrap((difference,), np.mean, rng=np.random.default_rng(0)).confidence_interval
    p = stats.permutation_test(
        (difference, np.zeros(n)), lambda x, y, axis: (x - y).mean(axis), permutation_type="samples", vectorized=True,
        rng=np.random.default_rng(0),
    ).pvalue  # fmt: skip
    return Paired(mean, float(low), float(high), float(p), n)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of a family, adjusted by Holm's method."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted


if __name__ == "__main__":
    main()
