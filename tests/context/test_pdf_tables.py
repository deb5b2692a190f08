"""Tables of random cells, with the rules of several programs or none, are read as their cells with tabs in between."""

import textwrap
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lkv.context.document_reader import parse_document
from tests.context.pdf_writer import TYPE1, pdf

SIZE = 10.0
WIDTH = 0.6 * SIZE  # of each letter of Courier
COURIER = f"/Resources << /Font << /F1 {TYPE1.replace('Helvetica', 'Courier')} /Encoding /WinAnsiEncoding >> >> >>"
LENGTH = 16  # letters of a line of a cell
WORDS = st.text("abcdefghKLMN0123456789", min_size=1, max_size=8)
CELLS = st.lists(WORDS, min_size=1, max_size=7).map(" ".join)
LONG_WORDS = st.text("abcdefghKLMN0123456789", min_size=4, max_size=8)  # two are longer than any one
TITLES = ["Name", "Place", "Year", "Number"]
TEXTS = st.lists(st.text("abcdefghKLMN", min_size=2, max_size=6), min_size=1, max_size=9).map(" ".join)


def read(content: str) -> str:
    return parse_document(pdf(content, page=COURIER), "file.pdf").text


def text_at(x: float, y: float, text: str) -> str:
    return f"BT /F1 {SIZE} Tf {x:.2f} {y:.2f} Td ({text}) Tj ET\n"


@st.composite
def tables(draw: st.DrawFn) -> list[list[str]]:
    """Rows of cells, of which some are empty, but for those of the first row and column."""
    count = draw(st.integers(2, 4))
    header = draw(st.lists(CELLS, min_size=count, max_size=count))
    rows = st.tuples(CELLS, *[CELLS | st.just("")] * (count - 1)).map(list)
    return [header, *draw(st.lists(rows, min_size=1, max_size=5))]


def draw_rules(style: str, xs: list[float], ys: list[float]) -> str:
    """Draw the rules of a grid as lines, boxes around cells, thin filled boxes, one path or filled cells."""
    ends = [f"{xs[0]} {y} m {xs[-1]} {y} l" for y in ys] + [f"{x} {ys[0]} m {x} {ys[-1]} l" for x in xs]
    sizes = [(x, y, end - x, top - y) for x, end in pairwise(xs) for top, y in pairwise(ys)]
    thin = [(xs[0], y, xs[-1] - xs[0], 0.5) for y in ys] + [(x, ys[-1], 0.5, ys[0] - ys[-1]) for x in xs]
    return {
        "lines": " S\n".join(ends) + " S\n",
        "path": " ".join(ends) + " S\n",
        "boxes": "".join(f"{x} {y} {width} {height} re S\n" for x, y, width, height in sizes),
        "thin boxes": " ".join(f"{x} {y} {width} {height} re" for x, y, width, height in thin) + " f\n",
        "filled cells": "0.9 g " + "".join(f"{x} {y} {a - 1} {b - 1} re f\n" for x, y, a, b in sizes) + "0 g\n",
    }[style]


@pytest.mark.slow
@given(
    table=tables(),
    style=st.sampled_from(["lines", "path", "boxes", "thin boxes", "filled cells"]),
    height=st.sampled_from([0, 0.5, 1]),
    by_columns=st.booleans(),
)
def test_the_cells_of_a_ruled_table_are_separated_by_tabs(table, style, height, by_columns):
    """Cells have several lines at the top, in the middle or at the bottom."""
    wrapped = [[textwrap.wrap(cell, LENGTH) for cell in row] for row in table]
    xs, ys = [50 + (LENGTH + 1) * WIDTH * i for i in range(len(table[0]) + 1)], [740.0]
    drawn = []
    for row in wrapped:
        most = max(map(len, row))
        for column, lines in enumerate(row):
            top = ys[-1] - 12 - 12 * height * (most - len(lines))
            texts = "".join(text_at(xs[column] + 3, top - 12 * i, line) for i, line in enumerate(lines))
            drawn.append((column * by_columns, texts))
        ys.append(ys[-1] - 12 * most - 6)
    drawn.sort(key=lambda part: part[0])
    content = draw_rules(style, xs, ys) + "".join(text for _, text in drawn)
    around = text_at(50, 760, "A line before the table"), text_at(50, ys[-1] - 20, "and one behind it")
    rows = ["\t".join(row) for row in table]
    assert read(content.join(around)).split("\n") == ["A line before the table", *rows, "and one behind it"]


