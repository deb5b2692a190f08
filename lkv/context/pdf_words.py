"""Words of the lines of PDF pages: accents, scripts, and gaps between words. Does not import torch."""

from collections.abc import Sequence, Set
from functools import lru_cache
from itertools import groupby, pairwise
from operator import itemgetter
from statistics import fmean, mode
from typing import NamedTuple
from unicodedata import bidirectional, combining, normalize

from lkv.context.flow_text import script_text

# Shares of the font's size.
SAME_BASE = 0.15  # between the base lines of one line
ROW_OFFSET = 0.51  # between the base lines of cells of one row, at most
SMALL = 0.9  # superscripts and subscripts are smaller; 0.83 in browsers
WORD_GAP = 0.189  # between words, at least; the narrowest spaces of TeX have 0.19
MIDDLE = 0.25  # of letters over their base line, by the size of the font
_MIN_GAPS = 6  # of a line whose own gaps say which are between words
_NUMBER_GAP = 0.12  # between numbers
_MAX_TRACKING = 0.8  # between the letters of a spaced out word, at most
_SOLIDI, _BELOW = "/\u2044\u2215", -1e-3  # of fractions; how far small digits behind them are lowered, at least
_DIGIT_RAISE = 0.14  # of digits of the text's size that are scripts, at least
# Accents as characters of their own that have no decomposition, and letters without their dots.
_MARKS = {"`": "\u0300", "\u02c6": "\u0302", "\u02c7": "\u030c"}
_DOTLESS = {0x131: "i", 0x237: "j"}
_MAX_ACCENTS, _MAX_REACH = 2000, 100  # of a page; glyphs that are drawn in between
_MAX_CAPITALS = 40  # of a page that are several lines high
_ABOVE = 230  # the class of accents above


class Glyph(NamedTuple):
    """A glyph, or several that stand for one text, in a frame where text runs from left to right; in points."""

    text: str
    x: float
    y: float  # of its base line; greater is higher
    end: float  # by its own width
    size: float
    order: int  # how many glyphs of the page were drawn before it


@lru_cache(maxsize=4096)
def accent(text: str) -> str:
    """Return the combining character of an accent that is a character of its own; empty for other texts."""
    mark = _MARKS.get(text) or normalize("NFKD", text).strip(" ")
    return mark if mark and combining(mark[0]) else ""


def attach_accents(glyphs: Sequence[Glyph]) -> list[Glyph]:
    """Put accents that are glyphs of their own, as in TeX, on the letters at their place, drawn before or after."""
    joined: list[Glyph | None] = [*glyphs]
    last = -1
    for i, glyph in enumerate(glyphs):
        base = joined[last] if last >= 0 else None
        if base and combining(glyph.text[0]) and bidirectional(base.text[0]) not in ("R", "AL", "NSM"):
            # It follows its letter, as in every text, in some fonts at a place of its own.
            follower = glyphs[i + 1].x if i + 1 < len(glyphs) else glyph.end
            has_place = glyph.x > base.end - 0.1 * base.size and abs(follower - glyph.end) < 0.05 * base.size
            end = glyph.end if has_place else base.end
            joined[last], joined[i] = base._replace(text=normalize("NFC", base.text + glyph.text), end=end), None
        else:
            last = i
    marks = [(i, mark) for i, glyph in enumerate(glyphs) if joined[i] and (mark := accent(glyph.text))]
    reach = _MAX_REACH if len(marks) < _MAX_ACCENTS else 1  # raised ones are drawn apart
    for i, mark in marks:
        glyph, near = glyphs[i], range(max(0, i - reach), min(len(glyphs), i + reach + 1))
        centre = (glyph.x + glyph.end) / 2
        for j in sorted(near, key=lambda j: abs(j - i)):
            base = joined[j]
            if not base or not base.x < centre < base.end or accent(base.text) or not base.text[0].isalpha():
                continue
            if abs(base.y - glyph.y) < glyph.size / 2:
                letter = base.text.translate(_DOTLESS) if combining(mark[0]) == _ABOVE else base.text
                joined[j], joined[i] = base._replace(text=normalize("NFC", letter + mark)), None
                break
        else:
            if mark == glyph.text and i and (base := joined[i - 1]):
                joined[i - 1], joined[i] = base._replace(text=base.text + mark), None
    return [glyph for glyph in joined if glyph]


