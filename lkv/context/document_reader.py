"""Documents as text: UTF-8 and Markdown unchanged, HTML and PDF by their readers; imports no torch."""

import io
import os
import re
import sys
from pathlib import Path

from lkv.errors import DocumentError
from lkv.utils.extras import require
from lkv.utils.files import as_path, error_reason

STDIN = "-"
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")
_PAGE_START = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml.*?\?>\s*|<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", re.DOTALL | re.IGNORECASE
)
_CHARSET = re.compile(
    rb"""<meta[^>]*?charset\s*=\s*["']?\s*([\w.:-]+)|<\?xml[^>]*?encoding\s*=\s*["']([\w.:-]+)""", re.IGNORECASE
)
# What browsers display as blocks and list items, beside what inscriptis knows of.
_BLOCKS = (
    "caption center dd details dialog dir dl dt fieldset form frameset hr legend menu optgroup option search section "
    "select summary tbody tfoot thead tr"
).split()


def read_document(name: str | os.PathLike[str]) -> str:
    """Read the text of a file: UTF-8 text, Markdown, HTML or PDF, recognised by its first bytes, then its suffix.

    Args:
        name: The file's path, or "-" for standard input.

    Returns:
        The document's text.

    Raises:
        DocumentError: For a file that cannot be read, has no text or is of another kind.
        MissingPackageError: If HTML or PDF needs the extra `documents`.
    """
    name = str(as_path(name, DocumentError, "the document"))
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except FileNotFoundError:
        raise DocumentError(f"{name} does not exist; give a file, or - for stdin.") from None
    except OSError as error:
        raise DocumentError(
            f"{name} cannot be read as text ({error_reason(error)}); give a file, or - for stdin."
        ) from error
    label, start = "standard input" if name == STDIN else name, data[:4096]
    if start.startswith(_BYTE_ORDER_MARKS):
        start = start.decode("utf-16", "ignore").encode(errors="ignore")
    try:
        if data[:1024].lstrip().startswith(b"%PDF-"):
            text = _pdf(data, label)
        elif name.lower().endswith((".html", ".htm", ".xhtml")) or _PAGE_START.match(start):
            text = _html(data, label)
        else:
            text = _decode(data, label)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{label} cannot be read as text ({error}); give UTF-8 text, Markdown, HTML or PDF."
        ) from error
    if not text.strip():
        raise DocumentError(f"{label} has no text; a scanned document must go through text recognition first.")
    return text


def _decode(data: bytes, name: str) -> str:
    """Decode UTF-8, or UTF-16 with a byte order mark. Raises UnicodeDecodeError, and DocumentError for NULs."""
    text = data.decode("utf-16" if data.startswith(_BYTE_ORDER_MARKS) else "utf-8-sig")
    if "\0" in text:
        raise DocumentError(
            f"{name} holds NUL characters, so it is UTF-16 without a byte order mark or no text; save it as UTF-8."
        )
    return text


def _decode_html(data: bytes, name: str) -> str:
    """Decode a page: as UTF-8 where it is that, else as it declares."""
    declared = _CHARSET.search(data[:4096])
    charset = (declared[1] or declared[2]).decode().lower() if declared else "utf-8"
    if not charset.startswith("iso-2022"):  # whose bytes are ASCII
        try:
            return _decode(data, name)
        except UnicodeDecodeError:
            if charset in ("utf-8", "utf8"):
                raise
    if charset in ("iso-8859-1", "latin1", "us-ascii", "ascii"):  # which browsers read so
        charset = "windows-1252"
    try:
        return data.decode(charset)
    except LookupError:
        raise DocumentError(f"{name} declares the unknown encoding {charset!r}; save it as UTF-8.") from None


def _html(data: bytes, name: str) -> str:
    """The text that a browser shows; tables and lists keep their layout."""
    require("documents", "reading HTML")
    from inscriptis.css_profiles import CSS_PROFILES
    from inscriptis.html_engine import Inscriptis
    from inscriptis.html_properties import Display
    from inscriptis.model.config import ParserConfig
    from inscriptis.model.html_element import HtmlElement
    from lxml.etree import ParserError
    from lxml.html import HTMLParser, document_fromstring

    # Browsers append what follows these end tags to the body; the parser drops it.
    content = re.sub(r"</(?:body|html)\s*>", "", _decode_html(data, name), flags=re.IGNORECASE).strip()
    block = HtmlElement(display=Display.block)
    css = CSS_PROFILES["relaxed"] | {tag: block for tag in _BLOCKS if tag not in CSS_PROFILES["relaxed"]}
    try:
        # Without huge_tree the parser silently drops what is nested in more than 254 elements.
        tree = document_fromstring(content.encode(), parser=HTMLParser(huge_tree=True, encoding="utf-8"))
        return Inscriptis(tree, ParserConfig(css=css)).get_text()
    except ParserError:  # an empty document
        return ""
    except RecursionError:
        raise DocumentError(f"{name} is nested too deeply to be read; give its text.") from None


def _pdf(data: bytes, name: str) -> str:
    """The pages' text, a blank line between them, then form fields and notes; what is left out is named on stderr."""
    require("documents", "reading PDF")
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{name} is locked with a password; give a copy without one.")
        texts = [page.extract_text() for page in reader.pages]
        fields = (reader.get_fields() or {}).items()
        values = [(field, value.get("/V")) for field, value in fields]
        lines = [f"{field}: {str(value).removeprefix('/')}" for field, value in values if value and value != "/Off"]
        for page in reader.pages:
            notes = [note.get_object() for note in page.get("/Annots") or []]
            lines += [str(note["/Contents"]) for note in notes if "/Contents" in note]
        empty = [str(number) for number, text in enumerate(texts, 1) if not text.strip()]
        if empty and len(empty) < len(texts):
            print(
                f"{name}: no text on {len(empty)} pages ({', '.join(empty[:9])}); scans are not read", file=sys.stderr
            )
        if attached := list(reader.attachments):
            print(f"{name}: attached files are not read ({', '.join(attached[:9])})", file=sys.stderr)
        return "\n\n".join([*texts, "\n".join(lines)] if lines else texts)
    except DependencyError as error:
        raise DocumentError(
            f"{name} is encrypted, which takes one more package to read; run `pip install 'pypdf[crypto]'`, or print "
            "it to a new PDF."
        ) from error
    except DocumentError:
        raise
    except Exception as error:  # of any type, from KeyError to AssertionError
        raise DocumentError(f"{name} is a damaged PDF ({error}); print it to a new PDF, or give its text.") from error
