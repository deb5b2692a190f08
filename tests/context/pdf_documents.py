"""Small PDFs written by hand, with the text that a reader shows of them."""

import zlib
from collections.abc import Sequence

from tests.context.pdf_forms import FORMS
from tests.context.pdf_writer import FONT, FONTS, TWO_FONTS, TYPE1, PdfDocument, lines, pdf, stream, xobject

_IMAGE = stream("\x00", "/Type /XObject /Subtype /Image /Width 1 /Height 1 /ColorSpace /DeviceGray /BitsPerComponent 8")
_SCAN = "/Resources << /Font << /F1 3 0 R >> /XObject << /Im1 100 0 R >> >>"
_LIGATURES = """/CIDInit /ProcSet findresource begin begincmap
1 begincodespacerange <00> <FF> endcodespacerange
2 beginbfchar <01> <FB01> <02> <FB03> endbfchar 1 beginbfrange <20> <7E> <0020> endbfrange endcmap end"""


def _mapped(content: str, character: str, text: str, skipped: Sequence[str] = ()) -> PdfDocument:
    """A line in a font whose map to Unicode has a character (in hexadecimal) at code 1."""
    fonts = {100: f"{TYPE1} /ToUnicode 101 0 R >>", 101: stream(_LIGATURES.replace("FB01", character))}
    page = "/Resources << /Font << /F2 100 0 R >> >>"
    return PdfDocument(pdf(f"BT /F2 12 Tf 72 700 Td ({content}) Tj ET", page=page, objects=fonts), text, skipped)


def _unreadable(text: str, *objects: str) -> PdfDocument:
    """Write a line in a font that does not name its characters, object 100, and another line in a font that does."""
    content = lines(text) + "BT /F2 12 Tf 72 600 Td (lit) Tj ET"
    data = pdf(content, page=TWO_FONTS, objects=dict(enumerate(objects, 100)))
    return PdfDocument(data, "lit", ["text in fonts without characters on page 1"])


