"""The pictures of benchmarks/results/small that committed result files hold all of, drawn anew without measuring.

python -m benchmarks.pictures    (benchmarks/results/small/README.md says what the others need)
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import length
from benchmarks.common import RESULTS
from benchmarks.pages.parts import rows
from lkv.report.figures import save_figure
from lkv.report.names import AVERAGE, FULL, label, ordered
from lkv.report.plots import plot
from lkv.report.profile import plot_memory, read_profile
from lkv.report.tables import LEAST, Cell, Column, Table, TableRow

# What the tables of docs/paper-scorer.md were measured with.
_EARLIER = "SmolLM2-135M-Instruct, LKV with the paper's scorer"
_ABLE = "full >= 50"
_WHICH = "tasks where the full cache scores 50 or more"

Row = dict[str, Any]


def main() -> None:
    folder = RESULTS / "small"
    for name, draw in PICTURES.items():
        draw(folder / f"{name}.png")
        print(folder / f"{name}.png")


def draw_lengths(path: Path) -> None:
    """Fidelity over length and over R, of the policy that is shipped."""
    length.draw([{"model": "SmolLM2-135M-Instruct", **row} for row in rows("length")], path)


def draw_refit(path: Path) -> None:
    """Methods with what they keep refitted, beside themselves."""
    length.draw(rows("refit"), path)


def draw_ruler(path: Path) -> None:
    """RULER over length, every method at R = 0.15."""
    measured = rows("ruler", task=_ABLE)
    lengths = sorted({row["tokens"] for row in measured})
    columns = tuple(Column(_tokens(tokens), x=tokens) for tokens in lengths)
    made = [_row(method, measured, "tokens", _tokens, "R = 0.15") for method in _methods(measured)]
    caption = f"{_EARLIER}; R = 0.15; n = {measured[0]['n']} samples a length, {_WHICH}"
    axis = "context length (tokens)"
    _save(Table("ruler", "RULER, over length", columns, tuple(made), axis=axis, caption=caption), path)


def draw_sweep(path: Path) -> None:
    """RULER over R at one length."""
    measured = rows("ruler_sweep", task=_ABLE)
    retentions = sorted({row["retention"] for row in measured if row["method"] != FULL}, reverse=True)
    columns = tuple(Column(_retention(retention), x=retention) for retention in retentions)
    full = [{**row, "retention": r} for row in measured if row["method"] == FULL for r in retentions]
    measured = [*full, *(row for row in measured if row["method"] != FULL)]
    made = [_row(method, measured, "retention", _retention) for method in _methods(measured)]
    caption = f"{_EARLIER}; {_tokens(measured[0]['tokens'])}; n = {measured[0]['n']} samples a point, {_WHICH}"
    axis = "retention (kept / all entries)"
    _save(Table("sweep", "RULER, over retention", columns, tuple(made), axis=axis, caption=caption), path)


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
    measured = [row for row in rows(name) if row["task"] != _ABLE]
    measured = [{**row, "task": AVERAGE if row["task"] == "all" else row["task"]} for row in measured]
    lengths = dict.fromkeys(row["tokens"] for row in measured)
    made = []
    for tokens in lengths:
        at = [row for row in measured if row["tokens"] == tokens]
        group = "" if tokens is None else _tokens(tokens)
        made += [_row(method, at, "task", str, group) for method in _methods(at)]
    columns = tuple(Column(task) for task in dict.fromkeys(row["task"] for row in measured))
    counts = {row["n"] for row in measured if row["task"] != AVERAGE}
    caption = f"{_EARLIER}; R = 0.15; n = {min(counts)} samples a task"
    return Table("tasks", title, columns, tuple(made), caption=caption)


def _row(method: str, measured: Sequence[Row], key: str, name: Callable[[Any], str], group: str = "") -> TableRow:
    """The row of a method: a cell for every value of `key`."""
    own = [row for row in measured if row["method"] == method]
    cells = {name(row[key]): _cell(row) for row in own}
    shown = "LKV, the paper's scorer" if method == "lkv" else label(method)
    return TableRow(method, shown, cells, group, own[0]["retention"])


def _cell(row: Row) -> Cell:
    low, high = (row["low"], row["high"]) if row["n"] >= LEAST else (None, None)
    return Cell(row["value"], low, high, row["n"], row["realised"])


def _methods(measured: Sequence[Row]) -> list[str]:
    return ordered(row["method"] for row in measured)


def _tokens(tokens: int) -> str:
    return f"{tokens:,} tokens"


def _retention(retention: float) -> str:
    return f"R = {retention:g}"


def _save(table: Table, path: Path) -> None:
    save_figure(plot(table), path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "length": draw_lengths,
    "refit": draw_refit,
    "ruler_ruler": draw_ruler,
    "swept_sweep": draw_sweep,
    "ruler_tasks": draw_ruler_tasks,
    "longbench_tasks": draw_longbench_tasks,
    "profile": draw_profile,
}


if __name__ == "__main__":
    main()
