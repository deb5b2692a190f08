"""Decode a document's bytes: by byte order mark, as UTF-8, as declared, else by detection. Does not import torch."""

import codecs
import re
from collections.abc import Callable
from contextlib import suppress
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
# Labels that browsers know and Python does not (https://encoding.spec.whatwg.org/#names-and-labels), by Python's names.
_LABELS = {
    "utf-8": "csunicode iso-10646-ucs-2 ucs-2 unicode unicode-1-1-utf-8 unicode11utf8 unicode20utf8 unicodefeff "
    "unicodefffe x-unicode20utf8",
    "cp1252": "ansi x-user-defined",
    "cp949": "cseuckr csksc56011987 iso-ir-149 ks_c_5601-1989 ksc_5601 windows-949",
    "gb18030": "csgb2312 gb_2312 gb_2312-80 x-gbk",
    "big5": "cn-big5 x-x-big5",
    "cp932": "windows-31j x-sjis",
    "euc-jp": "cseucpkdfmtjapanese x-euc-jp",
    "iso8859-8": "csiso88598e csiso88598i logical visual",
    "iso8859-15": "csisolatin9",
    "iso8859-6": "csiso88596e csiso88596i",
    "iso8859-7": "sun_eu_greek",
    "mac-roman": "csmacintosh mac x-mac-roman",
    "mac-cyrillic": "x-mac-cyrillic x-mac-ukrainian",
    "cp874": "dos-874 windows-874",
    "koi8-r": "koi koi8",
    "koi8-u": "koi8-ru",
}
_PYTHON_NAMES = {label: name for name, labels in _LABELS.items() for label in labels.split()}
# What browsers read instead of some encodings, of which these are parts.
_SUPERSETS = {
    "ascii": "windows-1252",
    "iso8859-1": "windows-1252",
    "cp1252": "windows-1252",
    "iso8859-9": "windows-1254",
}
_SUPERSETS |= {"gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs"}
_SUPERSETS |= {"iso8859-11": "cp874", "tis-620": "cp874"}
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")  # but white space and terminals' escapes
_MAX_CONTROLS = 0.02
# ASCII with symbols and single letters, which in other encodings are rarer characters.
_SYMBOLS = re.compile("(?:[\0-\x7f€…\u2018\u2019“”•\u2013—™£§©®°±µ·«»¼½¾\u00d7ÄÉÖÜßàäçèéêñöü]|(?<=m)[²³])*")
# Encodings for the same languages, by those that are detected instead.
_SIBLINGS = {"windows-1250": "iso8859-2", "windows-1252": "iso8859-15", "koi8-r": "koi8-u"}
_NO_QUOTES = re.compile("[^\0-\x7f\\s\u2018\u2019“”„«»\u2013—…·]")  # beyond ASCII
_NOT_POLISH = re.compile("[čďěľňřťůđ]", re.IGNORECASE)
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
    try:
        encoding = _python_encoding(declared or "utf-8")
        is_unicode = codecs.lookup(encoding).name.startswith(("utf-8", "utf-16"))  # a declaration in ASCII means UTF-8
        return None if is_unicode else Document(_decode_by_name(data, encoding), [])
    except LookupError:
        raise DocumentError(f"{name} declares the unknown encoding {declared!r}; save it as UTF-8.") from None
    except UnicodeDecodeError:
        return None


def _python_encoding(label: str) -> str:
    """Return the name in Python of the encoding that browsers read for a label.

    Raises:
        LookupError: If there is none.
    """
    label = re.sub(r"^x-(?=cp\d)", "", label.strip().lower())
    label = re.sub(r"^iso[-_]?8859[-_]?(\d+)(?::\d+|-[ei])?$", r"iso8859-\1", label)
    encoding = _PYTHON_NAMES.get(label, label)
    return _SUPERSETS.get(codecs.lookup(encoding).name, encoding)


def _decode_by_name(data: bytes, encoding: str) -> str:
    if encoding == "windows-1252":  # browsers decode its unused bytes as control characters
        return "".join(bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in data)
    return data.decode(encoding)


def _decode_as_detected(data: bytes, name: str) -> Document | None:
    require("documents", f"reading {name}, which is not UTF-8,", ["chardet"])
    import chardet

    encoding = chardet.detect(data[: 2**20])["encoding"]
    if encoding is None and _SYMBOLS.fullmatch(data.decode("cp1252", "replace")):  # too few letters for a language
        encoding = "windows-1252"
    if encoding is None or encoding.lower() == "ascii":
        return None
    texts: dict[str, str] = {}
    with suppress(LookupError):
        encoding = _python_encoding(encoding)
        for each in filter(None, (encoding, _SIBLINGS.get(encoding.lower()))):
            with suppress(UnicodeDecodeError):
                texts[each] = _decode_by_name(data, each)
    texts = {each: text for each, text in texts.items() if not _CONTROLS.search(text)}
    if not texts:
        return None
    encoding = min(texts, key=lambda each: _count_oddities(texts[each]))  # of two that are equal, the detected one
    return Document(texts[encoding], [f"the encoding is a guess: {encoding.upper()}"])


def _count_oddities(text: str) -> int:
    """Count what words seldom have: symbols beside letters, other letters beside digits, letters of two languages."""
    oddities = text.count("ą") if _NOT_POLISH.search(text) else 0
    for match in _NO_QUOTES.finditer(text):
        beside = text[max(0, match.start() - 1) : match.start()], text[match.end() : match.end() + 1]
        is_odd = any(map(str.isdigit if match[0].isalpha() else str.isalpha, beside))
        oddities += is_odd or match[0] == "¤"
    return oddities


def _describe_problem(data: bytes) -> str:
    if b"\0" in data:
        return f"it holds NUL characters, the first at byte {data.index(0)}, as binary files do"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"byte 0x{data[error.start]:02X} at {error.start} is not UTF-8, and no other encoding fits"
    return "it consists of control characters, as binary files do"
