"""The figures: curves, points with intervals, the ablation's grid, memory, training curves, heat maps of budgets."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.report import names
from experiments.report.names import AVERAGE, FULL, RULES, SELECTORS, is_lkv, method_label
from experiments.report.profile_table import ProfileResults
from experiments.report.tables import MEASURED, PUBLISHED, Table
from lkv.errors import DEFAULT_RETENTION, ReportError
from lkv.methods.registry import COMPENSATION, find_method
from lkv.utils import files
from lkv.utils.extras import optional_import
from lkv.utils.journal import MEMORY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LKV_COLOUR = "#D55E00"
# Markers and colours of methods; without a colour they are grey. The palette is Okabe and Ito's, which the colour-blind
# can tell apart.
_LOOKS = {
    "lkv": ("o", LKV_COLOUR), "lkv-t": ("p",), "snapkv": ("s", "#0072B2"), "pyramidkv": ("^",),
    "adakv-snapkv": ("v", "#56B4E9"), "adakv-expected": ("d",), "expected": ("X",), "duo": ("P",),
    "pyramidkv-kvpress": ("^",), "duo-kvpress": ("P",), "expected-e2": ("X",), "adakv-expected-e2": ("d",),
    "kvzip": ("D", "#009E73"), "criticalkv": (">",), "h2o": ("<",), "observed-attention": ("h",), "tova": ("H",),
    "streaming-llm": ("8",), "knorm": ("*",), "keydiff": ("X", "#CC79A7"), "random": ("x",), "lkv-h+snapkv": ("1",),
    "lkv-h+expected": ("^", "#E69F00"), "ada+lkv-t": ("2",), "lkv-h+kvzip": ("p", "#7A3E9D"),
}  # fmt: skip
_POLICIES = ((LKV_COLOUR, "o"), ("#8C3D00", "s"), ("#F0A06A", "D"), ("#5E2A00", "^"))  # LKV under several policies
_COMPENSATED = "-."
_MAX_COLOURS = 6  # curves that can be told apart by colour
_MAX_BANDS = 6  # with more methods only LKV's interval is drawn: bands that overlap cannot be read
_GREYS, _MARKERS = ("#7F7F7F", "#A6A6A6", "#595959"), "svd^XP<>hpD*8"  # where a method's own look is taken
_RUNS = ((LKV_COLOUR, "o"), ("#0072B2", "s"), ("#009E73", "D"), ("#CC79A7", "X"), ("#E69F00", "^"), ("#56B4E9", "v"))
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


class Style(NamedTuple):
    """How a method is drawn."""

    colour: str
    marker: str
    width: float
    order: int  # what is drawn later lies on top
    line: str = "-"


def method_styles(methods: Sequence[str]) -> dict[str, Style]:
    """A style for each method, no two alike, and the same in every figure where the methods are.

    The full cache is black and LKV thick; the others as `_LOOKS` has them, dash-dotted with compensation.
    Beyond six colours the later ones are grey. Methods of one look, or of none, differ by grey and marker.
    """
    styles: dict[str, Style] = {}
    free = [Style(colour, marker, 1.4, 2) for colour, marker in product(_GREYS, _MARKERS)]
    learned = coloured = 0
    for method in dict.fromkeys(methods):
        if method == FULL:
            styles[method] = Style("#000000", "_", 1.4, 1, ":")
            continue
        if is_lkv(method):
            styles[method] = Style(*_POLICIES[learned % len(_POLICIES)], 2.8, 4)
            learned, coloured = learned + 1, coloured + 1
            continue
        style, entry = free[0], find_method(method)
        if entry:
            marker, colour = (*_LOOKS.get(entry.canonical.removesuffix(COMPENSATION), (".",)), _GREYS[0])[:2]
            coloured += colour not in _GREYS
            colour = colour if coloured <= _MAX_COLOURS else _GREYS[0]
            line = _COMPENSATED if entry.compensation else "-"
            style = Style(colour, marker, 1.4, 2 if colour in _GREYS else 3, line)
        looks = (style if entry else free[0], *(look._replace(line=style.line) for look in free))
        styles[method] = next((look for look in looks if look not in styles.values()), style)
    return styles


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **sharing: Any
) -> tuple["Figure", list["Axes"]]:
    """A figure of this size in inches, with its axes. Raises MissingPackageError without matplotlib."""
    with optional_import("plots", "a figure"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **sharing).flat)


def finish_figure(figure: "Figure", all_axes: Sequence["Axes"], title: str, caption: str = "") -> None:
    """A light grid, no box, one title with its caption, one legend below for all axes."""
    handles: dict[str, Any] = {}
    for axes in all_axes:
        axes.grid(True, axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    width = figure.get_size_inches()[0]
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, int(width // 2.3)), frameon=False,
        fontsize=9,
    )  # fmt: skip
    lines = textwrap.wrap(caption, int(10 * width))  # letters of this size to an inch
    figure.suptitle("\n".join([title, *lines]), fontsize=11)


def draw_kl(axes: "Axes", rows: Sequence[Mapping[str, Any]], x: str, label: str, style: Style) -> None:
    """A line of KL with its intervals over the rows' `x`."""
    rows = sorted(rows, key=lambda row: row[x])
    low, high = ([abs(row[end] - row["kl"]) for row in rows] for end in ("low", "high"))
    axes.errorbar(
        [row[x] for row in rows], [row["kl"] for row in rows], yerr=(low, high), label=label, color=style.colour,
        marker=style.marker, linewidth=style.width, linestyle=style.line, capsize=2, zorder=style.order,
    )  # fmt: skip


