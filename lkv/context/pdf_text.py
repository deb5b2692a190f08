"""The text of a PDF as viewers show it, with form fields and notes. Does not import torch."""

import io
import logging
import math
import re
import threading
import zlib
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from pypdf import PageObject, PdfReader
from pypdf.errors import DependencyError
from pypdf.generic import DictionaryObject, EncodedStreamObject

from lkv.context.flow_text import SUBSCRIPTS, SUPERSCRIPTS
from lkv.context.pdf_annotations import annotations, field_texts, get, items, note_texts
from lkv.context.pdf_content import ACTUAL_TEXT, MOVE_TEXT, SHOW_TEXT, Layers, PageContent
from lkv.errors import DocumentError

# What stands for a glyph without a character: controls, replacement characters, private use (but for symbol fonts).
_NO_CHARACTERS = re.compile(r"[\x01-\x08\x0e-\x1f\ufffd\ue000-\uefff\uf100-\uf8ff]")
# Predefined maps of composite fonts that pypdf reads.
_READABLE_MAPS = frozenset("GBK-EUC GB-EUC GBK2K 90ms-RKSJ ETen-B5".split()) | {
    f"Uni{script}-{form}" for script in ("GB", "CNS", "JIS", "KS") for form in ("UCS2", "UTF16")
}
_LIGATURES = {0xFB00: "ff", 0xFB01: "fi", 0xFB02: "fl", 0xFB03: "ffi", 0xFB04: "ffl", 0xFB05: "st", 0xFB06: "st"}
_BROKEN_WORD = re.compile(r"([^\W\d_]+)[-\N{HYPHEN}]\n([^\W\d_]+)")
_MIN_COLUMN = 18  # characters of a line of a column of prose, on average
_COPY_DISTANCE = 0.1  # between a piece and its copy that makes it bold, by the font's size
_UNNAMED, _OUTSIDE, _HIDDEN, _STRUCK, _DAMAGED, _SCAN, _EMPTY, _IMAGES = _KINDS = (
    "text in fonts without characters on page",
    "text outside of page",
    "text of hidden layers on page",
    "text read though struck out on page",
    "damaged content of page",
    "the scanned page",
    "the page without text",
    "the images of page",
)
_DAMAGE = re.compile("decompress|not defined|[Ii]mpossible to decode|Stream has ended|unexpected end")
_MAX_CONTENT = 10**8  # decompressed bytes
_NAMED = 9  # the most pages and files listed individually


def pdf_text(data: bytes, name: str) -> tuple[str, list[str]]:
    """Return the pages' text, form fields and notes, separated by blank lines, and descriptions of skipped content.

    Raises:
        DocumentError: For a damaged or locked document.
    """
    log, damage = logging.getLogger("pypdf"), _DamageLog()
    log.addHandler(damage)
    try:
        reader = PdfReader(io.BytesIO(data[max(0, data[:1024].find(b"%PDF-")) :]))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{name} is locked with a password; give a copy without one.")
        own_pages = list(reader.pages)
        is_damaged = damage.take() or _is_update_cut(data)
        layers = Layers(reader)
        pages = [_read_page(page, layers, damage) for page in own_pages]
        details = "\n".join([*field_texts(reader, layers.is_off), *note_texts(reader, layers.is_off)])
        skipped = [*_left_out(reader, pages), *(["damaged parts"] if is_damaged or damage.take() else [])]
        return "\n\n".join(filter(None, [*(text for text, _ in pages), details])), skipped
    except DependencyError as error:
        raise DocumentError(
            f"{name} is encrypted, which takes one more package to read; run `pip install 'pypdf[crypto]'`, or print "
            "it to a new PDF."
        ) from error
    except DocumentError:
        raise
    except Exception as error:  # of any type, from KeyError to AssertionError
        raise DocumentError(f"{name} is a damaged PDF ({error}); print it to a new PDF, or give its text.") from error
    finally:
        log.removeHandler(damage)


