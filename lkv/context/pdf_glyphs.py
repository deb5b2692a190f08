"""The glyphs of PDF pages with their places, read by pdfium. Does not import torch."""

import ctypes
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from string import digits
from typing import Any, NamedTuple
from unicodedata import bidirectional

import pypdfium2
import pypdfium2.raw as pdfium

from lkv.context.pdf_fields import Box, Field, place_fields
from lkv.context.pdf_fractions import join_fractions
from lkv.context.pdf_layout import lines_of
from lkv.context.pdf_objects import Objects, address, outermost, read_objects
from lkv.context.pdf_tables import join_tables
from lkv.context.pdf_words import MIDDLE, Glyph, accent

_LOCK = threading.Lock()  # pdfium is not thread-safe
_LAM = "\u0644"  # the first letter of the ligatures that Unicode has
_HYPHEN = 2  # pdfium's character for a hyphen at a line's end
# What stands for a glyph without a character: controls, replacement characters, private use (but for symbol fonts).
_NO_CHARACTER = re.compile(r"[\x01-\x08\x0e-\x1f\ufffd\ue000-\uefff\uf100-\uf8ff]")
_SYMBOL_FONTS = re.compile("Wingdings|Webdings")
_MAX_UNNAMED = 0.05  # of a font's characters
_MAX_CHARACTERS = 500_000  # of a page
_SIDE_BEARINGS = 0.2  # of the font's size
_EXACT = 0.01  # from the origin of a glyph to the box of its advance
# Small digits that a font has for scripts: their feet if raised, their heads if lowered, their height and their size.
_RAISED_FOOT, _LOWERED_HEAD, _MAX_HEIGHT, _SCRIPT_SIZE = 0.2, 0.36, 0.5, 0.6


class PageText(NamedTuple):
    """The text of a page, and what else is there."""

    lines: list[str]  # first those that run from left to right on the screen
    objects: Objects
    has_unnamed: bool  # glyphs without a character, left out if their fonts have several
    has_outside: bool  # text outside of the page, left out
    is_unseen: bool  # there is text that is covered or clipped


def read_pages(data: bytes, fields: Mapping[int | None, Sequence[Field]]) -> list[PageText]:
    """Read the text of a PDF's pages, with the form fields of each by its number; no other thread reads meanwhile."""
    with _LOCK:
        document = pypdfium2.PdfDocument(data)
        try:
            pages = ((_open_page(document, number), fields.get(number, ())) for number in range(len(document)))
            return [_read_page(page, own_fields) for page, own_fields in pages if page]
        finally:
            document.close()


def _open_page(document: pypdfium2.PdfDocument, number: int) -> pypdfium2.PdfPage | None:
    """Return a page; None if it is missing."""
    try:
        return document[number]
    except pypdfium2.PdfiumError:
        return None


class _Style(NamedTuple):
    """What the glyphs of a text object have in common."""

    address: int  # of the object
    font: int  # its address
    size: float  # in points
    direction: tuple[float, bool]  # of reading, in degrees counterclockwise, and whether it is that of vertical writing
    span: int  # address of the outermost marked content with /ActualText around the object; 0 for none
    stretch: float  # points on the page of a glyph of width 1
    side: int | None  # which side of a glyph's box is its width; None in boxes that are turned by another angle
    is_symbol: bool  # the font has pictures in the place of letters
    is_embedded: bool  # so that glyphs are as wide as the font says


class _Placed(NamedTuple):
    """A glyph with its origin and width on the page, and whether its font does not name its character."""

    text: str
    x: float
    y: float
    width: float
    style: _Style
    is_unnamed: bool
    rise: float  # of a small digit that its font draws above the line, or below it


def _read_page(page: pypdfium2.PdfPage, fields: Sequence[Field]) -> PageText:
    try:
        objects = read_objects(page)
        owners: dict[int, int] = {}  # the object in whose place an /ActualText is
        glyphs = [
            glyph
            for glyph in _placed_glyphs(page.get_textpage())
            if not glyph.style.span or owners.setdefault(glyph.style.span, glyph.style.address) == glyph.style.address
        ]
        letters = Counter(glyph.style.font for glyph in glyphs if glyph.text.strip("\0 "))
        unnamed = Counter(glyph.style.font for glyph in glyphs if glyph.is_unnamed)
        nameless = {font for font, count in unnamed.items() if count > _MAX_UNNAMED * letters[font]}
        named = [glyph for glyph in glyphs if glyph.style.font not in nameless]
        left, bottom, right, top = page.get_bbox()
        inside = [glyph for glyph in named if left <= glyph.x < right and bottom <= glyph.y < top]
        directions = _directions(inside, objects, page.get_rotation(), fields)
        return PageText(
            lines=[line for frame in directions for line in lines_of(frame)],
            objects=objects,
            has_unnamed=bool(unnamed),
            has_outside=any(glyph.text.strip() for glyph in {*named}.difference(inside)),
            is_unseen=any(_is_unseen(glyph, objects) for glyph in inside),
        )
    finally:
        page.close()