def scale_by_factors(axes: "Axes", places: Sequence[float], form: str) -> None:
    """Logarithmic scales, with ticks at the `places` along x alone."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{place:{form}}" for place in places])
    axes.minorticks_off()


def save_figure(figure: "Figure", path: Path) -> None:
    """Write `figure` as PNG, PDF or SVG, by the name's suffix, to a temporary name first. Raises ReportError."""
    files.save_figure(figure, path, ReportError)


def plot_policies(panels: Mapping[str, Sequence[Sequence[float]]], retention: float) -> "Figure":
    """The budget policies side by side (Fig. 1): the share [L][H] of the tokens that each KV head keeps, by method."""
    layers = max(len(ratios) for ratios in panels.values())
    height = min(7.0, max(3.2, 1.3 + 0.12 * layers))
    figure, all_axes = new_figure(1.0 + 1.7 * len(panels), height, 1, len(panels), sharey=True)
    for axes, (name, ratios) in zip(all_axes, panels.items(), strict=True):
        image = axes.imshow(ratios, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
        axes.set_title(f"{name}\nkept: {np.mean(ratios):.3f}", fontsize=10)
        axes.set_xticks(range(0, len(ratios[0]), 1 if len(ratios[0]) <= 8 else 4))
        axes.set_xlabel("KV head")
    all_axes[0].set_ylabel("layer")
    figure.suptitle(f"Share of the tokens that each head keeps, R = {retention:g}")
    figure.colorbar(image, ax=all_axes, label="kept / all tokens of the head")
    return figure


def plot_table(table: Table) -> "Figure":
    """The table's figure: curves for `sweep` and `ruler`, a grid for `ablation`, points for the others."""
    plots = {"sweep": _plot_curves, "ruler": _plot_curves, "ablation": _plot_grid}
    return plots.get(table.name, _plot_points)(table)


def _plot_curves(table: Table) -> "Figure":
    """The average over retention (Fig. 3); RULER over length at one retention, and over retention at one length."""
    places = {column.name: column.x for column in table.columns if column.x is not None}
    styles = method_styles(list(table.cells.method))
    cells = table.cells.assign(place=table.cells.column.map(places)).dropna(subset=["value", "place"])
    requested, is_memory = cells.place if table.name == "sweep" else cells.retention, table.amount == MEMORY
    by_budget = cells.assign(x=requested if is_memory else cells.realised.fillna(requested))
    budget = "memory (of the 16-bit cache's bytes)" if is_memory else "retention (kept / all entries)"
    panels = [("", by_budget)]
    if table.name == "ruler":
        last = list(places)[-1]
        has_retentions = table.cells.group.nunique() > 1 or len(places) == 1
        panels = [(last, by_budget[cells.column == last])] if has_retentions else []
        if len(places) > 1:
            groups = cells[cells.method != FULL].groupby("group", sort=False).retention.first()
            gap = {name: abs(groups.get(name, 1.0) - DEFAULT_RETENTION) for name in cells.group.unique()}
            nearest = min(gap, key=lambda name: gap[name])
            panels.insert(0, (nearest, cells.assign(x=cells.place)[cells.group == nearest]))
    figure, all_axes = new_figure(0.6 + 5.2 * len(panels), 5.4, 1, len(panels), sharey=True)
    for axes, (title, panel) in zip(all_axes, panels, strict=True):
        is_length = panel.x.max() > 1
        _draw_curves(axes, panel, styles, full_is_flat=not is_length)
        axes.set_title(title)
        axes.set_xlabel(table.axis if is_length else budget)
        if is_length:
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(places.values()), [f"{x / 1024:g}k" for x in places.values()])
            axes.minorticks_off()
    all_axes[0].set_ylabel(table.value)
    finish_figure(figure, all_axes, table.title, table.caption)
    return figure


