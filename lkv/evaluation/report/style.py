"""How methods look in every figure, and what all figures share."""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from lkv.evaluation.report.names import is_lkv
from lkv.methods.registry import FULL, METHODS, named_like

LKV_COLOUR, _BLACK = METHODS["lkv"].colour, "#000000"
_POLICIES = ((LKV_COLOUR, "o"), ("#8C3D00", "s"), ("#F0A06A", "D"), ("#5E2A00", "^"))  # LKV under several policies
_REFITTED = "-."
_COLOURED = 6  # curves that can be told apart by colour
_GREYS, _MARKERS = ("#7F7F7F", "#A6A6A6", "#595959"), "svd^XP<>hpD*8"  # of methods that the registry does not have


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
        return "left" if self.line == _REFITTED else "full"


def method_styles(methods: Sequence[str]) -> dict[str, Style]:
    """A style for each method, the same in every figure: the full cache black, LKV thick, the others as the registry
    has them, dash-dotted where refitted; beyond six in colour the later ones are grey, told apart by their markers."""
    chosen, unknown, learned, coloured = {}, 0, 0, 0
    for method in dict.fromkeys(methods):
        if method == FULL:
            chosen[method] = Style(_BLACK, "_", 1.4, 1)
        elif is_lkv(method):
            chosen[method] = Style(*_POLICIES[learned % len(_POLICIES)], 2.8, 4)
            learned, coloured = learned + 1, coloured + 1
        else:
            known = named_like(method)
            if known:
                colour, marker = known[1].colour, known[1].marker
                line = _REFITTED if known[1].compensation else "-"
            else:
                colour, marker = _GREYS[unknown // len(_MARKERS) % len(_GREYS)], _MARKERS[unknown % len(_MARKERS)]
                unknown, line = unknown + 1, "-"
            coloured += colour not in _GREYS
            colour = colour if coloured <= _COLOURED else _GREYS[0]
            chosen[method] = Style(colour, marker, 1.4, 2 if colour in _GREYS else 3, line)
    return chosen


def full_line(style: Style) -> dict[str, Any]:
    """The full cache's line."""
    return {"color": style.colour, "linestyle": ":", "linewidth": style.width, "zorder": style.order}


def finish_figure(figure: Any, all_axes: Sequence[Any], title: str, caption: str = "") -> None:
    """A light grid, no box, one title with its caption, one legend below for all axes."""
    for axes in all_axes:
        axes.grid(True, axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles: dict[str, Any] = {}
    for axes in all_axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    columns = max(1, int(figure.get_size_inches()[0] // 2.3))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    lines = textwrap.wrap(caption, int(10 * figure.get_size_inches()[0]))  # letters of this size to an inch
    figure.suptitle("\n".join([title, *lines]), fontsize=11)
