"""The text of a PDF as viewers show it, with form fields and notes. Does not import torch."""

import io
import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unicodedata import normalize

from pypdf import PdfReader
from pypdf.errors import DependencyError
from pypdfium2 import PdfiumError

from lkv.context.pdf_annotations import annotations, form_fields, get, items, note_texts
from lkv.context.pdf_content import ContentCheck, Layers, rewrite
from lkv.context.pdf_fields import Field
from lkv.context.pdf_glyphs import PageText, read_pages
from lkv.errors import DocumentError

_LIGATURES = {0xFB00: "ff", 0xFB01: "fi", 0xFB02: "fl", 0xFB03: "ffi", 0xFB04: "ffl", 0xFB05: "st", 0xFB06: "st"}
# Of superscripts, a solidus and subscripts.
_FRACTION = re.compile("([⁰¹²³⁴-⁹]+)(?:[/\u2044\u2215](?=[₀-₉])|\u2044(?=[0-9]))([₀-₉0-9]+)")
_WORD = re.compile(r"[^\W\d_]+(?:[-\u2010][^\W\d_]+)*")
_BROKEN_WORD = re.compile(rf"({_WORD.pattern})[-\u2010]\u00ad[\n ]({_WORD.pattern})")
# Parts that more often begin or end compounds than what a word's end is broken into.
_BEGIN_COMPOUNDS = frozenset(
    "all best cross double e eight ever fifty first five forty four front full good half high large long low middle "
    "next non not one right second self semi single six sixty third thirty three time twenty two well whole".split()
)
_END_COMPOUNDS = frozenset(
    "associated based called class control driven fashioned free friendly growing haired handed high hour in induced "
    "legged level life like looking made making mile minute month off on only oriented owned party person powered "
    "quality raising range related scale shaped sided specific speed state style term thirds type up use week "
    "working world year".split()
)
_MIN_BREAKS = 0.015  # of the lines of a document that breaks words
_MIN_COMPOUNDS = 3  # that are certain, of a document that breaks no words
_UNNAMED, _OUTSIDE, _HIDDEN, _INVISIBLE, _STRUCK, _DAMAGED, _SCAN, _EMPTY, _IMAGES = _KINDS = (
    "text in fonts without characters on page",
    "text outside of page",
    "text of hidden layers on page",
    "text read though invisible on page",
    "text read though struck out on page",
    "damaged content of page",
    "the scanned page",
    "the page without text",
    "the images of page",
)
_DAMAGE = re.compile("decompress|not defined|[Ii]mpossible to decode|Stream has ended|unexpected end")
_NAMED = 9  # the most pages and files listed individually


def pdf_text(data: bytes, name: str) -> tuple[str, list[str]]:
    """Return the pages' text, form fields and notes, separated by blank lines, and descriptions of skipped content.

    Raises:
        DocumentError: For a damaged or locked document.
    """
    log, damage = logging.getLogger("pypdf"), _DamageLog()
    log.addHandler(damage)
    try:
        data = data[max(0, data[:1024].find(b"%PDF-")) :]
        data = data if data.startswith(b"%PDF-") else b"%PDF-1.7\n" + data
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{name} is locked with a password; give a copy without one.")
        own_pages = list(reader.pages)
        is_damaged = damage.take() or _is_update_cut(data)
        check = ContentCheck()
        all_missing = [[_DAMAGED] * any([check.is_damaged(page), damage.take()]) for page in own_pages]
        layers, fields = Layers(reader), dict[int | None, list[Field]]()
        for number, field in form_fields(reader, layers.is_off):
            fields.setdefault(number if field.box else None, []).append(field)
        all_pages = _pages(reader, data, check.draws_glyphs or "/OCProperties" in reader.root_object, fields)
        texts = []
        for page, glyphs, missing in zip(own_pages, all_pages, all_missing, strict=True):
            missing += [_STRUCK] * any(get(note, "/Subtype") == "/StrikeOut" for note in items(get(page, "/Annots")))
            texts.append(_page_text(glyphs, missing))
        unplaced = (field.named_text for field in fields.get(None, []) if field.named_text)
        details = "\n".join([*unplaced, *note_texts(reader, layers.is_off)])
        skipped = [*_left_out(reader, all_missing), *(["damaged parts"] if is_damaged or damage.take() else [])]
        return "\n\n".join(filter(None, [*_join_words(texts), details])), skipped
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


