"""Lines of text from the places of glyphs on a page. Does not import torch."""

from bisect import bisect, bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain, dropwhile, groupby, pairwise

from lkv.context.pdf_cells import CELL_GAP, Cell, Segment, align, divide, join_cells, overlap, segment_of
from lkv.context.pdf_words import (
    ROW_OFFSET,
    SAME_BASE,
    SMALL,
    WORD_GAP,
    Glyph,
    attach_accents,
    attach_capitals,
    texts_of,
    word_breaks,
    word_gap,
)
from lkv.context.reading_order import in_reading_order

# Shares of the font's size.
_COLUMN_GAP = 0.5  # between columns that are not drawn line by line, at least
_MAX_RAISE, _MAX_DROP = 0.7, 0.55  # of superscripts and of subscripts
_MAX_OFFSET = 0.35  # of glyphs that a font draws lower or higher than others
_MAX_SHADOW = 0.2  # to the right of what is drawn a second time
_MAX_SCRIPT = 8  # glyphs
_MIN_COLUMN = 18  # characters of a line of a column of prose, on average
_MIN_WIDTH = 4  # of a line whose last word is broken
_MIN_LETTERS = 5  # that are different from each other, of code
_MAX_SKIP = 8  # between lines that are drawn one after the other
_MAX_RUNS, _MAX_JUMPS = 60, 0.4  # upwards: in all, and by the number of segments, of pages with an order of drawing

_Run = list[Glyph]  # in the order in which they are drawn, next to each other


def lines_of(glyphs: Sequence[Glyph]) -> list[str]:
    """Return the lines that glyphs form, as seen."""
    lines = _attach_scripts(_base_lines(attach_capitals(attach_accents(glyphs))))
    segments = (segment for line in lines for segment in _segments(line))
    blocks = _blocks(join_cells([each for each in segments if any(glyph.text != " " for glyph in each.glyphs)]))
    return [line for block in blocks for line in _block_lines([*_by_columns(_rows(block))])]


def _base_lines(glyphs: Sequence[Glyph]) -> list[list[_Run]]:
    """Group glyphs of one base line, from top to bottom: runs, ordered by place. Copies that make letters bold go."""
    lines: list[_Run] = []
    for glyph in sorted(glyphs, key=lambda glyph: -glyph.y):
        if not lines or lines[-1][0].y - glyph.y > SAME_BASE * min(glyph.size, lines[-1][0].size):
            lines.append([])
        lines[-1].append(glyph)
    return [_runs(sorted(line, key=lambda glyph: glyph.order)) for line in lines]


def _runs(line: list[Glyph]) -> list[_Run]:
    runs: list[_Run] = []
    for glyph in line:
        last = runs[-1][-1] if runs else None
        if last and last.x <= glyph.x and -0.5 * glyph.size < glyph.x - last.end < WORD_GAP * glyph.size:
            runs[-1].append(glyph)
        else:
            runs.append([glyph])
    runs.sort(key=lambda run: run[0].x)
    return [run for before, run in pairwise([[], *runs]) if not _is_copy(run, before)]


def _is_copy(run: _Run, other: _Run) -> bool:
    """Return whether a run is another one drawn again, as for bold letters or a shadow."""
    is_near = len(run) == len(other) and run[0].x - other[0].x < _MAX_SHADOW * run[0].size
    return is_near and [glyph.text for glyph in run] == [glyph.text for glyph in other]


def _attach_scripts(lines: list[list[_Run]]) -> list[list[_Run]]:
    """Put small runs that are raised or lowered next to a larger glyph into its run."""
    reach = [_MAX_RAISE * max(glyph.size for run in line for glyph in run) for line in lines]
    for number, line in enumerate(lines):
        y, first = line[0][0].y, max(0, number - 4)
        others = [(abs(other[0][0].y - y), first + i) for i, other in enumerate(lines[first : number + 5]) if other]
        near = [lines[i] for distance, i in sorted(others) if i != number and distance < reach[i]]
        line[:] = [run for run in line if len(run) > _MAX_SCRIPT or not any(_is_inserted(run, other) for other in near)]
    return [line for line in lines if line]


