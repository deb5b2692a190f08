"""Fractions of a numerator above a denominator are read as such, and other lines between texts are not."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lkv.context.document_reader import parse_document
from tests.context.pdf_writer import TYPE1, pdf

COURIER = "/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Courier >> >> >>"
WIDTH = 0.6  # of each letter of Courier
# As TeX places numerators and denominators, and farther apart: their size, and how far they are above the line of the
# text, by its size.
STYLES = {"text": (0.7, 0.394, -0.345), "display": (1, 0.677, -0.686), "apart": (0.7, 0.75, -0.75)}
KINDS = ["filled", "stroked", "scaled", "dashed", "polygon", "border", "grid"]
OPERANDS = st.one_of(
    st.integers(1, 2000).map(str), st.sampled_from("abxyz"), st.sampled_from(["a+b", "c-2", "x-17", "2x", "n+m-1"])
)


def read(content: str, page: str = COURIER) -> str:
    return parse_document(pdf(content, page=page), "file.pdf").text


def text_at(x: float, y: float, text: str, size: float) -> str:
    return f"BT /F1 {size:.2f} Tf {x:.2f} {y:.2f} Td ({text}) Tj ET\n" if text else ""


def rule(x: float, y: float, width: float, size: float, kind: str = "filled") -> str:
    """Draw a line as programs do: those that print HTML fill a frame, of which a clip leaves the lower side."""
    low, high, end = y - 0.02 * size, y + 0.02 * size, x + width
    box = f"{x:.2f} {low:.3f} {width:.2f} {0.04 * size:.3f} re"
    return {
        "filled": f"{box} f",
        "stroked": f"{0.04 * size:.3f} w {x:.2f} {y:.2f} m {end:.2f} {y:.2f} l S",
        "scaled": f"q .1 0 0 1 0 0 cm {0.13 * size:.2f} w {10 * x:.1f} {y:.2f} m {10 * end:.1f} {y:.2f} l S Q",
        "dashed": f"q [{0.2 * size:.2f}] 0 d {0.04 * size:.3f} w {x:.2f} {y:.2f} m {end:.2f} {y:.2f} l S Q",
        "polygon": f"{x:.2f} {low:.3f} m {end:.2f} {low:.3f} l {end:.2f} {high:.3f} l {x:.2f} {high:.3f} l h f",
        "border": f"q {box} W* n {x:.2f} {low:.3f} {width:.2f} {size:.2f} re {x:.2f} {high:.3f} {width:.2f} "
        f"{0.96 * size:.2f} re f* Q",
        "grid": f"{0.04 * size:.3f} w {x:.2f} {y:.2f} m {end:.2f} {y:.2f} l 10 10 m 20 10 l S",
    }[kind] + "\n"


def fraction(
    x: float, y: float, above: str, below: str, size: float, style: str, margin: float = 0, kind: str = "filled"
) -> tuple[str, float]:
    """Return the content of a fraction, and where it ends."""
    share, up, down = STYLES[style]
    own, widest = share * size, max(len(above), len(below))
    width = WIDTH * own * widest + 2 * margin * size
    drawn = rule(x, y + 0.25 * size, width, size, kind)
    for text, shift in ((above, up), (below, down)):
        drawn += text_at(x + (width - WIDTH * own * len(text)) / 2, y + shift * size, text, own)
    return drawn, x + width


def shown(above: str, below: str) -> str:
    return "/".join(text if text.isdigit() or len(text) == 1 else f"({text})" for text in (above, below))


@given(
    parts=st.tuples(OPERANDS, OPERANDS),
    before=st.sampled_from(["", "2", "take", "y =", "["]),
    after=st.sampled_from(["", "of the oil", "]", "+ 7"]),
    size=st.floats(6, 14),
    style=st.sampled_from([*STYLES]),
    margin=st.sampled_from([0, 0.12]),
    kind=st.sampled_from(KINDS),
    angle=st.sampled_from([0, 90]),
)
def test_a_numerator_over_a_denominator_is_a_fraction(parts, before, after, size, style, margin, kind, angle):
    """Alone, behind a whole number, and in a line between other lines."""
    assume(before or after or style != "apart")
    start = 72 + WIDTH * size * len(before)
    gap = 0.12 * size if before in ("", "2", "[") else WIDTH * size
    drawn, end = fraction(start + gap, 400, *parts, size, style, margin=margin, kind=kind)
    gap = 0.12 * size if after in ("", "]") else WIDTH * size
    leading = 1.3 * size if style == "text" else 2 * size
    content = text_at(72, 400, before, size) + drawn + text_at(end + gap, 400, after, size)
    around = [text_at(72, 400 + way * leading, f"line {way} of the text", size) for way in (1, -1) if before or after]
    text = f"{before}{' ' * (before not in ('', '['))}{shown(*parts)}{' ' * (after not in ('', ']'))}{after}"
    expected = ["line 1 of the text", text, "line -1 of the text"] if before or after else [text]
    turn = "0 1 -1 0 600 0" if angle else "1 0 0 1 0 0"
    assert read(f"q {turn} cm {content}{''.join(around)}Q").split("\n") == expected


@given(
    rows=st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99), st.integers(0, 99)), min_size=2, max_size=5),
    has_grid=st.booleans(),
)
def test_fractions_in_the_cells_of_a_table(rows, has_grid):
    content = ""
    for number, (above, below, other) in enumerate(rows):
        y = 700 - 24 * number
        content += text_at(72, y, "size", 10) + fraction(150, y, str(above), str(below), 10, "text")[0]
        content += text_at(230, y, str(other), 10)
        content += "".join(f"{x} {y - 9} 80 24 re S\n" for x in (66, 146, 226) if has_grid)
    assert read(content).split("\n") == [f"size\t{above}/{below}\t{other}" for above, below, other in rows]


def test_fractions_within_fractions_and_scripts():
    inner, end = fraction(90, 406.77, "1", "2", 10, "text")
    nested = inner + rule(88, 402.5, end + 2 - 88, 10) + text_at((88 + end + 2) / 2 - 3, 393.1, "7", 10)
    power = text_at(150, 400, "x", 10) + fraction(156.6, 404, "3", "4", 6, "display")[0]
    assert read(text_at(75, 400, "y=", 10) + nested + power) == "y=(1/2)/7\tx^(3/4)"


@pytest.mark.parametrize("rise", [3.5, 4.5])
@pytest.mark.parametrize("solidus", ["/", "\\200"])
@pytest.mark.parametrize("lowered", [0, -1.5])
def test_digits_around_a_solidus(rise, solidus, lowered):
    font = f"{TYPE1} /Encoding << /Differences [128 /fraction 129 /threesuperior 130 /uni2084] >> >>"
    pieces = (
        ("take 2", 0),
        ("3", rise),
        (solidus, 0),
        ("14", lowered - 0.1),
        (" of \\201\\200\\202, 10", 0),
        ("6", rise),
    )
    drawn = "".join(f"{rise} Ts /F1 {7 if rise else 12} Tf ({text}) Tj " for text, rise in (*pieces, ("/7", 0)))
    content = f"BT 72 700 Td {drawn} ET"
    page = "/Resources << /Font << /F1 100 0 R >> >>"
    text = parse_document(pdf(content, page=page, objects={100: font}), "file.pdf").text
    assert text == "take 2 3/14 of 3/4, 10⁶/7"


@given(
    numbers=st.lists(st.integers(1, 99).map(str) | st.floats(1, 99).map("{:.2f}".format), min_size=3, max_size=5),
    leading=st.floats(11, 16),
    has_label=st.booleans(),
)
def test_a_column_with_its_sum_is_no_fraction(numbers, leading, has_label):
    size, widest = 10.0, WIDTH * 10 * max(map(len, numbers))
    content = rule(200, 700 - leading * (len(numbers) - 2) - 0.3 * leading, widest, size)
    for number, text in enumerate(numbers):
        content += text_at(200 + widest - WIDTH * size * len(text), 700 - leading * number, text, size)
        content += text_at(72, 700 - leading * number, "cost", size) * has_label
    assert read(content).split("\n") == ["cost\t" * has_label + text for text in numbers]


@given(
    words=st.lists(st.sampled_from(["17", "4", "of", "the lamp", "1990", "a"]), min_size=1, max_size=4),
    place=st.integers(0, 3),
    drop=st.floats(0.08, 0.13),
)
def test_underlined_text_is_no_numerator(words, place, drop):
    size, place = 12.0, min(place, len(words) - 1)
    start, width = 72 + WIDTH * size * len(" ".join([*words[:place], ""])), WIDTH * size * len(words[place])
    content = text_at(72, 700, " ".join(words), size) + rule(start, 700 - drop * size, width, size)
    content += text_at(start + width / 2 - WIDTH * size, 686, "42", size)
    assert [line.strip() for line in read(content).split("\n")] == [" ".join(words), "42"]


@given(
    rows=st.lists(st.tuples(st.integers(1, 99), st.integers(1, 999), st.integers(1, 9)), min_size=2, max_size=5),
    gap=st.sampled_from([0, 1, 6]),
    kind=st.sampled_from(KINDS),
)
def test_rows_whose_cells_have_a_line_below_are_no_fractions(rows, gap, kind):
    content = ""
    for number, row in enumerate(rows):
        for column, cell in enumerate(row):
            x, y, width = 72 + (30 + gap) * column, 700 - 14 * number, 30.0
            content += text_at(x + (width - WIDTH * 12 * len(str(cell))) / 2, y, str(cell), 12)
            content += rule(x, y - 3.5, width, 12, kind)
    assert read(content).replace("\t", " ").split("\n") == [" ".join(map(str, row)) for row in rows]


@pytest.mark.parametrize("rise", [4, 4.5, 5])
def test_an_underlined_superscript_is_no_numerator(rise):
    """As references of web pages, over a shorter line of text."""
    content = text_at(72, 400, "extension", 10) + text_at(126, 400 + rise, "[4]", 7)
    content += rule(126, 400 + rise - 0.8, 12.6, 10, "border") + text_at(140, 400, "and more", 10)
    assert read(content + text_at(126, 388, "ab", 10)).split("\n") == ["extension^[4] and more", "ab"]


def test_cells_over_and_under_a_rule_of_their_column_are_none():
    cells = [(72, "Qty"), (150, "12"), (250, "a")], [(75.6, "4"), (153.6, "3"), (250, "b")]
    content = "".join(text_at(x, 700 - 14 * i, text, 12) for i, row in enumerate(cells) for x, text in row)
    content += "".join(rule(x, 696, WIDTH * 12 * len(text), 12) for x, text in cells[0][:2])
    assert read(content).split("\n") == ["Qty\t12\ta", "4\t3\tb"]
