"""The pictures of benchmarks/results/small that committed result files hold all of, drawn anew without measuring.

python -m benchmarks.pictures    (benchmarks/results/small/README.md says what the others need)
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import length
from benchmarks.common import RESULTS
from benchmarks.evaluations import ABLE
from benchmarks.readme import read as rows
from lkv.evaluation.report.figures import save_figure
from lkv.evaluation.report.names import AVERAGE, FULL, method_label, sort_methods
from lkv.evaluation.report.plots import plot_table
from lkv.evaluation.report.profiles import plot_memory, read_profile
from lkv.evaluation.report.tables import MIN_SAMPLES, Cell, Column, Table, TableRow, make_cells

_MODEL = "SmolLM2-135M-Instruct"

Row = dict[str, Any]


def main() -> None:
    folder = RESULTS / "small"
    for name, draw in PICTURES.items():
        draw(folder / f"{name}.png")
        print(folder / f"{name}.png")


def draw_lengths(path: Path) -> None:
    """Fidelity over length and over R, of the policy that is shipped."""
    length.draw([{"model": _MODEL, **row} for row in rows("length")], path)


def draw_refit(path: Path) -> None:
    """Methods with what they keep refitted, beside themselves."""
    length.draw(rows("refit"), path)


def draw_sweep(path: Path) -> None:
    """RULER over R at one length."""
    measured = rows("ruler_sweep", task="all")
    retentions = sorted({row["retention"] for row in measured if row["method"] != FULL}, reverse=True)
    columns = tuple(Column(_retention(retention), x=retention) for retention in retentions)
    full = [{**row, "retention": r} for row in measured if row["method"] == FULL for r in retentions]
    measured = [*full, *(row for row in measured if row["method"] != FULL)]
    made = [_row(method, measured, "retention", _retention) for method in _methods(measured)]
    caption = f"{_MODEL}; {_tokens(measured[0]['tokens'])}; n = {measured[0]['n']} samples of five retrieval tasks"
    axis = "retention (kept / all entries)"
    _save(Table("sweep", "RULER, over retention", columns, make_cells(made, columns), axis=axis, caption=caption), path)


def draw_ruler_tasks(path: Path) -> None:
    """RULER by task, a panel a length."""
    _save(_tasks("ruler", "RULER, by task"), path)


def draw_longbench_tasks(path: Path) -> None:
    """The sample of LongBench by task."""
    _save(_tasks("longbench", "LongBench, by task"), path)


def draw_profile(path: Path) -> None:
    """Memory over length."""
    save_figure(plot_memory(read_profile(RESULTS / "profile.json")), path)


def _tasks(name: str, title: str) -> Table:
    measured = [row for row in rows(name) if row["task"] != ABLE]
    measured = [{**row, "task": AVERAGE if row["task"] == "all" else row["task"]} for row in measured]
    lengths = dict.fromkeys(row["tokens"] for row in measured)
    made = []
    for tokens in lengths:
        at = [row for row in measured if row["tokens"] == tokens]
        group = "" if tokens is None else _tokens(tokens)
        made += [_row(method, at, "task", str, group) for method in _methods(at)]
    columns = tuple(Column(task) for task in dict.fromkeys(row["task"] for row in measured))
    counts = {row["n"] for row in measured if row["task"] != AVERAGE}
    caption = f"{_MODEL}; R = 0.15; n = {min(counts)} samples a task"
    return Table("tasks", title, columns, make_cells(made, columns), caption=caption)


def _row(method: str, measured: Sequence[Row], key: str, name: Callable[[Any], str], group: str = "") -> TableRow:
    """The row of a method: a cell for every value of `key`."""
    own = [row for row in measured if row["method"] == method]
    cells = {name(row[key]): _cell(row) for row in own}
    return TableRow(method, method_label(method), cells, group, own[0]["retention"])


def _cell(row: Row) -> Cell:
    low, high = (row["low"], row["high"]) if row["n"] >= MIN_SAMPLES else (None, None)
    return Cell(row["value"], low, high, row["n"], row["realised"])


def _methods(measured: Sequence[Row]) -> list[str]:
    return sort_methods(row["method"] for row in measured)


def _tokens(tokens: int) -> str:
    return f"{tokens:,} tokens"


def _retention(retention: float) -> str:
    return f"R = {retention:g}"


def _save(table: Table, path: Path) -> None:
    save_figure(plot_table(table), path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "length": draw_lengths,
    "refit": draw_refit,
    "swept_sweep": draw_sweep,
    "ruler_tasks": draw_ruler_tasks,
    "longbench_tasks": draw_longbench_tasks,
    "profile": draw_profile,
}


if __name__ == "__main__":
    main()