def attach_capitals(glyphs: list[Glyph]) -> list[Glyph]:
    """Put a capital that is as high as several lines before the first of them."""
    sizes = sorted(glyph.size for glyph in glyphs)
    placed, least = [*glyphs], 2 * sizes[len(sizes) // 2] if sizes else 0.0
    large = [i for i, glyph in enumerate(glyphs) if glyph.size > least and glyph.text.isalpha()]
    alone = [i for i in large if all(glyphs[j].size != glyphs[i].size for j in (i - 1, i + 1) if 0 <= j < len(glyphs))]
    for capital in (glyphs[i] for i in alone[:_MAX_CAPITALS]):
        (x, y, size), reach = (capital.end, capital.y, capital.size), capital.size / 2
        beside = [each for each in glyphs if -0.1 * size < each.x - x < reach > each.size and y < each.y < y + size]
        top = max((each.y for each in beside), default=y)
        line = [each for each in beside if top - each.y < SAME_BASE * each.size < top - y]
        if line:
            first = min(line, key=lambda each: each.x)
            placed.remove(capital)
            joined = capital._replace(y=first.y, size=first.size, end=first.x, order=first.order)
            placed.insert(placed.index(first), joined)
    return placed


def texts_of(glyphs: list[Glyph], breaks: Set[Glyph]) -> list[str]:
    """Return the texts of a segment's glyphs, with a space at each break and scripts as part of what they follow."""
    size = max([glyph.size for glyph in glyphs if glyph.text[0].isalnum()] or [glyph.size for glyph in glyphs])
    large = [glyph for glyph in glyphs if glyph.size >= SMALL * size]
    base = mode([glyph.y for glyph in large if not glyph.text.isdigit()] or [glyph.y for glyph in large])
    raises: list[float] = []
    for y, level in groupby(glyphs, key=lambda glyph: round(glyph.y, 1)):  # a value on a form's line is not a script
        run = [*level]
        raises += [(y - base) * all(_is_script(glyph, y - base, size) for glyph in run)] * len(run)
    for i, (before, glyph) in enumerate(pairwise(glyphs), 1):  # below a solidus, on the line as in "nicefrac"
        is_below = before.text in _SOLIDI and i > 1 and raises[i - 2] > 0 and glyphs[i - 2].text.isdigit()
        is_below |= raises[i - 1] == _BELOW
        raises[i] = _BELOW if is_below and glyph.text.isdigit() and glyph.size < SMALL * size else raises[i]
    spaced: list[tuple[str, float]] = []  # and how far each is raised
    for i, (glyph, shift) in enumerate(zip(glyphs, raises, strict=True)):
        spaced += [(" ", shift * (raises[i - 1] == shift))] * (glyph in breaks) + [(glyph.text, shift)]
    texts: list[str] = []
    place = 0
    for raised, members in groupby(spaced, key=itemgetter(1)):
        part = [text for text, _ in members]
        place += len(part)
        before_script = texts[-1].strip(" ")[-1:] if texts else ""
        is_near = before_script not in ("", "_") or (spaced[place : place + 1] or [(" ", 0)])[0][0] not in (" ", "_")
        if raised and is_near:
            script = script_text("".join(part), before_script, raised > 0)
            # A footnote's letter does not belong to the number behind it.
            part = [texts.pop() + script] if before_script else [script, *[" "] * (script == "".join(part))]
        texts += part
    return texts


def word_breaks(glyphs: list[Glyph], usual_gap: float) -> set[Glyph]:
    """Return the glyphs of a segment with a gap between words before them, but no character for a space."""
    pairs = [
        (before, glyph)
        for before, glyph in pairwise(glyphs)
        if not -before.size <= glyph.x - before.end <= 0 and before.text[-1] != " " != glyph.text[0]
    ]
    if not pairs:
        return set()
    tracking, pitch = _tracking(glyphs)
    own_gap = word_gap([glyphs], default=usual_gap)
    breaks: set[Glyph] = set()
    for before, glyph in pairs:
        are_digits = before.text[-1].isdigit() and glyph.text[0].isdigit()
        least = WORD_GAP if are_dots(before, glyph) else min(own_gap, _NUMBER_GAP) if are_digits else own_gap
        most = max(tracking, pitch + before.x - before.end) + least * before.size
        if not -before.size <= glyph.x - before.end <= most:
            breaks.add(glyph)
    return breaks


def _is_script(glyph: Glyph, shift: float, size: float) -> bool:
    """Return whether a glyph is a superscript or a subscript of text of a size: small, or a digit clearly off."""
    if glyph.size < SMALL * size:
        return abs(shift) > 0.05 * size
    return glyph.text.isdigit() and _DIGIT_RAISE * size < abs(shift) < ROW_OFFSET * size


def word_gap(lines: list[list[Glyph]], default: float) -> float:
    """Return the least gap between words by the size: between the narrow and the wide ones, if these are apart."""
    pairs = [(a, b) for glyphs in lines for a, b in pairwise(glyphs) if not are_dots(a, b)]
    gaps = sorted((b.x - a.end) / a.size for a, b in pairs if a.text != " " != b.text)
    if len(gaps) < _MIN_GAPS or len(gaps) < len(pairs):  # with characters for spaces
        return default
    # As wide as an em of the font seems.
    unit = min(1.0, 2 * fmean((glyph.end - glyph.x) / glyph.size for glyphs in lines for glyph in glyphs))
    apart = [(b - a, (a + b) / 2) for a, b in pairwise(gaps) if a < 0.12 * unit and b > 0.08 * unit]
    widest, middle = max(apart, default=(0.0, 0.0))
    return min(middle, WORD_GAP) if widest > 0.06 * unit else default


def are_dots(before: Glyph, glyph: Glyph) -> bool:
    """Return whether two glyphs are part of a row of dots or the like."""
    return before.text == glyph.text and not glyph.text.isalnum()


def _tracking(glyphs: list[Glyph]) -> tuple[float, float]:
    """Return the space between the letters of text that is spaced out, and the distance of evenly placed ones, or 0."""
    letters = [(a, b) for a, b in pairwise(glyphs) if a.text.isalpha() and b.text.isalpha()]
    size, count = glyphs[0].size, len(letters)
    gaps, pitches = sorted(b.x - a.end for a, b in letters), sorted(b.x - a.x for a, b in letters)
    if count < 4:
        return 0.0, 0.0
    is_even = gaps[count // 2] - gaps[count // 4] < 0.1 * size
    has_tracking = is_even and _NUMBER_GAP * size < gaps[count // 4] < _MAX_TRACKING * size
    widths = [a.end - a.x for a, b in letters if b.x - a.x - pitches[0] < 0.02 * size]
    # Evenly placed, though not as wide as each other: not so in ordinary text.
    has_pitch = len(widths) > 0.7 * count and max(widths) - min(widths) > 0.15 * size and pitches[0] < size
    return gaps[count // 4] * has_tracking, pitches[0] * has_pitch
