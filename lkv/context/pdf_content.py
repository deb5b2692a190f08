"""The content of a PDF page as one stream: forms in place, hidden layers left out. Does not import torch."""

from typing import Any

from pypdf import PageObject, PdfReader
from pypdf.generic import (
    ContentStream,
    DictionaryObject,
    FloatObject,
    NameObject,
    StreamObject,
    create_string_object,
)

from lkv.context.pdf_annotations import get, items

ACTUAL_TEXT = b"ActualText"  # an operator of our own: what the pieces up to the next one stand for, None for themselves
_KEPT = frozenset(b"BT ET q Q cm Tc Tw TL Tf Td TD Tm T* Tj TJ ' \" Ts".split())
SHOW_TEXT = frozenset(b"Tj TJ ' \"".split())
MOVE_TEXT = frozenset(b"BT Td TD Tm T* ' \"".split())
_MAX_DRAWN = 10_000  # forms of a page
_MAX_OPERATIONS = 10**6  # of the forms of a page
_UNIT = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0)
_FALLBACK_FONT = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica", "/Encoding": "/WinAnsiEncoding"}


class Layers:
    """The optional content groups (layers) of a document that are not displayed in its default configuration."""

    def __init__(self, reader: PdfReader):
        properties = get(reader.root_object, "/OCProperties") or {}
        config = get(properties, "/D") or {}
        self._off = {id(group) for group in items(get(config, "/OFF"))}
        if get(config, "/BaseState") == "/OFF":
            on = {id(group) for group in items(get(config, "/ON"))}
            self._off |= {id(group) for group in items(get(properties, "/OCGs"))} - on
        for usage in items(get(config, "/AS")):
            if get(usage, "/Event") == "/View" and "/View" in items(get(usage, "/Category")):
                for group in items(get(usage, "/OCGs")):
                    state = get(get(get(group, "/Usage") or {}, "/View") or {}, "/ViewState")
                    self._off = self._off | {id(group)} if state == "/OFF" else self._off - {id(group)}

    def is_off(self, membership: object) -> bool:
        """Return whether content with this entry /OC is hidden; None for content without one."""
        if not isinstance(membership, DictionaryObject) or membership.get("/Type") != "/OCMD":
            return id(membership) in self._off
        if (expression := get(membership, "/VE")) is not None:
            return not self._is_on(expression)
        off = [self.is_off(group) for group in items(get(membership, "/OCGs")) if isinstance(group, DictionaryObject)]
        hidden = {"/AllOn": any(off), "/AnyOff": not any(off), "/AllOff": not all(off)}
        return bool(off) and hidden.get(str(get(membership, "/P")), all(off))

    def _is_on(self, expression: object) -> bool:
        if not isinstance(expression, list):
            return not self.is_off(expression)
        operator, *operands = items(expression)
        are_on = [self._is_on(operand) for operand in operands]
        return not any(are_on) if operator == "/Not" else any(are_on) if operator == "/Or" else all(are_on)


