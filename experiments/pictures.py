"""Draw the figures of experiments/results/small that follow from committed result files; nothing is measured.

python -m experiments.pictures    (experiments/results/small/README.md lists what the others need)
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments import length, memory
from experiments.common import RESULTS
from experiments.evaluations import ABLE
from experiments.fit_tables import CURVE, FITTED_ON, fit_files, minutes_of
from experiments.report.figures import finish_figure, new_figure, plot_memory, plot_table, save_figure
from experiments.report.names import AVERAGE, FULL, method_label, sort_methods
from experiments.report.profile_table import read_profile
from experiments.report.tables import MIN_SAMPLES, Cell, Column, Table, TableRow, make_cells
from experiments.results_page import LONGER
from experiments.tables import read
from lkv.training.fit_plan import PROGRESS_TEXTS
from lkv.training.heldout import PROGRESS_RETENTIONS

_MODEL = "SmolLM2-135M-Instruct"

Row = dict[str, Any]


def main() -> None:
    for name, draw in PICTURES.items():
        path = RESULTS / "small" / f"{name}.png"
        draw(path)
        print(path)


def draw_lengths(name: str, path: Path) -> None:
    """Fidelity over length and over R: of methods, or of methods with compensation beside themselves."""
    length.draw([{"model": _MODEL, **row} for row in read(name)], path)


def draw_memory(path: Path) -> None:
    """Fidelity over memory."""
    memory.draw([{"model": _MODEL, **row} for row in read("memory")], path)


def draw_sweep(path: Path) -> None:
    """RULER over R at one length."""
    rows = read("ruler_sweep", task="all")
    retentions = sorted({row["retention"] for row in rows if row["method"] != FULL}, reverse=True)
    full = [{**row, "retention": retention} for row in rows if row["method"] == FULL for retention in retentions]
    columns = {retention: Column(f"R = {retention:g}", x=retention) for retention in retentions}
    caption = f"{_MODEL}; {rows[0]['tokens']:,} tokens; n = {rows[0]['n']} samples of five retrieval tasks"
    rows = [*full, *(row for row in rows if row["method"] != FULL)]
    _draw_table("sweep", "RULER, over retention", rows, "retention", columns, caption, path)


def draw_tasks(name: str, suite: str, path: Path) -> None:
    """A suite by task, a panel a length."""
    rows = [row | {"task": row["task"].replace("all", AVERAGE)} for row in read(name) if row["task"] != ABLE]
    columns = {task: Column(task) for task in dict.fromkeys(row["task"] for row in rows)}
    samples = min(row["n"] for row in rows if row["task"] != AVERAGE)
    caption = f"{_MODEL}; R = 0.15; n = {samples} samples a task"
    _draw_table("tasks", f"{suite}, by task", rows, "task", columns, caption, path)


def draw_fits(path: Path) -> None:
    """Held-out KL over the minutes of `lkv fit`, a panel a model; of each kind of text the fit of most minutes."""
    files = [file for file in fit_files() if read(file, task=CURVE)]
    figure = new_figure(0.6 + 4.5 * len(files), 4.2)
    panels = list(figure.subplots(1, len(files), sharey=True, squeeze=False)[0])
    for axes, file in zip(panels, files, strict=True):
        points = read(file, task=CURVE)
        # The last of a kind's fits, by minutes.
        longest = {row["method"]: row["minutes"] for row in sorted(points, key=lambda row: row["minutes"])}
        for method, minutes in longest.items():
            colour = f"C{[*FITTED_ON].index(method)}"  # the same in all panels
            own = [row for row in points if (row["method"], row["minutes"]) == (method, minutes)]
            for retention, line in zip(PROGRESS_RETENTIONS, ("-", "--"), strict=True):
                curve = [row for row in own if row["retention"] == retention]
                axes.plot(
                    [row["seconds"] / 60 for row in curve], [row["value"] for row in curve], line, color=colour,
                    marker="o", markersize=3, label=FITTED_ON[method] if line == "-" else "",
                )  # fmt: skip
        axes.set_title(points[0]["model"].rpartition("/")[2])
        axes.set_xlabel(f"minutes of {minutes_of(file)}")
        axes.set_yscale("log")
    panels[0].set_ylabel("KL(full || compressed), nats a token")
    first, second = PROGRESS_RETENTIONS
    caption = f"R = {first:g}, dashed {second:g}; {PROGRESS_TEXTS} unread texts, at first after the statistics"
    finish_figure(figure, panels, "lkv fit by minutes", caption)
    save_figure(figure, path)


def draw_profile(path: Path) -> None:
    """Memory over length."""
    save_figure(plot_memory(read_profile(RESULTS / "profile.json")), path)


def _draw_table(
    name: str, title: str, rows: Sequence[Row], key: str, columns: Mapping[Any, Column], caption: str, path: Path
) -> None:
    """Draw result rows as a table with a line a length and method, and a column for every value of `key`."""
    lines: dict[tuple[str, str], dict[str, Cell]] = {}
    for row in rows:
        group = f"{row['tokens']:,} tokens" if name == "tasks" and row["tokens"] else ""
        low, high = (row["low"], row["high"]) if row["n"] >= MIN_SAMPLES else (None, None)
        cell = Cell(row["value"], low, high, row["n"], row["realised"])
        lines.setdefault((group, row["method"]), {})[columns[row[key]].name] = cell
    order = sort_methods(method for _, method in lines)
    figures = [
        TableRow(method, method_label(method), cells, group)
        for (group, method), cells in sorted(lines.items(), key=lambda item: order.index(item[0][1]))
    ]
    every, axis = tuple(columns.values()), "retention (kept / all entries)" if name == "sweep" else ""
    save_figure(plot_table(Table(name, title, every, make_cells(figures, every), axis=axis, caption=caption)), path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "memory": draw_memory,
    "length": partial(draw_lengths, "length"),
    "refit": partial(draw_lengths, "refit"),
    "swept_sweep": draw_sweep,
    "ruler_tasks": partial(draw_tasks, "ruler", "RULER"),
    "longbench_tasks": partial(draw_tasks, "longbench", "LongBench"),
    "profile": draw_profile,
    "fit": draw_fits,
    **{
        path.stem: partial(draw_lengths, path.stem)
        for name in ("length", "refit", *LONGER)
        for path in sorted(RESULTS.glob(f"{name}-*.json"))
    },
}


if __name__ == "__main__":
    main()
