"""Values of form fields among the text of a PDF's page. Does not import torch."""

from bisect import bisect
from collections.abc import Iterable
from typing import NamedTuple

from lkv.context.pdf_words import WORD_GAP, Glyph

Box = tuple[float, float, float, float]  # left, bottom, right and top
# Shares of the text's size.
_LABEL, _LABEL_BEHIND, _LABEL_ABOVE = 16.0, 2.0, 1.6  # the most between a field and its label
_NEXT = 5  # glyphs, spaces between, of two that are drawn one after the other
_BASE = 0.35  # of a base line below the middle of a field
_LEADING = 1.2
_SIZE = 10.0  # of a page without text, in points


class Field(NamedTuple):
    """A form field that is displayed."""

    box: Box | None  # on the page; None if it has no place there
    text: str
    named_text: str  # with the field's name


def place_fields(glyphs: list[Glyph], fields: Iterable[tuple[Box, Field]]) -> list[Glyph]:
    """Put the values of fields at their places, with their names where no text is beside or above them.

    Args:
        glyphs: Those of a page, in a frame where text runs from left to right.
        fields: The fields, each with its place in this frame.
    """
    placed, rows = [*glyphs], sorted((each for each in glyphs if each.text != " "), key=lambda each: each.y)
    usual = sorted(each.size for each in rows)[len(rows) // 2] if rows else _SIZE
    for (x, low, end, high), field in fields:
        size = min(usual, high - low)
        level = rows[bisect(rows, low - _BASE * size, key=lambda each: each.y) :]
        above = level[: bisect(level, high + _LABEL_ABOVE * size, key=lambda each: each.y)]
        level = level[: bisect(level, high, key=lambda each: each.y)]
        left = max((each for each in level if each.end < x + size / 2), key=lambda each: each.end, default=None)
        right = min((each for each in level if each.x > end - size / 2), key=lambda each: each.x, default=None)
        before = left if left and x - left.end < _LABEL * size else None
        behind = right if right and right.x - end < _LABEL_BEHIND * size else None
        over = next((each for each in above if each.y >= high - size / 2 and x - size < each.x < end), None)
        label, nearest = before or behind or over, before or behind or left or right
        follows = label or next((each for each in rows if each.y > low), None)
        order = follows.order if follows else len(glyphs)
        if before and behind and before.order < behind.order < before.order + _NEXT:
            order = behind.order - 1
        y = nearest.y if nearest else max((low + high) / 2 - _BASE * size, high - _LEADING * size)
        text = field.text if label else field.named_text
        text = " " * bool(left and x - left.end < WORD_GAP * size) + text if text else ""
        text += " " * bool(text and right and right.x - end < WORD_GAP * size)
        for number, line in enumerate(text.split("\n") if text else ()):
            placed += [Glyph(line, x, y - number * _LEADING * size, end, size, order)] * bool(line.strip())
    return placed
