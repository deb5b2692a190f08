"""Tables of PDF pages: what is in the cells between rules. Does not import torch."""

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from math import inf

from lkv.context.pdf_layout import lines_of
from lkv.context.pdf_objects import Box
from lkv.context.pdf_words import MIDDLE, WORD_GAP, Glyph

_SAME = 4.0  # points; sides that are nearer are one rule, as those of neighbouring cells
_MIN_FILLED = 0.35  # of the cells; less in forms and drawings
_MIN_LINE = 0.6  # of the width of a cell where a line breaks
_MAX_BREAKS = 0.5  # by the number of cells
_MAX_CROSSED = 0.005  # of letters, with a rule before them
_MAX_RULES = 500  # of a page; charts have more

_Rule = tuple[float, float, float]  # its place across its direction, its start and its end
_Cell = tuple[_Rule, _Rule, _Rule, _Rule]  # to the left and right, below and above


def join_tables(glyphs: Sequence[Glyph], shapes: list[Box]) -> list[Glyph]:
    """Put one glyph in the place of each row of a table with rules: the texts of its cells, separated by tabs."""
    vertical = _rules((at, y, top) for x, y, end, top in shapes if x <= end and y < top - _SAME for at in (x, end))
    horizontal = _rules((at, x, end) for x, y, end, top in shapes if y <= top and x < end - _SAME for at in (y, top))
    if min(len(vertical), len(horizontal)) < 3 or len(vertical) + len(horizontal) > _MAX_RULES:
        return [*glyphs]
    cells, crossed = defaultdict[_Cell | None, list[Glyph]](list), Counter[_Cell | None]()
    own: _Cell | None = None
    for last, glyph in pairwise([*glyphs[:1], *glyphs]):
        before, own = own, _cell((glyph.x + glyph.end) / 2, glyph.y + MIDDLE * glyph.size, vertical, horizontal)
        goes_on = last.y == glyph.y and abs(glyph.x - last.end) < WORD_GAP * glyph.size
        crossed[own] += goes_on and own != before
        cells[own].append(glyph)
    joined, tables = cells.pop(None, []), list[list[_Cell]]()
    for cell in filter(None, cells):
        near = [table for table in tables if any(rule in other for other in table for rule in cell if rule[1] > -inf)]
        tables = [*(table for table in tables if table not in near), sum(near, [cell])]
    for table in tables:
        letters = [*chain(*(cells[cell] for cell in table))]
        is_crossed = sum(crossed[cell] for cell in table) > max(1, _MAX_CROSSED * len(letters))
        joined += (not is_crossed and _row_glyphs({cell: cells[cell] for cell in table})) or letters
    return joined


def _rules(sides: Iterable[_Rule]) -> list[_Rule]:
    """Join sides that are next to each other or overlap; put one without a place before and behind all rules."""
    rules: list[_Rule] = []
    for place, start, end in sorted(sides, key=lambda side: (round(side[0]), side[1])):
        if rules and round(rules[-1][0]) == round(place) and start < rules[-1][2] + _SAME:
            start, end = rules[-1][1], max(rules.pop()[2], end)
        rules.append((place, start, end))
    return [(-inf, -inf, inf), *sorted(rules), (inf, -inf, inf)]


def _cell(x: float, y: float, vertical: list[_Rule], horizontal: list[_Rule]) -> _Cell | None:
    """Return the cell around a place, which may be open to the left or right; None for none."""
    left, right = _beside(vertical, x, y, y)
    start, end = left[0] + _SAME if left[0] > -inf else x, right[0] - _SAME if right[0] < inf else x
    low, high = _beside(horizontal, y, start, end)
    is_closed = -inf < low[0] and high[0] < inf and (left[0] > -inf or right[0] < inf)
    is_ruled = all(rule[1] < low[0] + _SAME and high[0] - _SAME < rule[2] for rule in (left, right))
    return (left, right, low, high) if is_closed and is_ruled else None


def _beside(rules: list[_Rule], place: float, start: float, end: float) -> list[_Rule]:
    """Return the rule before a place and the one behind it, of those that are there from start to end."""
    near = [rule for rule in rules if rule[1] < start and end < rule[2]]
    index = bisect(near, (place,))
    return near[index - 1 : index + 1]


def _row_glyphs(cells: dict[_Cell, list[Glyph]]) -> list[Glyph]:
    """Return a glyph for each row of cells, or none if they are no table."""
    cells = {cell: glyphs for cell, glyphs in cells.items() if any(glyph.text.strip() for glyph in glyphs)}
    xs, tops = _starts(left[0] for left, *_ in cells), _starts(-high[0] for *_, high in cells)
    breaks = 0.0  # lines that are more than a text takes, as of several rows with no rules between them
    rows = [[list[Glyph]() for _ in xs] for _ in tops]
    for (left, right, _, high), glyphs in cells.items():
        length = sum(glyph.end - glyph.x for glyph in glyphs) / (_MIN_LINE * (right[0] - left[0]))
        breaks += max(0.0, len({glyph.y for glyph in glyphs}) - 1 - length)
        rows[bisect(tops, -high[0]) - 1][bisect(xs, left[0]) - 1] += glyphs
    least = max(len(xs), len(tops), _MIN_FILLED * len(xs) * len(tops))
    if len(cells) <= least or breaks > _MAX_BREAKS * len(cells):
        return []
    texts = ["\t".join(" ".join(lines_of(cell)).replace("\t", " ") for cell in row) for row in rows]
    glyphs = [*chain(*cells.values())]
    first = min(glyphs, key=lambda glyph: glyph.order)
    x, end = min(glyph.x for glyph in glyphs), max(glyph.end for glyph in glyphs)
    return [first._replace(text=text, x=x, y=-top - first.size, end=end) for text, top in zip(texts, tops, strict=True)]


def _starts(places: Iterable[float]) -> list[float]:
    """Return where each group of places begins that are the same."""
    ordered = sorted(places)
    return [place for i, place in enumerate(ordered) if not i or place - ordered[i - 1] > _SAME]