def _is_inserted(run: _Run, line: list[_Run]) -> bool:
    """Insert a short run behind or before a glyph of a line, if it is that near, and a script or only a little off."""
    (x, end), (y, size) = (run[0].x, run[-1].end), (run[0].y, run[0].size)
    place = bisect(line, x, key=lambda other: other[0].x)
    for other in line[max(0, place - 1) : place + 1]:
        index = bisect_left(other, x, key=lambda glyph: glyph.x)
        base = [glyph for glyph in other[max(0, index - 4) : index] or other[:1] if size < SMALL * glyph.size]
        is_number = all(glyph.text.isdigit() for glyph in run) and size <= other[0].size
        is_longer = len(run) < len(other) or (is_number and index > 0)
        is_same = size >= SMALL * other[0].size if is_number else size == other[0].size
        is_off = is_same and is_longer and abs(other[0].y - y) < (ROW_OFFSET if is_number else _MAX_OFFSET) * size
        for glyph in base[-1:] or other[max(0, index - 1) : max(1, index)] * is_off:
            gap = x - glyph.end if index else glyph.x - end
            following = (each.x for each in chain(other[index:], *line[place : place + 1]) if each.size > size)
            is_near = -0.25 * glyph.size < gap < 0.35 * glyph.size and end - next(following, end) < 0.25 * glyph.size
            if is_near and -_MAX_DROP * glyph.size < y - glyph.y < _MAX_RAISE * glyph.size:
                other[index:index] = run
                return True
    return False


def _segments(line: list[_Run]) -> Iterator[Segment]:
    """Divide a line at wide gaps."""
    glyphs: _Run = []
    for run in line:
        gap = CELL_GAP if glyphs and run[0].order == glyphs[-1].order + 1 else _COLUMN_GAP
        if glyphs and run[0].x - max(glyph.end for glyph in glyphs[-3:]) > gap * run[0].size:
            yield segment_of(glyphs)
            glyphs = []
        glyphs += run
    yield segment_of(glyphs)


def _blocks(segments: list[Segment]) -> list[list[Segment]]:
    """Divide a page into blocks in the order of reading, which is that of drawing if text is drawn downwards."""
    runs: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda segment: segment.order):
        last = runs[-1][-1] if runs else segment
        is_next = -_MAX_SKIP * segment.size < segment.y - last.y < segment.size and segment.block == last.block
        if not runs or not is_next:
            runs.append([])
        runs[-1].append(segment)
    jumps = len(runs) - 2 * len({segment.block for segment in segments} - {0})
    if jumps > min(_MAX_RUNS, 1 + _MAX_JUMPS * len(segments)):
        return [segments]
    blocks: list[list[Segment]] = []
    for block in runs:
        places = [i for i, other in enumerate(blocks) if _is_above(block, other)]
        while joined := [i for i, other in enumerate(blocks) if _are_rows(other, block)]:
            block = [*blocks.pop(joined[0]), *block]
            places.append(joined[0])
        blocks.insert(min([*places, len(blocks)]), block)
    return blocks


def _extent(block: list[Segment]) -> tuple[float, float, float, float]:
    """Return the left, right, lower and upper ends."""
    ys = [each.y for each in block]
    return min(each.x for each in block), max(each.end for each in block), min(ys), max(ys)


def _is_above(block: list[Segment], other: list[Segment]) -> bool:
    """Return whether a block is above another one of the same column, or of which one is a title or a page's number."""
    (x, end, low, high), (other_x, other_end, other_low, other_high) = map(_extent, (block, other))
    is_short = min(high - low, other_high - other_low) < 3 * block[0].size
    return low > other_high and (is_short or min(end, other_end) > max(x, other_x))


def _are_rows(*blocks: list[Segment]) -> bool:
    """Return whether two blocks interleave, or are the cells of a table that is drawn column by column."""
    lows, highs = zip(*(_extent(block)[2:] for block in blocks), strict=True)
    low, high = max(lows), min(highs)
    if any(block[0].block for block in blocks) or low > high + SAME_BASE * blocks[0][0].size:
        return False
    within = [
        [each for each in block if low - SAME_BASE * each.size < each.y < high + SAME_BASE * each.size]
        for block in blocks
    ]
    if not all(within):
        return True
    left, right = sorted(map(_extent, within))
    if left[1] > right[0]:
        return True
    fewer, more = sorted(within, key=len)
    bases = sorted(each.y for each in more)
    offsets = [each.y - bases[bisect(bases, each.y + SAME_BASE * each.size) - 1] for each in fewer]
    common = sum(abs(offset) < SAME_BASE * each.size for offset, each in zip(offsets, fewer, strict=True))
    is_longer = sum(each.y < low for each in blocks[0]) > len(within[0])  # text in columns, of which the last is short
    are_cells = [*map(_are_cells, within)]
    return common > 0.7 * len(fewer) and (all(are_cells) or (any(are_cells) and not is_longer))


