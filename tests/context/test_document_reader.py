"""Documents as text: what a reader sees, whatever the format."""

import base64
import io
import sys
import zlib
from types import SimpleNamespace

import pypdf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lkv.context import document_reader
from lkv.context.document_reader import Document, parse_document, read_document
from lkv.errors import DocumentError, MissingPackageError
from tests.context.pdf_writer import lines, pdf, stream

PAGE = b"""<!DOCTYPE html><html><head><title>Log</title><style>p { color: red }</style></head><body>
<p>The keeper &amp; her <b>lamp</b>.</p><script>alert("no")</script>
<table><tr><td>height</td><td>42 m</td></tr></table></body></html>"""


@pytest.fixture
def reading(tmp_path):
    def read(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        return read_document(str(tmp_path / name))

    return read


def test_text_and_markdown_stay_as_they_are(reading):
    text = "# Log\n\n* the *keeper* — 42 m\n"
    assert reading("log.md", text.encode()) == reading("log", b"\xef\xbb\xbf" + text.encode()) == text


@pytest.mark.parametrize("name", ["log.html", "log.HTM", "log"])
def test_html_gives_what_a_browser_shows(reading, name):
    text = reading(name, PAGE)
    assert "The keeper & her lamp." in text and "height" in text and "42 m" in text
    assert not any(word in text for word in ("alert", "color", "<", "&amp;"))


@pytest.mark.parametrize("name", ["log.pdf", "log"])
def test_pdf_gives_the_text_of_its_pages_in_order(reading, name):
    assert reading(name, pdf(lines("The keeper counted."), lines("Forty-two steps."))).split("\n\n") == [
        "The keeper counted.",
        "Forty-two steps.",
    ]


def test_standard_input_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("Öl and water".encode())))
    assert read_document("-") == "Öl and water"


def test_endless_input_is_refused(monkeypatch):
    monkeypatch.setattr(document_reader, "_MAX_BYTES", 2**20)
    with pytest.raises(DocumentError, match="/dev/zero is larger than 1 MB; give a part of it"):
        read_document("/dev/zero")
    with pytest.raises(DocumentError, match="the document is '', but"):
        read_document("")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b" \n", "has no text"),
        ("a.bin", b"\xff\xfe\x00", "cannot be read as text"),
        ("a.html", b"<html><body></body></html>", "has no text"),
        ("a.pdf", pdf(lines("")), "a scanned document must go through text recognition"),
        ("b.pdf", b"%PDF-1.7 and then nothing", "is a damaged PDF"),
        ("c.pdf", pdf(lines("x")).replace(b"trailer", b"trailer 5"), "is a damaged PDF"),
    ],
)
def test_what_is_no_text_is_one_sentence(reading, name, data, message):
    with pytest.raises(DocumentError, match=message):
        reading(name, data)


def test_an_encrypted_document_without_what_reads_it_is_named(reading, monkeypatch):

    def refuse(*_):
        raise pypdf.errors.DependencyError("cryptography>=3.1 is required for AES algorithm")

    monkeypatch.setattr("lkv.context.pdf_text.PdfReader", refuse)
    with pytest.raises(DocumentError, match=r"a\.pdf is encrypted.*pip install 'pypdf\[crypto\]'"):
        reading("a.pdf", pdf(lines("x")))


