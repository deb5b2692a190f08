"""Tables of PDF pages: what is in the cells between rules. Does not import torch."""

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise, product
from statistics import median
from typing import NamedTuple

from lkv.context.flow_text import Cell, table_lines
from lkv.context.pdf_layout import lines_of
from lkv.context.pdf_objects import Box
from lkv.context.pdf_words import MIDDLE, WORD_GAP, Glyph

_SAME = 4.0  # points; sides that are nearer are one rule, as those of double lines and of neighbouring cells
_MIN_FILLED = 0.35  # of the cells; less in forms and drawings
_MIN_LINE = 0.6  # of the width of a cell where a line breaks
_MAX_BREAKS = 0.5  # by the number of cells
_MAX_CROSSED = 0.005  # of neighbouring letters, with a rule between them
_MAX_RULES, _MAX_SHAPES = 500, 20_000  # of a page; charts have more


class _Rule(NamedTuple):
    """A horizontal or vertical line."""

    place: float  # across its direction
    start: float
    end: float

    def meets(self, other: "_Rule") -> bool:
        """Return whether a rule of the other direction touches it."""
        return (
            self.start - _SAME < other.place < self.end + _SAME and other.start - _SAME < self.place < other.end + _SAME
        )


_Place = tuple[int, int]  # a row, counted from below, and a column


def join_tables(glyphs: Sequence[Glyph], shapes: list[Box]) -> list[Glyph]:
    """Put one glyph in the place of each row of a table with rules: the texts of its cells, separated by tabs."""
    joined = [*glyphs]
    for columns, rows in _grids(shapes) if joined else ():
        joined = _join_grid(joined, columns, rows)
    return joined


def _grids(shapes: list[Box]) -> Iterator[tuple[list[_Rule], list[_Rule]]]:
    """Yield the vertical and the horizontal rules of each group that is connected."""
    seen = [box for box in shapes if box[0] <= box[2] and box[1] <= box[3]][:_MAX_SHAPES]
    vertical = _rules((place, y, top) for x, y, end, top in seen if top - y > _SAME for place in (x, end))
    horizontal = _rules((place, x, end) for x, y, end, top in seen if end - x > _SAME for place in (y, top))
    while vertical and len(vertical) + len(horizontal) < _MAX_RULES:
        columns, rows, group = list[_Rule](), list[_Rule](), [vertical[0]]
        while group:
            columns += group
            vertical = [rule for rule in vertical if rule not in group]
            found = [rule for rule in horizontal if any(rule.meets(each) for each in group)]
            rows += found
            horizontal = [rule for rule in horizontal if rule not in found]
            group = [rule for rule in vertical if any(rule.meets(each) for each in found)]
        yield columns, rows


def _rules(sides: Iterable[tuple[float, float, float]]) -> list[_Rule]:
    """Join sides that are next to each other or overlap."""
    levels: list[list[_Rule]] = []
    for side in sorted(map(_Rule._make, sides)):
        if not levels or side.place - levels[-1][0].place > _SAME:
            levels.append([])
        levels[-1].append(side)
    rules: list[_Rule] = []
    for level in levels:
        place = (level[0].place + level[-1].place) / 2
        parts: list[_Rule] = []
        for _, start, end in sorted(level, key=lambda side: side.start):
            if parts and start < parts[-1].end + _SAME:
                parts[-1] = parts[-1]._replace(end=max(end, parts[-1].end))
            else:
                parts.append(_Rule(place, start, end))
        rules += parts
    return rules


def _bounds(rules: list[_Rule], across: list[_Rule]) -> list[float]:
    """Return the places of rules, and the ends of those across where there is none."""
    places = sorted({rule.place for rule in rules})
    first, last = min(rule.start for rule in across), max(rule.end for rule in across)
    return [first] * (first < places[0] - _SAME) + places + [last] * (last > places[-1] + _SAME)