def _is_unseen(glyph: _Placed, objects: Objects) -> bool:
    """Return whether the middle of a glyph is covered by a shape, or clipped."""
    clip, covers = objects.views.get(glyph.style.address, (None, []))
    if clip is None or glyph.text == " ":
        return False
    x, y = _turn(glyph.width / 2, MIDDLE * glyph.style.size, -glyph.style.direction[0])
    x, y = x + glyph.x, y + glyph.y
    is_within = [box[0] <= x <= box[2] and box[1] <= y <= box[3] for box in (clip, *covers)]
    return not is_within[0] or any(is_within[1:])


def _directions(
    glyphs: list[_Placed], objects: Objects, rotation: int, fields: Sequence[Field]
) -> Iterator[list[Glyph]]:
    """Yield the glyphs of each direction in its frame, fractions and rows of tables as one, with the form's fields.

    `rotation` is that of the page, clockwise.
    """
    frames: dict[tuple[int, bool], tuple[float, list[Glyph]]] = {}  # by degrees, and whether vertical; the exact angle
    for order, (text, x, y, width, style, _, rise) in enumerate(glyphs):
        exact, is_vertical = style.direction
        near = [((round(exact) + step) % 360, is_vertical) for step in (0, -1, 1)]
        angle, frame = frames.setdefault(next((key for key in near if key in frames), near[0]), (exact, []))
        start, base = _turn(x, y, angle)
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        size = style.size * (_SCRIPT_SIZE if rise else 1)
        frame.append(Glyph(text, start, base + rise, start + width, size, order))
    if fields:
        frames.setdefault((rotation, False), (rotation, []))
    for key in sorted(frames, key=lambda key: (key[0] + 90 * key[1] - rotation + 5) % 360):
        angle, frame = frames[key]
        shapes = [_turn_box(box, angle) for box in objects.shapes]
        joined = join_fractions(frame, shapes)
        placed = [(_turn_box(field.box, angle), field) for field in fields if field.box]
        yield join_tables(place_fields(joined, placed if key == (rotation, False) else []), shapes)


def _turn_box(box: Box, angle: float) -> Box:
    """Return the box around a box, or a line, in a frame that is turned by degrees."""
    (x, y), (end, top) = _turn(*box[:2], angle), _turn(*box[2:], angle)
    return min(x, end), min(y, top), max(x, end), max(y, top)


def _turn(x: float, y: float, angle: float) -> tuple[float, float]:
    """Return the place of a point in a frame that is turned by degrees."""
    across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    return x * across + y * up, y * across - x * up


