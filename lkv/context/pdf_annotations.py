"""Form fields and notes of a PDF as text. Does not import torch."""

import re
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any, cast

from pypdf import PageObject, PdfReader
from pypdf.generic import DictionaryObject, EncodedStreamObject, StreamObject

from lkv.context.pdf_fields import Field

_HIDDEN = 2 | 32  # flags of annotations: Hidden, NoView
_PASSWORD, _PUSH = 1 << 13, 1 << 16  # flags of text fields and buttons


def form_fields(reader: PdfReader, is_off: Callable[[Any], bool]) -> Iterator[tuple[int | None, Field]]:
    """Yield the fields of forms that are displayed, with their pages, from 0, or None.

    Args:
        reader: The document.
        is_off: Says which layers are hidden.
    """
    placed = set[int]()
    for page, widget in annotations(reader, is_widget=True):
        field = widget
        while "/T" not in field and (parent := get(field, "/Parent")) is not None:
            field = parent
        placed.add(id(field))
        if not int(widget.get("/F", 0)) & _HIDDEN and not is_off(get(widget, "/OC")):
            yield from ((page.page_number, each) for each in _field(_qualified_name(field), widget, page))
    pending = items(get(get(reader.root_object, "/AcroForm") or {}, "/Fields"))
    while pending:  # fields that no page displays
        field = pending.pop(0)
        kids = [kid for kid in items(get(field, "/Kids")) if "/T" in kid]
        if id(field) not in placed:
            placed.add(id(field))
            pending += kids
            yield from () if kids else ((None, each) for each in _field(_qualified_name(field), field, None))


def _field(name: str, field: DictionaryObject, page: PageObject | None) -> Iterator[Field]:
    """Yield a field as it is displayed by `page`, or by none; nothing for one that is empty."""
    value, kind, flags = (_inherited(field, key) for key in ("/V", "/FT", "/Ff"))
    is_button, flags = kind == "/Btn", int(flags or 0)
    if (is_button and flags & _PUSH) or (kind == "/Tx" and flags & _PASSWORD):
        return
    value = field.get("/AS", value) if is_button else value
    if isinstance(value, StreamObject):
        value = value.get_data().decode("utf-8", "replace")
    elif kind == "/Sig" and value is not None:
        value = f"signed by {get(value, '/Name') or 'someone'}"
    # Choices have a displayed text beside their value; buttons name theirs by number.
    options = [items(option) for option in items(_inherited(field, "/Opt"))]
    shown = {f"/{n}" if is_button else str(option[0]): str(option[-1]) for n, option in enumerate(options)}
    text = ", ".join(shown.get(str(each), str(each).removeprefix("/")) for each in items(value))
    if is_button and text in ("", "Off"):
        text, named = "[ ]", ""  # not said without a label beside it
    elif is_button:
        text, named = "[x]", text
    else:
        text = named = _as_lines(text or (_drawn_text(field, page) if page else ""))
    label = _inherited(field, "/TU") or name
    box = [each for each in items(get(field, "/Rect")) if isinstance(each, int | float)]
    place = (min(box[::2]), min(box[1::2]), max(box[::2]), max(box[1::2])) if len(box) == 4 and page else None
    if text:
        is_shown = place and place[0] < place[2] and place[1] < place[3]
        yield Field(place if is_shown else None, text, f"{label}: {named}" if label and named else named)


def note_texts(reader: PdfReader, is_off: Callable[[Any], bool]) -> Iterator[str]:
    """Yield the texts of annotations that are displayed; `is_off` says which layers are hidden."""
    for page, note in annotations(reader, is_widget=False):
        if int(note.get("/F", 0)) & _HIDDEN or note.get("/Subtype") == "/Popup" or is_off(get(note, "/OC")):
            continue
        text = str(get(note, "/Contents") or unescape(re.sub("<[^>]*>", "", str(get(note, "/RC") or ""))))
        drawn = _drawn_text(note, page)
        if not drawn and note.get("/Subtype") == "/Stamp":
            drawn = str(note.get("/Name", "/Draft")).removeprefix("/")
        if "".join(drawn.split()) not in "".join(text.split()):
            text = f"{drawn}\n{text}".strip("\n")
        if text:
            yield _as_lines(text)


def annotations(reader: PdfReader, is_widget: bool) -> Iterator[tuple[PageObject, DictionaryObject]]:
    """Yield the annotations of all pages: form fields, or the others."""
    for page in reader.pages:
        for note in items(get(page, "/Annots")):
            if isinstance(note, DictionaryObject) and (note.get("/Subtype") == "/Widget") == is_widget:
                yield page, note


def _drawn_text(note: DictionaryObject, page: PageObject) -> str:
    """Return the text of an annotation's appearance."""
    drawing = get(get(note, "/AP") or {}, "/N")
    if drawing is not None and not isinstance(drawing, StreamObject):  # one for each state
        drawing = get(drawing, str(note.get("/AS")))
    is_drawn = isinstance(drawing, StreamObject)
    return page.extract_xform_text(cast("EncodedStreamObject", drawing)).strip() if is_drawn else ""


def get(dictionary: Any, key: str) -> Any:
    """Return an entry of a dictionary, not a reference to it; None if there is none."""
    value = dictionary.get(key)
    return None if value is None else value.get_object()


def items(value: object) -> list[Any]:
    """Return the items of an array, another value as the only one, and none of None."""
    if isinstance(value, list):
        return [each.get_object() for each in value]
    return [] if value is None else [value]


def _inherited(field: object, key: str) -> Any:
    """Return an entry of a form field, or of the fields above it."""
    value, parent = get(field, key), get(field, "/Parent")
    return value if value is not None or parent is None else _inherited(parent, key)


def _qualified_name(field: object) -> str:
    parent = get(field, "/Parent")
    names = ["" if parent is None else _qualified_name(parent), str(get(field, "/T") or "")]
    return ".".join(filter(None, names))


def _as_lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")