class PageContent:
    """The content of a page for pypdf, which itself ignores layers, the place of forms, /ActualText and Tz.

    Attributes:
        is_empty: Whether the page draws nothing.
        draws_image: Whether an image is displayed.
        hides_text: Whether text of hidden layers is left out.
        is_incomplete: Whether content is missing in the file, or forms draw themselves or are too many.
    """

    def __init__(self, page: PageObject, layers: Layers):
        self.draws_image = self.hides_text = False
        self._pdf, self._layers = page.pdf, layers
        self._operations: list[tuple[list[Any], bytes]] = []
        self._fonts, self._font_names = DictionaryObject(), dict[int, NameObject]()
        self._parsed: dict[int, list[tuple[Any, bytes]]] = {}
        self._drawn = self._hidden = self._replaced = 0
        # Text state: the line's matrix, and leading and horizontal scale, which q and Q save and restore.
        self._line, self._leading, self._scale = _UNIT, 0.0, 1.0
        self._is_scaled = self._is_at_start = False
        contents = get(page, "/Contents")
        self.is_incomplete = "/Contents" in page and not isinstance(contents, StreamObject | list)
        operations = [] if self.is_incomplete else ContentStream(contents, self._pdf, "bytes").operations
        self.is_empty = not operations
        self._add(operations, page.get_inherited("/Resources", DictionaryObject()).get_object(), ())

    def turned(self, quarters: int) -> PageObject:
        """Return a page that consists of the operations that draw text, turned clockwise about the page's corner."""
        a, b = ((1.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (0.0, 1.0))[quarters % 4]
        content = ContentStream(None, self._pdf)
        content.operations = [([a, b, -b, a, 0.0, 0.0], b"cm"), *self._operations]
        page = PageObject(self._pdf)
        page[NameObject("/Contents")] = content
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): self._fonts})
        return page

    def _add(self, operations: list[tuple[Any, bytes]], resources: object, forms: tuple[int, ...]) -> None:
        """Add operations with their resources; `forms` are those being drawn."""
        marks: list[tuple[bool, bool]] = []
        states: list[tuple[float, float]] = []
        for operands, operator in operations:
            if operator in (b"BDC", b"BMC"):
                marks.append(self._begin_mark(operands, resources))
            elif operator == b"EMC" and marks:
                self._end_mark(*marks.pop())
            elif operator == b"Do" and operands:
                self._draw(get(get(resources, "/XObject") or {}, str(operands[0])), resources, forms)
            elif operator == b"INLINE IMAGE":
                self.draws_image |= not self._hidden
            elif operator == b"Tf" and len(operands) > 1:
                font = get(get(resources, "/Font") or {}, str(operands[0]))
                self._operations.append(([self._font_name(font), *operands[1:]], operator))
            elif operator == b"q":
                states.append((self._leading, self._scale))
                self._operations.append((operands, operator))
            elif operator == b"Q":
                if states:  # a form cannot restore the state of what draws it
                    self._leading, self._scale = states.pop()
                    self._operations.append((operands, operator))
            elif operator == b"Tz":
                self._scale = (_numbers(operands, 1) or (100.0,))[0] / 100
                if self._is_at_start:
                    self._place()
            elif operator in _KEPT:
                self._add_text(operands, operator)
        for mark in reversed(marks):
            self._end_mark(*mark)
        if forms:
            self._operations += [([], b"Q")] * len(states)

    def _begin_mark(self, operands: list[Any], resources: object) -> tuple[bool, bool]:
        """Begin marked content: return whether it is hidden, and whether it has an /ActualText."""
        properties = operands[1] if len(operands) > 1 else None
        if isinstance(properties, NameObject):
            properties = get(get(resources, "/Properties") or {}, properties)
        is_hidden = operands[:1] == ["/OC"] and self._layers.is_off(properties)
        text = get(properties, "/ActualText") if isinstance(properties, DictionaryObject) else None
        if isinstance(text, bytes):
            text = create_string_object(text)
        is_replaced = isinstance(text, str)
        self._hidden += is_hidden
        self._replaced += is_replaced
        if is_replaced and self._replaced == 1:
            self._operations += [([*_UNIT], b"cm"), ([text], ACTUAL_TEXT)]  # cm ends pypdf's piece of text
        return is_hidden, is_replaced

    def _end_mark(self, is_hidden: bool, is_replaced: bool) -> None:
        self._hidden -= is_hidden
        self._replaced -= is_replaced
        if is_replaced and not self._replaced:
            self._operations += [([*_UNIT], b"cm"), ([None], ACTUAL_TEXT)]

    def _draw(self, drawn: object, resources: object, forms: tuple[int, ...]) -> None:
        """Draw an image or, with their own resources or those around, the operations of a form."""
        if not isinstance(drawn, StreamObject):
            return
        is_off = self._layers.is_off(get(drawn, "/OC"))
        if drawn.get("/Subtype") == "/Image":
            self.draws_image |= not self._hidden and not is_off
        if drawn.get("/Subtype") != "/Form":
            return
        if id(drawn) in forms or self._drawn >= _MAX_DRAWN or len(self._operations) > _MAX_OPERATIONS:
            self.is_incomplete = True
            return
        self._drawn += 1
        if id(drawn) not in self._parsed:
            self._parsed[id(drawn)] = ContentStream(drawn, self._pdf, "bytes").operations
        matrix = _numbers(items(get(drawn, "/Matrix")), 6) or _UNIT
        self._hidden += is_off
        self._operations += [([], b"q"), ([*matrix], b"cm")]
        state = self._leading, self._scale
        self._add(self._parsed[id(drawn)], get(drawn, "/Resources") or resources, (*forms, id(drawn)))
        self._leading, self._scale = state
        self._operations.append(([], b"Q"))
        self._hidden -= is_off

    def _font_name(self, font: object) -> NameObject:
        """Return the font's name on the page; a font that is missing is Helvetica, as in viewers."""
        key = id(font) if isinstance(font, DictionaryObject) else 0
        if key not in self._font_names:
            self._font_names[key] = NameObject(f"/F{len(self._font_names)}")
            fallback = DictionaryObject({NameObject(name): NameObject(value) for name, value in _FALLBACK_FONT.items()})
            self._fonts[self._font_names[key]] = font if key else fallback
        return self._font_names[key]

    def _add_text(self, operands: list[Any], operator: bytes) -> None:
        """Add an operation that draws or places text; lines of another width are placed by matrices with that width."""
        a, b, c, d, e, f = self._line
        x, y = (0.0, -self._leading) if operator in (b"T*", b"'", b'"') else _numbers(operands, 2) or (0.0, 0.0)
        if operator in (b"TL", b"TD"):
            self._leading = (_numbers(operands, 1) or (0.0,))[0] if operator == b"TL" else -y
        if operator == b"BT":
            self._line, self._is_scaled = _UNIT, False
        elif operator == b"Tm":
            self._line = _numbers(operands, 6) or _UNIT  # type: ignore[assignment]
        elif operator in MOVE_TEXT:
            self._line = (a, b, c, d, e + x * a + y * c, f + x * b + y * d)
        x, y = self._line[4] - e, self._line[5] - f
        goes_back = operator in (b"Td", b"TD", b"Tm") and x * a + y * b <= 0 and x * c + y * d < 0
        if goes_back and not self._is_at_start:
            self._operations += [([], b"ET"), ([], b"BT")]  # a piece of its own: pypdf joins lines that are near
        is_moved, is_shown = operator in MOVE_TEXT and operator != b"BT", operator in SHOW_TEXT
        self._is_at_start = (is_moved or self._is_at_start) and not is_shown and operator != b"ET"
        is_hidden = is_shown and self._hidden > 0
        self.hides_text |= is_hidden
        if is_moved and (self._scale != 1 or self._is_scaled or goes_back):
            if operator == b'"' and len(operands) == 3:
                self._operations += [(operands[:1], b"Tw"), (operands[1:2], b"Tc")]
            self._place()
            if is_shown and not is_hidden:
                self._operations.append((operands[-1:], b"Tj"))
        elif not is_hidden:
            self._operations.append((operands, operator))
        elif is_moved:
            self._operations.append(([], b"T*"))

    def _place(self) -> None:
        """Begin a line at the current one's start, in the current width."""
        a, b, *rest = self._line
        self._is_scaled = True
        self._operations.append(([FloatObject(x) for x in (a * self._scale, b * self._scale, *rest)], b"Tm"))


def _numbers(operands: list[Any], count: int) -> tuple[float, ...] | None:
    """Return the first `count` operands as numbers; None if they are fewer or no numbers."""
    try:
        numbers = tuple(float(operand) for operand in operands[:count])
    except (TypeError, ValueError):
        return None
    return numbers if len(numbers) == count else None
