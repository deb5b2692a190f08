"""Small PDFs with text in many places and fonts, with the text as seen."""

from tests.context.pdf_scripts import SCRIPTS
from tests.context.pdf_writer import TWO_FONTS, TYPE1, PdfDocument, lines, pdf, stream

_LEFT = [
    "The lamp was lit at dusk by the",
    "keeper of the lighthouse, who",
    "counted forty-two ships before",
    "midnight came and the fog with it.",
]
_RIGHT = [
    "In the morning the boat arrived", "with oil and bread for a month,", "and the keeper signed the log of",
    "the harbour master with his name.",
]  # fmt: skip
_COLUMNS = "\n".join(_LEFT + _RIGHT)


_GRADES = (
    "Mathematics A-",
    "biology B-",
    "chemistry C-",
    "blood of the group AB-",
    "vitamin",
    "and twenty-",
    "one more",
)


def _side_by_side(left: list[str], right: list[str]) -> str:
    """Content of two columns, written line by line."""
    rows = enumerate(zip(left, right, strict=True))
    return "".join(lines(a, y=700 - 14 * i) + lines(b, x=330, y=700 - 14 * i) for i, (a, b) in rows)


PDF_TEXTS = SCRIPTS | {
    "columns, one after the other": PdfDocument(pdf(lines(*_LEFT) + lines(*_RIGHT, x=330)), _COLUMNS),
    "columns, line by line": PdfDocument(
        pdf(_side_by_side(_LEFT, _RIGHT)),
        _COLUMNS,
    ),
    "columns below a title": PdfDocument(
        pdf(
            lines("The log of the lighthouse at the end of the world, in two columns of text", y=730, size=14)
            + _side_by_side(_LEFT, _RIGHT)
        ),
        "The log of the lighthouse at the end of the world, in two columns of text\n" + _COLUMNS,
    ),
    "table": PdfDocument(
        pdf(_side_by_side(["2022", "2023", "2024"], ["17", "18", "19"])),
        "2022 17\n2023 18\n2024 19",
    ),
    "words apart by offsets": PdfDocument(
        pdf("BT /F1 12 Tf 72 700 Td [(The) -300 (k) 20 (eeper) -300 (counted)] TJ ET"), "The keeper counted"
    ),
    "letters placed one by one": PdfDocument(
        pdf(
            "".join(
                f"BT /F1 12 Tf {x} 700 Td ({letter}) Tj ET\n"
                for x, letter in zip((72, 74.7, 81.4, 91.4, 101.4, 108.1), "lamp42", strict=True)
            )
        ),
        "lamp 42",
    ),
    "lines written from below": PdfDocument(pdf(lines("second", y=680) + lines("first", y=700)), "first\nsecond"),
    "lists of grades": PdfDocument(pdf(lines(*_GRADES)), "\n".join(_GRADES)),
    "superscript": PdfDocument(
        pdf("BT /F1 12 Tf 72 700 Td (10) Tj 5 Ts /F1 7 Tf (6) Tj 0 Ts /F1 12 Tf ( lamps) Tj ET"), "10⁶ lamps"
    ),
    "table by columns": PdfDocument(pdf(lines("17", "18", x=140) + lines("2023", "2024")), "2023 17\n2024 18"),
    "bold by drawing twice": PdfDocument(
        pdf(lines("17 ships", "of all") + lines("17 ships", x=72) + "BT /F1 12 Tf 72.3 686 Td (of all) Tj ET"),
        "17 ships\nof all",
    ),
    "narrow letters": PdfDocument(
        pdf("BT /F1 12 Tf 50 Tz 72 700 Td (The lamp) Tj ET BT 112 700 Td (17) Tj ET"), "The lamp 17"
    ),
    "powers as lines": PdfDocument(
        pdf(
            "".join(
                f"BT /F1 {size} Tf {x} {y} Td ({text}) Tj ET\n"
                for size, x, y, text in (
                    (12, 72, 700, "E = mc"),
                    (7, 110, 706, "2"),
                    (12, 116, 700, "is 17"),
                    (12, 72, 680, "ships"),
                )
            )
        ),
        "E = mc² is 17\nships",
    ),
    "narrow letters of one text object": PdfDocument(
        pdf(
            "BT /F1 12 Tf 72 700 Td 50 Tz (The lamp) Tj 40 0 Td (17) Tj 12 0 Td 100 Tz (lit) Tj 0 -14 Td (at) Tj "
            "18 0 Td (dusk) Tj ET"
        ),
        "The lamp 17 lit\nat dusk",
    ),
    "wide letters": PdfDocument(pdf("BT /F1 12 Tf 200 Tz 72 700 Td (The) Tj 42 0 Td (lamp) Tj ET"), "Thelamp"),
    "narrow letters by operators of lines": PdfDocument(
        pdf("BT /F1 12 Tf 14 TL 72 700 Td (The) Tj 50 Tz (lamp) ' 0 0 (lit) \" T* (17) Tj ET"), "The\nlamp\nlit\n17"
    ),
}