PDFS = FORMS | {
    "lines": PdfDocument(
        pdf(lines("The keeper counted.", "Forty-two steps.")), "The keeper counted.\nForty-two steps."
    ),
    "pages": PdfDocument(pdf(lines("one"), lines("two"), lines("three")), "one\n\ntwo\n\nthree"),
    "hyphens at line ends": PdfDocument(
        pdf(lines("The log of the old light-", "house that has the well-", "known keeper; well-known.")),
        "The log of the old lighthouse that has the well-known keeper; well-known.",
    ),
    "a compound of words of another page at a line's end": PdfDocument(
        pdf(lines("A computer for a general-", "purpose use."), lines("It has a purpose, in general.")),
        "A computer for a general-purpose use.\n\nIt has a purpose, in general.",
    ),
    "a compound that is a word elsewhere": PdfDocument(
        pdf(lines("They lit the light-", "house, a lighthouse", "and some HOUSE-", "BOAT, a houseboat.")),
        "They lit the lighthouse, a lighthouse\nand some HOUSEBOAT, a houseboat.",
    ),
    "a long compound at a line's end": PdfDocument(
        pdf(lines("This is a state-of-the-", "art lamp.")), "This is a state-of-the-art lamp."
    ),
    "compounds of a document that breaks no words": PdfDocument(
        pdf(
            lines(
                "It is a well-",
                "known, long-",
                "term, a low-",
                "cost, high-",
                "speed lamp,",
                "well-known,",
                "long-term,",
                "low-cost.",
            )
        ),
        "It is a well-known, long-term, a low-cost, high-speed lamp,\nwell-known,\nlong-term,\nlow-cost.",
    ),
    "compounds that occur once, by their parts": PdfDocument(
        pdf(
            lines(
                "A lamp burns water-",
                "based oil in a well-",
                "kept house of com-",
                "mon size, and two-",
                "thirds is left",
            )
        ),
        "A lamp burns water-based oil in a well-kept house of common size, and two-thirds is left",
    ),
    "a hyphen of a document with many lines and no other": PdfDocument(
        pdf(*[lines(*["The lamp was lit."] * 40)] * 2, lines("A keeper of sea-", "facing rocks.")),
        "\n\n".join(["\n".join(["The lamp was lit."] * 40)] * 2 + ["A keeper of sea-facing rocks."]),
    ),
    "soft hyphens at line ends": PdfDocument(pdf(lines("The light\\255", "house.")), "The lighthouse."),
    "a dash at a line's end": PdfDocument(
        pdf(lines("From 1990-", "1995 and -", "5 degrees")), "From 1990-\n1995 and -\n5 degrees"
    ),
    "ligatures by ToUnicode": _mapped("\x01nd the o\x02ce", "FB01", "find the office"),
    "hyphens that the font names soft hyphens": _mapped("pages 10\x0112, A\x012", "00AD", "pages 10-12, A-2"),
    "a digit without a character among many letters": _mapped(
        "the storm of the third night took \x01 of the boats from the harbour",
        "F732",
        "the storm of the third night took \uf732 of the boats from the harbour",
        ["text in fonts without characters on page 1"],
    ),
    "ligatures by glyph names": PdfDocument(
        pdf(
            "BT /F2 12 Tf 72 700 Td (\x01nd the \x02ag) Tj ET",
            page="/Resources << /Font << /F2 100 0 R >> >>",
            objects={100: f"{TYPE1} /Encoding << /Differences [1 /fi /fl] >> >>"},
        ),
        "find the flag",
    ),
    "hexadecimal strings": PdfDocument(pdf("BT /F1 12 Tf 72 700 Td <5468652063616665> Tj ET"), "The cafe"),
    "accents and the euro": PdfDocument(pdf(lines("Caf\\351 \\200 42")), "Café € 42"),
    "escapes": PdfDocument(pdf(lines("f\\(x\\) = \\\\ 2")), "f(x) = \\ 2"),
    "invisible text over a scan": PdfDocument(
        pdf("/Im1 Do BT /F1 12 Tf 3 Tr 72 700 Td (recognised) Tj ET", page=_SCAN, objects={100: _IMAGE}),
        "recognised",
        ["the images of page 1"],
    ),
    "invisible text": PdfDocument(
        pdf("BT /F1 12 Tf 3 Tr 72 700 Td (secret) Tj ET"), "secret", ["text read though invisible on page 1"]
    ),
    "white text on paper": PdfDocument(
        pdf(lines("lit") + "1 g BT /F1 12 Tf 72 650 Td (secret) Tj ET"),
        "lit\nsecret",
        ["text read though invisible on page 1"],
    ),
    "white text on black": PdfDocument(
        pdf("72 640 200 30 re f 1 g BT /F1 12 Tf 72 650 Td (a heading) Tj ET"), "a heading"
    ),
    "text below a shape that is drawn later": PdfDocument(
        pdf(lines("The keeper of the lamp", "lit") + "1 g 110 695 30 14 re f"),
        "The keeper of the lamp\nlit",
        ["text read though invisible on page 1"],
    ),
    "text below a shape of a form": PdfDocument(
        pdf(
            lines("lit") + "q 2 0 0 2 0 0 cm /F Do Q",
            page="/Resources << /Font << /F1 3 0 R >> /XObject << /F 100 0 R >> >>",
            objects={100: stream("30 340 60 30 re f", "/Type /XObject /Subtype /Form /BBox [0 0 612 792]")},
        ),
        "lit",
        ["text read though invisible on page 1"],
    ),
    "text that is clipped": PdfDocument(
        pdf("q 70 690 30 20 re W n " + lines("secret") + "Q " + lines("lit", y=650)),
        "secret\nlit",
        ["text read though invisible on page 1"],
    ),
    "text above shapes, below others that are transparent, empty or elsewhere": PdfDocument(
        pdf(
            "q 70 640 300 90 re W n 0.9 g 70 640 300 90 re f 0 g "
            + lines("The lamp", "lit")
            + "Q /G gs 70 690 90 20 re f 70 676 90 30 re S 72 660 90 20 re f 60 680 10 30 re f",
            page="/Resources << /Font << /F1 3 0 R >> /ExtGState << /G << /ca 0.4 /CA 1 >> >> >>",
        ),
        "The lamp\nlit",
    ),
    "rotated page": PdfDocument(pdf(lines("one", "two"), page="/Rotate 90"), "one\ntwo"),
    "text in a form XObject": PdfDocument(
        pdf("/Fm1 Do", page="/Resources << /XObject << /Fm1 100 0 R >> >>", objects={100: xobject(lines("inside"))}),
        "inside",
    ),
    "text outside the page": PdfDocument(
        pdf(lines("seen") + lines("unseen", x=5000)), "seen", ["text outside of page 1"]
    ),
    "scanned page": PdfDocument(
        pdf(lines("one"), "q 612 0 0 792 0 0 cm /Im1 Do Q", lines("three"), page=_SCAN, objects={100: _IMAGE}),
        "one\n\nthree",
        ["the scanned page 2"],
    ),
    "empty page": PdfDocument(pdf(lines("one"), "", lines("three")), "one\n\nthree"),
    "a scan with a printed number": PdfDocument(
        pdf("q 612 0 0 792 0 0 cm /Im1 Do Q\n" + lines("17"), page=_SCAN, objects={100: _IMAGE}),
        "17",
        ["the images of page 1"],
    ),
    "a scan as an inline image": PdfDocument(
        pdf("q 612 0 0 792 0 0 cm BI /W 1 /H 1 /CS /G /BPC 8 ID x EI Q", lines("two")), "two", ["the scanned page 1"]
    ),
    "a glyph's numbers": PdfDocument(
        pdf(
            "BT /F9 12 Tf 72 700 Td <00240025> Tj ET",
            page="/Resources << /Font << /F9 100 0 R >> >>",
            objects={
                100: "<< /Type /Font /Subtype /Type0 /BaseFont /X /Encoding /Identity-H /DescendantFonts [101 0 R] >>",
                101: "<< /Type /Font /Subtype /CIDFontType2 /BaseFont /X /CIDSystemInfo << /Ordering (Identity) >> >>",
            },
        ),
        "",
        ["text in fonts without characters on page 1"],
    ),
    "a glyph's numbers by a font without an encoding": _unreadable(
        "7KH\\003ODPS\\003LV\\003OLW", "<< /Type /Font /Subtype /TrueType /BaseFont /ABCDEF+X >>"
    ),
    "glyphs with numbers as names": _unreadable("abc", f"{TYPE1} /Encoding << /Differences [97 /g1 /g2 /g3] >> >>"),
    "letters named, digits not": _unreadable(
        "tel \\005\\003\\010", f"{TYPE1} /ToUnicode 101 0 R >>", stream(_LIGATURES)
    ),
    "damaged page": PdfDocument(
        pdf(lines("one"), "", objects={13: stream("damaged", "/Filter /FlateDecode")}),
        "one",
        ["damaged content of page 2"],
    ),
    "page that breaks off": PdfDocument(
        pdf(
            "",
            objects={
                11: stream(zlib.compress(lines(*"abcdefgh").encode())[:-10].decode("latin-1"), "/Filter /FlateDecode")
            },
        ),
        "a\nb\nc\nd\ne\nf\ng",
        ["damaged content of page 1"],
    ),
    "missing page": PdfDocument(
        pdf(lines("one")).replace(b"/Kids [10 0 R]", b"/Kids [10 0 R 99 0 R]"), "one", ["damaged parts"]
    ),
    "no header": PdfDocument(pdf(lines("one"))[9:], "one"),
    "damaged table of objects": PdfDocument(pdf(lines("one")).replace(b"startxref\n", b"startxref\n9"), "one"),
    "junk before the header": PdfDocument(b"\r\n\xef\xbb\xbfjunk\n" + pdf(lines("one")), "one"),
}


