"""What all figures share: how methods are drawn, how a figure is finished and written, and heat maps of budgets."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lkv.errors import ReportError
from lkv.evaluation.report.names import is_lkv
from lkv.methods.registry import FULL, METHODS, find_method
from lkv.utils.extras import optional_import
from lkv.utils.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LKV_COLOUR, _BLACK = METHODS["lkv"].colour, "#000000"
_SUFFIXES = (".png", ".pdf", ".svg")
_POLICIES = ((LKV_COLOUR, "o"), ("#8C3D00", "s"), ("#F0A06A", "D"), ("#5E2A00", "^"))  # LKV under several policies
_COMPENSATED = "-."
_MAX_COLOURS = 6  # curves that can be told apart by colour
_GREYS, _MARKERS = ("#7F7F7F", "#A6A6A6", "#595959"), "svd^XP<>hpD*8"  # where a method's own look is taken


class Style(NamedTuple):
    """How a method is drawn."""

    colour: str
    marker: str
    width: float
    order: int  # what is drawn later lies on top
    line: str = "-"

    @property
    def fill(self) -> str:
        """How much of the marker is filled, where there are points alone."""
        return "left" if self.line == _COMPENSATED else "full"


def method_styles(methods: Sequence[str]) -> dict[str, Style]:
    """A style for each method, no two alike, and the same in every figure where the methods are.

    The full cache is black and LKV thick; the others look as the registry has them, dash-dotted with compensation.
    Beyond six colours the later ones are grey. Methods of one look, or of none, differ by grey and marker.
    """
    styles: dict[str, Style] = {}
    free = [Style(colour, marker, 1.4, 2) for colour, marker in product(_GREYS, _MARKERS)]
    learned = coloured = 0
    for method in dict.fromkeys(methods):
        if method == FULL:
            styles[method] = Style(_BLACK, "_", 1.4, 1)
            continue
        if is_lkv(method):
            styles[method] = Style(*_POLICIES[learned % len(_POLICIES)], 2.8, 4)
            learned, coloured = learned + 1, coloured + 1
            continue
        style, entry = free[0], find_method(method)
        if entry:
            coloured += entry.colour not in _GREYS
            colour = entry.colour if coloured <= _MAX_COLOURS else _GREYS[0]
            line = _COMPENSATED if entry.compensation else "-"
            style = Style(colour, entry.marker, 1.4, 2 if colour in _GREYS else 3, line)
        if not entry or style in styles.values():
            same_line = (own._replace(line=style.line) for own in free)
            style = next((own for own in same_line if own not in styles.values()), style)
        styles[method] = style
    return styles


def full_cache_line(style: Style) -> dict[str, Any]:
    """Options of matplotlib for the full cache's line."""
    return {"color": style.colour, "linestyle": ":", "linewidth": style.width, "zorder": style.order}


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches. Raises MissingPackageError without matplotlib."""
    with optional_import("plots", "a figure"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


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


def save_figure(figure: "Figure", path: Path) -> None:
    """Write `figure` as PNG, PDF or SVG, by the name's suffix, to a temporary name first. Raises ReportError."""
    if path.suffix not in _SUFFIXES:
        raise ReportError(f"{path} is not the name of a figure; end it with one of {', '.join(_SUFFIXES)}.")
    with atomic_write(path, ReportError, "the figure") as temporary:
        figure.savefig(temporary, dpi=150, format=path.suffix[1:])


def draw_budgets(ratios: Sequence[Sequence[float]], retention: float, path: Path) -> None:
    """Heat map of the share that each head keeps, layers by KV heads (Fig. 1e), written to `path`."""
    layers, heads = len(ratios), len(ratios[0])
    figure = new_figure(max(4.0, 0.28 * layers), 1.2 + 0.35 * heads)
    axes = figure.subplots()
    image = _draw_heat_map(axes, [[row[head] for row in ratios] for head in range(heads)])
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.set_yticks(range(heads))
    axes.set_title(f"Share of the tokens each head keeps at R = {retention:g}")
    figure.colorbar(image, ax=axes, label="ratio r")
    save_figure(figure, path)


def draw_policies(panels: Mapping[str, Sequence[Sequence[float]]], retention: float, path: Path) -> None:
    """The budget policies side by side (Fig. 1), written to `path`; see `plot_policies`."""
    save_figure(plot_policies(panels, retention), path)


def plot_policies(panels: Mapping[str, Sequence[Sequence[float]]], retention: float) -> "Figure":
    """One heat map a method: the share [L][H] of the tokens that each KV head keeps, all on one scale."""
    layers = max(len(ratios) for ratios in panels.values())
    figure = new_figure(1.0 + 1.7 * len(panels), min(7.0, max(3.2, 1.3 + 0.12 * layers)))
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, ratios) in zip(row, panels.items(), strict=True):
        image = _draw_heat_map(axes, ratios)
        shares = [share for layer in ratios for share in layer]
        axes.set_title(f"{name}\nkept: {sum(shares) / len(shares):.3f}", fontsize=10)
        axes.set_xticks(range(0, len(ratios[0]), 1 if len(ratios[0]) <= 8 else 4))
        axes.set_xlabel("KV head")
    row[0].set_ylabel("layer")
    figure.suptitle(f"Share of the tokens that each head keeps, R = {retention:g}")
    figure.colorbar(image, ax=list(row), label="kept / all tokens of the head")
    return figure


def _draw_heat_map(axes: "Axes", rows: Sequence[Sequence[float]]) -> Any:
    return axes.imshow(rows, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
