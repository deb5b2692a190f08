"""The text of a PDF as viewers show it, with form fields and notes. Does not import torch."""

import io
import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from lkv.context.html_text import SUBSCRIPTS, SUPERSCRIPTS
from lkv.errors import DocumentError

if TYPE_CHECKING:
    from pypdf import PageObject, PdfReader

_LIGATURES = {0xFB00: "ff", 0xFB01: "fi", 0xFB02: "fl", 0xFB03: "ffi", 0xFB04: "ffl", 0xFB05: "st", 0xFB06: "st"}
_BROKEN_WORD = re.compile(r"([^\W\d_]+)[-\N{HYPHEN}]\n([^\W\d_]+)")
_HIDDEN = 2 | 32  # flags of annotations: Hidden, NoView
_MIN_COLUMN = 18  # characters of a line of a column of prose, on average
_NAMED = 9  # the most pages and files listed individually


def pdf_text(data: bytes, name: str) -> tuple[str, list[str]]:
    """Return the pages' text, form fields and notes, separated by blank lines, and descriptions of skipped content.

    Raises:
        DocumentError: For a damaged or locked document.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    try:
        reader = PdfReader(io.BytesIO(data[max(0, data[:1024].find(b"%PDF-")) :]))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{name} is locked with a password; give a copy without one.")
        texts = [_page_text(page) for page in reader.pages]
        details = "\n".join([*_fields(reader), *_notes(reader)])
        return "\n\n".join(text for text in [*texts, details] if text), list(_left_out(reader, texts))
    except DependencyError as error:
        raise DocumentError(
            f"{name} is encrypted, which takes one more package to read; run `pip install 'pypdf[crypto]'`, or print "
            "it to a new PDF."
        ) from error
    except DocumentError:
        raise
    except Exception as error:  # of any type, from KeyError to AssertionError
        raise DocumentError(f"{name} is a damaged PDF ({error}); print it to a new PDF, or give its text.") from error


class _Piece(NamedTuple):
    """A piece of text drawn at one position.

    Attributes:
        text: The text.
        x: Start of the base line, in points from the page's left.
        y: Height of the base line, in points from the page's bottom.
        size: Font size in points.
        rise: Rise above the base line.
        is_level: Whether it runs from left to right.
    """

    text: str
    x: float
    y: float
    size: float
    rise: float
    is_level: bool


def _page_text(page: "PageObject") -> str:
    pieces = _pieces(page)
    left, bottom, right, top = (float(edge) for edge in page.cropbox)
    # Pieces without a position are line breaks found by pypdf.
    visible = [each for each in pieces if each.text == "\n" or (left <= each.x < right and bottom <= each.y < top)]
    lines = [list(line) for is_break, line in groupby(visible, key=lambda piece: piece.text == "\n") if not is_break]
    if all(piece.is_level for line in lines for piece in line):
        lines = _order_columns(_order_lines(lines, left + 0.4 * (right - left)))
    text = "\n".join(_line_text(line) for line in lines)
    return _join_words(text.translate(_LIGATURES)).strip("\n")


def _pieces(page: "PageObject") -> list[_Piece]:
    pieces: list[_Piece] = []
    rise = shown_rise = 0.0

    def before(operator: bytes, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        nonlocal rise, shown_rise
        if operator == b"Ts":
            rise = float(operands[0])
        elif operator in (b"Tj", b"TJ", b"'", b'"'):
            shown_rise = rise

    def add(text: str, cm: list[float], tm: list[float], font: Any, size: float) -> None:
        x, y = (tm[4] * cm[i] + tm[5] * cm[i + 2] + cm[i + 4] for i in (0, 1))
        scale = abs(tm[3] * cm[3] + tm[2] * cm[1])
        is_level = abs(tm[0] * cm[1] + tm[1] * cm[3]) < 1e-3
        for number, line in enumerate(text.split("\n")):
            if number:
                pieces.append(_Piece("\n", 0, 0, 0, 0, True))
            if line:
                pieces.append(_Piece(line, x, y, size * scale, shown_rise, is_level))

    page.extract_text(visitor_operand_before=before, visitor_text=add)
    return pieces


def _order_lines(lines: list[list[_Piece]], middle: float) -> list[list[_Piece]]:
    """Sort lines drawn out of order from top to bottom, except columns, which begin right of `middle`."""
    jumps = [line for before, line in pairwise(lines) if line[0].y > before[0].y + before[0].size]
    if not jumps or any(line[0].x > middle for line in jumps):
        return lines
    return sorted(lines, key=lambda line: -line[0].y)


def _order_columns(lines: list[list[_Piece]]) -> list[list[_Piece]]:
    """Put two columns of prose that were drawn line by line one after the other."""
    ordered: list[list[_Piece]] = []
    for place, run in groupby(lines, key=_second_column):
        column = list(run)
        if place is None or len(column) < 3:
            ordered += column
            continue
        left, right = (
            [[piece for piece in line if (piece.x < place) == is_left] for line in column] for is_left in (True, False)
        )
        least = _MIN_COLUMN * len(column)
        is_prose = all(sum(len(piece.text) for line in side for piece in line) >= least for side in (left, right))
        ordered += left + right if is_prose else column
    return ordered


def _second_column(line: list[_Piece]) -> int | None:
    """Return the position after a gap in a line, to the nearest ten points."""
    gaps = [
        after.x
        for before, after in pairwise(line)
        if after.x - before.x > 0.4 * len(before.text) * before.size + before.size
    ]
    return round(gaps[0], -1) if len(gaps) == 1 else None  # type: ignore[return-value]


def _line_text(line: list[_Piece]) -> str:
    """Return a line's text, with superscripts and subscripts as such: 10\N{SUPERSCRIPT SIX}, not 106."""
    text = ""
    for before, piece in zip([None, *line], line, strict=False):
        is_small = before is not None and piece.size < 0.8 * before.size and text[-1:].isalnum()
        shift = 0.0 if before is None else piece.y + piece.rise - before.y - before.rise
        characters = SUPERSCRIPTS if shift > 0 else SUBSCRIPTS
        is_script = is_small and shift and all(ord(character) in characters for character in piece.text)
        text += piece.text.translate(characters) if is_script else piece.text
    return text.strip(" ")