class _DamageLog(logging.Handler):
    """Collects what pypdf logs of lost content in this thread; nothing of it is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread and _DAMAGE.search(record.getMessage()):
            self.messages.append(record.getMessage())

    def take(self) -> bool:
        """Return whether there are messages, and drop them."""
        messages, self.messages = self.messages, []
        return bool(messages)


class _Piece(NamedTuple):
    """A piece of text drawn at one position.

    Attributes:
        text: The text.
        x: Start of the base line, in points from the page's left.
        y: Height of the base line, in points from the page's bottom.
        size: Font size in points.
        rise: Rise above the base line.
        turn: Its direction in quarter turns from left to right, counterclockwise; None between them.
        font: Identifies its font on the page.
        place: Counts the positions that the page has set before it.
    """

    text: str
    x: float
    y: float
    size: float
    rise: float
    turn: int | None
    font: int = 0
    place: int = 0

    def is_after(self, other: "_Piece") -> bool:
        """Return whether there is a gap between the other piece and this one, by letters of half their size."""
        end = other.x + 0.5 * len(other.text) * other.size
        return self.x - end > 0.2 * self.size and other.text[-1:] != " " != self.text[:1]

    def is_copy(self, other: "_Piece") -> bool:
        """Return whether this is the other piece drawn again, as for bold letters or a shadow."""
        distance = max(abs(self.x - other.x), abs(self.y - other.y))
        is_placed = self.place != other.place
        return is_placed and self.text == other.text and distance < _COPY_DISTANCE * max(self.size, other.size)


def _read_page(page: PageObject, layers: Layers, damage: _DamageLog) -> tuple[str, list[str]]:
    """Return a page's text, and what of it is missing."""
    content = PageContent(page, layers)
    lines: list[list[_Piece]] = []
    missing = [_HIDDEN] * content.hides_text
    for quarters in range(4):
        all_pieces, unnamed = _pieces(content.turned(quarters + page.rotation // 90))
        # What runs in other directions is read from left to right in its own turn: pypdf separates words there alone.
        own = [piece for piece in all_pieces if piece.turn == 0 or (piece.turn is None and not quarters)]
        lines += _lines(own, unnamed, _turned_box(page, quarters + page.rotation // 90), missing)
        if not any(piece.turn for piece in all_pieces):
            break
    missing += [_STRUCK] * any(get(note, "/Subtype") == "/StrikeOut" for note in items(get(page, "/Annots")))
    if damage.take() or content.is_incomplete or any(_is_cut(stream) for stream in items(get(page, "/Contents"))):
        missing.append(_DAMAGED)
    text = _join_words("\n".join(_line_text(line) for line in lines).translate(_LIGATURES)).strip("\n")
    if content.draws_image:
        missing.append(_IMAGES if text else _SCAN)
    elif not text and not missing and not content.is_empty:
        missing.append(_EMPTY)
    return text, missing


def _lines(
    all_pieces: list[_Piece], unnamed: set[int], box: tuple[float, float, float, float], missing: list[str]
) -> list[list[_Piece]]:
    """Return the lines of pieces within a box (left, bottom, right, top); `missing` gets what is left out."""
    pieces = [piece for piece in all_pieces if piece.font not in unnamed]
    left, bottom, right, top = box
    # Pieces without a position are line breaks found by pypdf.
    visible = [each for each in pieces if each.text == "\n" or (left <= each.x < right and bottom <= each.y < top)]
    missing += [_UNNAMED] * (len(pieces) < len(all_pieces))
    if len("".join(each.text for each in pieces).split()) > len("".join(each.text for each in visible).split()):
        missing.append(_OUTSIDE)
    lines: list[list[_Piece]] = []
    for is_break, line in groupby(visible, key=lambda piece: piece.text == "\n"):
        lines += [] if is_break else _rows(list(line))
    if all(piece.turn == 0 for line in lines for piece in line):
        lines = _order_columns(_order_lines(_join_scripts(lines), left + 0.4 * (right - left)))
    return lines


def _rows(line: list[_Piece]) -> list[list[_Piece]]:
    """Split what pypdf takes for one line where a piece goes back and down, as the next row of a table does."""
    rows = [line[:1]]
    for before, piece in pairwise(line):
        least = 0.2 if piece.x < before.x - piece.size else 0.5
        if piece.x <= before.x and before.y - piece.y > least * piece.size:
            rows.append([])
        rows[-1].append(piece)
    return rows


def _turned_box(page: PageObject, quarters: int) -> tuple[float, float, float, float]:
    """Return a page's crop box (left, bottom, right, top), turned clockwise about the page's corner."""
    left, bottom, right, top = (float(edge) for edge in page.cropbox)
    for _ in range(quarters % 4):
        left, bottom, right, top = bottom, -right, top, -left
    return left, bottom, right, top


def _is_update_cut(data: bytes) -> bool:
    """Return whether the last update of a document breaks off, so that pypdf reads the one before."""
    _, mark, update = data.rpartition(b"%%EOF")
    return bool(mark) and b" obj" in update


def _is_cut(stream: object) -> bool:
    """Return whether compressed content breaks off, which pypdf does not report."""
    if not isinstance(stream, EncodedStreamObject) or items(get(stream, "/Filter")) != ["/FlateDecode"]:
        return False
    decompressor = zlib.decompressobj()
    try:
        decompressor.decompress(stream._data, _MAX_CONTENT)
    except zlib.error:
        return True
    return not decompressor.eof


def _pieces(page: PageObject) -> tuple[list[_Piece], set[int]]:
    """Return a page's pieces of text, and the fonts that do not name their characters."""
    pieces: list[_Piece] = []
    unnamed: set[int] = set()
    rise = shown_rise = 0.0
    places, place = 0, None
    actual: str | None = None  # the text that the next pieces stand for; empty after the first of them
    was_replaced = False

    def before(operator: bytes, operands: list[Any], cm: list[float], tm: list[float]) -> None:
        nonlocal rise, shown_rise, places, place, actual, was_replaced
        places += operator in MOVE_TEXT
        if operator == b"Ts":
            rise = float(operands[0])
        elif operator == ACTUAL_TEXT:
            actual, was_replaced = operands[0], False
        elif operator in SHOW_TEXT:
            shown_rise, place = rise, places if place is None else place

    def add(text: str, cm: list[float], tm: list[float], font: Any, size: float) -> None:
        nonlocal place, actual, was_replaced
        # An empty text stands for a hyphen; what more it would hide is displayed.
        if actual is not None and text.strip() and (actual or was_replaced or len(text.strip()) == 1):
            text, actual, was_replaced = actual + "\n" * text.endswith("\n"), "", True
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        x, y = (tm[4] * cm[i] + tm[5] * cm[i + 2] + cm[i + 4] for i in (0, 1))
        across, up = ((tm[0] * cm[i] + tm[1] * cm[i + 2]) * math.copysign(1, size) for i in (0, 1))
        quarters = math.atan2(up, across) / (math.pi / 2)
        turn = round(quarters) % 4 if abs(quarters - round(quarters)) < 1e-3 else None
        size = abs(size) * abs(tm[3] * cm[3] + tm[2] * cm[1])
        if text.strip() and font is not None and _is_unnamed(font, text):
            unnamed.add(id(font))
        for number, line in enumerate(text.split("\n")):
            if number:
                pieces.append(_Piece("\n", 0, 0, 0, 0, 0))
            piece = _Piece(line, x, y, size, shown_rise, turn, id(font), place or 0)
            if line and not any(piece.is_copy(other) for other in pieces[-12:]):
                pieces.append(piece)
        place = None if text else place

    page.extract_text(visitor_operand_before=before, visitor_text=add)
    return pieces, unnamed


def _is_unnamed(font: Any, text: str) -> bool:
    """Return whether a font does not say which characters its glyphs are, so that pypdf returns others for them."""
    if len(_NO_CHARACTERS.findall(text)) > 0.05 * len(text):
        return True
    if "/ToUnicode" in font:
        return False
    if re.search("Wingdings|Webdings", str(font.get("/BaseFont"))):
        return True
    encoding = get(font, "/Encoding")
    if get(font, "/DescendantFonts") is not None and str(encoding).startswith("/"):
        return str(encoding)[1:].removesuffix("-H").removesuffix("-V") not in _READABLE_MAPS
    differences = items(encoding.get("/Differences")) if isinstance(encoding, DictionaryObject) else []
    names = {str(name) for name in differences if re.search(r"[._\d]", str(name)) and str(name).startswith("/")}
    return any(name in text for name in names) or bool(re.fullmatch(r"(?:/[A-Za-z]{0,4}\d+)+", text))


def _join_scripts(lines: list[list[_Piece]]) -> list[list[_Piece]]:
    """Join parts of a line that are raised or lowered by less than a line's height."""
    joined: list[list[_Piece]] = []
    for line in lines:
        last = joined[-1][-1] if joined else line[0]
        base, first = max(joined[-1] if joined else line, key=lambda piece: piece.size), line[0]
        is_script = min(first.size, last.size) < 0.8 * base.size
        if joined and is_script and first.x > last.x and abs(first.y - base.y) < 0.7 * base.size:
            is_apart = first.size >= 0.8 * base.size and first.is_after(last)
            joined[-1] += [last._replace(text=" "), *line] if is_apart else line
        else:
            joined.append(line)
    return joined


def _order_lines(lines: list[list[_Piece]], middle: float) -> list[list[_Piece]]:
    """Sort lines drawn out of order from top to bottom, except columns, which begin right of `middle`.

    Parts of one line, such as the cells of a table that was drawn by columns, are joined from left to right.
    """
    jumps = [line for before, line in pairwise(lines) if line[0].y > before[0].y + before[0].size]
    if not jumps or any(line[0].x > middle for line in jumps):
        return lines
    ordered: list[list[_Piece]] = []
    for _, run in groupby(sorted(lines, key=lambda line: -line[0].y), key=lambda line: line[0].y):
        first, *rest = sorted(run, key=lambda line: line[0].x)
        ordered.append(sum(([part[0]._replace(text=" "), *part] for part in rest), first))
    return ordered


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


def _left_out(reader: PdfReader, pages: list[tuple[str, list[str]]]) -> Iterator[str]:
    found: dict[str, list[Any]] = {
        name: [number for number, (_, missing) in enumerate(pages, 1) if name in missing] for name in _KINDS
    }
    files = [get(note, "/FS") or {} for _, note in annotations(reader, is_widget=False)]
    names = [str(file.get("/UF") or file.get("/F")) for file in files if isinstance(file, dict) and "/EF" in file]
    found["the attached file"] = [*reader.attachments, *names]
    yield from (_name_some(what, names) for what, names in found.items() if names)
    form = get(reader.root_object, "/AcroForm") or {}
    if "/XFA" in form and not items(get(form, "/Fields")):
        yield "the form in XFA"


def _name_some(what: str, names: list[Any]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{what}{'s' * (len(names) > 1)} {', '.join(map(str, names[:_NAMED]))}{more}"