def test_a_missing_reader_is_named(reading, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(MissingPackageError, match=r"reading PDF needs pypdf.*pip install .*\[documents\]"):
        reading("a.pdf", pdf(lines("x")))


@pytest.mark.parametrize("depth", [10, 254, 300])
def test_nested_html_is_read_whole_or_refused(reading, depth):
    page = b"<html><body>" + b"<div>" * depth + b"inside" + b"</div>" * depth + b"<p>after</p></body></html>"
    assert reading("a.html", page).split() == ["inside", "after"]
    with pytest.raises(DocumentError, match="nested too deeply"):
        reading("b.html", page.replace(b"<div>", b"<div>" * 500))


@pytest.mark.parametrize("name", [3, None, b"a", "a\0b"])
def test_what_is_no_path_is_refused(name):
    with pytest.raises(DocumentError, match="must be a path"):
        read_document(name)


def test_what_is_left_out_is_named_on_stderr(reading, capsys):
    assert reading("log.html", PAGE + b"<img src=a.png><img src=b.png>")
    assert capsys.readouterr().err.endswith("log.html: left out or uncertain: 2 images; 1 script\n")
    reading("log.md", b"# Log")
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "page",
    [
        "<b>" * 100_000,
        "<div><p>" * 100_000,
        "<table><tr><td>" * 6000,
        "<div></b>" * 9000,
        '<div a=">" "><!--</div>-->' * 9000,
        "<svg><style>" + "<div>" * 9000,
    ],
)
def test_pages_that_would_take_minutes_are_refused(reading, page):
    with pytest.raises(DocumentError, match="nested too deeply"):
        reading("page.html", page.encode())


@pytest.mark.parametrize(
    "page",
    [
        "<p>one" * 20_000,
        "<li>one" * 20_000,
        "<table>" + "<tr><td>one" * 20_000,
        "<svg>" + "<text>one</text><path d='>'/>" * 20_000 + "</svg>",
        "<!--<div>--><i a='<b>'>one</i>" * 20_000,
    ],
)
def test_elements_without_end_tags_are_not_nested(reading, page):
    assert reading("page.html", page.encode()).count("one") == 20_000


def test_text_with_the_name_of_a_pdf_is_uncertain():
    assert parse_document(b"The lamp.", "a.pdf") == Document("The lamp.", ["the format, as the name says PDF"])


FILTERS = {
    "FlateDecode": zlib.compress,
    "ASCII85Decode": lambda data: base64.a85encode(data) + b"~>",
    "ASCIIHexDecode": lambda data: data.hex().encode() + b">",
    "RunLengthDecode": lambda data: b"".join(b"\x00" + data[i : i + 1] for i in range(len(data))) + b"\x80",
}
HAVE_CHECKSUMS = [["FlateDecode"], ["ASCII85Decode", "FlateDecode"], ["ASCIIHexDecode", "FlateDecode"]]


@given(
    change=st.tuples(st.sampled_from(HAVE_CHECKSUMS), st.just(1) | st.integers(0, 30))
    | st.tuples(st.lists(st.sampled_from([*FILTERS]), max_size=2), st.none()),
    place=st.floats(0.1, 0.9),
    text=st.lists(st.text("abcde 123", min_size=1), min_size=3, max_size=9),
    byte=st.integers(33, 117),
)
def test_damage_of_a_page_is_named_or_refused(change, place, text, byte):
    """A changed byte, some that are missing, or all behind one."""
    filters, count = change
    shown = [" ".join(f"{part}{number}".split()) for number, part in enumerate(text)]
    data = f"BT /F1 12 Tf 14 TL 72 700 Td {''.join(f'({line}) Tj T* ' for line in shown)} ET".encode()
    for name in reversed(filters):
        data = FILTERS[name](data)
    start = int(place * len(data))
    rest = b"" if count is None else data[start + count :]
    damaged = data[:start] + (bytes([byte]) if count == 1 else b"") + rest
    entries = f"/Filter [{' '.join('/' + name for name in filters)}]"
    try:
        document = parse_document(
            pdf("", lines("second"), objects={11: stream(damaged.decode("latin-1"), entries)}), "a.pdf"
        )
    except DocumentError:
        return
    assert document.skipped or document.text == "\n".join([*shown, "", "second"])


def test_nul_characters_of_a_pdf_are_left_out_and_counted():
    data = pdf("BT /F1 12 Tf 50 700 Td (4\x001 boats\x00.) Tj ET")
    assert parse_document(data, "file.pdf") == Document("41 boats.", ["2 NUL characters"])


def test_indented_lines_behind_a_name_take_no_time(reading):
    text = "services:\n" + "        image: web\n" * 5000 + "end"
    assert reading("a.yaml", text.encode()) == text
