"""Decode a document's bytes: by byte order mark, as UTF-8, as declared, else by detection. Does not import torch."""

import codecs
import re
from collections.abc import Callable
from typing import NamedTuple

from lkv.errors import DocumentError
from lkv.utils.extras import require

_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16's mark, which is its prefix
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
# What browsers mean by these names (https://encoding.spec.whatwg.org), with Python's names.
_LABELS = {"windows-1252": "iso-8859-1 iso8859-1 latin-1 latin1 l1 us-ascii ascii ansi", "gb18030": "gb2312 gbk x-gbk"}
_LABELS |= {"cp932": "shift_jis shift-jis sjis x-sjis windows-31j", "cp949": "euc-kr ks_c_5601-1987 korean"}
_LABELS |= {"windows-1254": "iso-8859-9 latin5", "cp874": "tis-620 iso-8859-11", "big5hkscs": "big5 x-x-big5"}
_PYTHON_NAMES = {label: name for name, labels in _LABELS.items() for label in labels.split()}
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")  # but white space and terminals' escapes
_MAX_CONTROLS = 0.02
_MIN_NULS = 0.2  # of the bytes of mostly ASCII text in UTF-16
_MAX_UNREADABLE = 0.05  # bytes, of the characters beyond ASCII


class Document(NamedTuple):
    """The text of a document.

    Attributes:
        text: The text.
        skipped: Descriptions of content missing from the text, such as "2 scripts" or "the scanned page 3", and
            whether its encoding is a guess.
    """

    text: str
    skipped: list[str]


def decode_text(
    data: bytes, name: str, declared: str | None = None, may_hold_nuls: Callable[[str], bool] = lambda text: False
) -> Document:
    """Decode a document.

    A byte order mark takes precedence. Then UTF-8 is tried, because valid UTF-8 almost always is UTF-8 even if another
    encoding is declared. Then the declared encoding is tried, and last the best detected one. `may_hold_nuls` is called
    with a text that has some NULs; others are no text.

    Raises:
        DocumentError: For bytes that are not text.
        MissingPackageError: If finding the encoding needs the extra `documents`.
    """
    mark = next(filter(data.startswith, _MARKS), None)
    is_seven_bit = (declared or "").startswith("iso-2022") or re.search(rb"\x1b(?:\$[@AB]|\$\(|\$\)C)", data)
    decoded = _replace_unreadable(data, _MARKS[mark]) if mark else None
    decoded = decoded or _decode_wide(data, name) or (None if is_seven_bit else _replace_unreadable(data, "utf-8"))
    decoded = decoded or _decode_declared(data, name, declared)
    if decoded is None:
        raw = data.decode("latin-1")
        if "\0" not in raw or (_has_few_nuls(raw) and may_hold_nuls(raw)):
            decoded = _decode_as_detected(data.replace(b"\0", b""), name)
    text = "\0" if decoded is None else decoded.text
    if "\0" in text and _has_few_nuls(text) and may_hold_nuls(text):
        text = text.replace("\0", "")
    if decoded is None or "\0" in text or len(_CONTROLS.findall(text)) > _MAX_CONTROLS * len(text):
        raise DocumentError(
            f"{name} cannot be read as text ({_describe_problem(data)}); save it as UTF-8 text, Markdown, HTML or PDF."
        )
    return decoded


def _has_few_nuls(text: str) -> bool:
    """Return whether NULs are rare but for those at the end, which fill up files."""
    return text.rstrip("\0").count("\0") < _MIN_NULS * len(text)


def _decode_wide(data: bytes, name: str) -> Document | None:
    """Decode UTF-16 or UTF-32 without a mark, which the NULs of its ASCII characters show."""
    if b"\0" not in data:
        return None
    if data.count(0) < _MIN_NULS * len(data):  # not mostly ASCII
        decoded = _decode_as_detected(data, name)
        return decoded if decoded and "UTF-" in decoded.skipped[0] else None
    for encoding in _WIDE:
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if sum(character.isascii() for character in text) > len(text) // 2 and not _CONTROLS.search(text):
            return Document(text, [f"the encoding is a guess: {encoding.upper()}"])
    return None


def _replace_unreadable(data: bytes, encoding: str) -> Document | None:
    """Decode Unicode, replacing a few unreadable bytes; None if there are many."""
    try:
        return Document(data.decode(encoding), [])
    except UnicodeDecodeError as error:
        text, first = data.decode(encoding, "replace"), error.start
    lost = text.count("\N{REPLACEMENT CHARACTER}")
    read = sum(not character.isascii() for character in text) - lost if encoding == "utf-8" else len(text) - lost
    if lost > _MAX_UNREADABLE * read:
        return None
    return Document(text, [f"{lost} unreadable character{'s' * (lost > 1)}, the first at byte {first}"])


def _decode_declared(data: bytes, name: str, declared: str | None) -> Document | None:
    if declared is None or declared in ("utf-8", "utf8"):
        return None
    try:
        return Document(_decode_by_name(data, _PYTHON_NAMES.get(declared, declared)), [])
    except LookupError:
        raise DocumentError(f"{name} declares the unknown encoding {declared!r}; save it as UTF-8.") from None
    except UnicodeDecodeError:
        return None


def _decode_by_name(data: bytes, encoding: str) -> str:
    if encoding == "windows-1252":  # browsers decode its unused bytes as control characters
        return "".join(bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in data)
    return data.decode(encoding)


def _decode_as_detected(data: bytes, name: str) -> Document | None:
    require("documents", f"reading {name}, which is not UTF-8,", ["chardet"])
    import chardet

    encoding = chardet.detect(data[: 2**20])["encoding"]
    if encoding is None or encoding.lower() == "ascii":
        return None
    encoding = _PYTHON_NAMES.get(encoding.lower(), encoding)
    try:
        text = _decode_by_name(data, encoding)
    except (LookupError, UnicodeDecodeError):
        return None
    return None if _CONTROLS.search(text) else Document(text, [f"the encoding is a guess: {encoding.upper()}"])


def _describe_problem(data: bytes) -> str:
    if b"\0" in data:
        return f"it holds NUL characters, the first at byte {data.index(0)}, as binary files do"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"byte 0x{data[error.start]:02X} at {error.start} is not UTF-8, and no other encoding fits"
    return "it consists of control characters, as binary files do"
