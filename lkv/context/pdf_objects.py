"""The objects of PDF pages by pdfium: hidden layers, rules, and what covers or clips text. Does not import torch."""

import ctypes
import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pypdfium2
import pypdfium2.raw as pdfium

from lkv.context.pdf_content import HIDDEN_MARK
from lkv.context.pdf_fields import Box

_MIN_WIDTH = 0.02  # of an object, in points
_MAX_DEPTH = 40  # of forms within forms
_MAX_SEGMENTS = 200  # of a path with rules
_EVERYWHERE = -math.inf, -math.inf, math.inf, math.inf
_MAX_COVERS = 300  # of a page


class Objects(NamedTuple):
    """What is on a page."""

    is_empty: bool
    draws_image: bool
    has_hidden: bool  # text of hidden layers
    has_invisible: bool  # text without ink that is not over an image, as recognised text is
    shapes: list[Box]  # what is seen of them
    views: dict[int, tuple[Box, list[Box]]]  # by a text object's address: what is seen of it, and what covers it


def read_objects(page: pypdfium2.PdfPage) -> Objects:
    """Return what is on a page, after objects of layers that are not displayed are hidden."""
    objects = [(drawn, _hide(drawn)) for drawn in page.get_objects(max_depth=_MAX_DEPTH)]
    shown = [drawn for drawn, is_hidden in objects if not is_hidden]
    places = _Places()
    shapes, covers, views = list[Box](), list[Box](), dict[int, tuple[Box, list[Box]]]()
    for drawn in reversed(shown):
        box = places.box(drawn, drawn.get_bounds())
        if drawn.type == pdfium.FPDF_PAGEOBJ_TEXT:
            commons = ((cover, _common(cover, box)) for cover in covers)
            clip, over = places.clip(drawn), [each for each, (x, y, end, top) in commons if x < end and y < top]
            is_clip = pdfium.FPDFTextObj_GetTextRenderMode(drawn) >= pdfium.FPDF_TEXTRENDERMODE_FILL_CLIP
            if (over or clip != _EVERYWHERE) and not is_clip:  # a clip by text is seen by what is drawn later
                views[address(drawn.raw)] = clip, over
        elif drawn.type == pdfium.FPDF_PAGEOBJ_PATH:
            clip = places.clip(drawn)
            shapes += (_common(places.box(drawn, part), clip) for part in _parts(drawn))
            if len(covers) < _MAX_COVERS and _is_cover(drawn):
                covers.append(_common(box, clip))
    return Objects(
        is_empty=not objects,
        draws_image=any(drawn.type == pdfium.FPDF_PAGEOBJ_IMAGE for drawn in shown),
        has_hidden=any(is_hidden and drawn.type == pdfium.FPDF_PAGEOBJ_TEXT for drawn, is_hidden in objects),
        has_invisible=_has_invisible(shown),
        shapes=shapes,
        views=views,
    )


class _Places:
    """The places of objects on a page, those within forms too."""

    def __init__(self) -> None:
        self._matrices = dict[int, pypdfium2.PdfMatrix]()  # by form

    def _matrix(self, form: pypdfium2.PdfObject | None) -> pypdfium2.PdfMatrix:
        """Return the matrix from the content of a form, or of the page itself, to the page."""
        if form is None:
            return pypdfium2.PdfMatrix()
        if id(form) not in self._matrices:
            self._matrices[id(form)] = form.get_matrix().multiply(self._matrix(form.container))
        return self._matrices[id(form)]

    def box(self, drawn: pypdfium2.PdfObject, bounds: Box) -> Box:
        """Return where bounds are that are given in the content of an object."""
        return bounds if drawn.container is None else self._matrix(drawn.container).on_rect(*bounds)

    def clip(self, drawn: pypdfium2.PdfObject) -> Box:
        """Return a box outside of which nothing of an object is seen."""
        clip, view = pdfium.FPDFPageObj_GetClipPath(drawn), _EVERYWHERE
        for i in range(pdfium.FPDFClipPath_CountPaths(clip)):
            count = pdfium.FPDFClipPath_CountPathSegments(clip, i)
            xs, ys = _corners(pdfium.FPDFClipPath_GetPathSegment(clip, i, j) for j in range(count))
            view = _common(view, self.box(drawn, (min(xs), min(ys), max(xs), max(ys))))
        return view


def _corners(segments: Iterable[Any]) -> tuple[list[float], list[float]]:
    """Return the horizontal and the vertical places of a path's corners."""
    x, y = ctypes.c_float(), ctypes.c_float()
    points = [(x.value, y.value) for each in segments if pdfium.FPDFPathSegment_GetPoint(each, x, y)]
    return [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0]