def test_merged_cells_have_their_text_once():
    content = "".join(f"{x} {y} {width} {height} re S\n" for x, y, width, height in (
        (50, 660, 100, 40), (150, 680, 200, 20), (150, 660, 100, 20), (250, 660, 100, 20),
        (50, 640, 100, 20), (150, 640, 100, 20), (250, 640, 100, 20),
    ))  # fmt: skip
    places = {(60, 676): "Region", (220, 686): "Sales", (160, 666): "2023", (260, 666): "2024"}
    places |= {(60, 646): "North", (260, 646): "17"}
    content += "".join(text_at(x, y, text) for (x, y), text in places.items())
    assert read(content) == "Region\tSales\t\n\t2023\t2024\nNorth\t\t17"


@given(rows=st.lists(st.lists(WORDS, min_size=1, max_size=8), min_size=2, max_size=6))
def test_rules_without_a_grid_make_no_table(rows):
    """Underlined rows in a frame."""
    content = "40 600 500 160 re S\n" + "".join(f"40 {730 - 20 * i} m 540 {730 - 20 * i} l S\n" for i in range(6))
    content += "".join(text_at(50, 736 - 20 * i, " ".join(row)) for i, row in enumerate(rows))
    assert read(content) == "\n".join(map(" ".join, rows))


