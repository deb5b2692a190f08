"""Fractions of PDF pages: what is drawn above and below a rule. Does not import torch."""

import re
from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lkv.context.flow_text import operand_text
from lkv.context.pdf_fields import Box
from lkv.context.pdf_layout import lines_of
from lkv.context.pdf_words import WORD_GAP, Glyph

# Shares of the font's size.
_DEPTH, _HEIGHT = 0.2, 0.7  # of letters below and above their base line
_AXIS, _MIN_AXIS, _MAX_AXIS = 0.25, 0.1, 0.45  # of a rule above the base line of the text beside it
_MIN_SCRIPT_AXIS, _MAX_SCRIPT_AXIS = -0.3, 1.1  # of a fraction that is a script
_SCRIPT = 0.8  # the size of such a fraction, at most
_MAX_THICKNESS = 0.2  # of a rule
_THIN, _FLAT = 0.01, 0.4  # the least thickness, in points, and the most, by the length
_MAX_GAP = 0.6  # between a rule and what is nearest to it, by the largest text there or beside it
_MAX_RISE = 0.6  # of scripts
_MAX_OVERHANG, _MAX_MARGIN = 0.25, 0.8  # of glyphs beyond a rule, and of a rule beyond glyphs
_MAX_OFFSET = 0.3  # between the middle of a rule and that of what is above or below
_MAX_SPACE = 1.0  # within what is above or below
_BESIDE = 0.8  # between a rule and the text beside it
_MIN_RISE = 0.14  # of a base line over the rule below it; underlines are nearer
_STACKED = 1.7  # between the numbers of a column
_SAME = 0.03  # between the base lines of cells of a row
_MAX_RULES = 1000  # of a page; charts have more
_NO_FRACTION = re.compile(r"[^\W\d_]{3}|\d[.,]\d")  # words and amounts, unless text is beside their rule


class _Rule(NamedTuple):
    """A thin horizontal line, in a frame where text runs from left to right."""

    x: float
    y: float
    end: float
    thickness: float

    def covers(self, glyph: Glyph) -> bool:
        """Return whether the middle of a glyph is over or under the rule."""
        return self.x < (glyph.x + glyph.end) / 2 < self.end


class _Part(NamedTuple):
    """A glyph or a fraction, with its lower and upper end."""

    low: float
    high: float
    glyph: Glyph


def join_fractions(glyphs: Sequence[Glyph], shapes: Sequence[Box]) -> list[Glyph]:
    """Put one glyph, such as 3/4, in the place of what is above and below a rule, on the line that is beside it."""
    # Of a shape that is thinner still, two edges meet.
    rules = [_Rule(x, (y + top) / 2, end, top - y) for x, y, end, top in shapes if _THIN < top - y < _FLAT * (end - x)]
    if not rules or not glyphs:
        return [*glyphs]
    parts = sorted(_Part(each.y - _DEPTH * each.size, each.y + _HEIGHT * each.size, each) for each in glyphs)
    reach = 4 * max(each.size for each in glyphs)
    rules = sorted(rules, key=lambda rule: rule.end - rule.x)[:_MAX_RULES]
    for rule in rules:  # inner ones first
        near = parts[bisect(parts, (rule.y - reach,)) : bisect(parts, (rule.y + reach,))]
        apart = [each for each in rules if abs(each.y - rule.y) < reach and each is not rule]
        sides = [_side(rule, near, sign, apart) for sign in (1, -1)]
        if not _fits(rule, [[part.glyph for part in side if part.glyph.text != " "] for side in sides]):
            continue
        members = {*map(id, sides[0]), *map(id, sides[1])}
        others = [part.glyph for part in near if id(part) not in members and part.glyph.text != " "]
        gap = max(min(part.low for part in sides[0]) - rule.y, rule.y - max(part.high for part in sides[1]))
        if joined := _fraction(rule, gap, [[part.glyph for part in side] for side in sides], others, apart):
            low, high = min(part.low for part in sides[1]), max(part.high for part in sides[0])
            kept = (part for part in parts if id(part) not in members)
            parts = sorted([*kept, *(_Part(low, high, each) for each in joined)])
    ordered = sorted((part.glyph for part in parts), key=lambda glyph: (glyph.order, glyph.x))
    return [glyph._replace(order=order) for order, glyph in enumerate(ordered)]


def _side(rule: _Rule, parts: list[_Part], sign: int, rules: list[_Rule]) -> list[_Part]:
    """Return what is next to a rule, with no other rule between: above it for a sign of 1, below it for -1."""
    gaps = [
        (gap, part)
        for part in parts
        if rule.covers(part.glyph) and (part.low + part.high - 2 * rule.y) * sign > 0
        for gap in [part.low - rule.y if sign > 0 else rule.y - part.high]
        if not any(0 < (each.y - rule.y) * sign < gap and each.covers(part.glyph) for each in rules)
    ]
    nearest, first = min(gaps, default=(0.0, None))
    if first is None:
        return []
    size, gap = max((part.glyph.size, gap) for gap, part in gaps if gap < nearest + _MAX_RISE * first.glyph.size)
    return [part for other, part in gaps if other < gap + _MAX_RISE * size]


