"""Documents as text: what a reader sees, whatever the format."""

import io
import sys
from types import SimpleNamespace

import pypdf
import pytest

from lkv.context.document_reader import read_document
from lkv.errors import DocumentError, MissingPackageError

PAGE = b"""<!DOCTYPE html><html><head><title>Log</title><style>p { color: red }</style></head><body>
<p>The keeper &amp; her <b>lamp</b>.</p><script>alert("no")</script>
<table><tr><td>height</td><td>42 m</td></tr></table></body></html>"""


def pdf(*pages: str) -> bytes:
    """A PDF of one line a page, written by hand."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    parts = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, line in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 700 Td ({line}) Tj ET".encode()
        page = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
        parts.append(f"{page}/Contents {5 + 2 * i} 0 R >>".encode())
        parts.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, part in enumerate(parts, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, part)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(parts) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (len(parts) + 1, start)
    return bytes(out)


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
    assert reading(name, pdf("The keeper counted.", "Forty-two steps.")).split("\n\n") == [
        "The keeper counted.",
        "Forty-two steps.",
    ]


def test_standard_input_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("Öl and water".encode())))
    assert read_document("-") == "Öl and water"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b" \n", "has no text"),
        ("a.bin", b"\xff\xfe\x00", "cannot be read as text"),
        ("a.html", b"<html><body></body></html>", "has no text"),
        ("a.pdf", pdf(""), "a scanned document must go through text recognition"),
        ("b.pdf", b"%PDF-1.7 and then nothing", "is a damaged PDF"),
        ("c.pdf", pdf("x").replace(b"trailer", b"trailer 5"), "is a damaged PDF"),
    ],
)
def test_what_is_no_text_is_one_sentence(reading, name, data, message):
    with pytest.raises(DocumentError, match=message):
        reading(name, data)


def test_an_encrypted_document_without_what_reads_it_is_named(reading, monkeypatch):

    def refuse(*_):
        raise pypdf.errors.DependencyError("cryptography>=3.1 is required for AES algorithm")

    monkeypatch.setattr(pypdf, "PdfReader", refuse)
    with pytest.raises(DocumentError, match=r"a\.pdf is encrypted.*pip install 'pypdf\[crypto\]'"):
        reading("a.pdf", pdf("x"))


def test_a_missing_reader_is_named(reading, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(MissingPackageError, match=r"reading PDF needs pypdf.*pip install .*\[documents\]"):
        reading("a.pdf", pdf("x"))


@pytest.mark.parametrize("depth", [10, 254, 300])
def test_nested_html_is_read_whole_or_refused(reading, depth):
    page = b"<html><body>" + b"<div>" * depth + b"inside" + b"</div>" * depth + b"<p>after</p></body></html>"
    assert reading("a.html", page).split() == ["inside", "after"]
    with pytest.raises(DocumentError, match="nested too deeply"):
        reading("b.html", page.replace(b"<div>", b"<div>" * 500))


def test_html_with_an_xml_declaration_and_odd_bytes(reading):
    page = '<?xml version="1.0" encoding="latin-1"?><html><body><p>Brücke</p></body></html>'
    assert reading("a.xhtml", page.encode()).strip() == "Brücke"


@pytest.mark.parametrize("name", [3, None, b"a", "a\0b"])
def test_what_is_no_path_is_refused(name):
    with pytest.raises(DocumentError, match="must be a path"):
        read_document(name)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("<html><body>one</body></html><p>two</p>", ["one", "two"]),
        ("<html><body>one</BODY ></html\n><html><body><p>two</p></body></html>three", ["one", "two", "three"]),
        ("<dl><dt>2023</dt><dd>17</dd><dt>2024</dt><dd>18</dd></dl>", ["2023", "17", "2024", "18"]),
        ("<form>Tel 12<hr>34</form>56", ["Tel", "12", "34", "56"]),
        ("<details><summary>1</summary>2</details><fieldset><legend>3</legend>4</fieldset>5", list("12345")),
        ("<select><option>1</option><option>2</option></select><menu><li>3</li></menu>4", ["1", "2", "*", "3", "4"]),
        ("1<section>2</section>3<center>4</center>5", list("12345")),
        ("<table><caption>1</caption><thead><tr><th>2<th>3</thead><tr><td>4<td>5</table>", list("12345")),
    ],
)
def test_blocks_of_a_page_are_apart_and_none_is_lost(reading, page, words):
    assert reading("page.html", page.encode()).split() == words


@pytest.mark.parametrize("name", ["log.txt", "log.html"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_text_of_two_bytes_a_letter_is_read_by_its_mark_and_else_refused(reading, name, encoding):
    text = "<html><p>Forty-two steps.</p></html>" if name.endswith("html") else "Forty-two steps."
    with pytest.raises(DocumentError, match=r"holds NUL characters, .*; save it as UTF-8"):
        reading(name, text.encode(encoding))
    if encoding.startswith("utf-16"):
        assert reading(name, ("\ufeff" + text).encode(encoding)).strip() == "Forty-two steps."


@pytest.mark.parametrize(
    "start",
    [
        b"\xef\xbb\xbf",
        b"<?xml version='1.0'?>\n",
        b"<!-- saved -->\n<!-- twice -->",
        b"\n <?xml version='1.0'?><!-- a -->",
    ],
)
def test_a_page_is_known_behind_marks_comments_and_declarations(reading, start):
    text = reading("page", start + PAGE)
    assert "The keeper & her lamp." in text and "<" not in text


@pytest.mark.parametrize(
    ("start", "encoding"),
    [
        ("<meta charset=windows-1251>", "windows-1251"),
        ("<meta http-equiv='Content-Type' content='text/html; charset=Shift_JIS'>", "shift_jis"),
        ("<meta charset='iso-2022-jp'>", "iso-2022-jp"),
        ("<meta charset='iso-8859-1'>", "windows-1252"),
        ("<?xml version='1.0' encoding='koi8-r'?><html>", "koi8-r"),
        ("<meta charset='iso-8859-1'>", "utf-8"),  # misdeclared
        ("", "utf-8"),
    ],
)
def test_a_page_is_decoded_as_it_declares_or_as_utf_8(reading, start, encoding):
    words = {"windows-1251": "маяк", "koi8-r": "маяк", "windows-1252": "café €", "utf-8": "café"}.get(encoding, "灯台")
    assert words in reading("page.html", f"{start}<p>{words}</p>".encode(encoding))


def test_a_page_of_an_unknown_encoding_is_refused(reading):
    with pytest.raises(DocumentError, match="declares the unknown encoding 'klingon'"):
        reading("page.html", b"<meta charset=klingon><p>\xff</p>")


def test_form_fields_and_notes_of_a_pdf_are_read_and_other_parts_named(reading, tmp_path, capsys):
    writer = pypdf.PdfWriter(io.BytesIO(pdf("The lamp is lit.", "")))
    name, text = pypdf.generic.NameObject, pypdf.generic.TextStringObject

    def dictionary(**entries):
        return pypdf.generic.DictionaryObject({name(f"/{key}"): value for key, value in entries.items()})

    field = dictionary(
        Type=name("/Annot"), Subtype=name("/Widget"), FT=name("/Tx"), T=text("height"), V=text("42 m"),
        Rect=pypdf.generic.ArrayObject([pypdf.generic.NumberObject(0)] * 4),
    )  # fmt: skip
    note = dictionary(Type=name("/Annot"), Subtype=name("/Text"), Contents=text("ask the keeper"))
    references = pypdf.generic.ArrayObject([writer._add_object(field), writer._add_object(note)])
    writer.pages[0][name("/Annots")] = references
    form = dictionary(Fields=pypdf.generic.ArrayObject(references[:1]))
    writer._root_object[name("/AcroForm")] = writer._add_object(form)
    writer.add_attachment("plan.txt", b"plan")
    file = io.BytesIO()
    writer.write(file)
    read = reading("form.pdf", file.getvalue())
    assert "The lamp is lit." in read and "height: 42 m" in read and "ask the keeper" in read
    said = capsys.readouterr().err
    assert "no text on 1 pages (2)" in said and "attached files are not read (plan.txt)" in said