def _layered(content: str, config: str, properties: str = "/L1 100 0 R /L2 101 0 R", **objects: str) -> bytes:
    """Write a page with the layers L1 (object 100) and L2 (object 101), and a form F (object 102) of L2."""
    return pdf(
        lines("lit", y=730) + content,
        page=f"/Resources << /Font << /F1 3 0 R >> /Properties << {properties} >> /XObject << /F 102 0 R >> >> "
        + objects.get("page", ""),
        objects={
            100: "<< /Type /OCG /Name (one) /Usage << /View << /ViewState /OFF >> >> >>",
            101: "<< /Type /OCG /Name (two) >>",
            102: stream(lines("form", y=600), f"/Type /XObject /Subtype /Form /BBox [0 0 612 792] /OC 101 0 R {FONTS}"),
            103: f"<< /Type /OCMD {objects.get('ocmd', '')} >>",
            104: "<< /Type /Annot /Subtype /FreeText /Rect [0 0 9 9] /Contents (note) /OC 101 0 R >>",
        },
        catalog=f"/OCProperties << /OCGs [100 0 R 101 0 R] /D << {config} >> >>",
    )


_BOTH = (
    f"/OC /L1 BDC {lines('one')} EMC /OC /L2 BDC /Span BMC {lines('two', y=650)} EMC EMC "
    + "/Span BMC EMC "
    + lines("last", y=500)
)
_OFF = ["text of hidden layers on page 1"]
for _name, _data, _shown in (
    ("all on", _layered(_BOTH, ""), "lit\none\ntwo\nlast"),
    ("one off", _layered(_BOTH, "/OFF [101 0 R]"), "lit\none\nlast"),
    ("all off but one", _layered(_BOTH, "/BaseState /OFF /ON [101 0 R]"), "lit\ntwo\nlast"),
    ("off on screens", _layered(_BOTH, "/AS [<< /Event /View /Category [/View] /OCGs [100 0 R] >>]"), "lit\ntwo\nlast"),
    ("only off in print", _layered(_BOTH, "/AS [<< /Event /Print /Category [/Print] /OCGs [100 0 R] >>]"),
     "lit\none\ntwo\nlast"),
    ("form", _layered("/F Do", "/OFF [101 0 R]"), "lit"),
    ("form in a layer", _layered("/OC /L1 BDC /F Do EMC", "/OFF [100 0 R]"), "lit"),
    ("note", _layered("/F Do", "/OFF [101 0 R]", page="/Annots [104 0 R]"), "lit"),
    *((f"members {_rule}", _layered(_BOTH, "/OFF [101 0 R]", "/L1 103 0 R /L2 100 0 R", ocmd=_rule),
       f"lit\n{'one' * _is_on}\ntwo\nlast".replace("\n\n", "\n"))
      for _rule, _is_on in (
        ("/OCGs [100 0 R 101 0 R]", True), ("/OCGs 101 0 R", False), ("/OCGs [100 0 R 101 0 R] /P /AllOn", False),
        ("/OCGs [100 0 R 101 0 R] /P /AnyOff", True), ("/OCGs [100 0 R 101 0 R] /P /AllOff", False),
        ("/VE [/Not 101 0 R]", True), ("/VE [/And 100 0 R [/Or 101 0 R 100 0 R]]", True),
        ("/VE [/And 100 0 R 101 0 R]", False))),
):  # fmt: skip
    is_whole = _shown == "lit\none\ntwo\nlast"
    PDFS[f"layers, {_name}"] = PdfDocument(_data, _shown, [] if is_whole else _OFF)