def _draw_curves(axes: "Axes", cells: pd.DataFrame, styles: dict[str, Style], full_is_flat: bool = True) -> None:
    """A line a method over the cells' `x`, its interval as a band; published ones dashed, hollow and without band."""
    for (label, method, source), curve in cells.groupby(["label", "method", "source"], sort=False):
        style, published = styles[method], source == PUBLISHED
        look = {"color": style.colour, "zorder": style.order, "label": label}
        if method == FULL and full_is_flat:
            axes.axhline(curve.value.iloc[0], linestyle=style.line, linewidth=style.width, **look)
            continue
        curve = curve.dropna(subset="x").sort_values("x", kind="stable")
        axes.plot(
            curve.x,
            curve.value,
            marker="" if method == FULL else style.marker,
            linestyle="--" if published and method != FULL else style.line,
            linewidth=1.4 if published else style.width,
            markerfacecolor="white" if published else style.colour,
            **look,
        )
        if method == FULL:
            continue
        if curve[["low", "high"]].notna().all(axis=None) and (is_lkv(method) or len(styles) <= _MAX_BANDS + 1):
            axes.fill_between(
                curve.x, curve.low, curve.high, color=style.colour, alpha=0.15, linewidth=0, zorder=style.order - 1
            )


def _plot_points(table: Table) -> "Figure":
    """One panel a group, one cluster a column, one point a method with its interval; published points are hollow."""
    titles = [column.name for column in table.columns if column.best]
    styles = method_styles(list(table.cells.method))
    groups = list(table.cells.groupby("group", sort=False))
    most = max(points.row.nunique() for _, points in groups)
    width = min(16.0, max(6.4, 1.2 + 0.11 * len(titles) * (most + 2)))
    figure, all_axes = new_figure(width, 2.0 + 2.8 * len(groups), len(groups), sharex=True)
    for axes, (group, cells) in zip(all_axes, groups, strict=True):
        for i, (_, points) in enumerate(cells.groupby("row", sort=False)):
            first, style = points.iloc[0], styles[points.method.iloc[0]]
            points = points[points.column.isin(titles)].dropna(subset="value")
            published = first.source == PUBLISHED
            offset = 0.8 * ((i + 0.5) / cells.row.nunique() - 0.5)
            errors = np.abs([points.value - points.low, points.high - points.value])
            axes.errorbar(
                [titles.index(name) + offset for name in points.column],
                points.value,
                yerr=np.nan_to_num(errors),
                fmt=style.marker,
                fillstyle="full" if published else "left" if style.line == _COMPENSATED else "full",
                color=style.colour,
                markerfacecolor="white" if published else style.colour,
                markersize=8 if style.order == 4 else 5,
                elinewidth=0.9,
                label=first.label,
            )
        for j in range(0, len(titles), 2):  # every other cluster shaded, so that its points stay together
            axes.axvspan(j - 0.5, j + 0.5, color="#F4F4F4", zorder=0)
        axes.set_xlim(-0.5, len(titles) - 0.5)
        axes.set_xticks(range(len(titles)), titles, rotation=30, ha="right")
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
    figure, all_axes = new_figure(0.8 + 4.4 * len(sources), 3.6, 1, len(sources))
    own_place = (len(SELECTORS) - 1, len(RULES) - 1)  # LKV is the last of both
    for axes, source in zip(all_axes, sources, strict=True):
        cells: dict[Any, Any] = {
            names.budget_and_selector(cell.method): cell for cell in in_grid[in_grid.source == source].itertuples()
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
        axes.set_xticks(range(len(SELECTORS)), [names.part_label(name) for name in SELECTORS])
        axes.set_yticks(range(len(RULES)), [names.part_label(name) for name in RULES])
        corner = (own_place[0] - 0.5, own_place[1] - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=LKV_COLOUR, linewidth=4, clip_on=False))
        axes.set_xlabel("selector")
        axes.set_title(source if len(sources) > 1 else "", fontsize=10)
    all_axes[0].set_ylabel("budget rule")
    full = averages[(averages.method == FULL) & (averages.source == MEASURED)].value.tolist()
    figure.suptitle(table.title + (f" ({AVERAGE}; full cache {full[0]:.2f})" if full else ""), fontsize=11)
    return figure