def _parts(drawn: pypdfium2.PdfObject) -> Iterator[Box]:
    """Yield the boxes of a path's parts: lines as thick as they are drawn, and what is filled."""
    fill, stroke, width = ctypes.c_int(), ctypes.c_int(), ctypes.c_float()
    pdfium.FPDFPath_GetDrawMode(drawn, fill, stroke)
    pdfium.FPDFPageObj_GetStrokeWidth(drawn, width)
    matrix, count = drawn.get_matrix(), pdfium.FPDFPath_CountSegments(drawn)
    segments = [pdfium.FPDFPath_GetPathSegment(drawn, i) for i in range(min(count, _MAX_SEGMENTS))]
    kinds = enumerate(map(pdfium.FPDFPathSegment_GetType, segments))
    starts = [i for i, kind in kinds if kind == pdfium.FPDF_SEGMENT_MOVETO]
    half = max(width.value * math.sqrt(abs(matrix.a * matrix.d - matrix.b * matrix.c)), _MIN_WIDTH) / 2
    for start, end in pairwise([*starts, len(segments)]):
        xs, ys = _corners(segments[start:end])
        x, y, right, top = matrix.on_rect(min(xs), min(ys), max(xs), max(ys))
        edge = half if stroke.value else 0.0
        yield x - edge, y - edge, right + edge, top + edge


def _is_cover(drawn: pypdfium2.PdfObject) -> bool:
    """Return whether a path is a filled rectangle, and nothing shines through it."""
    fill, stroke, color = ctypes.c_int(), ctypes.c_int(), [ctypes.c_uint() for _ in range(4)]
    pdfium.FPDFPath_GetDrawMode(drawn, fill, stroke)
    count, (a, b, c, d, *_) = pdfium.FPDFPath_CountSegments(drawn), drawn.get_matrix().get()
    is_turned = max(abs(b), abs(c)) > 1e-6 < max(abs(a), abs(d))
    if fill.value == pdfium.FPDF_FILLMODE_NONE or not 4 <= count <= 5 or is_turned:
        return False
    xs, ys = _corners(pdfium.FPDFPath_GetPathSegment(drawn, i) for i in range(count))
    around: pypdfium2.PdfObject | None = drawn
    while around is not None and not pdfium.FPDFPageObj_HasTransparency(around):
        around = around.container
    is_opaque = around is None and pdfium.FPDFPageObj_GetFillColor(drawn, *color) and color[3].value == 255
    return bool(is_opaque) and len({*xs}) == len({*ys}) == 2 and len({*zip(xs, ys, strict=True)}) == 4


def _common(one: Box, other: Box) -> Box:
    return max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), min(one[3], other[3])


def _hide(drawn: pypdfium2.PdfObject) -> bool:
    """Hide an object of a layer that is not displayed; return whether it is of one."""
    container: pypdfium2.PdfObject | None = drawn
    while container is not None:
        if outermost(container.raw, HIDDEN_MARK.encode()):
            pdfium.FPDFPageObj_SetIsActive(drawn, False)
            return True
        container = container.container
    if drawn.type == pdfium.FPDF_PAGEOBJ_TEXT:
        left, _, right, _ = drawn.get_bounds()
        if right - left < _MIN_WIDTH:  # of vertical text in a font that is not there, which pdfium would skip
            pdfium.FPDFPageObj_Transform(drawn, 1, 0, _MIN_WIDTH, 1, -_MIN_WIDTH * drawn.get_matrix().f, 0)
    return False


def _has_invisible(objects: list[pypdfium2.PdfObject]) -> bool:
    """Return whether there is text without ink on a page without images, or white text with nothing behind it."""
    has_image = any(drawn.type == pdfium.FPDF_PAGEOBJ_IMAGE for drawn in objects)
    color, is_blank = [ctypes.c_uint() for _ in range(4)], True
    for drawn in objects:
        is_text = drawn.type == pdfium.FPDF_PAGEOBJ_TEXT
        is_blank &= is_text
        mode = pdfium.FPDFTextObj_GetTextRenderMode(drawn) if is_text else None
        if mode == pdfium.FPDF_TEXTRENDERMODE_INVISIBLE and not has_image:
            return True
        if mode == pdfium.FPDF_TEXTRENDERMODE_FILL and pdfium.FPDFPageObj_GetFillColor(drawn, *color):
            *ink, opacity = (each.value for each in color)
            if opacity == 0 or (is_blank and min(ink) == 255):
                return True
    return False


def outermost(drawn: Any, key: bytes) -> int:
    """Return the address of the outermost marked content with an entry that an object belongs to; 0 for none."""
    length = ctypes.c_ulong()
    for number in range(pdfium.FPDFPageObj_CountMarks(drawn)):
        mark = pdfium.FPDFPageObj_GetMark(drawn, number)
        if pdfium.FPDFPageObjMark_GetParamBlobValue(mark, key, None, 0, length) and length.value:
            return address(mark)
    return 0


def address(pointer: Any) -> int:
    """Return the address of one of pdfium's structures."""
    return ctypes.addressof(pointer.contents)
