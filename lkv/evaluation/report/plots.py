"""Tables as figures: curves over retention and length, points with intervals, and the ablation's grid."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from lkv.evaluation.report.figures import (
    LKV_COLOUR,
    Style,
    finish_figure,
    full_cache_line,
    method_styles,
    new_figure,
)
from lkv.evaluation.report.names import (
    AVERAGE,
    FULL,
    LKV,
    RULES,
    SELECTORS,
    budget_and_selector,
    is_lkv,
    part_label,
)
from lkv.evaluation.report.scores import DEFAULT_RETENTION
from lkv.evaluation.report.tables import MEASURED, PUBLISHED, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_BANDS = 6  # with more methods only LKV's interval is drawn: bands that overlap cannot be read


def plot_table(table: Table) -> "Figure":
    """The table's figure: curves for `sweep` and `ruler`, a grid for `ablation`, points for the others."""
    plots = {"sweep": _plot_sweep, "ruler": _plot_ruler, "ablation": _plot_grid}
    return plots.get(table.name, _plot_points)(table)


def _plot_sweep(table: Table) -> "Figure":
    """The average over the realised retention (the paper's Fig. 3)."""
    figure = new_figure(6.4, 5.0)
    axes = figure.subplots()
    places = {column.name: column.x for column in table.columns}
    cells = table.cells.dropna(subset="value")
    cells = cells.assign(x=cells.realised.fillna(cells.column.map(places)))
    _draw_curves(axes, cells, method_styles(list(table.cells.method)))
    axes.set_xlabel(table.axis)
    axes.set_ylabel(table.value)
    finish_figure(figure, [axes], table.title, table.caption)
    return figure


def _plot_ruler(table: Table) -> "Figure":
    """Over length at one retention, over retention at the greatest length (the paper's Fig. 4)."""
    places = {column.name: column.x for column in table.columns if column.x is not None}
    styles = method_styles(list(table.cells.method))
    cells = table.cells.dropna(subset="value")
    cells = cells.assign(length=cells.column.map(places)).dropna(subset="length")
    groups = table.cells[table.cells.method != FULL].groupby("group", sort=False).retention.first()

    def draw_over_length(axes: "Axes") -> None:
        all_groups = list(cells.group.unique())
        group = min(all_groups, key=lambda name: abs(groups.get(name, 1.0) - DEFAULT_RETENTION))
        own = cells[cells.group == group]
        _draw_curves(axes, own.assign(x=own.length), styles, full_is_flat=False)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(places.values()), [f"{x / 1024:g}k" for x in places.values()])
        axes.minorticks_off()
        axes.set_xlabel(table.axis)
        axes.set_title(group)

    def draw_over_retention(axes: "Axes") -> None:
        name = list(places)[-1]
        own = cells[cells.column == name]
        _draw_curves(axes, own.assign(x=own.realised), styles)
        axes.set_xlabel("retention (kept / all entries)")
        axes.set_title(name)

    panels: list[Callable[[Axes], None]] = [draw_over_length] if len(places) > 1 else []
    if table.cells.group.nunique() > 1 or not panels:
        panels.append(draw_over_retention)
    figure = new_figure(0.6 + 5.2 * len(panels), 5.4)
    all_axes = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    for axes, draw in zip(all_axes, panels, strict=True):
        draw(axes)
    all_axes[0].set_ylabel(table.value)
    finish_figure(figure, all_axes, table.title, table.caption)
    return figure


def _draw_curves(axes: "Axes", cells: pd.DataFrame, styles: dict[str, Style], full_is_flat: bool = True) -> None:
    """A line a method over the cells' `x`, its interval as a band; published ones dashed, hollow and without band."""
    for (label, method, source), own in cells.groupby(["label", "method", "source"], sort=False):
        style, published = styles[method], source == PUBLISHED
        if method == FULL and full_is_flat:
            axes.axhline(own.value.iloc[0], **full_cache_line(style), label=label)
            continue
        own = own.dropna(subset="x").sort_values("x", kind="stable")
        if method == FULL:
            axes.plot(own.x, own.value, **full_cache_line(style), label=label)
            continue
        axes.plot(
            own.x,
            own.value,
            color=style.colour,
            marker=style.marker,
            linestyle="--" if published else style.line,
            linewidth=1.4 if published else style.width,
            markerfacecolor="white" if published else style.colour,
            zorder=style.order,
            label=label,
        )
        if own[["low", "high"]].notna().all(axis=None) and (is_lkv(method) or len(styles) <= _MAX_BANDS + 1):
            axes.fill_between(
                own.x, own.low, own.high, color=style.colour, alpha=0.15, linewidth=0, zorder=style.order - 1
            )