def _composite(encoding: str, ordering: str, text: bytes) -> bytes:
    """Write a page in a composite font with a predefined map and no map to Unicode, and a line in another font."""
    system = f"/CIDSystemInfo << /Registry (Adobe) /Ordering ({ordering}) /Supplement 2 >>"
    return pdf(
        f"BT /F1 12 Tf 72 700 Td <{text.hex()}> Tj ET BT /F2 12 Tf 72 600 Td (lit) Tj ET",
        page=TWO_FONTS,
        objects={
            100: f"<< /Type /Font /Subtype /Type0 /BaseFont /X /Encoding /{encoding} /DescendantFonts [101 0 R] >>",
            101: f"<< /Type /Font /Subtype /CIDFontType0 /BaseFont /X {system} /DW 1000 >>",
        },
    )


for _encoding, _ordering, _codec, _text, _is_read in (
    ("UniGB-UCS2-H", "GB1", "utf-16-be", "你好", True),
    ("GBK-EUC-H", "GB1", "gbk", "你好", True),
    ("90ms-RKSJ-H", "Japan1", "shift-jis", "日本", True),
    ("ETen-B5-V", "CNS1", "big5", "中文", True),
    ("UniJIS-UTF16-H", "Japan1", "utf-16-be", "日本", True),
    ("KSCms-UHC-H", "Korea1", "cp949", "한국", True),
    ("EUC-H", "Japan1", "euc-jp", "日本", True),
    ("90msp-RKSJ-H", "Japan1", "shift-jis", "日本", True),
    ("Identity-H", "Japan1", "utf-16-be", "日本", False),
):
    PDF_TEXTS[f"characters by {_encoding}"] = PdfDocument(
        _composite(_encoding, _ordering, _text.encode(_codec)),
        f"{_text}\nlit" if _is_read else "lit",
        [] if _is_read else ["text in fonts without characters on page 1"],
    )


_ROWS = (("2023", "1500", "77"), ("2024", "1600", "88"))
_TURNS = {"right": "1 0 0 1", "up": "0 1 -1 0", "left": "-1 0 0 -1", "down": "0 -1 1 0"}
PDF_TEXTS |= (
    {
        f"a table that runs {name} on a page turned by {angle}": PdfDocument(
            pdf(
                f"q {turn} 300 400 cm "
                + "".join(
                    f"BT /F1 12 Tf {60 * column} {-20 * row} Td ({cell}) Tj ET "
                    for row, cells in enumerate(_ROWS)
                    for column, cell in enumerate(cells)
                )
                + "Q",
                page=f"/Rotate {angle}",
            ),
            "2023 1500 77\n2024 1600 88",
        )
        for name, turn in _TURNS.items()
        for angle in (0, 90, 180, 270)
    }
    | {
        f"cells {drop} points below their row, {leading} apart": PdfDocument(
            pdf(
                "BT /F1 12 Tf 72 700 Td "
                + "".join(f"({a}) Tj 128 {-drop} Td ({b}) Tj -128 {drop - leading} Td " for a, b, _ in _ROWS)
                + "ET "
                + "".join(
                    f"BT /F1 12 Tf {x} {y - leading * row} Td ({cells[column]}) Tj ET "
                    for row, cells in enumerate(_ROWS)
                    for column, x, y in ((0, 72, 600), (1, 200, 600 - drop))
                )
            ),
            "2023 1500\n2024 1600\n2023 1500\n2024 1600",
        )
        for drop in (0, 2, 4.8, 6)
        for leading in (12, 13.2, 15.6)
    }
    | {
        "lines that nearly touch": PdfDocument(
            pdf("BT /F1 12 Tf 72 700 Td (100) Tj 0 -9.4 Td (200) Tj 0 -9.4 Td (300) Tj ET"), "100\n200\n300"
        ),
        "a size below zero": PdfDocument(
            pdf("BT /F1 -12 Tf -1 0 0 -1 72 700 Tm (lit) Tj ET " + lines("at dusk", y=680)), "lit\nat dusk"
        ),
        "a heading along the edge": PdfDocument(
            pdf("q 0 1 -1 0 60 400 cm BT /F1 12 Tf 0 0 Td (Draft) Tj 60 0 Td (of 1874) Tj ET Q " + lines("The lamp")),
            "The lamp\nDraft of 1874",
        ),
    }
)


