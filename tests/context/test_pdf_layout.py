"""Rows of random words, drawn in pieces in random order and directions, are read as they are seen."""

import math
import textwrap
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from unicodedata import combining, normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lkv.context.document_reader import parse_document
from lkv.context.flow_text import script_text
from lkv.errors import DocumentError
from tests.context.pdf_documents import PDFS
from tests.context.pdf_writer import TYPE1, lines, pdf, stream

SIZE = 10.0
WIDTH = 0.6 * SIZE  # of each letter of Courier
COURIER = (
    "/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Courier /Encoding /WinAnsiEncoding >> >> >>"
)
HEBREW = "אבגדהוזחטיכלמנסעפצקרשת"
WORDS = st.text("abcdefghKLMN0123456789", min_size=1, max_size=8)
LONG_WORDS = WORDS.filter(lambda word: len(word) > 1)


FIXTURES = Path(__file__).parent.parent / "fixtures"
ACCENTS = {
    "acute": "\u0301",
    "grave": "\u0300",
    "circumflex": "\u0302",
    "dieresis": "\u0308",
    "caron": "\u030c",
    "cedilla": "\u0327",
}
COMPOSED = {  # letter and accent
    letter: (base, name)
    for base in "aceinosuzACESUZ"
    for name, mark in ACCENTS.items()
    if len(letter := normalize("NFC", base + mark)) == 1
}
PARAGRAPHS = st.lists(WORDS, min_size=15, max_size=60).map(" ".join)


def text_at(x: float, y: float, text: str) -> str:
    return f"BT /F1 {SIZE} Tf {x:.2f} {y:.2f} Td ({text}) Tj ET\n"


