"""Read documents as text: UTF-8 and Markdown unchanged, HTML and PDF as displayed. Does not import torch."""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from lkv.context.flow_text import UNSEEN
from lkv.errors import DocumentError
from lkv.utils.data_files import replace_lone_surrogates
from lkv.utils.extras import require
from lkv.utils.files import as_path, error_reason, list_files
from lkv.utils.text_decoding import Document as Document
from lkv.utils.text_decoding import decode_text

STDIN = "-"
_MAX_BYTES = 2**29  # far more text than models read
_HTML_SUFFIXES = (".html", ".htm", ".xhtml", ".xht")
# What is text even if it begins as a page does: Markdown, data and code by their suffix, and a server's code in pages.
_TEXT_SUFFIXES = tuple(".md .rst .csv .tsv .json .jsonl .yaml .yml .js .jsx .ts .tsx .py .c .cpp .java".split())
_SERVER_CODE = re.compile(r"<\?(?:php\b|=)|<%[=@-]?\s")
_PAGE_START = re.compile(
    r"\s*(?:<\?.*?\?>\s*|<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body|title)\b", re.DOTALL | re.IGNORECASE
)
_NO_DECLARATION = re.compile(r"<!--.*?-->|<(script|style|title)\b.*?</\1", re.DOTALL | re.IGNORECASE)
_FORMATS = {
    b"{\\rtf": "RTF",
    b"%!PS": "PostScript",
    b"PK\x03\x04": "ZIP, as .docx, .odt and .epub are",
    b"\xd0\xcf\x11\xe0": ".doc",
}
# The headers of a message, usual ones, and that of a part which is written in other characters.
_HEADERS = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:>?From [^\n]*\n)?((?:[!-9;-~]+[ \t]*:[^\n]*\n(?:[ \t][^\n]*\n)*)+)\r?\n"
)
_MIME_HEADERS = {b"content-transfer-encoding", b"content-type", b"mime-version", b"received"}
_MAIL_HEADERS = _MIME_HEADERS.union(
    b"bcc cc date delivered-to dkim-signature from in-reply-to message-id references reply-to return-path sender "
    b"subject to".split()
)
_CODED = re.compile(
    rb"^Content-Transfer-Encoding[ \t]*:\s*\"?(?:base64|quoted-printable|x-uuencode)\b", re.IGNORECASE | re.MULTILINE
)
_CHARSET = re.compile(
    r"""<meta[^>]*?charset\s*=\s*["']?\s*([\w.:-]+)|<\?xml[^>]*?encoding\s*=\s*["']([\w.:-]+)""", re.IGNORECASE
)
_DOCTYPE = re.compile(r"<!DOCTYPE\s[^<>\[]*\[(.*?)\]\s*>", re.DOTALL)
_ENTITY = re.compile(r"""<!ENTITY\s+([\w.-]+)\s+("[^"]*"|'[^']*')\s*>""")


