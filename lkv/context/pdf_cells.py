"""Cells of PDF pages without rules: lines that are drawn one by one, and columns. Does not import torch."""

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import accumulate, pairwise, starmap
from typing import NamedTuple

from lkv.context.pdf_words import ROW_OFFSET, SAME_BASE, WORD_GAP, Glyph, are_dots

# Shares of the font's size.
CELL_GAP, _SPACED_GAP = 1.0, 3.0  # between cells, at least; behind a character for a space
_MIN_LEADING, _MAX_LEADING = 0.7, 1.6  # between the lines of a cell
_LOOSE_LEADING = 2.05  # the same for cells beside the middle of which others lie
_ALIGNED = 0.05  # between the places of aligned cells
_MIN_NARROW = 3  # gaps between columns that are narrow in all rows
_DISTINCT = 1.2  # a gap between cells, by those within them
_LEVEL = 0.4  # between the first lines, the last ones or the middles of the cells of a row, at most
_ROW_GAP = 1.05  # between rows of cells of several lines, at least, by the distance of these lines
_WIDE_ROW_GAP = 1.2  # the same for lines of one word or of numbers
_MAX_ROW_GAP = 4.0  # between rows of one table
_MARKER = 3.0  # the width of a column of marks of a list, at most
_MAX_LINES = 8  # of a cell, or of texts side by side, such as addresses
_MIN_WORDS = 1.5  # of a line of text, on average
_FULL = 0.9  # of the width of a cell, which a line and the next word are longer than
_MIN_FILLED = 0.35  # of the cells of a table; less in drawings
_MAX_COLUMNS, _MAX_ROWS = 60, 1000  # that are aligned


class Segment(NamedTuple):
    """Glyphs of one line without a wide gap, from left to right."""

    glyphs: list[Glyph]
    x: float
    y: float
    end: float
    size: float
    order: int  # that of its first glyph
    block: int = 0  # the number of a text that is drawn beside another one
    depth: float = 0.0  # of the lines that were put on this one
    breaks: Set[Glyph] = frozenset()  # those with a gap between words before them, but no space


Cell = list[Segment]  # its lines, or the parts of its line; none if it is empty


class _Column(NamedTuple):
    x: float
    end: float
    rows: int  # a bit for each row that has a cell there
    apart: int  # a bit for each row whose cell there is far from the one before it, or the first


def segment_of(glyphs: list[Glyph]) -> Segment:
    """Return the segment of glyphs, on the base line of the largest."""
    largest = max(glyphs, key=lambda glyph: glyph.size)
    start, end = min(glyph.x for glyph in glyphs), max(glyph.end for glyph in glyphs)
    return Segment(glyphs, start, largest.y, end, largest.size, min(glyph.order for glyph in glyphs))


def overlap(one: Segment, other: Segment) -> bool:
    """Return whether two segments are above each other, not side by side."""
    return min(one.end, other.end) - max(one.x, other.x) > 0.5 * min(one.size, other.size, one.end - one.x)


def join_cells(segments: Sequence[Segment]) -> list[Segment]:
    """Put the lines of cells that are drawn one by one on one line, and number texts that are drawn side by side."""
    divided = [[*divide(segment, _undrawn_spaces(segment.glyphs))] for segment in segments]
    spaces = sum(glyph.text == " " for segment in segments for glyph in segment.glyphs)
    if sum(map(len, divided)) - len(segments) > spaces:  # most of them are not drawn
        divided = [[segment] for segment in segments]
    joined: list[Segment] = []
    cells: set[int] = set()  # the orders of the parts in these cells and texts
    for table, _ in _grids(_drawn_rows([part for line in divided for part in line]), lambda *_: True):
        rows = [row for row in table if len(row) > 1]
        is_table = _is_table(rows)
        for row in rows:
            are_texts = all(1 < len(cell) <= _MAX_LINES and _is_text(cell) for cell in row)
            if is_table:
                joined += (_joined(cell, max(cell[0].y for cell in row)) for cell in row)
            elif are_texts and _leading(row) < _MAX_LEADING * row[0][0].size:
                joined += (line._replace(block=cell[0].order + 1) for cell in row for line in cell)
            else:
                continue
            cells.update(part.order for cell in row for part in cell)
    for segment, line in zip(segments, divided, strict=True):
        others = [part for part in line if part.order not in cells]
        joined += others if len(others) < len(line) else [segment]
    return joined


