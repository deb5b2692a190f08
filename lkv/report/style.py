"""How methods look in every figure, and what all figures share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lkv.report.names import FULL, is_lkv

# Okabe and Ito's palette, told apart by the colour-blind; vermilion is LKV's.
LKV_COLOUR, _BLACK = "#D55E00", "#000000"
_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
_MARKERS = "svd^XP<>hpD*8"


class Style(NamedTuple):
    """How a method is drawn."""

    colour: str
    marker: str
    width: float
    order: int  # what is drawn later lies on top


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """A style for each method: the full cache black, LKV vermilion and thick.

    The others' six colours and 13 markers repeat, each pair after 78 methods.
    """
    found, rivals = {}, 0
    for method in dict.fromkeys(methods):
        if method == FULL:
            found[method] = Style(_BLACK, "_", 1.4, 1)
        elif is_lkv(method):
            found[method] = Style(LKV_COLOUR, "o", 2.8, 4)
        else:
            found[method] = Style(_COLOURS[rivals % len(_COLOURS)], _MARKERS[rivals % len(_MARKERS)], 1.4, 2)
            rivals += 1
    return found


def full_line(style: Style) -> dict[str, Any]:
    """The full cache's line."""
    return {"color": style.colour, "linestyle": ":", "linewidth": style.width, "zorder": style.order}


def finish(figure: Any, every: Sequence[Any], title: str) -> None:
    """A light grid, no box, one title, one legend below for all axes."""
    for axes in every:
        axes.grid(True, axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    found: dict[str, Any] = {}
    for axes in every:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    columns = max(1, int(figure.get_size_inches()[0] // 2.3))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
