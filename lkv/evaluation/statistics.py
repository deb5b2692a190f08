"""Means over tasks with 95% intervals, and a short table of a result file."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lkv.errors import DataError
from lkv.utils.journal import MEMORY, Record, read_journal

MIN_SAMPLES = 5  # that an interval needs
_COLUMNS = ("method", "kept", "score", "95% interval", "KL", "agreement", "n")

Groups = Sequence[Sequence[float] | np.ndarray]


class Mean(NamedTuple):
    """A mean with its 95% bootstrap interval over `n` samples."""

    value: float
    low: float
    high: float
    n: int


def macro_mean(groups: Groups, draws: int = 2000) -> Mean:
    """Return the mean of the groups' means, with a percentile bootstrap that draws samples within each group.

    The draws of small groups vary too little, by (n - 1) / n, and so few samples are not normally distributed: the
    interval is widened by both, the latter as Student's t with Satterthwaite's degrees of freedom. A group of one
    sample is drawn as if it varied as the others do, about their means; where all have one, whole groups are drawn.
    Differences of two methods, sample by sample, give the paired comparison. Needs scipy.

    Args:
        groups: The samples of each task (at one length).
        draws: How many.

    Raises:
        ValueError: For an empty group.
    """
    point, drawn = draw_macro_means([np.asarray(group, np.float64)[:, None] for group in groups], draws)
    return to_interval(point[0], drawn[:, 0], sum(map(len, groups)))


def draw_macro_means(groups: Sequence[np.ndarray], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over the groups' means [K] and its draws [draws, K], for groups of shape [samples, K]."""
    from scipy.stats import norm, t

    if not groups or not all(len(group) for group in groups):
        raise ValueError("there are no values to average.")
    random = np.random.default_rng(0)
    means = np.stack([group.mean(0) for group in groups])
    point = means.mean(0)
    # Deviations of samples from their group's mean, for groups with more than one sample.
    residuals = [
        (group - mean) * np.sqrt(len(group) / (len(group) - 1))
        for group, mean in zip(groups, means, strict=True)
        if len(group) > 1
    ]
    if not residuals:
        return point, means[random.integers(0, len(groups), (draws, len(groups)))].mean(1)
    singles, pooled = len(groups) - len(residuals), np.concatenate(residuals)
    spread = pooled[random.integers(0, len(pooled), (draws, singles))].sum(1)
    for each in residuals:
        spread += each[random.integers(0, len(each), (draws, len(each)))].mean(1)
    # Satterthwaite's degrees of freedom, by the first column; the singles share those of the others.
    variances = [each[:, 0].var() / len(each) for each in residuals] + [singles * pooled[:, 0].var()] * bool(singles)
    degrees = [len(each) - 1 for each in residuals] + [len(pooled) - len(residuals)] * bool(singles)
    total = sum(variance**2 / degree for variance, degree in zip(variances, degrees, strict=True))
    freedom = sum(variances) ** 2 / total if total else sum(degrees)
    return point, point + spread / len(groups) * (t.ppf(0.975, freedom) / norm.ppf(0.975))


def to_interval(value: float, drawn: np.ndarray, samples: int) -> Mean:
    """Return the mean `value` with the 95% interval of its draws [draws]."""
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Mean(float(value), float(low), float(high), samples)


def summarize(path: Path) -> str:
    """Return a table of text: the mean over tasks and lengths of each method at each budget.

    Every sample that a method could run on counts; `python -m experiments.report` compares methods on shared samples.

    Args:
        path: A file that `lkv eval` wrote.

    Raises:
        DataError: If the file cannot be read.
    """
    (_, header), *samples = read_journal(path, DataError, "give a file that `lkv eval` wrote").rows
    rows: dict[tuple[str, float], dict[tuple[str, int | None], list[Record]]] = defaultdict(lambda: defaultdict(list))
    for _, sample in samples:
        for row in sample.get("rows", ()):
            rows[row["method"], row["retention"]][sample["task"], sample.get("length")].append(row)
    lines = [_COLUMNS, *(_summarize_rows(method, kept, tasks) for (method, kept), tasks in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    budget = "of the 16-bit cache's bytes" if header.get("budget") == MEMORY else "of the KV entries"
    text = ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([f"{header['suite']}, {header['model']}; kept: the share {budget}", "", *text]) + "\n"


def _summarize_rows(
    method: str, kept: float, tasks: dict[tuple[str, int | None], list[Record]]
) -> tuple[str, str, str, str, str, str, str]:
    def means(metric: str) -> list[list[float]]:
        found = ([row[metric] for row in task if row.get(metric) is not None] for task in tasks.values())
        return [values for values in found if values]

    score = macro_mean(means("score"))
    fidelity = [f"{macro_mean(means(name)).value:.3f}" if means(name) else "" for name in ("kl", "agreement")]
    interval = f"{max(0.0, score.low):.1f} to {min(100.0, score.high):.1f}" if score.n >= MIN_SAMPLES else ""
    return method, f"{kept:g}", f"{score.value:.1f}", interval, fidelity[0], fidelity[1], str(score.n)