def _placed_glyphs(text: pypdfium2.PdfTextPage) -> Iterator[_Placed]:
    """Yield the glyphs of a page, but those that pdfium generates, in its order."""
    last: _Placed | None = None
    x, y, box, width = ctypes.c_double(), ctypes.c_double(), pdfium.FS_RECTF(), ctypes.c_float()
    if (count := pdfium.FPDFText_CountChars(text)) > _MAX_CHARACTERS:
        raise ValueError(f"a page of more than {_MAX_CHARACTERS} characters")
    for i in range(count):
        drawn = pdfium.FPDFText_GetTextObject(text, i)
        if not drawn or pdfium.FPDFText_IsGenerated(text, i) == 1:
            continue
        style = last.style if last and last.style.address == address(drawn) else _style(text, i, drawn)
        code = pdfium.FPDFText_GetUnicode(text, i)
        character = "-" if code == _HYPHEN else chr(code)
        is_unnamed = (pdfium.FPDFText_HasUnicodeMapError(text, i) == 1 and character not in "\0 ") or (
            bool(_NO_CHARACTER.match(character)) or (style.is_symbol and code < 0x100)
        )
        pdfium.FPDFText_GetCharOrigin(text, i, x, y)
        pdfium.FPDFText_GetLooseCharBox(text, i, box)
        sides = box.right - box.left, box.top - box.bottom  # of what is drawn and the advance
        most = style.size if style.side is None else sides[style.side]
        # Characters of a ligature, or of /ActualText, but not an accent and its letter.
        is_part = bool(last and (style.span or not (accent(last.text) or accent(character))))
        if last and last.style is style and is_part and (last.x, last.y) == (x.value, y.value):
            most *= len(last.text) + 1 if style.span else 1  # each character of /ActualText has its share
            # pdfium gives the letters of a ligature as they are seen, but those that have a character of their own.
            is_turned = not style.span and bidirectional(character) in ("R", "AL") and last.text != _LAM
            joined = character + last.text if is_turned else last.text + character
            last = last._replace(text=joined, width=most, is_unnamed=last.is_unnamed or is_unnamed)
            continue
        if last:
            yield last
        pdfium.FPDFFont_GetGlyphWidth(pdfium.FPDFTextObj_GetFont(drawn), code, 1.0, width)
        # Of several glyphs of a character, pdfium gives the width of one: of an Arabic letter, or a small digit.
        edges = (box.bottom - y.value, box.top - y.value) if style.side else (box.left - x.value, box.right - x.value)
        is_level = style.side is not None and not style.direction[1]  # not of vertical writing, nor oblique
        is_exact = style.is_embedded and is_level and min(map(abs, edges)) < _EXACT * style.size
        is_own = bidirectional(character) == "AL" or (is_exact and character.isdigit())
        advance = most if is_own else min(abs(width.value) * style.stretch or most, most)
        if style.span:  # the box of /ActualText is what is drawn alone
            advance = most + _SIDE_BEARINGS * style.size
        rise = _rise(text, i, style, (x.value, y.value)) if is_exact and character in digits else 0.0
        last = _Placed(character, x.value, y.value, advance, style, is_unnamed, rise)
    if last:
        yield last


def _rise(text: pypdfium2.PdfTextPage, index: int, style: _Style, origin: tuple[float, float]) -> float:
    """Return how far above the line a digit stands that its font has for scripts, in points; 0 for other digits."""
    left, right, bottom, top = (ctypes.c_double() for _ in range(4))
    pdfium.FPDFText_GetCharBox(text, index, left, right, bottom, top)
    _, low, _, high = _turn_box((left.value, bottom.value, right.value, top.value), style.direction[0])
    foot, head = ((edge - _turn(*origin, style.direction[0])[1]) / (style.size or 1) for edge in (low, high))
    is_script = (foot > _RAISED_FOOT or foot < 0 < head < _LOWERED_HEAD) and head - foot < _MAX_HEIGHT
    return foot * style.size * is_script


def _style(text: pypdfium2.PdfTextPage, index: int, drawn: Any) -> _Style:
    font, matrix = pdfium.FPDFTextObj_GetFont(drawn), pdfium.FS_MATRIX()
    name, width = ctypes.create_string_buffer(256), ctypes.c_float()
    pdfium.FPDFFont_GetBaseFontName(font, name, len(name))
    pdfium.FPDFText_GetMatrix(text, index, matrix)
    pdfium.FPDFFont_GetGlyphWidth(font, pdfium.FPDFText_GetUnicode(text, index), 1.0, width)
    is_vertical = width.value < 0
    size = pdfium.FPDFText_GetFontSize(text, index)
    a, b, c, d = (size * each for each in (matrix.a, matrix.b, matrix.c, matrix.d))
    fuzz = 1e-3 * max(abs(a), abs(b))
    is_upright, is_turned = max(abs(b), abs(c)) < fuzz, max(abs(a), abs(d)) < fuzz
    return _Style(
        address=address(drawn),
        font=address(font) if font else 0,
        size=math.hypot(c, d),
        direction=(math.degrees(math.atan2(b, a)) - 90 * is_vertical, is_vertical),
        span=outermost(drawn, b"ActualText"),
        stretch=math.hypot(a, b),
        side=int(is_turned != is_vertical) if is_upright or is_turned else None,
        is_symbol=bool(_SYMBOL_FONTS.search(name.value.decode("latin-1"))),
        is_embedded=pdfium.FPDFFont_GetIsEmbedded(font) == 1,
    )
