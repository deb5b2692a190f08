"""Small PDFs with superscripts and subscripts, with the text as seen."""

from tests.context.pdf_writer import PdfDocument, pdf


def _script(before: str, script: str, after: str, rise: float, size: float = 8) -> str:
    """Content of a line with a superscript or a subscript."""
    return f"({before}) Tj {rise} Ts /F1 {size} Tf ({script}) Tj 0 Ts /F1 12 Tf ({after}) Tj 0 -14.4 Td\n"


_SCRIPTS = (
    ("10", "2.5", " kg", "10^(2.5) kg"),
    ("in 1990", "1,2", " it", "in 1990^(1,2) it"),
    ("10", "6", " m", "10⁶ m"),
    ("in 2020", "12\22614", "", "in 2020^(12\N{EN DASH}14)"),
    ("12%", "3", " of", "12%³ of"),
    ("of 7.", "8", " Next", "of 7.⁸ Next"),
    ("cost 25", "a", " in all", "cost 25^a in all"),
    ("the 12", "th", " of May", "the 12th of May"),
    ("", "1", "2019 was good", "¹2019 was good"),
    ("of ", "14", "C", "of ¹⁴C"),
    ("", "a", "12.5 with tax", "a 12.5 with tax"),
    ("10", "2, 3", " kg", "10^(2, 3) kg"),
)
_INDICES = (
    ("PM", "2.5", " at 35", "PM_(2.5) at 35"),
    ("CO", "2", " of 40", "CO₂ of 40"),
    ("log", "10", "100", "log₁₀100"),
    ("x", "max", " is 7", "x_max is 7"),
)

SCRIPTS = {
    f"scripts raised by {rise}": PdfDocument(
        pdf("BT /F1 12 Tf 72 700 Td " + "".join(_script(*each[:3], rise) for each in scripts) + "ET"),
        "\n".join(read for *_, read in scripts),
    )
    for scripts, rises in ((_SCRIPTS, (3, 5, 7)), (_INDICES, (-1.5, -3, -4, -6)))
    for rise in rises
}