def _published_sizes(model: str) -> dict[str, Any]:
    if sizes := names.paper_numbers()["memory"].get(model):
        return sizes
    name = names.paper_models()[model]
    raise ReportError(f"the paper prints no memory sizes with {name}; use --published llama-3.1-8b.")


def plot_memory(profile: ProfileResults, published: str = "", weights: bool = False) -> "Figure":
    """Peak memory where it was measured, and bytes of k and v, over context length; all scales linear, from 0.

    A dashed line stands where a method ran out of memory.

    Args:
        profile: What was measured.
        published: A model of the paper whose published sizes are drawn as hollow points, if the profile is of it.
        weights: Whether the peak includes the weights, as in the paper's Fig. 5.
    """
    frame = profile.frame.sort_values("tokens", kind="stable")
    panels = {"kv_bytes": "k and v held"}
    if frame.peak_bytes.notna().any():
        panels = {"peak_bytes": "peak memory, weights included" if weights else "peak memory"} | panels
    if weights:
        if "weight_bytes" not in frame:
            raise ReportError("the profile does not state the bytes of the weights; measure it again.")
        frame["peak_bytes"] += frame.weight_bytes
    paper = _published_sizes(published) if published and published in profile.model.lower() else {}
    points = {method: size * 2**30 for method, size in paper.get("kv_gib", {}).items()}  # "25.0 GB at 200k" are GiB
    figure, all_axes = new_figure(0.6 + 5.0 * len(panels), 4.6, 1, len(panels))
    styles = method_styles(names.sort_methods(frame.method))
    for axes, (field, title) in zip(all_axes, panels.items(), strict=True):
        own_points = points if field == "kv_bytes" else {}
        most = max([frame[field].max(), *own_points.values()])
        unit, scale = next((name, size) for name, size in _UNITS if most >= size)
        for method, style in styles.items():
            of_method = frame[frame.method == method]
            for retention, rows in of_method.groupby("retention", sort=False):
                measured = rows.dropna(subset=field)
                axes.plot(
                    measured.tokens,
                    measured[field] / scale,
                    color=style.colour,
                    marker="." if method == FULL else style.marker,
                    linewidth=style.width,
                    zorder=style.order,
                    linestyle=style.line,
                    label=method_label(method) + f", R = {retention:g}" * (of_method.retention.nunique() > 1),
                )
            for tokens in of_method.get("failed_at", pd.Series()).dropna():
                axes.axvline(tokens, color=style.colour, linestyle="--", linewidth=1)
        for method, size in own_points.items():
            axes.plot(
                [paper["tokens"]], [size / scale], "D", color=styles[method].colour if method in styles else _GREYS[0],
                markerfacecolor="white", markersize=8, label=f"{method_label(method)} ({PUBLISHED})",
            )  # fmt: skip
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=6)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel(f"{title} ({unit})")
    retentions = sorted(frame.retention[frame.method != FULL].unique(), reverse=True)
    amounts = f"R = {', '.join(f'{r:g}' for r in retentions)}; " if retentions else ""
    caption = f"{profile.model}; {amounts}batch {profile.batch}; measured on {profile.machine}"
    finish_figure(figure, all_axes, "Memory over context length", caption)
    return figure


def plot_training(curves: Mapping[str, pd.DataFrame]) -> "Figure":
    """KL and agreement over the contexts seen; at a third of R dashed, where it was measured."""
    panels = {"validation_kl": "KL(full || compressed), nats per token", "validation_agreement": "top-1 agreement"}
    panels = {key: title for key, title in panels.items() if any(key in run for run in curves.values())}
    if not panels:
        raise ReportError("these runs have no held-out samples to draw; train with data that has some to spare.")
    figure, all_axes = new_figure(0.6 + 5.2 * len(panels), 4.4, 1, len(panels))
    for axes, (key, title) in zip(all_axes, panels.items(), strict=True):
        for number, (name, run) in enumerate(curves.items()):
            colour, marker = _RUNS[number % len(_RUNS)]
            for column, line, label in ((key, "-", name), (f"{key}_third", "--", f"{name}, R / 3")):
                if {column, "contexts"} <= set(run.columns):
                    points = run.dropna(subset=[column, "contexts"])
                    axes.plot(
                        points.contexts, points[column], line, color=colour, marker=marker, markersize=4, label=label
                    )
        axes.set_xlabel("contexts seen")
        axes.set_ylabel(title)
    if "validation_kl" in panels:
        all_axes[0].set_yscale("log")
    finish_figure(figure, all_axes, "Fidelity on held-out samples while training")
    return figure
