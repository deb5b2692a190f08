"""PDFs written by hand."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class PdfDocument(NamedTuple):
    """A PDF, its text and what the reader leaves out."""

    data: bytes
    text: str
    skipped: Sequence[str] = ()


TYPE1 = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica"
FONT = f"{TYPE1} /Encoding /WinAnsiEncoding >>"
FONTS = "/Resources << /Font << /F1 3 0 R >> >>"
TWO_FONTS = "/Resources << /Font << /F1 100 0 R /F2 3 0 R >> >>"


def pdf(*contents: str, page: str = "", objects: Mapping[int, str] | None = None, catalog: str = "") -> bytes:
    """Write a PDF.

    Args:
        contents: The content stream of each page.
        page: More entries of every page.
        objects: More objects by their number, from 100 on. Object 3 is the font F1.
        catalog: More entries of the catalog.
    """
    numbered = {
        1: f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        2: f"<< /Type /Pages /Kids [{' '.join(f'{10 + 2 * i} 0 R' for i in range(len(contents)))}] "
        f"/Count {len(contents)} >>",
        3: FONT,
    }
    for i, content in enumerate(contents):
        resources = "" if "/Resources" in page else "/Resources << /Font << /F1 3 0 R >> >>"
        box = "/Type /Page /Parent 2 0 R /MediaBox [0 0 612 792]"
        numbered[10 + 2 * i] = f"<< {box} {resources} {page} /Contents {11 + 2 * i} 0 R >>"
        numbered[11 + 2 * i] = stream(content)
    numbered |= objects or {}
    out, places = bytearray(b"%PDF-1.7\n"), {}
    for number, body in numbered.items():
        places[number] = len(out)
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    start = len(out)
    out += b"xref\n0 1\n0000000000 65535 f \n"
    out += b"".join(b"%d 1\n%010d 00000 n \n" % (number, place) for number, place in sorted(places.items()))
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (max(places) + 1, start)
    return bytes(out)


def stream(content: str, entries: str = "") -> str:
    return f"<< /Length {len(content)} {entries} >>\nstream\n{content}\nendstream"


def lines(*texts: str, x: int = 72, y: int = 700, size: int = 12) -> str:
    """Content of lines, one below the other."""
    return "".join(f"BT /F1 {size} Tf {x} {y - 14 * i} Td ({text}) Tj ET\n" for i, text in enumerate(texts))


def xobject(content: str) -> str:
    """Write a form XObject."""
    return stream(content, f"/Type /XObject /Subtype /Form /BBox [0 0 612 792] {FONTS}")