@given(
    header=st.lists(WORDS, min_size=3, max_size=6),
    cells=st.lists(st.lists(WORDS, min_size=6, max_size=6), min_size=1, max_size=8),
    holes=st.lists(st.sets(st.integers(1, 5), max_size=2), min_size=8, max_size=8),
    sides=st.lists(st.sampled_from([0, 0.5, 1]), min_size=6, max_size=6),
    leading=st.floats(11, 30),
)
def test_empty_cells_of_a_table_without_rules_are_seen(header, cells, holes, sides, leading):
    """Columns are to the left, in the middle or to the right; at most half of a row's cells are empty."""
    columns = len(header)
    rows = [
        ["" if column in [*hole][: (columns - 1) // 2] else cell for column, cell in enumerate(row[:columns])]
        for row, hole in zip(cells, holes, strict=False)
    ]
    content = ""
    for number, row in enumerate([header, *rows]):
        for column, cell in enumerate(row):
            x = 40 + 70 * column + sides[column] * (48 - WIDTH * len(cell))
            content += text_at(x, 740 - leading * number, cell) * bool(cell)
    lines = [line.lstrip(" ") for line in read(content).split("\n")]  # letters of one width are indented as code
    assert lines == ["\t".join(row) for row in [header, *rows]]


@given(
    columns=st.lists(
        st.lists(TEXTS.filter(lambda text: len(text) < 20), min_size=6, max_size=6, unique=True), min_size=3, max_size=4
    ),
    count=st.integers(3, 6),
    gap=st.floats(3.0, 12.0),
    sides=st.lists(st.sampled_from([0, 0.5, 1]), min_size=5, max_size=5),
)
def test_cells_are_separated_where_the_columns_part_however_narrow_the_gap(columns, count, gap, sides):
    """Columns are as wide as their longest cell; prose above and below them stays whole."""
    lengths = [max(map(len, column[:count])) for column in columns]
    rows = [*zip(*columns, strict=True)][:count]
    content = text_at(40, 714, "A line before the table")
    for number, row in enumerate(rows):
        x = 40.0
        for cell, length, side in zip(row, lengths, sides, strict=False):
            content += text_at(x + side * WIDTH * (length - len(cell)), 700 - 14 * number, cell)
            x += WIDTH * length + gap
    content += text_at(40, 686 - 14 * len(rows), "and one behind it that goes on")
    lines = [line.lstrip(" ") for line in read(content).split("\n")]
    assert lines == ["A line before the table", *map("\t".join, rows), "and one behind it that goes on"]


@given(
    table=st.integers(2, 4).flatmap(
        lambda count: st.lists(st.lists(TEXTS, min_size=count, max_size=count), min_size=2, max_size=5)
    ),
    holes=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    height=st.sampled_from([0, 0.5, 1]),
)
def test_wrapped_cells_of_a_table_without_rules(table, holes, height):
    """Cells are drawn one by one, with their lines at the top, in the middle or at the bottom; some are empty."""
    content, y = "", 740.0
    for row, hole in zip(table[1:], holes, strict=False):
        if 0 < hole < len(row) > 2:
            row[hole] = ""
    for row in table:
        wrapped = [textwrap.wrap(cell, LENGTH) for cell in row]
        most = max(map(len, wrapped))
        for column, lines in enumerate(wrapped):
            top = y - 12 * height * (most - len(lines))
            place = 50 + (LENGTH + 2) * WIDTH * column
            content += "".join(text_at(place, top - 12 * i, line) for i, line in enumerate(lines))
        y -= 12 * most + 6
    assert read(content).split("\n") == ["\t".join(row) for row in table]


@given(texts=st.lists(st.tuples(TEXTS, WORDS), min_size=2, max_size=8), leading=st.floats(11, 15))
def test_titles_within_a_table_are_not_joined_to_the_next_row(texts, leading):
    rows = [["Name", "2024", "2025"], *(row for title, label in texts for row in ([title], [label, "12", "7"]))]
    content = "".join(
        text_at(40 + 350 * bool(i) + 50 * i, 740 - leading * number, cell)
        for number, row in enumerate(rows)
        for i, cell in enumerate(row)
    )
    lines = [line.lstrip(" ") for line in read(content).split("\n")]
    assert lines == ["\t".join(row) for row in rows]


@given(
    texts=st.lists(
        st.lists(st.tuples(st.integers(1, 199), st.text("abcdKLMN", min_size=2, max_size=9)), min_size=2, max_size=6),
        min_size=2,
        max_size=3,
    ),
    offset=st.floats(0, 12),
)
def test_addresses_side_by_side_are_read_one_after_the_other(texts, offset):
    texts = [[f"{number} {name} street" for number, name in lines] for lines in texts]
    content = "".join(
        text_at(50 + 180 * column, 700 - 12 * i - offset * column, line)
        for column, lines in enumerate(texts)
        for i, line in enumerate(lines)
    )
    around = text_at(50, 740, "A line before the addresses"), text_at(50, 560, "and one behind them")
    shown = [line for lines in texts for line in lines]
    assert read(content.join(around)).split("\n") == ["A line before the addresses", *shown, "and one behind them"]


@given(
    rows=st.lists(
        st.lists(st.lists(LONG_WORDS, min_size=1, max_size=3), min_size=2, max_size=4), min_size=2, max_size=6
    ),
    leading=st.sampled_from([12, 15]),
)
def test_cells_of_one_word_a_line_are_joined_and_those_beside_them_stay_apart(rows, leading):
    """Columns are as wide as their longest word, with less than the size between them and a line of prose above."""
    count = min(map(len, rows))
    titles = [[word] for word in TITLES[:count]]
    rows = [titles, *([row[0][:1], *row[1:count]] for row in rows)]
    content, y, prose = "", 740.0, "A line above the table that has spaces of its own and more words than it"
    content += text_at(50, 780, prose)
    for row in rows:
        for column, words in enumerate(row):
            place = 50 + (8 * WIDTH + 0.8 * SIZE) * column
            content += "".join(text_at(place, y - leading * i, word) for i, word in enumerate(words))
        y -= leading * max(map(len, row)) + 6
    assert read(content).split("\n") == [prose, *("\t".join(map(" ".join, row)) for row in rows)]


@given(
    rows=st.lists(st.tuples(WORDS, TEXTS.filter(lambda text: len(text) > LENGTH), WORDS), min_size=2, max_size=6),
    leading=st.floats(17, 20),
)
def test_wrapped_cells_with_wide_leading_in_rows_that_are_as_near_as_lines(rows, leading):
    """As fpdf2 draws them: the other cells of a row lie beside the middle."""
    content, y = "", 740.0
    for first, text, last in rows:
        lines = textwrap.wrap(text, LENGTH)
        middle = y - leading * (len(lines) - 1) / 2
        content += text_at(50, middle, first)
        content += "".join(text_at(120, y - leading * i, line) for i, line in enumerate(lines))
        content += text_at(120 + (LENGTH + 2) * WIDTH, middle, last)
        y -= leading * len(lines)
    assert read(content).split("\n") == ["\t".join(row) for row in rows]
