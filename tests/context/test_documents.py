"""Small hostile documents (`tests/fixtures/documents`) with the text that a browser or reader shows of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lkv.context.document_reader import Document, parse_document
from lkv.errors import DocumentError
from tests.context.pdf_documents import PDFS
from tests.context.pdf_texts import PDF_TEXTS

FOLDER = Path(__file__).parents[1] / "fixtures" / "documents"
TEXTS = [json.loads(line) for line in (FOLDER / "text.ndjson").read_text().splitlines()]


def pages() -> dict[str, tuple[str, str, list[str]]]:
    """The source of each page, its text (⇥ stands for a tab) and what is left out of it."""
    documents = {}
    for part in re.split(r"^#### ", (FOLDER / "html.txt").read_text(), flags=re.MULTILINE)[1:]:
        name, rest = part.split("\n", 1)
        source, text, *skipped = re.split(r"^----.*\n", rest, flags=re.MULTILINE)
        documents[name] = source[:-1], text[:-1].replace("⇥", "\t"), "".join(skipped).splitlines()
    return documents


PAGES = pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_gives_what_a_browser_displays(name):
    source, text, skipped = PAGES[name]
    if text:
        assert parse_document(source.encode(), "page.html") == (text, skipped)
    else:
        with pytest.raises(DocumentError, match=f"page.html has no text but {', '.join(skipped)}"):
            parse_document(source.encode(), "page.html")


@pytest.mark.parametrize("name", PDFS | PDF_TEXTS)
def test_a_pdf_gives_what_a_reader_displays(name):
    data, text, skipped = (PDFS | PDF_TEXTS)[name]
    if text:
        document = parse_document(data, "file.pdf")  # where tabs stand is tested with random tables
        assert document == Document(document.text, list(skipped))
        assert document.text.replace("\t", " ") == text.replace("\t", " ")
    else:
        with pytest.raises(DocumentError, match=f"file.pdf has no text but {', '.join(skipped)}; a scanned document"):
            parse_document(data, "file.pdf")


@pytest.mark.parametrize("case", TEXTS, ids=[case["name"] for case in TEXTS])
def test_a_text_is_read_whole_in_its_encoding_or_refused(case: dict[str, Any]):
    is_hex = case["encoding"] == "hex"
    data = bytes.fromhex(case["text"]) if is_hex else case["text"].encode(case["encoding"])
    if "error" in case:
        with pytest.raises(DocumentError, match=re.escape(case["error"])) as refusal:
            parse_document(data, case["file"])
        assert str(refusal.value).startswith(case["file"])
    else:
        assert parse_document(data, case["file"]) == (case.get("reads", case["text"]), case.get("skipped", []))


PIXELS = {"px": 1, "pt": 4 / 3, "em": 16, "rem": 16, "ch": 8, "in": 96}
LENGTHS = st.tuples(st.integers(-8, 24).map(lambda number: number / 4), st.sampled_from(sorted(PIXELS)))
BOXES = st.fixed_dictionaries({}, optional=dict.fromkeys(("margin", "padding-left", "padding-right"), LENGTHS))


@given(st.lists(BOXES, min_size=1, max_size=4), st.booleans())
def test_numbers_run_together_only_where_they_touch(boxes, has_sheet):
    styles = [";".join(f"{name}:{value}{unit}" for name, (value, unit) in box.items()) for box in boxes]
    sheet = "".join(f".c{number}{{{style}}}" for number, style in enumerate(styles)) if has_sheet else ""
    page, expected, gap = f"<style>{sheet}</style>", "", 0.0
    for number, (box, style) in enumerate(zip(boxes, styles, strict=True)):
        page += f"<b class=c{number}>{number}</b>" if has_sheet else f'<b style="{style}">{number}</b>'
        pixels = {name: value * PIXELS[unit] for name, (value, unit) in box.items()}
        left, right = (pixels.get("margin", 0) + max(0, pixels.get(f"padding-{side}", 0)) for side in ("left", "right"))
        expected += f" {number}" if number and gap + left > 3.99 else f"{number}"
        gap = right
    assert parse_document(page.encode(), "page.html").text == expected


@given(
    st.lists(st.tuples(st.none() | st.integers(1, 3999), st.integers(-2, 3)), min_size=1, max_size=6),
    st.integers(1, 3900),
    st.booleans(),
)
def test_numbers_of_lists_count_as_their_styles_say(items, start, is_reversed):
    page, number, expected = "", start, []
    for value, step in items:
        step = -step if is_reversed else step
        number = value if value is not None else number + step
        attribute = f" value={value}" if value is not None else ""
        page += f'<li{attribute} style="counter-increment: list-item {step}">x'
        expected.append(f"{roman(number)}. x" if 0 < number < 4000 else f"{number}. x")
    reset = f"counter-reset: list-item {start}"
    page = f'<ol {"reversed" * is_reversed} style="list-style-type: lower-roman; {reset}">{page}</ol>'
    assert parse_document(page.encode(), "page.html").text.splitlines() == expected


def roman(number: int) -> str:
    digits = [(("", *parts.split()), 10**place) for place, parts in enumerate(ROMAN)]
    return "".join(parts[number // unit % 10] for parts, unit in reversed(digits))


ROMAN = ("i ii iii iv v vi vii viii ix", "x xx xxx xl l lx lxx lxxx xc", "c cc ccc cd d dc dcc dccc cm", "m mm mmm")


DISPLAYS = "block contents flex flow-root grid inline inline-block inline-flex inline-grid inline-table".split()
DISPLAYS += "list-item table table-cell table-row table-row-group".split()
INNER_TAGS = {"div": "div", "table": "tbody", "tbody": "tr", "tr": "td", "td": "table"}
TREES: st.SearchStrategy[Any] = st.none()  # words (None), and elements: a `display` (empty for the tag's) and parts
for _ in range(4):
    TREES = st.none() | st.tuples(st.just("") | st.sampled_from(DISPLAYS), st.lists(TREES, min_size=2, max_size=4))


def markup(tree: Any, tag: str, words: list[str]) -> str:
    """A tree as elements; its words are added to `words`."""
    display, parts = tree or ("", [None])
    content = ""
    for part in parts:
        if part is None and tag in ("div", "td"):
            words.append(f"w{len(words)}")
            content += f" {words[-1]} "
        else:
            content += markup(part, INNER_TAGS[tag], words)
    return f'<{tag} style="display:{display}">{content}</{tag}>'


@given(TREES, st.sampled_from(["div", "table"]))
def test_words_of_tables_stay_in_their_order(tree, tag):
    words: list[str] = []
    page = markup(tree, tag, words)
    text = parse_document(page.encode(), "page.html").text
    assert [word for word in text.split() if word != "*"] == words


@pytest.mark.parametrize("line", (FOLDER / "labels.txt").read_text().splitlines())
def test_the_labels_of_the_encoding_standard_are_known(line):
    encoding, text, labels = line.split("|")  # Python's name for it, a text, and all labels that browsers know
    for label in labels.split():
        for declaration in (
            f"<meta charset={label}>",
            f'<meta http-equiv=Content-Type content="text/html; charset={label}">',
        ):
            page = f"<!doctype html>{declaration}<p>".encode() + f"{text} abc".encode(encoding)
            assert parse_document(page, "page.html") == (f"{text} abc", []), label