def _join_words(text: str) -> str:
    """Join words that are broken at a line's end; the hyphen stays where the text has it elsewhere in the word."""
    text = text.replace("\N{SOFT HYPHEN}\n", "").replace("\N{SOFT HYPHEN}", "")

    def join(match: re.Match[str]) -> str:
        first, second = match.groups()
        has_hyphen = second[0].isupper() or re.search(rf"\b{first}-{second}\b", text, re.IGNORECASE)
        return f"{first}-{second}" if has_hyphen else first + second

    return _BROKEN_WORD.sub(join, text)


def _fields(reader: "PdfReader") -> Iterator[str]:
    """Return the filled fields of forms, as `label: value`."""
    for name, field in (reader.get_fields() or {}).items():
        value = field.get("/V")
        value = value.get_object() if value is not None else None
        values = [str(each).removeprefix("/") for each in (value if isinstance(value, list) else [value])]
        if value is not None and values != ["Off"] and (text := ", ".join(values)):
            yield f"{field.get('/TU') or name}: {_as_lines(text)}"


def _notes(reader: "PdfReader") -> Iterator[str]:
    """Return the contents of annotations that are displayed."""
    for page in reader.pages:
        for reference in page.get("/Annots") or []:
            note = reference.get_object()
            is_displayed = not int(note.get("/F", 0)) & _HIDDEN and note.get("/Subtype") not in ("/Widget", "/Popup")
            if is_displayed and note.get("/Contents"):
                yield _as_lines(str(note["/Contents"]))


def _as_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _left_out(reader: "PdfReader", texts: list[str]) -> Iterator[str]:
    empty = {n: page for n, (page, text) in enumerate(zip(reader.pages, texts, strict=True), 1) if not text}
    if scans := [n for n, page in empty.items() if _has_image(page)]:
        yield _name_some("the scanned page", scans)
    if drawn := [n for n, page in empty.items() if n not in scans and _has_content(page)]:
        yield _name_some("the page without text", drawn)
    if attached := list(reader.attachments):
        yield _name_some("the attached file", attached)


def _has_image(page: "PageObject") -> bool:
    from pypdf.generic import DictionaryObject

    resources = page.get("/Resources", DictionaryObject()).get_object()
    objects = resources.get("/XObject", DictionaryObject()).get_object().values()
    return any(each.get_object().get("/Subtype") in ("/Image", "/Form") for each in objects)


def _has_content(page: "PageObject") -> bool:
    content = page.get_contents()
    return content is not None and bool(content.get_data().strip())


def _name_some(what: str, names: list[Any]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{what}{'s' * (len(names) > 1)} {', '.join(map(str, names[:_NAMED]))}{more}"
