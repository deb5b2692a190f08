"""Small PDFs with form fields, notes and files, with the text that a reader shows of them."""

from tests.context.pdf_writer import PdfDocument, lines, pdf, stream, xobject


def _widget(entries: str, y: int = 400, x: int = 150) -> str:
    return f"<< /Type /Annot /Subtype /Widget /Rect [{x} {y} {x + 90} {y + 16}] {entries} >>"


def _form(*fields: str) -> bytes:
    references = " ".join(f"{100 + i} 0 R" for i in range(len(fields)))
    return pdf(
        lines("Application"),
        page=f"/Annots [{references}]",
        objects={100 + i: _widget(each, y=400 - 20 * i) for i, each in enumerate(fields)},
        catalog=f"/AcroForm << /Fields [{references}] >>",
    )


def _noted(annotation: str) -> bytes:
    return pdf(
        lines("The log"), page="/Annots [100 0 R]", objects={100: f"<< /Type /Annot /Rect [0 0 9 9] {annotation} >>"}
    )


FORMS = {
    "filled text field": PdfDocument(_form("/FT /Tx /T (height) /V (42 m)"), "Application\nheight: 42 m"),
    "field in UTF-16": PdfDocument(_form("/FT /Tx /T (name) /V <FEFF00C900760061>"), "Application\nname: Éva"),
    "field of several lines": PdfDocument(
        _form("/FT /Tx /Ff 4096 /T (note) /V (one\\rtwo)"), "Application\nnote: one\ntwo"
    ),
    "empty field": PdfDocument(_form("/FT /Tx /T (height)"), "Application"),
    "checkboxes": PdfDocument(
        _form("/FT /Btn /T (paid) /V /Yes /AS /Yes", "/FT /Btn /T (late) /V /Off /AS /Off"),
        "Application\npaid: Yes",
    ),
    "choice": PdfDocument(_form("/FT /Ch /T (month) /V (May) /Opt [(April) (May)]"), "Application\nmonth: May"),
    "choices": PdfDocument(
        _form("/FT /Ch /Ff 2097152 /T (days) /V [(Monday) (Friday)]"), "Application\ndays: Monday, Friday"
    ),
    "fields stand with their page": PdfDocument(
        pdf(
            lines("one"),
            lines("two"),
            objects={
                10: "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
                "/Contents 11 0 R /Annots [100 0 R] >>",
                100: _widget("/FT /Tx /T (f1) /TU (Height) /V (42 m)"),
            },
            catalog="/AcroForm << /Fields [100 0 R] >>",
        ),
        "one\nHeight: 42 m\n\ntwo",
    ),
    "field with its label": PdfDocument(
        _form("/FT /Tx /T (f1) /TU (Height of the tower) /V (42 m)"), "Application\nHeight of the tower: 42 m"
    ),
    "field that was drawn": PdfDocument(
        pdf(
            lines("Application"),
            page="/Annots [100 0 R]",
            catalog="/AcroForm << /Fields [100 0 R] >>",
            objects={
                100: _widget("/FT /Tx /T (height) /V (42 m) /AP << /N 101 0 R >>"),
                101: xobject("BT /F1 9 Tf (42 m) Tj ET"),
            },
        ),
        "Application\nheight: 42 m",
    ),
    "note": PdfDocument(_noted("/Subtype /Text /Contents (ask the keeper)"), "The log\n\nask the keeper"),
    "free text": PdfDocument(_noted("/Subtype /FreeText /Contents (approved) /DA (/F1 9 Tf)"), "The log\n\napproved"),
    "highlight with a comment": PdfDocument(
        _noted("/Subtype /Highlight /QuadPoints [] /Contents (check this)"), "The log\n\ncheck this"
    ),
    "hidden note": PdfDocument(_noted("/Subtype /Text /F 2 /Contents (unseen)"), "The log"),
    "link": PdfDocument(_noted("/Subtype /Link /A << /S /URI /URI (https://example.org) >>"), "The log"),
    "attached file": PdfDocument(
        pdf(
            lines("The log"),
            catalog="/Names << /EmbeddedFiles << /Names [(plan.txt) 100 0 R] >> >>",
            objects={
                100: "<< /Type /Filespec /F (plan.txt) /EF << /F 101 0 R >> >>",
                101: stream("plan", "/Type /EmbeddedFile"),
            },
        ),
        "The log",
        ["the attached file plan.txt"],
    ),
    "radio buttons": PdfDocument(
        pdf(
            lines("Application"),
            page="/Annots [101 0 R 102 0 R]",
            objects={
                100: "<< /FT /Btn /Ff 32768 /T (size) /V /1 /Opt [(small) (large)] /Kids [101 0 R 102 0 R] >>",
                101: _widget("/Parent 100 0 R /AS /Off"),
                102: _widget("/Parent 100 0 R /AS /1"),
            },
            catalog="/AcroForm << /Fields [100 0 R] >>",
        ),
        "Application\nsize: large",
    ),
    "displayed text of a choice": PdfDocument(
        _form("/FT /Ch /T (month) /V (5) /Opt [[(4) (April)] [(5) (May)]]"), "Application\nmonth: May"
    ),
    "fields of the same name": PdfDocument(
        _form("/FT /Tx /T (a) /V (17)", "/FT /Tx /T (a) /V (18)"), "Application\na: 17\na: 18"
    ),
    "field without a name": PdfDocument(_form("/FT /Tx /V (17)"), "Application\n17"),
    "hidden field": PdfDocument(_form("/FT /Tx /T (a) /V (unseen) /F 2"), "Application"),
    "password": PdfDocument(_form("/FT /Tx /Ff 8192 /T (a) /V (unseen)"), "Application"),
    "signature": PdfDocument(
        _form("/FT /Sig /T (by) /V << /Type /Sig /Name (Eva) >>"), "Application\nby: signed by Eva"
    ),
    "field of a page alone": PdfDocument(
        pdf(lines("Application"), page="/Annots [100 0 R]", objects={100: _widget("/FT /Tx /T (a) /V (17)")}),
        "Application\na: 17",
    ),
    "field of no page": PdfDocument(
        pdf(
            lines("Application"),
            objects={
                100: "<< /T (of) /Kids [101 0 R] >>",
                101: "<< /Parent 100 0 R /FT /Tx /T (a) /V 102 0 R >>",
                102: stream("17"),
            },
            catalog="/AcroForm << /Fields [100 0 R] >>",
        ),
        "Application\n\nof.a: 17",
    ),
    "field that was only drawn": PdfDocument(
        pdf(
            lines("Application"),
            page="/Annots [100 0 R]",
            objects={100: _widget("/FT /Tx /T (a) /AP << /N 101 0 R >>"), 101: xobject(lines("17"))},
        ),
        "Application\na: 17",
    ),
    "form in XFA": PdfDocument(
        pdf(lines("Please wait"), catalog="/AcroForm << /Fields [] /XFA 100 0 R >>", objects={100: stream("<xdp/>")}),
        "Please wait",
        ["the form in XFA"],
    ),
    "drawn stamp": PdfDocument(
        pdf(
            lines("The log"),
            page="/Annots [100 0 R]",
            objects={
                100: "<< /Type /Annot /Subtype /Stamp /Contents (by Eva) /AS /On /AP << /N << /On 101 0 R >> >> >>",
                101: xobject(lines("PAID")),
            },
        ),
        "The log\n\nPAID\nby Eva",
    ),
    "stamp by name": PdfDocument(_noted("/Subtype /Stamp /Name /Approved"), "The log\n\nApproved"),
    "rich text": PdfDocument(_noted("/Subtype /FreeText /RC (<body><p>17 &lt; 18</p></body>)"), "The log\n\n17 < 18"),
    "file in a note": PdfDocument(
        _noted("/Subtype /FileAttachment /FS << /Type /Filespec /UF (data.csv) /EF << /F 101 0 R >> >>"),
        "The log",
        ["the attached file data.csv"],
    ),
}