def _fits(rule: _Rule, sides: list[list[Glyph]]) -> bool:
    """Return whether a rule is as long as what is above and below, which has no wide gaps and is in its middle."""
    if not all(sides):
        return False
    size = max(glyph.size for side in sides for glyph in side)
    widths = []
    for side in sides:
        side.sort(key=lambda glyph: glyph.x)
        start, end = side[0].x, max(glyph.end for glyph in side)
        is_within = min(start - rule.x, rule.end - end) > -_MAX_OVERHANG * size
        is_middle = abs(start + end - rule.x - rule.end) < 2 * _MAX_OFFSET * size
        if not is_within or not is_middle or any(b.x - a.end > _MAX_SPACE * size for a, b in pairwise(side)):
            return False
        widths.append(end - start)
    return rule.end - rule.x - max(widths) < _MAX_MARGIN * size and rule.thickness < _MAX_THICKNESS * size


def _fraction(
    rule: _Rule, gap: float, sides: list[list[Glyph]], others: list[Glyph], rules: list[_Rule]
) -> list[Glyph]:
    """Return the glyph of a fraction and the spaces beside it, or nothing if the parts are none."""
    size = max(glyph.size for side in sides for glyph in side)
    texts = [" ".join(lines_of(side)) for side in sides]
    left = max((g for g in others if _is_beside(rule, g, rule.x - g.end, size)), key=lambda g: g.end, default=None)
    right = min((g for g in others if _is_beside(rule, g, g.x - rule.end, size)), key=lambda g: g.x, default=None)
    near = left or right
    if gap > _MAX_GAP * max(size, near.size if near else 0.0):
        return []
    if near is None and (any(map(_NO_FRACTION.search, texts)) or _is_in_column(rule, sides, others, rules)):
        return []
    order = min(glyph.order for side in sides for glyph in side)
    fraction = Glyph("/".join(map(operand_text, texts)), rule.x, rule.y - _AXIS * size, rule.end, size, order)
    if near is None or (near.size * _SCRIPT > size and not _MIN_AXIS < (rule.y - near.y) / near.size < _MAX_AXIS):
        return [fraction]
    fraction = fraction._replace(y=near.y, size=near.size)
    spaces = [fraction._replace(text=" ", x=x, end=x) for x in (rule.x, rule.end)]
    is_left = left and left.text[-1].isalnum() and rule.x - left.end < WORD_GAP * left.size
    is_right = right and right.text[0].isalnum() and right.x - rule.end < WORD_GAP * right.size
    return [*spaces[: bool(is_left)], fraction, *spaces[2 - bool(is_right) :]]


def _is_beside(rule: _Rule, glyph: Glyph, gap: float, size: float) -> bool:
    """Return whether a rule is as high as the signs of the line of a glyph that is this far from it, or in a script."""
    rise = (rule.y - glyph.y) / (glyph.size or 1)
    if not -_MAX_OVERHANG * size < gap < _BESIDE * glyph.size:
        return False
    if size < _SCRIPT * glyph.size and gap < _MAX_OVERHANG * glyph.size and glyph.x < rule.x:
        return _MIN_SCRIPT_AXIS < rise < _MAX_SCRIPT_AXIS
    return _MIN_AXIS < rise < _MAX_AXIS and glyph.size > _SCRIPT * size


def _is_in_column(rule: _Rule, sides: list[list[Glyph]], others: list[Glyph], rules: list[_Rule]) -> bool:
    """Return whether what has no text beside its rule is underlined, in a row of cells or in a column of numbers."""
    base, size = min((glyph.y, glyph.size) for glyph in sides[0])
    if base - rule.y < _MIN_RISE * size:
        return True
    for each in rules:
        low, high = sorted((each.y, rule.y))
        if high - low < _SAME * size and max(each.x - rule.end, rule.x - each.end) < _SAME * size:
            return True
        # A fraction is as wide as its line.
        own = (each.x, each.end)
        between = ((other.x, other.end) == own or (low < other.y < high and rule.covers(other)) for other in others)
        is_next = high - low < 2 * _STACKED * size and not any(between)
        if is_next and max(abs(each.x - rule.x), abs(each.end - rule.end)) < _SAME * size:
            return True
    for side, sign in zip(sides, (1, -1), strict=True):
        y, size = max((glyph.size, glyph.y) for glyph in side)[::-1]
        for other in others:
            level = [each for each in others if abs(each.y - other.y) < _SAME * size]
            is_narrow = all(rule.covers(each) for each in level if rule.x - 3 * size < each.x < rule.end + 3 * size)
            is_stacked = rule.covers(other) and is_narrow and 0 < (other.y - y) * sign < _STACKED * size
            has_rule = any(each.covers(other) and abs(each.y - other.y) < _STACKED * other.size for each in rules)
            if (is_stacked or abs(other.y - y) < _SAME * size) and not has_rule:
                return True
    return False
