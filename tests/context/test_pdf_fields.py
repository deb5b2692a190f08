"""Values of form fields are read at their places, beside their labels."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lkv.context.document_reader import parse_document
from tests.context.pdf_writer import lines, pdf

WORDS = st.text("abcdefghKLMN", min_size=2, max_size=8)


def text_at(x: float, y: float, text: str) -> str:
    return f"BT /F1 11 Tf {x:.1f} {y:.1f} Td ({text}) Tj ET\n"


def read(content: str, widgets: list[str], page: str = "") -> str:
    """Read a page with form fields, each given by its rectangle and more entries."""
    references = " ".join(f"{100 + i} 0 R" for i in range(len(widgets)))
    objects = {
        100 + i: f"<< /Type /Annot /Subtype /Widget /T (f{i}.{72}) {widget} >>" for i, widget in enumerate(widgets)
    }
    catalog = f"/AcroForm << /Fields [{references}] >>"
    return parse_document(
        pdf(content, page=f"/Annots [{references}] {page}", objects=objects, catalog=catalog), "a.pdf"
    ).text


def field(kind: str, value: str) -> tuple[str, str]:
    """Return the entries of a field, and its text."""
    return {
        "text": (f"/FT /Tx /V ({value})", value),
        "choice": (f"/FT /Ch /V (1) /Opt [[(0) (other)] [(1) ({value})]]", value),
        "empty": ("/FT /Tx", ""),
        "ticked": ("/FT /Btn /V /Yes /AS /Yes", "[x]"),
        "unticked": ("/FT /Btn /V /Off /AS /Off", "[ ]"),
        "button": ("/FT /Btn /Ff 65536", ""),
    }[kind]


FIELDS = st.builds(field, st.sampled_from(["text", "choice", "empty", "ticked", "unticked", "button"]), WORDS)


@given(
    rows=st.lists(st.lists(st.tuples(WORDS, FIELDS), min_size=2, max_size=2), min_size=1, max_size=5),
    columns=st.integers(1, 2),
    gap=st.floats(60, 110),
    lift=st.floats(-5, -2),
    angle=st.sampled_from([0, 90]),
)
def test_values_follow_the_labels_on_their_lines(rows, columns, gap, lift, angle):
    content, widgets, shown = "", [], []
    for number, row in enumerate(rows):
        y = 700 - 24 * number
        for column, (label, (entries, _)) in enumerate(row[:columns]):
            x = 60 + 270 * column
            content += text_at(x, y, f"{label}:")
            box = [x + gap, y + lift, x + gap + 90, y + lift + 16]
            box = [800 - box[1], box[0], 800 - box[3], box[2]] if angle else box
            widgets.append(f"/Rect [{' '.join(map('{:.1f}'.format, box))}] {entries}")
        shown.append(" ".join(f"{label}: {text}".strip() for label, (_, text) in row[:columns]))
    content = f"q 0 1 -1 0 800 0 cm {content} Q" if angle else content
    page = "/MediaBox [0 0 800 800] " + f"/Rotate {angle}"
    lines = read(content, widgets, page).split("\n")
    assert [re.sub("\t+", " ", line.rstrip("\t")) for line in lines] == shown  # two tabs around an empty field


@given(labels=st.lists(WORDS, min_size=1, max_size=4), ticks=st.lists(st.booleans(), min_size=4, max_size=4))
def test_boxes_stand_before_the_labels_behind_them(labels, ticks):
    content = "".join(text_at(90, 700 - 20 * i, label) for i, label in enumerate(labels))
    boxes = [f"/Rect [72 {697 - 20 * i} 84 {709 - 20 * i}]" for i in range(len(labels))]
    widgets = [
        f"{box} /FT /Btn /Ff 32768 /AS /{'On' if tick else 'Off'}" for box, tick in zip(boxes, ticks, strict=False)
    ]
    shown = [f"[{'x' if tick else ' '}] {label}" for label, tick in zip(labels, ticks, strict=False)]
    assert read(content, widgets).split("\n") == shown


@pytest.mark.parametrize("spaces", [0, 2, 3])
@pytest.mark.parametrize("offset", [0, 3, 6])
def test_boxes_between_numbers_and_text_leave_columns_apart(spaces, offset):
    left = ["1 [ ] Single people", "2 [ ] Married people who file together", "3 [ ] Married people, with the name"]
    right = ["4 [ ] Head of household, see instructions", "if the person is a child then give it", "its name here"]
    content, boxes = "", []
    for x, column in ((60, [*left, "and full name here of the person"]), (320, [*right, "5 [ ] Widows with children"])):
        for i, text in enumerate(column):
            y = 700 - 13 * i - offset * (x == 320)
            number, _, rest = text.rpartition(" [ ] ")
            content += text_at(x, y, number + " " * spaces) * bool(number) + text_at(x + 32, y, rest)
            boxes += [f"/Rect [{x + 12} {y - 2} {x + 22} {y + 8}] /FT /Btn /AS /Off"] if number else []
    shown = [*left, "and full name here of the person", *right, "5 [ ] Widows with children"]
    assert read(content, boxes).split("\n") == shown


def test_a_value_within_a_sentence_or_below_its_label():
    content = text_at(72, 700, "I,") + text_at(190, 700, "of the pier, agree.") + text_at(72, 650, "Remarks")
    boxes = "/Rect [84 697 188 712] /FT /Tx /V (Ada Byron)", "/Rect [72 600 300 645] /FT /Tx /V (one\\r\\rtwo)"
    assert read(content + lines("Date", y=560), [*boxes]) == "I, Ada Byron of the pier, agree.\nRemarks\none\ntwo\nDate"


@pytest.mark.parametrize("rectangle", ["[0 0 0 0]", "[1 null 90 20]", "[1 2]", "(here)"])
def test_a_field_without_a_place_is_listed_behind_the_pages(rectangle):
    assert read(text_at(72, 700, "Form"), [f"/Rect {rectangle} /FT /Tx /V (42)"]) == "Form\n\nf0.72: 42"


@pytest.mark.parametrize(("entries", "shown"), [("/TU (Height)", "Height: 42"), ("", "f0.72: 42")])
def test_a_field_without_a_label_has_its_name(entries, shown):
    content = text_at(72, 700, "Form") + text_at(72, 300, "End")
    assert read(content, [f"/Rect [300 500 390 516] /FT /Tx /V (42) {entries}"]) == f"Form\n{shown}\nEnd"