def read_document(name: str | os.PathLike[str]) -> str:
    """Read the text of a file: text, Markdown, HTML or PDF, recognised by its suffix and its first bytes.

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
        with nullcontext(sys.stdin.buffer) if name == STDIN else Path(name).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise DocumentError(f"{name} does not exist; give a file, or - for stdin.") from None
    except OSError as error:
        raise DocumentError(
            f"{name} cannot be read as text ({error_reason(error)}); give a file, or - for stdin."
        ) from error
    label = "standard input" if name == STDIN else name
    if len(data) > _MAX_BYTES:
        raise DocumentError(f"{label} is larger than {_MAX_BYTES >> 20} MB; give a part of it.")
    document = parse_document(data, label)
    if document.skipped:
        print(f"{label}: left out or uncertain: {'; '.join(document.skipped)}", file=sys.stderr)
    return document.text


def read_documents(names: Sequence[str]) -> str:
    """Read files, and all files in folders, as one text in which the name of each file is a heading.

    A single file is read as by `read_document`. Of a folder, hidden files are left out, and files without readable text
    are skipped and listed on stderr.

    Raises:
        DocumentError: As `read_document`, and for a folder without readable files.
        MissingPackageError: If a document needs the extra `documents`.
    """
    if len(names) == 1 and not os.path.isdir(names[0]):
        return read_document(names[0])
    texts: dict[str, str] = {}
    skipped: list[str] = []
    for name in names:
        is_folder = os.path.isdir(name)
        files, others = list_files(Path(name)) if is_folder else ([], [])
        skipped += map(str, others)
        for path in map(str, files) if is_folder else [name]:
            try:
                texts[path] = read_document(path)
            except DocumentError:
                if not is_folder:
                    raise
                skipped.append(path)
    if skipped:
        print(
            "skipped, as they are links to folders or have no text that can be read: " + ", ".join(skipped),
            file=sys.stderr,
        )
    if not texts:
        raise DocumentError(f"no file in {names[0]} has text that can be read; give text, Markdown, HTML or PDF.")
    return "\n\n".join(f"# {replace_lone_surrogates(name)}\n\n{text.strip()}" for name, text in texts.items())


def parse_document(data: bytes, name: str) -> Document:
    """Return the text of a document's bytes, and the skipped content.

    Args:
        data: The bytes.
        name: The file's name; its suffix identifies HTML, and error messages start with it.

    Raises:
        DocumentError: For a document that has no text or is of another kind.
        MissingPackageError: If the document needs the extra `documents`.
    """
    start = data.lstrip()[:1024]
    is_pdf = b"%PDF-" in start or (name.lower().endswith(".pdf") and b" obj" in data)
    if is_pdf and not _PAGE_START.match(start.decode("latin-1")):
        require("documents", "reading PDF", ["pypdf", "pypdfium2"])
        from lkv.context.pdf_text import pdf_text

        text, skipped = pdf_text(data, name)
    else:
        text, skipped = _read_text(data, name)
        skipped += ["the format, as the name says PDF"] * name.lower().endswith(".pdf")
    if count := text.count("\0"):  # of a PDF's strings, where a reader displays nothing
        text, skipped = text.replace("\0", ""), [*skipped, f"{count} NUL character{'s' * (count > 1)}"]
    if not text.translate(UNSEEN).strip():
        without = f" but {', '.join(skipped)}" if skipped else ""
        advice = "a scanned document must go through text recognition first" if is_pdf else "give another document"
        raise DocumentError(f"{name} has no text{without}; {advice}.")
    return Document(text, skipped)


def _read_text(data: bytes, name: str) -> tuple[str, list[str]]:
    is_html = name.lower().endswith(_HTML_SUFFIXES)
    form = next((form for mark, form in _FORMATS.items() if data.startswith(mark)), None)
    if form := form or ("MIME, as mail and .mht are" if _is_coded_mail(data[:65536]) else None):
        raise DocumentError(f"{name} is not text, but of the format {form}; save it as PDF, HTML or UTF-8 text.")
    start = data[:8192].decode("latin-1").removeprefix("\xef\xbb\xbf")
    is_declaring = is_html or start.startswith("<?xml") or _PAGE_START.match(start)
    declared = _CHARSET.search(_NO_DECLARATION.sub("", start)) if is_declaring else None

    def is_page(text: str) -> bool:
        begins_as_one = _PAGE_START.match(text[:4096]) and not name.lower().endswith(_TEXT_SUFFIXES)
        return is_html or bool(begins_as_one and not _SERVER_CODE.search(_NO_DECLARATION.sub("", text)))

    text, skipped = decode_text(data, name, (declared[1] or declared[2]).lower() if declared else None, is_page)
    if not is_page(text):
        return text, skipped
    require("documents", "reading HTML", ["selectolax"])
    from lkv.context.html_text import html_text

    try:
        page, left_out = html_text(_as_html(text) if name.lower().endswith((".xhtml", ".xht")) else text)
    except RecursionError as error:
        raise DocumentError(f"{name} is nested too deeply to be read ({error}); give its text.") from None
    return page, skipped + left_out


def _is_coded_mail(data: bytes) -> bool:
    """Return whether a text begins with the headers of a mail, and has a part that is not readable as it is."""
    if not (headers := _HEADERS.match(data)) or not _CODED.search(data):
        return False
    names = {name.lower() for name in re.findall(rb"^([^\s:]+)[ \t]*:", headers[1], re.MULTILINE)}
    return len(names & _MAIL_HEADERS) > 1 and not names.isdisjoint(_MIME_HEADERS)


def _as_html(page: str) -> str:
    """Convert what HTML lacks to HTML: XML's entities, prefixes, CDATA sections and empty elements."""
    if doctype := _DOCTYPE.search(page):
        entities = dict(_ENTITY.findall(doctype[1]))
        page = re.sub(
            r"&([\w.-]+);", lambda match: entities.get(match[1], f'"{match[0]}"')[1:-1], page[doctype.end() :]
        )
    if prefix := re.search(r"""\sxmlns:([\w.-]+)\s*=\s*["']http://www\.w3\.org/1999/xhtml["']""", page):
        page = re.sub(rf"<(/?){re.escape(prefix[1])}:", r"<\1", page)
    page = re.sub(
        r"<!\[CDATA\[(.*?)(?:\]\]>|\Z)",
        lambda match: match[1].replace("&", "&amp;").replace("<", "&lt;"),
        page,
        flags=re.DOTALL,
    )
    void = "area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr"
    return re.sub(rf"<(?!(?:{void})\b)([a-zA-Z][\w:.-]*)((?:\s[^<>]*)?)/>", r"<\1\2></\1>", page)