def _pages(
    reader: PdfReader, data: bytes, is_rewritten: bool, fields: Mapping[int | None, Sequence[Field]]
) -> list[PageText]:
    """Return the text of a document's pages."""
    try:
        pages = [] if is_rewritten else read_pages(data, fields)
    except PdfiumError:
        pages = []
    # pypdf finds more pages in some damaged documents.
    if len(pages) != len(reader.pages) and len(pages := read_pages(rewrite(reader), fields)) != len(reader.pages):
        raise ValueError(f"{len(pages)} of {len(reader.pages)} pages can be read")
    return pages


def _page_text(page: PageText, missing: list[str]) -> str:
    """Return a page's text; `missing` gets what of it is left out."""
    missing += [_HIDDEN] * page.objects.has_hidden + [_UNNAMED] * page.has_unnamed + [_OUTSIDE] * page.has_outside
    missing += [_INVISIBLE] * (page.objects.has_invisible or page.is_unseen)
    text = _FRACTION.sub(_fraction_text, "\n".join(line for line in page.lines if line).translate(_LIGATURES))
    if page.objects.draws_image:
        missing.append(_IMAGES if text else _SCAN)
    elif not text and not missing and not page.objects.is_empty:
        missing.append(_EMPTY)
    return text


def _fraction_text(match: re.Match[str]) -> str:
    is_mixed = match.string[max(0, match.start() - 1) : match.start()].isalnum()
    return " " * is_mixed + "/".join(normalize("NFKC", part) for part in match.groups())


def _is_update_cut(data: bytes) -> bool:
    """Return whether the last update of a document breaks off, so that pypdf reads the one before."""
    _, mark, update = data.rpartition(b"%%EOF")
    return bool(mark) and b" obj" in update


def _join_words(texts: list[str]) -> list[str]:
    """Join words that are broken at a line's end; the hyphen stays where the words of the document say so."""
    whole = "\n\n".join(_BROKEN_WORD.sub("\n", text) for text in texts).casefold()
    words = {word.replace("\N{HYPHEN}", "-") for word in _WORD.findall(whole)} | {*re.findall(r"[^\W\d_]+", whole)}
    certain = Counter(_has_hyphen(match, words) for text in texts for match in _BROKEN_WORD.finditer(text))
    has_many = certain.total() > _MIN_BREAKS * whole.count("\n")
    breaks_words = certain[False] > 0 or (certain[True] < _MIN_COMPOUNDS and has_many)

    def join(match: re.Match[str]) -> str:
        first, second = match.groups()
        has_hyphen = _has_hyphen(match, words)
        if has_hyphen is None and (first.lower() in _BEGIN_COMPOUNDS or second.lower() in _END_COMPOUNDS):
            has_hyphen = True
        if not (first[-1] + second[0]).islower() and has_hyphen is not False:
            return match[0]
        return f"{first}-{second}" if has_hyphen or (has_hyphen is None and not breaks_words) else first + second

    joined = (re.sub(r"(?<![-\N{HYPHEN}])\N{SOFT HYPHEN}[\n ]", "", _BROKEN_WORD.sub(join, text)) for text in texts)
    # Behind a hyphen it marks the end of a full line; others are drawn as hyphens.
    return [re.sub(r"(?<=[-\N{HYPHEN}])\N{SOFT HYPHEN}", "", text).replace("\N{SOFT HYPHEN}", "-") for text in joined]


def _has_hyphen(broken: re.Match[str], words: set[str]) -> bool | None:
    """Return whether words of the document, or both parts as its words, say that a broken one has a hyphen, or None."""
    first, second = (part.casefold().replace("\N{HYPHEN}", "-") for part in broken.groups())
    if f"{first}-{second}" in words or first + second in words:
        return f"{first}-{second}" in words
    parts = first.rpartition("-")[2], second.partition("-")[0]
    return True if "-" in first or words.issuperset(parts) else None


def _left_out(reader: PdfReader, all_missing: list[list[str]]) -> Iterator[str]:
    found: dict[str, list[Any]] = {
        name: [number for number, missing in enumerate(all_missing, 1) if name in missing] for name in _KINDS
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
