"""The content of PDF pages, by pypdf: hidden layers, damage and forms that multiply. Does not import torch."""

import io
import re
import zlib
from collections import Counter
from typing import Any
from urllib.parse import unquote

from pypdf import PageObject, PdfReader, PdfWriter
from pypdf._codecs import adobe_glyphs
from pypdf.filters import ASCII85Decode, ASCIIHexDecode
from pypdf.generic import (
    DecodedStreamObject,
    DictionaryObject,
    EncodedStreamObject,
    NameObject,
    NumberObject,
    StreamObject,
    create_string_object,
)

from lkv.context.pdf_annotations import get, items

HIDDEN_MARK = "LKVHidden"  # an entry of our own
_NAME = re.compile(rb"/[^\s\0/\[\]()<>{}%]+")
_STRING = re.compile(rb"\((?:\\.|[^\\()])*|<[0-9a-fA-F\s]*", re.DOTALL)
# Strings, dictionaries' ends, comments, names and inline images.
_OPERANDS = re.compile(
    rb"\((?:[^\\()]++|\\.|\((?:[^\\()]++|\\.|\((?:[^\\()]++|\\.)*+\))*+\))*+\)|<<|>>|<[0-9a-fA-F\s\0]*+>|%[^\r\n]*+|"
    + _NAME.pattern
    + rb"|\bBI\b.*?(?:\bEI\b|\Z)",
    re.DOTALL,
)
_OPERATORS = frozenset(
    b"b B b* B* BDC BMC BT BX c cm CS cs d d0 d1 Do DP EMC ET EX f F f* G g gs h i j J K k l m M MP n q Q re RG rg ri "
    b"s S SC sc SCN scn sh T* Tc Td TD Tf Tj TJ TL Tm Tr Ts Tw Tz v w W W* y ' \" true false null".split()
)
_ASCII = {"/ASCII85Decode": ASCII85Decode.decode, "/ASCIIHexDecode": ASCIIHexDecode.decode}
_NUMBER = re.compile(rb"[-+.\d]+")
_MAX_CONTENT = 10**8  # decompressed bytes of a page, forms counted as often as they are drawn
_MAX_CHECKED = 10**7  # bytes whose operators are checked
_TEXT_WEIGHT, _FORM_WEIGHT = 20, 10**4  # a byte of text and a form take as long as this many bytes


class Layers:
    """The optional content groups (layers) of a document that are not displayed in its default configuration."""

    def __init__(self, reader: PdfReader | PdfWriter):
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


class ContentCheck:
    """Checks the content of pages before pdfium reads it, which reports no damage and has no limit.

    Attributes:
        draws_glyphs: Whether there are fonts of glyphs that are drawn by operations (Type 3).
    """

    def __init__(self) -> None:
        self._sizes, self._active, self._fonts = dict[int, int](), set[int](), set[int]()
        self._is_damaged = self.draws_glyphs = False

    def is_damaged(self, page: PageObject) -> bool:
        """Return whether content is missing, breaks off or draws itself.

        Raises:
            ValueError: For a page that draws too much.
        """
        self._is_damaged = "/Contents" in page and not isinstance(get(page, "/Contents"), StreamObject | list)
        resources = page.get_inherited("/Resources", DictionaryObject()).get_object()
        streams = items(get(page, "/Contents"))
        if sum(self._size(stream, resources) for stream in streams) > _MAX_CONTENT:
            raise ValueError(f"a page draws more than {_MAX_CONTENT >> 20} MB")
        data = b"\n".join(stream.get_data() for stream in streams if isinstance(stream, StreamObject))
        return self._is_damaged or _is_garbled(data)

    def _size(self, stream: Any, resources: Any) -> int:
        """Return how many bytes a stream draws, with the forms and the glyphs of its resources."""
        if not isinstance(stream, StreamObject) or id(stream) in self._active:
            self._is_damaged = True
            return 0
        if id(stream) not in self._sizes:
            self._active.add(id(stream))
            data, resources = stream.get_data(), get(stream, "/Resources") or resources
            self._is_damaged |= _is_cut(stream) or (stream.get("/Subtype") == "/Form" and _is_garbled(data))
            names = Counter(
                unquote(name.decode("latin-1").replace("#", "%"), "latin-1") for name in _NAME.findall(data)
            )
            drawn = [(get(get(resources, "/XObject") or {}, name), count) for name, count in names.items()]
            forms = [(form, count) for form, count in drawn if form is not None and form.get("/Subtype") == "/Form"]
            size = len(data) + _TEXT_WEIGHT * sum(map(len, _STRING.findall(data)))
            size += sum(count * (_FORM_WEIGHT + self._size(form, resources)) for form, count in forms)
            for font in (each.get_object() for each in (get(resources, "/Font") or {}).values()):
                if id(font) not in self._fonts and isinstance(font, DictionaryObject):
                    self._fonts.add(id(font))
                    self.draws_glyphs |= font.get("/Subtype") == "/Type3" and "/ToUnicode" not in font
                    glyphs = (get(font, "/CharProcs") or {}).values()
                    size += sum(self._size(glyph.get_object(), resources) for glyph in glyphs)
            self._sizes[id(stream)] = size
            self._active.remove(id(stream))
        return self._sizes[id(stream)]


