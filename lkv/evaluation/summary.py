"""A short table of a result file: mean score and KL of every method at every budget."""

from collections import defaultdict
from pathlib import Path

from lkv.errors import DataError
from lkv.evaluation.statistics import MIN_SAMPLES, macro_mean
from lkv.utils.journal import MEMORY, Record, read_journal

_COLUMNS = ("method", "kept", "score", "95% interval", "KL", "agreement", "n")


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
    interval = f"{score.low:.1f} to {score.high:.1f}" if score.n >= MIN_SAMPLES else ""
    return method, f"{kept:g}", f"{score.value:.1f}", interval, fidelity[0], fidelity[1], str(score.n)
