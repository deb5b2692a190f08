"""How methods look in every figure, and what all figures share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lkv.methods.catalogue import FULL, METHODS, named_like
from lkv.report.names import is_lkv

LKV_COLOUR, _BLACK = METHODS["lkv"].colour, "#000000"
_GREYS, _MARKERS = ("#7F7F7F", "#A6A6A6", "#595959"), "svd^XP<>hpD*8"  # of methods that the catalogue does not have


class Style(NamedTuple):
    """How a method is drawn."""

    colour: str
    marker: str
    width: float
    order: int  # what is drawn later lies on top


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """A style for each method, the same in every figure: the full cache black, LKV thick, the others as the catalogue
    has them."""
    found, unknown = {}, 0
    for method in dict.fromkeys(methods):
        if method == FULL:
            found[method] = Style(_BLACK, "_", 1.4, 1)
        elif is_lkv(method):
            found[method] = Style(LKV_COLOUR, "o", 2.8, 4)
        else:
            known = named_like(method)
            if known:
                colour, marker = known[1].colour, known[1].marker
            else:
                colour, marker = _GREYS[unknown // len(_MARKERS) % len(_GREYS)], _MARKERS[unknown % len(_MARKERS)]
                unknown += 1
            found[method] = Style(colour, marker, 1.4, 2 if colour in _GREYS else 3)
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
