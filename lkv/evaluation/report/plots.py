"""Tables as figures: curves, points with intervals, and the ablation's grid."""

from typing import Any

from lkv.evaluation.report.curves import plot_ruler, plot_sweep
from lkv.evaluation.report.figures import new_figure
from lkv.evaluation.report.names import AVERAGE, FULL, LKV, RULES, SELECTORS, budget_and_selector, part_label
from lkv.evaluation.report.style import LKV_COLOUR, finish_figure, method_styles
from lkv.evaluation.report.tables import Cell, Table, TableRow


def plot(table: Table) -> Any:
    """The table's figure: curves for `sweep` and `ruler`, a grid for `ablation`, points for the others."""
    return {"sweep": plot_sweep, "ruler": plot_ruler, "ablation": _grid}.get(table.name, _points)(table)


def _points(table: Table) -> Any:
    """One panel a group, one cluster a column, one point a method with its interval; published points are hollow."""
    columns = [column for column in table.columns if column.best]
    groups = table.groups()
    chosen = method_styles([row.method for row in table.rows])
    most = max(len(rows) for _, rows in groups)
    figure = new_figure(min(16.0, max(6.4, 1.2 + 0.11 * len(columns) * (most + 2))), 2.0 + 2.8 * len(groups))
    all_axes = list(figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0])
    for axes, (group, rows) in zip(all_axes, groups, strict=True):
        for i, row in enumerate(rows):
            style = chosen[row.method]
            points = [(j, cell) for j, column in enumerate(columns) if (cell := row.cells.get(column.name))]
            axes.errorbar(
                [j + 0.8 * ((i + 0.5) / len(rows) - 0.5) for j, _ in points],
                [cell.value for _, cell in points],
                yerr=[[_below(cell) for _, cell in points], [_above(cell) for _, cell in points]],
                fmt=style.marker,
                fillstyle="full" if row.published else style.fill,
                color=style.colour,
                markerfacecolor="white" if row.published else style.colour,
                markersize=8 if style.order == 4 else 5,
                elinewidth=0.9,
                label=row.label,
            )
        for j in range(0, len(columns), 2):  # every other cluster shaded, so that its points stay together
            axes.axvspan(j - 0.5, j + 0.5, color="#F4F4F4", zorder=0)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_xticks(range(len(columns)), [column.name for column in columns], rotation=30, ha="right")
        axes.set_ylabel(table.value or group)
        axes.set_title(group if table.value else "", fontsize=10)
    finish_figure(figure, all_axes, table.title, table.caption)
    return figure


def _grid(table: Table) -> Any:
    """Budget rules by selectors (Table 2), measured and published: the averages as a heat map with the numbers."""
    panels = [("measured", False)] + [("published", True)] * any(row.published for row in table.rows)
    figure = new_figure(0.8 + 4.4 * len(panels), 3.6)
    all_axes = list(figure.subplots(1, len(panels), squeeze=False)[0])
    rows = [row for row in table.rows if "+" in row.method]
    for axes, (name, published) in zip(all_axes, panels, strict=True):
        averages = {
            budget_and_selector(row.method): cell
            for row in rows
            if row.published == published and (cell := _average(row))
        }
        values = [[_value(averages.get((rule, selector))) for selector in SELECTORS] for rule in RULES]
        image = axes.imshow(values, cmap="cividis", aspect="auto")
        middle = sum(image.get_clim()) / 2
        for y, rule in enumerate(RULES):
            for x, selector in enumerate(SELECTORS):
                if cell := averages.get((rule, selector)):
                    text = f"{cell.value:.2f}" + (
                        f"\n[{cell.low:.1f}, {cell.high:.1f}]" if cell.low is not None else ""
                    )
                    dark = cell.value < middle
                    of_lkv = (rule, selector) == budget_and_selector(LKV)
                    axes.text(
                        x, y, text, ha="center", va="center", color="white" if dark else "black",
                        fontweight="bold" if of_lkv else "normal",
                    )  # fmt: skip
        axes.set_xticks(range(len(SELECTORS)), [part_label(selector) for selector in SELECTORS])
        axes.set_yticks(range(len(RULES)), [part_label(rule) for rule in RULES])
        axes.add_patch(_frame())
        axes.set_xlabel("selector")
        axes.set_title(name if len(panels) > 1 else "", fontsize=10)
    all_axes[0].set_ylabel("budget rule")
    full = [cell for row in table.rows if row.method == FULL and not row.published and (cell := _average(row))]
    figure.suptitle(table.title + (f" ({AVERAGE}; full cache {full[0].value:.2f})" if full else ""), fontsize=11)
    return figure


def _frame() -> Any:
    """A frame around LKV's own field."""
    from matplotlib.patches import Rectangle

    rule, selector = budget_and_selector(LKV) or ("", "")
    corner = (SELECTORS.index(selector) - 0.5, RULES.index(rule) - 0.5)
    return Rectangle(corner, 1, 1, fill=False, edgecolor=LKV_COLOUR, linewidth=4, clip_on=False)


def _average(row: TableRow) -> Cell | None:
    return row.cells.get(AVERAGE)


def _value(cell: Cell | None) -> float:
    return cell.value if cell else float("nan")


def _below(cell: Cell) -> float:
    return 0.0 if cell.low is None else max(0.0, cell.value - cell.low)


def _above(cell: Cell) -> float:
    return 0.0 if cell.high is None else max(0.0, cell.high - cell.value)