def _drawn_rows(segments: Sequence[Segment]) -> list[list[Cell]]:
    """Group segments in the order of drawing: lines below each other are a cell, cells beside each other are a row."""
    cells: list[Cell] = []
    for segment in sorted(segments, key=lambda segment: segment.order):
        last, size = cells[-1][-1] if cells else segment, segment.size
        gap = last.y - segment.y
        leading = (cells and _leading(cells[-1:])) or gap
        is_even = max(gap, leading) < _MAX_LEADING * size or abs(gap - leading) < SAME_BASE * size
        if _MIN_LEADING * size < gap < _LOOSE_LEADING * size and is_even and overlap(segment, last):
            cells[-1].append(segment)
        else:
            cells.append([segment])
    rows: list[list[Cell]] = []
    for cell in cells:
        before, reach = rows[-1][-1] if rows else [], ROW_OFFSET * cell[0].size
        is_level = before and cell[-1].y - reach < before[0].y and before[-1].y < cell[0].y + reach
        if is_level and min(line.x for line in cell) > max(line.end for line in before):
            rows[-1].append(cell)
        else:
            rows.append([cell])
    return rows


def _is_table(rows: list[list[Cell]]) -> bool:
    """Return whether rows below each other have cells of several lines."""
    gap = min(starmap(_gap, pairwise(rows)), default=0.0)
    has_several = any(len(cell) > 1 for row in rows for cell in row)
    return has_several and gap >= 0 and all(_is_row(row, gap) for row in rows)


def _gap(row: list[Cell], below: list[Cell]) -> float:
    """Return the distance from the last line of a row to the first of the one below."""
    return min(cell[-1].y - cell[-1].depth for cell in row) - max(cell[0].y for cell in below)


def _leading(row: list[Cell]) -> float:
    """Return the distance between the lines of a cell the largest of a row; 0 for cells of one line."""
    return max((cell[0].y - cell[-1].y) / max(1, len(cell) - 1) for cell in row)


def _is_row(row: list[Cell], gap: float) -> bool:
    """Return whether cells are wrapped and lie at one level; `gap` is that to the other rows, 0 if there are none."""
    several, size, leading = [cell for cell in row if len(cell) > 1], row[0][0].size, _leading(row)
    levels = zip(*((cell[0].y, cell[-1].y, (cell[0].y + cell[-1].y) / 2) for cell in row), strict=True)
    top, low, middle = (max(level) - min(level) < _LEVEL * size for level in levels)
    if max(map(len, row)) > _MAX_LINES or not all(map(_is_full, several)):
        return False
    if middle and not top and not low and len(several) < len(row):
        return True
    # Lines below each other may be cells of several rows, above all if they are single words or numbers.
    is_apart = gap > (_ROW_GAP if all(map(_is_text, several)) else _WIDE_ROW_GAP) * leading
    is_text = len(several) < len(row) or any(map(_is_text, several))
    return (top or low or middle) and is_apart and is_text and leading < _MAX_LEADING * size


def _is_text(cell: Cell) -> bool:
    """Return whether lines have several words, mostly of letters."""
    glyphs = [glyph for line in cell for glyph in line.glyphs if glyph.text != " "]
    is_long = sum(len(_word_ends(line)) for line in cell) >= _MIN_WORDS * len(cell)
    return is_long and 2 * sum(glyph.text[0].isalpha() for glyph in glyphs) > len(glyphs)


def _is_full(cell: Cell) -> bool:
    """Return whether lines end where the next word does not fit."""
    width = max(line.end for line in cell) - min(line.x for line in cell)
    lengths = (one.end - one.x + _word_ends(other)[0] - other.x + WORD_GAP * one.size for one, other in pairwise(cell))
    return min(lengths) > _FULL * width


def _word_ends(line: Segment) -> list[float]:
    pairs = ((a, b.text == " " or b.x - a.end > WORD_GAP * a.size) for a, b in pairwise(line.glyphs) if a.text != " ")
    return [*(a.end for a, is_last in pairs if is_last), line.end]