def _are_cells(side: list[Segment]) -> bool:
    """Return whether lines are short, in several columns, or mostly shorter than the longest, as not those of prose."""
    if max(len(each.glyphs) for each in side) <= _MIN_COLUMN:
        return True
    rows = _rows(side)
    widths = [row[-1].end - row[0].x for row in rows]
    columns = sum(other.order > each.glyphs[-1].order + 1 for row in rows for each, other in pairwise(row))
    return columns > 0.5 * len(rows) or sum(width > 0.7 * max(widths) for width in widths) < 0.5 * len(rows)


def _by_columns(rows: list[list[Segment]]) -> Iterator[list[Segment]]:
    """Yield rows; if they are those of two columns of prose that are drawn line by line, one after the other."""
    for second, group in groupby(rows, key=lambda row: len(row) == 2 and round(row[1].x)):
        part = list(group)
        columns = [[row[number : number + 1] for row in part] for number in (0, 1)]
        yield from chain(*columns) if second and all(map(_is_prose, columns)) else part


def _is_prose(lines: list[list[Segment]]) -> bool:
    """Return whether lines are long, and those behind the first go on in the middle of a sentence."""
    length = sum(len(segment.glyphs) for line in lines for segment in line)
    first, *others = (line[0].glyphs[0].text for line in lines)
    goes_on = first.isupper() and sum(map(str.islower, others)) > 0.6 * len(others)
    return goes_on and len(lines) > 2 and length >= _MIN_COLUMN * len(lines)


def _rows(segments: list[Segment]) -> list[list[Segment]]:
    """Group the segments of one block into rows, from top to bottom, each from left to right."""
    rows: list[list[Segment]] = []
    top: Segment | None = None
    for segment in sorted(segments, key=lambda segment: -segment.y):
        row = rows[-1] if rows else []
        place = bisect(row, segment.x, key=lambda other: other.x)
        is_near = top is not None and top.y - segment.y < ROW_OFFSET * max(top.size, segment.size)
        if is_near and not any(overlap(segment, other) for other in row[max(0, place - 2) : place + 2]):
            row.insert(place, segment)
        else:
            rows.append([segment])
            top = segment
    return rows


def _block_lines(rows: list[list[Segment]]) -> Iterator[str]:
    """Yield the lines of a block, with a soft hyphen behind a hyphen where the following word does not fit."""
    usual_gap = word_gap([segment.glyphs for row in rows for segment in row], default=WORD_GAP)
    parted = [
        [[part] for segment in row for part in divide(segment, word_breaks(segment.glyphs, usual_gap))] for row in rows
    ]
    lines = in_reading_order([_line_texts(cells) for cells in align(parted)])
    texts = [*(line.strip(" ") for line in lines), 8 * "?"]  # where the text goes on is not known yet
    for number, (row, indent) in enumerate(zip(rows, _indents(rows), strict=True)):
        text, width, word = texts[number], row[-1].end - row[0].x, texts[number + 1].partition(" ")[0]
        edge = max(each[-1].end for each in rows[max(0, number - 2) : number + 3])
        is_full = row[-1].end + width / max(1, len(text)) * len(word) > edge and width > _MIN_WIDTH * row[-1].size
        text = text if text[:1] in ("", "\t") else indent + text
        yield text + "\N{SOFT HYPHEN}" * (is_full and text[-1:] in ("-", "\N{HYPHEN}"))


def _indents(rows: list[list[Segment]]) -> Iterator[str]:
    """Yield the spaces at the beginning of each row, where letters have one width as in code."""
    lines = [[each for segment in row for each in segment.glyphs if each.text != " "] or row[0].glyphs for row in rows]
    for width, group in groupby(lines, key=_letter_width):
        part = list(group)
        left = min(line[0].x for line in part)
        is_code = len({glyph.text for line in part for glyph in line if glyph.text.isalpha()}) > _MIN_LETTERS
        yield from (" " * round((line[0].x - left) / width) if width and is_code else "" for line in part)


def _letter_width(line: list[Glyph]) -> float:
    """Return the width of all glyphs; 0 if they differ or are as wide as those of Chinese."""
    widths, size = [glyph.end - glyph.x for glyph in line], line[0].size
    return round(widths[0], 1) * (max(widths) - min(widths) < 0.02 * size and widths[0] < 0.7 * size)


def _line_texts(cells: list[Cell]) -> list[str]:
    """Return a row's texts from left to right, with a tab between cells, and superscripts and subscripts as such."""
    texts: list[str] = []
    for number, cell in enumerate(cells):
        part: list[str] = []
        for segment in cell:
            own = texts_of(segment.glyphs, segment.breaks)
            part += [" "] * (bool(part) and part[-1] != " " != own[0]) + own
        while part and part[-1] == " ":
            part.pop()
        texts += ["\t"] * bool(number) + [*dropwhile(" ".__eq__, part)]
    return texts
