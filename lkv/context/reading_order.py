"""The order of reading of lines with Arabic or Hebrew, by the order in which they are seen. Does not import torch."""

import re
from collections.abc import Iterator
from itertools import accumulate
from unicodedata import bidirectional

# The classes of Unicode's bidirectional algorithm (UAX #9) that matter here; others are "-".
_KINDS = {"L": "L", "R": "R", "AL": "A", "EN": "N", "AN": "M", "ES": ".", "CS": ",", "ET": "T"}
# What runs from left to right, as seen: letters with the numbers around them (W7), and numbers, which behind an Arabic
# letter have neither signs nor units (W2 to W5).
_LEFT_TO_RIGHT = re.compile(
    r"(?:T*N[^RAML]*+)?L(?:[^RAM]*(?:L|NT*))?|T*+N(?:[.,]?N|T+N)*+T*+(?![^RAL]*A)|[MN](?:,?[MN])*"
)
_ISLAND = re.compile("[RAM][^L]*[RAM]|[RAM]")  # of a line that is read from left to right
_BRACKETS = ("()", "[]", "{}", "«»")
_LINES_AROUND = 3  # whose letters say how a line is read


def in_reading_order(lines: list[list[str]]) -> Iterator[str]:
    """Yield the lines of one block in the order of reading.

    Args:
        lines: The texts of each line in the order of their places from left to right.
    """
    all_kinds = ["".join(_KINDS.get(bidirectional(text[0]), "-") for text in texts) for texts in lines]
    for number, (texts, kinds) in enumerate(zip(lines, all_kinds, strict=True)):
        letters = re.sub("[^RAL]", "", "".join(all_kinds[max(0, number - _LINES_AROUND) : number + _LINES_AROUND + 1]))
        own = re.sub("[^RAL]", "", kinds)
        is_right = 2 * letters.count("L") < len(letters) or bool(own and "L" not in own[0] + own[-1])
        is_latin = set(own) == {"L"}
        yield "".join(_turn(texts, kinds, is_right and not is_latin))


def _turn(texts: list[str], kinds: str, is_right: bool) -> list[str]:
    """Turn one line round, but not what runs from left to right in it."""
    ordered: list[str] = []
    place = 0
    for zone in re.finditer(".+", kinds) if is_right else _ISLAND.finditer(kinds):
        ordered += texts[place : zone.start()]
        parts: list[list[str]] = []
        place = zone.start()
        for run in _LEFT_TO_RIGHT.finditer(kinds, zone.start(), zone.end()):
            start, end = run.span()
            if sum(text in "()[]{}" for text in texts[start:end]) % 2:  # brackets belong to what is within (N0)
                end += texts[end : end + 1] in [["("], [")"], ["["], ["]"]]
            parts += [*([text] for text in texts[place:start]), texts[start:end]]
            place = end
        parts += [[text] for text in texts[place : zone.end()]]
        ordered += [text for part in reversed(parts) for text in part]
        place = zone.end()
    return _pair_brackets(ordered + texts[place:]) if ordered else texts


def _pair_brackets(texts: list[str]) -> list[str]:
    """Mirror brackets, or open and close them in turn, if they do not match; pdfium mirrors some of them itself."""
    for pair in _BRACKETS:
        marks = [i for i, text in enumerate(texts) if text in (*pair,)]
        seen = "".join(texts[i] for i in marks)
        ways = seen, seen.translate(str.maketrans(pair, pair[::-1])), len(seen) // 2 * pair
        for i, mark in zip(marks, next((way for way in ways if _are_paired(way, pair)), seen), strict=False):
            texts[i] = mark
    return texts


def _are_paired(marks: str, pair: str) -> bool:
    depths = [0, *accumulate(1 if mark == pair[0] else -1 for mark in marks)]
    return min(depths) == depths[-1] == 0