def _joined(cell: Cell, y: float) -> Segment:
    """Return the lines of a cell on one base line."""
    glyphs: list[Glyph] = []
    for line in cell:
        if glyphs and (last := glyphs[-1]).text != " ":
            is_broken = last.text in ("-", "\N{HYPHEN}")
            glyphs.append(last._replace(text="\N{SOFT HYPHEN}" * is_broken + " ", x=last.end))
        glyphs += (glyph._replace(y=glyph.y - line.y + y) for glyph in line.glyphs)
    return segment_of(glyphs)._replace(depth=y - cell[-1].y)


def align(rows: Sequence[list[Cell]], is_last: bool = False) -> Iterator[list[Cell]]:
    """Yield the cells of rows: where columns show, the parts of one are a cell, and cells may be empty.

    Args:
        rows: The parts of each row, divided at all gaps between words where no space is drawn.
        is_last: Whether rows stay whole if one of them has a gap that is not one between columns.
    """
    for table, columns in _grids(rows, _is_wide):
        # Columns are apart by a wide gap in one row, or by narrow ones in several.
        columns = _merge(columns, lambda a, b: 0 < (a.rows & b.rows).bit_count() < _MIN_NARROW and not b.apart)
        placed = [_place(row, columns) for row in table]
        whole = [
            [*_joined_parts(row, accumulate(starmap(_is_wide, pairwise(row)), initial=0)).values()] for row in table
        ]
        has_labels = len(columns) > 2 or columns[0].end - columns[0].x > _MARKER * table[0][0][0].size
        others = [len(row) - 1 for row in placed if len(row) > 1]  # cells beside the first
        is_table = len(others) > 1 and sum(others) >= _MIN_FILLED * len(table) * (len(columns) - 1)
        divided = {i for i, row in enumerate(table) if len(row) > len(whole[i])}
        if rejected := _unaligned(placed, table) if divided and is_table else divided:
            rejected = divided if is_last else rejected
            yield from align([whole[i] if i in rejected else row for i, row in enumerate(table)], is_last=True)
        elif not (is_table and has_labels):
            yield from whole
        else:
            # The first row may have its cells beside those below them.
            joined = _merge(columns, lambda one, other: 1 in (one.rows, other.rows) and not one.rows & other.rows)
            if all(column.rows & 1 for column in joined):
                columns, placed = joined, [_place(row, joined) for row in table]
            for row in placed:
                yield [row.get(i, []) for i in range(len(columns) if len(row) > 1 else 1 + max(row))]


def divide(segment: Segment, breaks: Set[Glyph]) -> Iterator[Segment]:
    """Divide a segment before the glyphs behind gaps, but not within a row of dots."""
    glyphs, start = segment.glyphs, 0
    for i, (before, glyph) in enumerate(pairwise(glyphs), 1) if breaks else ():
        if glyph in breaks and before.x < glyph.x and not are_dots(before, glyph):
            end, order = max(each.end for each in glyphs[start:i]), glyphs[start].order
            yield segment._replace(glyphs=glyphs[start:i], x=glyphs[start].x, end=end, order=order, breaks=breaks)
            start = i
    yield segment._replace(glyphs=glyphs[start:], x=glyphs[start].x, order=glyphs[start].order, breaks=breaks)


def _undrawn_spaces(glyphs: list[Glyph]) -> set[Glyph]:
    """Return the glyphs behind a gap between words where no space is drawn."""
    return {b for a, b in pairwise(glyphs) if b.x - a.end > WORD_GAP * a.size and a.text != " " != b.text}


def _place(row: list[Cell], columns: list[_Column]) -> dict[int, Cell]:
    """Return the cells of a row by the numbers of their columns."""
    starts = [column.x for column in columns]
    return _joined_parts(row, (bisect(starts, cell[0].x) - 1 for cell in row))


def _joined_parts(row: list[Cell], numbers: Iterable[int]) -> dict[int, Cell]:
    """Join the cells of a row that have the same number, and the parts of a segment."""
    cells: dict[int, Cell] = {}
    for parts, number in zip(row, numbers, strict=True):
        cell = cells.setdefault(number, [])
        for part in parts:
            if cell and cell[-1].breaks is part.breaks:
                last = cell.pop()
                part = part._replace(glyphs=last.glyphs + part.glyphs, x=last.x)
            cell.append(part)
    return cells