def _at(x: float, y: float, text: str, size: float = 12) -> str:
    return f"BT /F1 {size} Tf {x} {y} Td ({text}) Tj ET\n"


def _right_to_left(letters: str, encoded: str, widths: str = "500") -> bytes:
    """Write content in a font with these letters in the place of `a`, `b` and so on, all as wide as a digit."""
    names = " ".join(f"<{code:02x}> <{letter.encode('utf-16-be').hex()}>" for code, letter in enumerate(letters, 0x61))
    cmap = (
        "/CIDInit /ProcSet findresource begin begincmap 1 begincodespacerange <00> <FF> endcodespacerange "
        f"{len(letters)} beginbfchar {names} endbfchar 1 beginbfrange <20> <5A> <0020> endbfrange endcmap end"
    )
    font = f"{TYPE1} /FirstChar 32 /LastChar 126 /Widths [{' '.join([widths] * 95)}] /ToUnicode 101 0 R >>"
    resources = "/Resources << /Font << /F1 100 0 R >> >>"
    return pdf(encoded, page=resources, objects={100: font, 101: stream(cmap)})


_NUMBERS = ("5", "2000", "30", "4")
_ANSWERS = (
    ("Name of the customer", "Anna Smith of London"),
    ("Address of the customer", "5 Long Road, London"),
    ("Amount that is due", "500 euros in total"),
    ("Amount that was paid", "300 euros in cash"),
    ("Date of the payment", "5 May of this year"),
    ("Number of the file", "12345 in the archive"),
)
_CODE = ("def f\\(x\\):", "    if x > 1:", "        return x # two")
_ACCOUNTS = (
    ("Revenue from continuing operations", "(987)"),
    ("Income from discontinued business", "2,468"),
    ("Earnings before interest and taxes", "(3,702)"),
    ("Interest and similar expenses paid", "(948)"),
)
_OPENING = (
    "the harbour opens in the morning at",
    "the keeper of the light lives in",
    "the boats that leave at noon go to",
    "the price for a ticket is about",
)
_TIMES = (
    "six, but on sundays it opens later",
    "the old house near the pier",
    "islands in the north, and return",
    "nine euros, or fifteen there and back",
)
_HEBREW, _ARABIC = "שלוםעבד", "سلامعبد"
_LINE = "gfe 1,500.5% dcba"  # as seen
_READ = "שלום 1,500.5% עבד"
_FORM = "/Type /XObject /Subtype /Form /BBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >>"
PDF_TEXTS |= {
    "cells from right to left": PdfDocument(
        pdf("BT /F1 12 Tf 200 700 Td (77) Tj -64 0 Td (1500) Tj -64 0 Td (2021) Tj ET"), "2021 1500 77"
    ),
    "values before their labels": PdfDocument(
        pdf(_at(200, 700, "500") + _at(72, 700, "Total") + _at(200, 686, "90") + _at(72, 686, "Tax")),
        "Total 500\nTax 90",
    ),
    "a word added last": PdfDocument(
        pdf(_at(72, 700, "You may") + _at(145, 700, "enter.") + _at(122.5, 700, "not")), "You may not enter."
    ),
    "forms from right to left on a line": PdfDocument(
        pdf(
            lines("A") + "/B Do /C Do",
            page="/Resources << /Font << /F1 3 0 R >> /XObject << /B 100 0 R /C 101 0 R >> >>",
            objects={100: stream(_at(200, 700, "500"), _FORM), 101: stream(_at(140, 700, "400"), _FORM)},
        ),
        "A 400 500",
    ),
    "values below the middle of their rows": PdfDocument(
        pdf(_at(72, 700, "Total") + _at(200, 694, "500") + _at(72, 688, "Tax") + _at(200, 682, "90")),
        "Total 500\nTax 90",
    ),
    "cells of two lines": PdfDocument(
        pdf(
            "".join(
                _at(72, y, name) + _at(200, y + 6, "price per") + _at(200, y - 6, unit) + _at(300, y, price)
                for y, name, unit, price in ((700, "Steel", "tonne", "300"), (670, "Wood", "log", "45"))
            )
        ),
        "Steel price per tonne 300\nWood price per log 45",
    ),
    "cells of two lines without space between rows": PdfDocument(
        pdf(
            "".join(
                _at(72, y, a) + _at(150, y + 6, b) + _at(150, y - 6, c) + _at(220, y, d)
                for y, a, b, c, d in ((700, "A", "1500", "1600", "77"), (676, "B", "2500", "2600", "88"))
            )
        ),
        "A 1500 1600 77\nB 2500 2600 88",
    ),
    "a form of two wide columns": PdfDocument(
        pdf(
            "".join(
                _at(72, 700 - 14 * i, label) + _at(330, 700 - 14 * i, value)
                for i, (label, value) in enumerate(_ANSWERS)
            )
        ),
        "\n".join(f"{label} {value}" for label, value in _ANSWERS),
    ),
    "spaced out words": PdfDocument(
        pdf("BT /F1 12 Tf 6 Tc 72 700 Td (WIDE HEADING) Tj ET BT /F1 12 Tf 0 Tc 72 680 Td (1 2) Tj ET"),
        "WIDE HEADING\n1 2",
    ),
    "kerned words and words apart by offsets": PdfDocument(
        pdf("BT /F1 12 Tf 72 700 Td [(T) 110 (o) 20 (w) 30 (er) -250 (A) 120 (V) 90 (A) -400 (17)] TJ ET"),
        "Tower AVA 17",
    ),
    "justified text": PdfDocument(
        pdf("BT /F1 12 Tf 7 Tw 72 700 Td (The lamp was lit) Tj -0.9 Tw 0 -14 Td (by the keeper of it) Tj ET"),
        "The lamp was lit\nby the keeper of it",
    ),
    "pictures of letters": PdfDocument(
        pdf(
            "BT /F1 10 Tf 72 700 Td (ab) Tj 30 0 Td (ba) Tj ET",
            page="/Resources << /Font << /F1 100 0 R >> >>",
            objects={
                100: "<< /Type /Font /Subtype /Type3 /FontBBox [0 0 1 1] /FontMatrix [1 0 0 1 0 0] /FirstChar 97 "
                "/LastChar 98 /Widths [1 1] /Encoding << /Differences [97 /four /two] >> "
                "/CharProcs << /four 101 0 R /two 101 0 R >> >>",
                101: stream("1 0 0 0 1 1 d1 0 0 1 1 re f"),
            },
        ),
        "42 24",
    ),
    "glyphs with suffixes in their names": PdfDocument(
        pdf(
            lines("abc"),
            page="/Resources << /Font << /F1 100 0 R >> >>",
            objects={100: f"{TYPE1} /Encoding << /Differences [97 /zero.onum /one.tnum /a.sc] >> >>"},
        ),
        "01a",
    ),
    "Hebrew as seen": PdfDocument(_right_to_left(_HEBREW, lines(_LINE)), _READ),
    "Arabic as seen": PdfDocument(_right_to_left(_ARABIC, lines("gfe 17 dcba")), "سلام 17 عبد"),
    "Hebrew from right to left": PdfDocument(
        _right_to_left(_HEBREW, "".join(_at(72 + 6 * i, 700, c) for i, c in reversed([*enumerate(_LINE)]))), _READ
    ),
    "Hebrew within a sentence": PdfDocument(
        _right_to_left(_HEBREW, lines("THE WORDS gfe dcba MEAN 12.")), "THE WORDS שלום עבד MEAN 12."
    ),
    "a word from left to right within Hebrew": PdfDocument(
        _right_to_left(_HEBREW, lines("gfe PDF FILE dcba")), "שלום PDF FILE עבד"
    ),
    "brackets around a word from left to right": PdfDocument(
        _right_to_left(_HEBREW, lines("gfe (PDF FILE) dcba")), "שלום (PDF FILE) עבד"
    ),
    "accounts row by row": PdfDocument(
        pdf(
            "".join(
                _at(72, 700 - 14 * i, label) + _at(300, 700 - 14 * i, "$") + _at(320, 700 - 14 * i, amount)
                for i, (label, amount) in enumerate(_ACCOUNTS)
            )
        ),
        "\n".join(f"{label} $ {amount}" for label, amount in _ACCOUNTS),
    ),
    "sentences row by row": PdfDocument(
        pdf(_side_by_side(list(_OPENING), list(_TIMES))),
        "\n".join(f"{one} {other}" for one, other in zip(_OPENING, _TIMES, strict=True)),
    ),
    "footnotes below columns": PdfDocument(
        pdf(
            _at(300, 40, "7", 9)
            + "".join(
                lines(*_LEFT, x=x, size=9) + _at(x, 620, f"{note} Of {note}", 7) + _at(x, 611, "and more of it", 7)
                for x, note in ((50, "one"), (330, "two"))
            )
        ),
        "\n".join(line for note in ("one", "two") for line in (*_LEFT, f"{note} Of {note}", "and more of it")) + "\n7",
    ),
    "the tightest spaces of TeX": PdfDocument(
        pdf("BT /F1 11.9552 Tf 72 700 Td [(License)-190(and)-190(any)-190(12)-190(terms)] TJ ET"),
        "License and any 12 terms",
    ),
    "code": PdfDocument(
        pdf(
            "".join(_at(72, 700 - 12 * i, line, 10) for i, line in enumerate(_CODE))
            + _at(72 + 4 * 6, 600, "print\\(1\\)", 10),
            page=f"/Resources << /Font << /F1 {TYPE1.replace('Helvetica', 'Courier')} >> >> >>",
        ),
        "def f(x):\n    if x > 1:\n        return x # two\n    print(1)",
    ),
    "indented lines of other fonts": PdfDocument(
        pdf(_at(72, 700, "One lamp") + _at(96, 686, "two ships")), "One lamp\ntwo ships"
    ),
    "digits nearer than their font says": PdfDocument(
        pdf(
            "".join(_at(72 + 5 * i, 700, c) for i, c in enumerate("1,122.33")),
            page="/Resources << /Font << /F1 100 0 R >> >>",
            objects={100: f"{TYPE1} /FirstChar 32 /LastChar 126 /Widths [{' '.join(['1000'] * 95)}] >>"},
        ),
        "1,122.33",
    ),
    "columns above a table": PdfDocument(
        pdf(_side_by_side(_LEFT, _RIGHT) + _at(72, 634, "2023") + _at(120, 634, "17") + _at(72, 620, "2024")),
        _COLUMNS + "\n2023 17\n2024",
    ),
    "scripts of browsers": PdfDocument(
        pdf(_at(72, 700, "10") + _at(85.4, 706, "6", 10) + _at(94.5, 700, "m of H") + _at(129.9, 697, "2", 10)),
        "10⁶ m of H₂",
    ),
    "a table from right to left": PdfDocument(
        _right_to_left(_HEBREW, _at(300, 700, "dcba") + _at(200, 700, "1500") + _at(72, 700, "gfe")), "שלום 1500 עבד"
    ),
    "a table of narrow declared widths": PdfDocument(
        _right_to_left("", _at(72, 700, "2021") + _at(101, 700, "77"), "556"), "2021 77"
    ),
} | {
    f"lines to the right, {leading} apart": PdfDocument(
        pdf("".join(_at(200 - 6.67 * len(n), 700 - 12 * leading * i, n) for i, n in enumerate(_NUMBERS))),
        "\n".join(_NUMBERS),
    )
    for leading in (0.7, 0.75, 0.8, 0.85)
}