def _drawn(content: str, form: str, entries: str = "") -> bytes:
    """Write a page that draws the form F (object 100), whose resources are those of the page without entries."""
    return pdf(
        content,
        page="/Resources << /Font << /F1 3 0 R /F2 101 0 R >> /XObject << /F 100 0 R >> >>",
        objects={
            100: stream(form, f"/Type /XObject /Subtype /Form /BBox [0 0 612 792] {entries}"),
            101: FONT.replace("Helvetica", "Times-Roman"),
        },
    )


def _span(text: str, content: str, y: int = 700) -> str:
    return f"BT /F1 12 Tf 72 {y} Td (See ) Tj /Span << /ActualText {text} >> BDC {content} EMC ( lit) Tj ET\n"


_AMOUNTS = "".join(
    lines(month, y=y) + f"q 1 0 0 1 0 {y - 700} cm /F Do Q\n" for month, y in (("Jan", 700), ("Feb", 680), ("Mar", 660))
)
PDFS |= {
    "forms drawn in several rows": PdfDocument(
        _drawn(_AMOUNTS, lines("300", x=300), FONTS), "Jan 300\nFeb 300\nMar 300"
    ),
    "a form with the page's resources": PdfDocument(_drawn(lines("lit") + "/F Do", lines("17", y=650)), "lit\n17"),
    "a form's matrix": PdfDocument(
        _drawn(lines("lit") + "/F Do " + lines("last", y=660), lines("17"), "/Matrix [1 0 0 1 0 -20]"), "lit\n17\nlast"
    ),
    "a form with fonts of the same names": PdfDocument(
        _drawn("/F Do " + lines("lit"), lines("17", y=750), "/Resources << /Font << /F1 101 0 R >> >>"), "17\nlit"
    ),
    "a form that changes the state": PdfDocument(
        _drawn("/F Do Q " + lines("lit"), "Q q 2 0 0 2 0 900 cm q " + lines("17", y=-80)), "17\nlit"
    ),
    "a form that draws itself": PdfDocument(
        _drawn(lines("lit") + "/F Do", lines("17", y=650) + "/F Do"), "lit\n17", ["damaged content of page 1"]
    ),
    "a missing font": PdfDocument(pdf("BT /None 12 Tf 72 700 Td (lit) Tj ET"), "lit"),
    "content that is missing": PdfDocument(
        pdf(lines("lit"), lines("two")).replace(b"/Contents 13 0 R", b"/Contents 99 0 R"), "lit",
        ["damaged content of page 2"],
    ),
    "a word twice in two fonts": PdfDocument(
        _drawn("BT /F1 12 Tf 72 700 Td (never ) Tj /F2 12 Tf (never ) Tj /F1 12 Tf (lit) Tj ET", ""),
        "never never lit",
    ),
    "actual text": PdfDocument(pdf(_span("(the lamp)", "(xxx) Tj 43 0 Td (yy) Tj")), "See the lamp lit"),
    "actual text in UTF-16": PdfDocument(pdf(_span("<FEFF65E5672C>", "(x) Tj")), "See 日本 lit"),
    "actual text within another": PdfDocument(
        pdf(_span("(lamps)", "(x) Tj /Span << /ActualText (no) >> BDC (y) Tj EMC (z) Tj")), "See lamps lit"
    ),
    "actual text of a name": PdfDocument(
        pdf(lines("See") + "/Span /MC0 BDC " + lines("xx", y=680) + "EMC",
            page="/Resources << /Font << /F1 3 0 R >> /Properties << /MC0 << /ActualText (the lamp) >> >> >>"),
        "See\nthe lamp",
    ),
    "hyphens by actual text": PdfDocument(
        pdf("BT /F1 12 Tf 9 700 Td (The com) Tj /Span << /ActualText <FEFF00AD> >> BDC (-) Tj EMC 0 -9 Td (puter) Tj ET"
            " BT 9 660 Td (The light) Tj /Span << /ActualText () >> BDC (-) Tj EMC 0 -14 Td (house) Tj ET"),
        "The computer\nThe lighthouse",
    ),
    "empty actual text of displayed words": PdfDocument(pdf(_span("()", "(17 ships) Tj")), "See 17 ships lit"),
    "letters of a symbol font": PdfDocument(
        pdf("BT /F1 12 Tf 72 700 Td (\xfe) Tj ET BT /F2 12 Tf 72 680 Td (lit) Tj ET", page=TWO_FONTS,
            objects={100: FONT.replace("Helvetica", "ABCDEF+Wingdings")}),
        "lit", ["text in fonts without characters on page 1"],
    ),
    "an update that is cut": PdfDocument(
        pdf(lines("lit")) + f"\n11 0 obj\n{stream(lines('17'))}\nendobj\n".encode(), "lit", ["damaged parts"]
    ),
    "struck out": PdfDocument(
        pdf(lines("lit"), page="/Annots [100 0 R]",
            objects={100: "<< /Type /Annot /Subtype /StrikeOut /Rect [72 690 99 710] >>"}),
        "lit", ["text read though struck out on page 1"],
    ),
}  # fmt: skip
