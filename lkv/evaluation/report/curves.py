"""Scores over retention and over context length, each method a line."""

from collections.abc import Callable, Sequence
from typing import Any

from lkv.evaluation.report.figures import new_figure
from lkv.evaluation.report.names import FULL, is_lkv
from lkv.evaluation.report.scores import DEFAULT_RETENTION
from lkv.evaluation.report.style import Style, finish_figure, full_line, method_styles
from lkv.evaluation.report.tables import Cell, Column, Table, TableRow

_BANDS = 6  # with more methods only LKV's interval is drawn: bands that overlap cannot be read


def plot_sweep(table: Table) -> Any:
    """The table `sweep`: the average over the realised retention (the paper's Fig. 3)."""
    figure = new_figure(6.4, 5.0)
    axes = figure.subplots()
    chosen = method_styles([row.method for row in table.rows])
    for row in table.rows:
        points = [(_abscissa(cell, column), cell) for column in table.columns if (cell := row.cells.get(column.name))]
        if row.method == FULL and points:
            axes.axhline(points[0][1].value, **full_line(chosen[FULL]), label=row.label)
        elif row.method != FULL:
            _curve(axes, row, points, chosen)
    axes.set_xlabel(table.axis)
    axes.set_ylabel(table.value)
    finish_figure(figure, [axes], table.title, table.caption)
    return figure


def plot_ruler(table: Table) -> Any:
    """The table `ruler`: over length at one retention, over retention at the greatest length (the paper's Fig. 4)."""
    lengths = [column for column in table.columns if column.x is not None]
    panels: list[Callable[[Any], None]] = []
    chosen = method_styles([row.method for row in table.rows])
    if len(lengths) > 1:
        panels.append(lambda axes: _over_length(axes, table, lengths, chosen))
    if len(table.groups()) > 1 or not panels:
        panels.append(lambda axes: _over_retention(axes, table, lengths[-1], chosen))
    figure = new_figure(0.6 + 5.2 * len(panels), 5.4)
    all_axes = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    for axes, draw in zip(all_axes, panels, strict=True):
        draw(axes)
    all_axes[0].set_ylabel(table.value)
    finish_figure(figure, all_axes, table.title, table.caption)
    return figure


def _over_length(axes: Any, table: Table, lengths: Sequence[Column], chosen: dict[str, Style]) -> None:
    group, rows = min(table.groups(), key=lambda item: abs(_retention(item[1]) - DEFAULT_RETENTION))
    for row in rows:
        points = [(column.x, cell) for column in lengths if (cell := row.cells.get(column.name))]
        if row.method == FULL:
            values = [cell.value for _, cell in points]
            axes.plot([x for x, _ in points], values, **full_line(chosen[FULL]), label=row.label)
        else:
            _curve(axes, row, points, chosen)
    ticks = [column.x for column in lengths if column.x is not None]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{x / 1024:g}k" for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel(table.axis)
    axes.set_title(group)


def _over_retention(axes: Any, table: Table, length: Column, chosen: dict[str, Style]) -> None:
    rows = [row for row in table.rows if row.cells.get(length.name)]
    for method in dict.fromkeys(row.method for row in rows):
        of_method = [row for row in rows if row.method == method]
        points = [(cell.realised, cell) for row in of_method if (cell := row.cells[length.name])]
        if method == FULL:
            axes.axhline(points[0][1].value, **full_line(chosen[FULL]), label=of_method[0].label)
        else:
            _curve(axes, of_method[0], points, chosen)
    axes.set_xlabel("retention (kept / all entries)")
    axes.set_title(length.name)


def _curve(axes: Any, row: TableRow, points: Sequence[tuple[float | None, Cell]], chosen: dict[str, Style]) -> None:
    """A line with its interval as a band; published ones are dashed, hollow and have none."""
    style = chosen[row.method]
    ordered = sorted(((x, cell) for x, cell in points if x is not None), key=lambda point: point[0])
    places, cells = [x for x, _ in ordered], [cell for _, cell in ordered]
    axes.plot(
        places,
        [cell.value for cell in cells],
        color=style.colour,
        marker=style.marker,
        linestyle="--" if row.published else style.line,
        linewidth=1.4 if row.published else style.width,
        markerfacecolor="white" if row.published else style.colour,
        zorder=style.order,
        label=row.label,
    )
    lows = [cell.low for cell in cells if cell.low is not None]
    highs = [cell.high for cell in cells if cell.high is not None]
    if len(lows) == len(highs) == len(cells) and (is_lkv(row.method) or len(chosen) <= _BANDS + 1):
        axes.fill_between(places, lows, highs, color=style.colour, alpha=0.15, linewidth=0, zorder=style.order - 1)


def _abscissa(cell: Cell, column: Column) -> float | None:
    return column.x if cell.realised is None else cell.realised


def _retention(rows: Sequence[TableRow]) -> float:
    return next((row.retention for row in rows if row.method != FULL and row.retention is not None), 1.0)
