"""Read documents as text: UTF-8 and Markdown unchanged, HTML and PDF as displayed. Does not import torch."""

import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from lkv.errors import DocumentError
from lkv.utils.extras import require
from lkv.utils.files import as_path, error_reason
from lkv.utils.text_decoding import decode_text

STDIN = "-"
_HTML_SUFFIXES = (".html", ".htm", ".xhtml", ".xht")
_PAGE_START = re.compile(r"\s*(?:<\?xml.*?\?>\s*|<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", re.DOTALL | re.IGNORECASE)
_CHARSET = re.compile(
    r"""<meta[^>]*?charset\s*=\s*["']?\s*([\w.:-]+)|<\?xml[^>]*?encoding\s*=\s*["']([\w.:-]+)""", re.IGNORECASE
)


class Document(NamedTuple):
    """The text of a document.

    Attributes:
        text: The text.
        skipped: Descriptions of content missing from the text, such as "2 scripts" or "the scanned page 3", and
            whether its encoding is a guess.
    """

    text: str
    skipped: list[str]


def read_document(name: str | os.PathLike[str]) -> str:
    """Read the text of a file: text, Markdown, HTML or PDF, recognised by its first bytes, then its suffix.

    Skipped content, such as scripts and scanned pages, is reported on stderr.

    Args:
        name: The file's path, or "-" for standard input.

    Returns:
        The document's text.

    Raises:
        DocumentError: For a file that cannot be read, has no text or is of another kind.
        MissingPackageError: If the document needs the extra `documents`.
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
    label = "standard input" if name == STDIN else name
    document = parse_document(data, label)
    if document.skipped:
        print(f"{label}: left out or uncertain: {'; '.join(document.skipped)}", file=sys.stderr)
    return document.text


def parse_document(data: bytes, name: str) -> Document:
    """Return the text of a document's bytes, and the skipped content.

    Args:
        data: The bytes.
        name: The file's name; its suffix identifies HTML, and error messages start with it.

    Raises:
        DocumentError: For a document that has no text or is of another kind.
        MissingPackageError: If the document needs the extra `documents`.
    """
    if b"%PDF-" in data[:1024] and not _PAGE_START.match(data[:1024].decode("latin-1")):
        require("documents", "reading PDF", ["pypdf"])
        from lkv.context.pdf_text import pdf_text

        text, skipped = pdf_text(data, name)
    else:
        text, skipped = _read_text(data, name)
    if count := text.count("\0"):  # of a PDF's strings, where a reader displays nothing
        text, skipped = text.replace("\0", ""), [*skipped, f"{count} NUL character{'s' * (count > 1)}"]
    if not text.strip():
        without = f" but {', '.join(skipped)}" if skipped else ""
        raise DocumentError(f"{name} has no text{without}; a scanned document must go through text recognition first.")
    return Document(text, skipped)


def _read_text(data: bytes, name: str) -> tuple[str, list[str]]:
    is_html = name.lower().endswith(_HTML_SUFFIXES)
    start = data[:4096].decode("latin-1").removeprefix("\xef\xbb\xbf")
    declared = _CHARSET.search(start) if is_html or _PAGE_START.match(start) else None
    text, skipped = decode_text(data, name, (declared[1] or declared[2]).lower() if declared else None)
    if not is_html and not _PAGE_START.match(text[:4096]):
        return text, skipped
    require("documents", "reading HTML", ["selectolax"])
    from lkv.context.html_text import html_text

    try:
        page, left_out = html_text(_as_html(text) if name.lower().endswith((".xhtml", ".xht")) else text)
    except RecursionError as error:
        raise DocumentError(f"{name} is nested too deeply to be read ({error}); give its text.") from None
    return page, skipped + left_out


def _as_html(page: str) -> str:
    """Convert XML's CDATA sections and empty elements, which HTML lacks, to HTML."""
    page = re.sub(
        r"<!\[CDATA\[(.*?)(?:\]\]>|\Z)",
        lambda match: match[1].replace("&", "&amp;").replace("<", "&lt;"),
        page,
        flags=re.DOTALL,
    )
    void = "area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr"
    return re.sub(rf"<(?!(?:{void})\b)([a-zA-Z][\w:.-]*)((?:\s[^<>]*)?)/>", r"<\1\2></\1>", page)