def read(data: bytes) -> str:
    return parse_document(data, "file.pdf").text


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Rows of cells of one or two words, and the operations that draw their pieces, in random order."""
    columns = draw(st.integers(1, 4))
    rows = draw(
        st.lists(
            st.lists(st.lists(WORDS, min_size=1, max_size=2), min_size=columns, max_size=columns),
            min_size=1,
            max_size=6,
        )
    )
    starts = [0.0]
    for column in range(columns):
        widest = max(len(" ".join(row[column])) for row in rows)
        starts.append(starts[-1] + widest * WIDTH + draw(st.floats(1.2, 4)) * SIZE)
    leading, space = draw(st.floats(0.95, 2)) * SIZE, draw(st.floats(0.2, 0.6)) * SIZE
    pieces = []
    for number, row in enumerate(rows):
        for start, cell in zip(starts, row, strict=False):
            x = start
            for word in cell:
                cuts = sorted({0, len(word), *draw(st.lists(st.integers(0, len(word)), max_size=2))})
                for first, last in pairwise(cuts):
                    place = f"{x + first * WIDTH:.3f} {-leading * number:.3f}"
                    pieces.append(f"BT /F1 {SIZE} Tf {place} Td ({word[first:last]}) Tj ET")
                x += len(word) * WIDTH + space
    return ["\t".join(map(" ".join, row)) for row in rows], draw(st.permutations(pieces))


@given(
    table=tables(), angle=st.sampled_from([0, 90, 180, 270, 7, 45, 200]), rotation=st.sampled_from([0, 90, 180, 270])
)
def test_a_table_gives_its_rows(table, angle, rotation):
    rows, pieces = table
    across, up = (0.3 * turn(math.radians(angle)) for turn in (math.cos, math.sin))
    content = f"q {across:.6f} {up:.6f} {-up:.6f} {across:.6f} 300 400 cm\n" + "\n".join(pieces) + "\nQ"
    assert read(pdf(content, page=f"{COURIER} /Rotate {rotation}")) == "\n".join(rows)


@given(
    columns=st.integers(2, 3),
    paragraphs=st.lists(st.tuples(st.booleans(), PARAGRAPHS), min_size=3, max_size=9),
    height=st.integers(15, 30),
    gap=st.floats(1.1, 2.5),
    space=st.floats(0, 0.8),
    has_number_first=st.booleans(),
)
def test_columns_are_read_one_after_the_other(columns, paragraphs, height, gap, space, has_number_first):
    length = 28
    flow = [  # the leading above each line, and the line
        (1.2 + (not number) * (space + has_heading * 0.5), line)
        for has_heading, paragraph in paragraphs
        for number, line in enumerate(["Heading of a part"] * has_heading + textwrap.wrap(paragraph, length))
    ]
    page_number, content, shown = text_at(300, 20, "Page 7"), "", []
    column, y = 0, 0.0
    for leading, line in flow:
        if y + leading > height:
            column, y = column + 1, 0.0
        if column < columns:
            y += leading
            content += text_at(30 + column * (length * WIDTH + gap * SIZE), 760 - y * SIZE, line)
            shown.append(line)
    content = page_number + content if has_number_first else content + page_number
    assert read(pdf(content, page=COURIER)) == "\n".join([*shown, "Page 7"])


@given(
    rows=st.lists(st.tuples(*[st.lists(WORDS, min_size=1, max_size=5)] * 3), min_size=2, max_size=12),
    gap=st.floats(1.1, 4),
    by_columns=st.booleans(),
)
def test_rows_of_long_cells_stay_whole(rows, gap, by_columns):
    texts = [[" ".join(words).capitalize() for words in row[:2]] + [f"$ {len(row[2]) * 137:,}"] for row in rows]
    starts = [0.0]
    for column in range(2):
        starts.append(starts[-1] + max(len(row[column]) for row in texts) * WIDTH + gap * SIZE)
    cells = [
        (column, text_at(20 + start + (column == 2) * (60 - len(text) * WIDTH), 760 - 14 * number, text))
        for number, row in enumerate(texts)
        for column, (start, text) in enumerate(zip(starts, row, strict=True))
    ]
    cells.sort(key=lambda cell: cell[0] * by_columns)
    page = f"{COURIER} /MediaBox [0 0 900 792]"
    assert read(pdf("".join(text for _, text in cells), page=page)) == "\n".join(map("\t".join, texts))


@given(
    words=st.lists(st.text(HEBREW, min_size=2, max_size=6) | st.integers(0, 99999).map(str), min_size=2, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_a_line_of_hebrew_and_numbers_is_read_from_right_to_left(words, order):
    if words[0].isdigit() and all(word.isdigit() for word in words):
        return
    seen = " ".join(word if word.isdigit() else word[::-1] for word in reversed(words))
    names = "".join(f"<{0x61 + i:02x}> <{ord(letter):04x}>" for i, letter in enumerate(HEBREW))
    cmap = (
        f"begincmap 1 begincodespacerange <00> <ff> endcodespacerange {len(HEBREW)} beginbfchar {names} endbfchar "
        "1 beginbfrange <20> <39> <0020> endbfrange endcmap"
    )
    letters = [(x, chr(0x61 + HEBREW.index(c)) if c in HEBREW else c) for x, c in enumerate(seen) if c != " "]
    as_line = "BT /F1 10 Tf 50 500 Td (" + "".join(chr(0x61 + HEBREW.index(c)) if c in HEBREW else c for c in seen)
    order.shuffle(letters)
    one_by_one = "".join(f"BT /F1 10 Tf {50 + 6 * x} 500 Td ({c}) Tj ET\n" for x, c in letters)
    for content in (as_line + ") Tj ET", one_by_one):
        font = "<< /Type /Font /Subtype /Type1 /BaseFont /Courier /ToUnicode 101 0 R >>"
        page = "/Resources << /Font << /F1 100 0 R >> >>"
        assert read(pdf(content, page=page, objects={100: font, 101: stream(cmap)})) == " ".join(words)


def test_lines_of_arabic_and_hebrew_are_read_in_logical_order():
    """The fixture has random lines with numbers, and as python-bidi 0.6 displays them, with mirrored brackets."""
    pairs = [line.split("\t") for line in (FIXTURES / "right_to_left.tsv").read_text("utf-8").splitlines()]
    for start in range(0, len(pairs), 4):
        logical, seen = zip(*pairs[start : start + 4], strict=True)
        codes = {character: code for code, character in enumerate(sorted(set("".join(seen))), 0x21)}
        names = "".join(f"<{code:02x}> <{ord(character):04x}>" for character, code in codes.items())
        content = "".join(
            f"BT /F1 10 Tf 20 {760 - 14 * number} Td <{bytes(codes[each] for each in line).hex()}> Tj ET\n"
            for number, line in enumerate(seen)
        )
        assert read(mapped_pdf(content, names, len(codes))) == "\n".join(logical)


def mapped_pdf(content: str, names: str, count: int) -> bytes:
    """Write a page in Courier with a map to Unicode of `count` characters."""
    cmap = f"begincmap 1 begincodespacerange <00> <ff> endcodespacerange {count} beginbfchar {names} endbfchar endcmap"
    widths = f"/FirstChar 0 /LastChar 255 /Widths [{' 600' * 256}]"
    font = f"<< /Type /Font /Subtype /Type1 /BaseFont /Courier {widths} /ToUnicode 101 0 R >>"
    page = "/MediaBox [0 0 900 792] /Resources << /Font << /F1 100 0 R >> >>"
    return pdf(content, page=page, objects={100: font, 101: stream(cmap)})


@given(
    rows=st.lists(st.lists(LONG_WORDS, min_size=4, max_size=8), min_size=1, max_size=4),
    scale=st.integers(50, 100),
    width=st.sampled_from([350, 450, 556]),
    space=st.floats(0.24, 0.6),
    kerning=st.lists(st.floats(-0.03, 0.03), min_size=64, max_size=64),
)
def test_narrow_spaces_of_condensed_text_separate_words(rows, scale, width, space, kerning):
    """Spaces are given by the width of a letter: 0.084 of the size and more."""
    content = f"BT /F1 10 Tf {scale} Tz 12 TL 30 700 Td "
    for row in rows:
        words = ["".join(f"({c}) {kerning[i] * width:.0f} " for i, c in enumerate(word)) for word in row]
        content += f"[{f' {-space * width:.0f} '.join(words)}] TJ T* "
    font = f"{TYPE1} /FirstChar 32 /LastChar 126 /Widths [{f' {width}' * 95}] >>"
    page = "/Resources << /Font << /F1 100 0 R >> >>"
    assert read(pdf(content + "ET", page=page, objects={100: font})) == "\n".join(map(" ".join, rows))


@given(
    words=st.lists(st.text("abceimnosuzACESUZ" + "".join(COMPOSED), min_size=1, max_size=8), min_size=1, max_size=5),
    is_before=st.booleans(),
    shift=st.integers(-60, 60),
)
def test_accents_of_their_own_are_put_on_their_letters(words, is_before, shift):
    names = [*ACCENTS, "dotlessi"]
    content = ""
    for letter in " ".join(words):
        base, mark = COMPOSED.get(letter, (letter, ""))
        drawn = f"({base})"
        if mark:
            drawn = f"(\\{1 + names.index('dotlessi'):03o})" if base == "i" else drawn
            rise = 2 * base.isupper()
            above = f"{shift}] TJ {rise} Ts [(\\{1 + names.index(mark):03o})] TJ 0 Ts [{-shift}"
            drawn = f"{above} 500 {drawn}" if is_before else f"{drawn} 500 {above}"
        content += drawn
    encoding = f"/Encoding << /Differences [1 {' '.join('/' + name for name in names)}] >>"
    font = f"{TYPE1} /FirstChar 0 /LastChar 127 /Widths [{' 500' * 128}] {encoding} >>"
    page = "/Resources << /Font << /F1 100 0 R >> >>"
    assert read(pdf(f"BT /F1 10 Tf 30 500 Td [{content}] TJ ET", page=page, objects={100: font})) == " ".join(words)


@given(
    base=st.sampled_from(["10", "in 1990", "CO", "page 17.", "the storm of 1901"]),
    script=st.integers(0, 99).map(str),
    after=st.sampled_from(["", " kg", ", then", " of 17"]),
    size=st.floats(6, 12),
    rise=st.floats(0.2, 0.45) | st.floats(-0.3, -0.15),
)
def test_raised_and_lowered_digits_of_any_size_are_scripts(base, script, after, size, rise):
    drawn = f"{12 * rise:.2f} Ts /F1 {size:.2f} Tf ({script}) Tj 0 Ts /F1 12 Tf ({after})"
    content = f"BT /F1 12 Tf 72 700 Td ({base}) Tj {drawn} Tj ET\n"
    shown = script_text(script, base[-1], is_raised=rise > 0)
    assert read(pdf(content + lines("and 17 more", y=670))) == f"{base}{shown}{after}\nand 17 more"


@pytest.mark.parametrize("text", ["L\u2019élève naïf a été", "Tiếng Việt ngữ", "ẹ̀kọ́ ọ̀rọ̀", "в ста́рый за́мок", "kṝ ṁ"])
@pytest.mark.parametrize("has_place", [True, False])
def test_combining_characters_follow_their_letters(text, has_place):
    """Text that was not composed, its marks drawn behind their letters or over them."""
    parts = normalize("NFD", text)
    codes = {character: code for code, character in enumerate(sorted(set(parts)), 0x21)}
    names = "".join(f"<{code:02x}> <{ord(character):04x}>" for character, code in codes.items())
    drawn = "".join(
        f"<{codes[each]:02x}>" if has_place or not combining(each) else f" 350 <{codes[each]:02x}> 250 "
        for each in parts
    )
    assert read(mapped_pdf(f"BT /F1 10 Tf 20 700 Td [{drawn}] TJ ET", names, len(codes))) == normalize("NFC", text)


@pytest.mark.parametrize("ligature", ["<0644 0627>", "<FEFB>"])
def test_the_letters_of_an_arabic_ligature_keep_their_order(ligature):
    letters = {0x21: "<0633>", 0x22: ligature, 0x23: "<0645>", 0x24: "<0020>"}
    names = "".join(f"<{code:02x}> {unicode.replace(' ', '')}" for code, unicode in letters.items())
    content = "BT /F1 10 Tf 20 700 Td <23222124 22242322> Tj ET"
    assert read(mapped_pdf(content, names, len(letters))) == "لام لا سلام"


@pytest.mark.parametrize("size", [14, 18, 30])
def test_tall_brackets_leave_the_text_between_them(size):
    pieces = [(12, "A = "), (size, "("), (12, "a + 25"), (size, ")"), (12, " = "), (size, "["), (12, "7"), (size, "]")]
    drawn = "".join(f"/F1 {own} Tf <{text.encode('ascii').hex()}> Tj " for own, text in pieces)
    assert read(pdf(f"BT 72 700 Td {drawn} ET")) == "A = (a + 25) = [7]"


@given(
    words=st.lists(LONG_WORDS, min_size=16, max_size=30),
    count=st.integers(2, 4),
    offset=st.floats(-0.2, 0.3),
    gap=st.floats(0, 0.4),
    is_last=st.booleans(),
)
def test_a_capital_that_is_several_lines_high_begins_the_first_word(words, count, offset, gap, is_last):
    """On the base line of the last line beside it, or a little off."""
    leading, size = 1.2 * SIZE, (1.2 * (count - 1) + 0.6) * SIZE / 0.6
    texts = textwrap.wrap(" ".join(words), 22)
    capital = f"BT /F1 {size:.2f} Tf 60 {700 - leading * (count - 1) + offset * SIZE:.2f} Td (Q) Tj ET\n"
    start = 60 + WIDTH * size / SIZE + gap * SIZE
    content = [text_at(start if i < count else 60, 700 - leading * i, text) for i, text in enumerate(texts)]
    content.insert(is_last * len(content), capital)
    assert [line.strip() for line in read(pdf("".join(content), page=COURIER)).split("\n")] == [
        f"Q{texts[0]}",
        *texts[1:],
    ]


@given(
    value=st.sampled_from(["3/4/1980", "1,250.00", "77-4411", "12.5 kg"]),
    rise=st.floats(1.7, 4),
    size=st.floats(9, 12),
)
def test_a_value_over_the_line_of_a_form_is_not_a_script(value, rise, size):
    content = text_at(60, 700, "Amount due: " + "_" * 30)
    content += f"BT /F1 {size:.1f} Tf 150 {700 + rise:.1f} Td ({value}) Tj ET\n"
    assert value in read(pdf(content))


@given(
    words=st.lists(LONG_WORDS, min_size=2, max_size=6),
    widths=st.lists(st.integers(250, 1000), min_size=95, max_size=95),
    kerning=st.lists(st.integers(-70, 90), min_size=60, max_size=60),
    space=st.integers(210, 900),
)
def test_words_are_as_wide_as_their_font_says(words, widths, kerning, space):
    font = f"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /FirstChar 32 /LastChar 126 /Widths {widths} >>"
    kerned = [" ".join(f"({c}) {kerning[i]}" for i, c in enumerate(word[:-1])) + f" ({word[-1]})" for word in words]
    content = f"BT /F1 10 Tf 30 500 Td [{f' {-space} '.join(kerned)}] TJ ET"
    page = "/Resources << /Font << /F1 100 0 R >> >>"
    assert read(pdf(content, page=page, objects={100: font.replace(",", "")})) == " ".join(words)


def embedded_pdf(content: str, glyphs: dict[int, str], widths: dict[int, int]) -> bytes:
    """Write content in DejaVu Sans, whose glyphs have these characters, and these widths by a thousandth of an em."""
    file = (Path(pytest.importorskip("matplotlib").get_data_path()) / "fonts/ttf/DejaVuSans.ttf").read_bytes()
    names = "".join(f"<{glyph:04x}> <{ord(character):04x}>" for glyph, character in glyphs.items())
    system = "/CIDSystemInfo << /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> /CIDToGIDMap /Identity"
    box = "/Flags 4 /FontBBox [0 0 1000 1000] /ItalicAngle 0 /Ascent 900 /Descent -200 /StemV 80"
    entries = "/Encoding /Identity-H /DescendantFonts [101 0 R] /ToUnicode 102 0 R"
    system += f" /W [{''.join(f'{glyph} [{width}]' for glyph, width in widths.items())}]"
    space = "1 begincodespacerange <0000> <ffff> endcodespacerange"
    fonts = {
        100: f"<< /Type /Font /Subtype /Type0 /BaseFont /X {entries} >>",
        101: f"<< /Type /Font /Subtype /CIDFontType2 /BaseFont /X {system} /FontDescriptor 103 0 R >>",
        102: stream(f"begincmap {space} {len(glyphs)} beginbfchar {names} endbfchar endcmap"),
        103: f"<< /Type /FontDescriptor /FontName /X {box} /FontFile2 104 0 R >>",
        104: stream(file.decode("latin-1"), f"/Length1 {len(file)}"),
    }
    return pdf(content, page="/Resources << /Font << /F1 100 0 R >> >>", objects=fonts)


def test_digits_are_as_wide_as_drawn_where_a_font_has_small_ones_too():
    """Of two glyphs of a digit, pdfium gives the width of one."""
    content = "BT /F1 12 Tf 72 700 Td <0014> Tj <0014> Tj ET"
    assert read(embedded_pdf(content, {20: "2", 21: "2"}, {20: 636, 21: 300})) == "22"


@pytest.mark.parametrize(
    ("turn", "before", "script", "after", "shown"),
    [
        ("1 0 0 1", "10", {2896: "5"}, " and 2", "10⁵ and 2"),
        ("0 1 -1 0", "5m", {116: "2"}, ", 2m", "5m², 2m"),
        ("-1 0 0 -1", "1990", {123: "1", 117: "3"}, ".", "1990¹³."),
        ("1 0 0 1", "", {123: "1"}, "343", "¹343"),
        ("1 0 0 1", "log", {15: "2"}, "8", "log₂8"),  # a comma is low enough
    ],
)
def test_small_digits_of_a_font_are_scripts(turn, before, script, after, shown):
    """As OpenType's `sups` and `subs` draw them: other glyphs of the same digits, on the line and in its size."""
    plain = [{ord(character) - 29: character} for character in before + after]  # as DejaVu Sans numbers its glyphs
    parts = [*plain[: len(before)], script, *plain[len(before) :]]
    codes = "".join(f"{glyph:04x}" for part in parts for glyph in part)
    glyphs = {glyph: character for part in parts for glyph, character in part.items()}
    widths = dict.fromkeys(glyphs, 600) | dict.fromkeys(script, 401)
    content = f"BT /F1 12 Tf {turn} 300 400 Tm <{codes}> Tj ET"
    assert read(embedded_pdf(content, glyphs, widths)) == shown


def test_documents_are_read_by_several_threads():
    documents = [each for each in PDFS.values() if each.text][:30]
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda each: read(each.data), documents * 3))
    assert texts == [each.text for each in documents * 3]


@pytest.mark.parametrize("place", ["forms", "glyphs"])
def test_forms_that_multiply_are_refused(place):
    depth = 30
    form = "/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /A {} 0 R >> >>"
    forms = {200 + i: stream("/A Do /#41 Do", form.format(201 + i)) for i in range(depth)}
    forms[200 + depth] = stream("0 0 1 1 re f" * 9)
    font = "<< /Subtype /Type3 /FontMatrix [1 0 0 1 0 0] /CharProcs << /a 200 0 R >> /FirstChar 97 /LastChar 97 "
    data = pdf(
        lines("a") + "/A Do" * (place == "forms"),
        page="/Resources << /XObject << /A 200 0 R >> /Font << /F1 100 0 R >> >>",
        objects=forms | {100: font + "/Widths [1] /Encoding << /Differences [97 /a] >> >>"},
    )
    with pytest.raises(DocumentError, match=r"file\.pdf is a damaged PDF \(a page draws more than 95 MB\)"):
        read(data)