def _plot_points(table: Table) -> "Figure":
    """One panel a group, one cluster a column, one point a method with its interval; published points are hollow."""
    names = [column.name for column in table.columns if column.best]
    styles = method_styles(list(table.cells.method))
    groups = list(table.cells.groupby("group", sort=False))
    most = max(own.row.nunique() for _, own in groups)
    figure = new_figure(min(16.0, max(6.4, 1.2 + 0.11 * len(names) * (most + 2))), 2.0 + 2.8 * len(groups))
    all_axes = list(figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0])
    for axes, (group, cells) in zip(all_axes, groups, strict=True):
        for i, (_, own) in enumerate(cells.groupby("row", sort=False)):
            first, style = own.iloc[0], styles[own.method.iloc[0]]
            own = own[own.column.isin(names)].dropna(subset="value")
            published = first.source == PUBLISHED
            offset = 0.8 * ((i + 0.5) / cells.row.nunique() - 0.5)
            errors = np.abs([own.value - own.low, own.high - own.value])
            axes.errorbar(
                [names.index(name) + offset for name in own.column],
                own.value,
                yerr=np.nan_to_num(errors),
                fmt=style.marker,
                fillstyle="full" if published else style.fill,
                color=style.colour,
                markerfacecolor="white" if published else style.colour,
                markersize=8 if style.order == 4 else 5,
                elinewidth=0.9,
                label=first.label,
            )
        for j in range(0, len(names), 2):  # every other cluster shaded, so that its points stay together
            axes.axvspan(j - 0.5, j + 0.5, color="#F4F4F4", zorder=0)
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axes.set_ylabel(table.value or group)
        axes.set_title(group if table.value else "", fontsize=10)
    finish_figure(figure, all_axes, table.title, table.caption)
    return figure


def _plot_grid(table: Table) -> "Figure":
    """Budget rules by selectors (Table 2), measured and published: the averages as a heat map with the numbers."""
    from matplotlib.patches import Rectangle

    averages = table.cells[table.cells.column == AVERAGE].dropna(subset="value")
    in_grid = averages[averages.method.str.contains("+", regex=False)]
    sources = [name for name in (MEASURED, PUBLISHED) if name == MEASURED or name in averages.source.unique()]
    figure = new_figure(0.8 + 4.4 * len(sources), 3.6)
    all_axes = list(figure.subplots(1, len(sources), squeeze=False)[0])
    rule, selector = budget_and_selector(LKV) or ("", "")
    own_place = (SELECTORS.index(selector), RULES.index(rule))
    for axes, source in zip(all_axes, sources, strict=True):
        cells: dict[Any, Any] = {
            budget_and_selector(cell.method): cell for cell in in_grid[in_grid.source == source].itertuples()
        }
        values = [[cells[r, s].value if (r, s) in cells else np.nan for s in SELECTORS] for r in RULES]
        image = axes.imshow(values, cmap="cividis", aspect="auto")
        middle = sum(image.get_clim()) / 2
        for x, y in ((x, y) for y in range(len(RULES)) for x in range(len(SELECTORS))):
            if cell := cells.get((RULES[y], SELECTORS[x])):
                text = f"{cell.value:.2f}" + (f"\n[{cell.low:.1f}, {cell.high:.1f}]" if pd.notna(cell.low) else "")
                axes.text(
                    x, y, text, ha="center", va="center", color="white" if cell.value < middle else "black",
                    fontweight="bold" if (x, y) == own_place else "normal",
                )  # fmt: skip
        axes.set_xticks(range(len(SELECTORS)), [part_label(name) for name in SELECTORS])
        axes.set_yticks(range(len(RULES)), [part_label(name) for name in RULES])
        corner = (own_place[0] - 0.5, own_place[1] - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=LKV_COLOUR, linewidth=4, clip_on=False))
        axes.set_xlabel("selector")
        axes.set_title(source if len(sources) > 1 else "", fontsize=10)
    all_axes[0].set_ylabel("budget rule")
    full = averages[(averages.method == FULL) & (averages.source == MEASURED)].value.tolist()
    figure.suptitle(table.title + (f" ({AVERAGE}; full cache {full[0]:.2f})" if full else ""), fontsize=11)
    return figure