def _unaligned(rows: list[dict[int, Cell]], table: list[list[Cell]]) -> set[int]:
    """Return the numbers of rows with a narrow gap that is not one between columns.

    Behind such a gap a cell begins, ends or has its middle where those of other rows have it, and gaps within the cells
    of the row are narrower.
    """
    columns = defaultdict[int, dict[str, tuple[float, ...]]](dict)  # the sides of each text, and their sum
    for row in rows:
        for i, cell in row.items():
            columns[i][_text(cell)] = cell[0].x, cell[-1].end, cell[0].x + cell[-1].end
    places = {i: [*map(sorted, zip(*column.values(), strict=True))] for i, column in columns.items()}
    unaligned: set[int] = set()
    for number, (row, parts) in enumerate(zip(rows, table, strict=True)):
        starts = {cell[0].x for cell in row.values()}
        within = max((b[0].x - a[-1].end for a, b in pairwise(parts) if b[0].x not in starts), default=0.0)
        for (_, cell), (i, other) in pairwise(sorted(row.items())):
            text, reach = _text(other), _ALIGNED * other[0].size
            sides = zip(places[i], columns[i][text], strict=True)
            x, end, middle = (
                bisect(all_sides, side + reach) - bisect(all_sides, side - reach) - 1 for all_sides, side in sides
            )
            # The ends of lines of prose may be below each other, too.
            is_aligned = max(2 * x, end, middle) > 1 and any(map(str.isalnum, _text(cell)))
            if not _is_wide(cell, other) and not (is_aligned and other[0].x - cell[-1].end > _DISTINCT * within):
                unaligned.add(number)
    return unaligned


def _text(cell: Cell) -> str:
    return "".join(glyph.text for part in cell for glyph in part.glyphs)


def _is_wide(cell: Cell, other: Cell) -> bool:
    """Return whether the gap between two cells of a row is wide."""
    last, segment = cell[-1], other[0]
    is_spaced = last.glyphs[-1].text == " "  # as in justified text
    return segment.x - last.end > (_SPACED_GAP if is_spaced else CELL_GAP) * segment.size


def _grids(
    rows: Sequence[list[Cell]], are_apart: Callable[[Cell, Cell], bool]
) -> Iterator[tuple[list[list[Cell]], list[_Column]]]:
    """Yield rows below each other whose cells form columns, with these columns."""
    table, columns = list[list[Cell]](), list[_Column]()
    for row in rows:
        bit, (first, *_) = 1 << len(table), row[0]
        apart = [False, *starmap(are_apart, pairwise(row))]
        own = [
            _Column(min(part.x for part in cell), max(part.end for part in cell), bit, bit * is_apart)
            for cell, is_apart in zip(row, apart, strict=True)
        ]
        most = _MIN_NARROW if len(row) == 1 else _MAX_ROWS + 1  # prose goes across the columns of a table
        wider = _merge([*columns, *own], lambda column, other: other.x < column.end, most)
        is_next = table and table[-1][0][-1].y > first.y and _gap(table[-1], row) < _MAX_ROW_GAP * first.size
        if table and (not (wider and is_next) or len(table[0]) == 1 < len(row) or len(table) == _MAX_ROWS):
            yield table, columns
            table, wider = [], [column._replace(rows=1, apart=min(1, column.apart)) for column in own]
        table.append(row)
        columns = wider or own
    if table:
        yield table, columns


def _merge(
    columns: list[_Column], are_one: Callable[[_Column, _Column], bool], most: int = _MAX_ROWS + 1
) -> list[_Column]:
    """Join neighbouring columns; none if a row has cells in several of them that are apart, or `most` rows have."""
    merged: list[_Column] = []
    for column in sorted(columns):
        if merged and are_one(last := merged[-1], column):
            if last.rows & column.apart or (last.rows & column.rows).bit_count() >= most:
                return []
            merged.pop()
            apart = last.apart | (column.apart & ~last.rows)
            column = _Column(last.x, max(last.end, column.end), last.rows | column.rows, apart)
        merged.append(column)
    return merged if len(merged) <= _MAX_COLUMNS else []