def _is_cut(stream: StreamObject) -> bool:
    """Return whether compressed content breaks off, which pypdf does not report."""
    if not isinstance(stream, EncodedStreamObject):
        return False
    data = stream._data
    for name in items(get(stream, "/Filter")):
        if name in _ASCII:
            if not data.rstrip(b"\r\n\t \0").endswith(b">"):
                return True
            data = _ASCII[name](data)
        elif name != "/FlateDecode":
            return False
        else:
            decompressor = zlib.decompressobj()
            try:
                data = decompressor.decompress(data, _MAX_CONTENT)
            except zlib.error:
                return True
            if not decompressor.eof:
                return True
    return False


def _is_garbled(data: bytes) -> bool:
    """Return whether content has what is no operator, or text without an end, as damage leaves it."""
    if len(data) > _MAX_CHECKED:
        return False
    words = Counter(re.split(rb"[\s\0\[\]]+", _OPERANDS.sub(b" ", data)))
    unknown = (word for word in words if word and word not in _OPERATORS and not _NUMBER.fullmatch(word))
    return words[b"BT"] != words[b"ET"] or (b"BX" not in words and any(unknown))


def rewrite(reader: PdfReader) -> bytes:
    """Write a document anew for pdfium, which ignores layers and the names of the glyphs of Type 3 fonts."""
    writer = PdfWriter(clone_from=reader)
    layers = Layers(writer)
    for each in [each for each in writer._objects if isinstance(each, DictionaryObject)]:
        if isinstance(each, StreamObject) and layers.is_off(get(each, "/OC")):
            data = each.get_data() if each.get("/Subtype") == "/Form" else b""  # an image becomes an empty form
            each[NameObject("/Subtype")] = NameObject("/Form")
            each._data = f"/OC << /{HIDDEN_MARK} (1) >> BDC\n".encode() + data + b"\nEMC"
            each.pop("/Filter", None)
        for holder in (each, get(each, "/Resources")):
            properties = get(holder, "/Properties") if isinstance(holder, DictionaryObject) else None
            for group in properties.values() if isinstance(properties, DictionaryObject) else ():
                if layers.is_off(group.get_object()):
                    group.get_object()[NameObject(f"/{HIDDEN_MARK}")] = create_string_object("1")
        if each.get("/Subtype") == "/Type3" and "/ToUnicode" not in each:
            to_unicode = DecodedStreamObject()
            to_unicode.set_data(_character_map(items(get(get(each, "/Encoding") or {}, "/Differences"))))
            each[NameObject("/ToUnicode")] = writer._add_object(to_unicode)
    get(writer.root_object, "/Pages")[NameObject("/Count")] = NumberObject(len(reader.pages))
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


def _character_map(differences: list[Any]) -> bytes:
    """Return a map to Unicode of the glyph names of an encoding: numbers, each followed by the names from it on."""
    characters, code = dict[int, str](), 0
    for each in differences:
        if isinstance(each, str):
            characters[code % 256] = adobe_glyphs.get(each.partition(".")[0], "\ufffd")
        code = code + 1 if isinstance(each, str) else int(each)
    lines = (f"<{code:02x}> <{text.encode('utf-16-be').hex()}>" for code, text in characters.items())
    ends = "1 begincodespacerange <00> <ff> endcodespacerange", f"{len(characters)} beginbfchar"
    return "\n".join(("begincmap", *ends, *lines, "endbfchar endcmap")).encode()