def _join_grid(glyphs: list[Glyph], columns: list[_Rule], rows: list[_Rule]) -> list[Glyph]:
    """Join the rows of one grid, if it is a table."""
    if not rows:
        return glyphs
    xs, ys = _bounds(columns, rows), _bounds(rows, columns)
    first = _first_cells(xs, ys, columns, rows)
    texts: dict[_Place, list[Glyph]] = {cell: [] for cell in first.values()}
    outside, crossed = list[Glyph](), 0
    last, last_place, content = None, list[Glyph](), list[Glyph]()
    for glyph in glyphs:
        x, y = (glyph.x + glyph.end) / 2, glyph.y + MIDDLE * glyph.size
        if not (xs[0] < x < xs[-1] and ys[0] < y < ys[-1]):
            outside.append(glyph)
            continue
        place = texts[first[bisect(ys, y) - 1, bisect(xs, x) - 1]]
        goes_on = last and last.y == glyph.y and abs(glyph.x - last.end) < WORD_GAP * glyph.size
        crossed += bool(goes_on) and place is not last_place
        content = content if goes_on and glyph.text != " " else place  # a word that is longer than its cell
        content.append(glyph)
        last, last_place = glyph, place
    filled = [cell for cell, content in texts.items() if any(glyph.text.strip() for glyph in content)]
    if not filled or crossed > max(1, _MAX_CROSSED * (len(glyphs) - len(outside))):
        return glyphs
    size = median(glyph.size for cell in filled for glyph in texts[cell])
    numbers = sorted({row for row, _ in filled}, reverse=True)
    wide = [i for i, (x, end) in enumerate(pairwise(xs)) if end - x > size or any(cell[1] == i for cell in filled)]
    ends = {cell: xs[column + 1] for (_, column), cell in first.items()}
    breaks = sum(_breaks(texts[cell], ends[cell] - xs[cell[1]]) for cell in filled)
    is_sparse = len(filled) < _MIN_FILLED * len(numbers) * len(wide)
    if is_sparse or breaks > _MAX_BREAKS * len(filled) or min(len(numbers), len({column for _, column in filled})) < 2:
        return glyphs
    order = min(glyph.order for cell in filled for glyph in texts[cell])
    for row in numbers:
        cells = ("\n".join(lines_of(texts.get((row, column), []))).replace("\t", " ") for column in wide)
        (line,) = table_lines([[Cell(text, 1, 1) for text in cells]])
        line += "\t" * (len(wide) - 1 - line.count("\t"))
        outside.append(Glyph(line, xs[0], ys[row + 1] - size, xs[-1], size, order))
    return outside


def _breaks(glyphs: list[Glyph], width: float) -> float:
    """Return how many lines of a cell are more than its text takes, as of several rows with no rules between them."""
    lines = [[*line] for _, line in groupby(sorted(glyphs, key=lambda glyph: glyph.y), key=lambda glyph: glyph.y)]
    length = sum(max(glyph.end for glyph in line) - min(glyph.x for glyph in line) for line in lines)
    return max(0.0, len(lines) - 1 - length / (_MIN_LINE * width))


def _first_cells(xs: list[float], ys: list[float], columns: list[_Rule], rows: list[_Rule]) -> dict[_Place, _Place]:
    """Return the upper left of the cells that each one is merged with, as there is no rule between them."""
    height, width = len(ys) - 1, len(xs) - 1
    first: dict[_Place, _Place] = {}
    for row, column in product(range(height - 1, -1, -1), range(width)):
        x, y = (xs[column] + xs[column + 1]) / 2, (ys[row] + ys[row + 1]) / 2
        if row < height - 1 and not _is_ruled(rows, ys[row + 1], x):
            first[row, column] = first[row + 1, column]
        elif column and not _is_ruled(columns, xs[column], y):
            first[row, column] = first[row, column - 1]
        else:
            first[row, column] = row, column
    return first


def _is_ruled(rules: list[_Rule], place: float, across: float) -> bool:
    return any(rule.place == place and rule.start < across < rule.end for rule in rules)
