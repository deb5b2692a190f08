"""Counters of CSS, and the markers of list items by them. Does not import torch.

https://www.w3.org/TR/css-lists-3 and https://www.w3.org/TR/css-counter-styles-3
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lkv.context.flow_text import SPACES

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

Style = dict[str, str]

LISTS = ("dir", "menu", "ol", "ul")
_ITEM = "list-item"  # the counter of list items
_TYPES = {"1": "decimal", "a": "lower-alpha", "A": "upper-alpha", "i": "lower-roman", "I": "upper-roman"}
_SYMBOLS = ("circle", "disc", "disclosure-closed", "disclosure-open", "square")
_LATIN = "abcdefghijklmnopqrstuvwxyz"
_ALPHABETS = {"lower-alpha": _LATIN, "lower-latin": _LATIN, "lower-greek": "αβγδεζηθικλμνξοπρστυφχψω"}
_ALPHABETS |= {"upper-alpha": _LATIN.upper(), "upper-latin": _LATIN.upper()}
_ESCAPE = re.compile(r"\\(?:([0-9a-fA-F]{1,6})\s?|(.))")
_MAX_LEVELS = 50  # of a number such as 1.2.3
_NUMERALS = "m cm d cd c xc l xl x ix v iv i".split()
_NUMERAL_VALUES = (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1)
_Default = TypeVar("_Default", int, None)


class Counters:
    """The counters that are in scope while a page is rendered.

    An element's counters hold for it and its content. Unless there was one of the same name before, they also hold for
    the elements after it with the same parent.
    """

    def __init__(self, style_of: Callable[["LexborNode"], Style]) -> None:
        self._style_of = style_of
        self._values: dict[str, list[int]] = {}  # by name, the outermost first
        # Of each open element, the root first: counters of its own, and those that its children share.
        self._begun: list[tuple[set[str], set[str]]] = [(set(), set())]

    def enter(self, style: Style, node: "LexborNode | None" = None, is_item: bool = False) -> None:
        """Begin an element.

        Args:
            style: Its style.
            node: The element; None for text before or after one, or a marker.
            is_item: Whether it is displayed as an item of a list.
        """
        resets, steps, values = {}, {}, {}
        is_list = node is not None and node.tag in LISTS
        if node is not None and is_list:
            is_reversed = "reversed" in node.attributes
            items = sum(map(self._is_item, node.iter())) if is_reversed else 0
            start = integer(node.attributes.get("start"), items or 1)
            resets[_ITEM] = start + 1 if is_reversed else start - 1
        if node is not None and is_item:
            steps[_ITEM] = -1 if node.parent and node.parent.tag == "ol" and "reversed" in node.parent.attributes else 1
            if (value := integer(node.attributes.get("value"), None)) is not None:
                values[_ITEM] = value
        own, shared = set[str](), self._begun[-1][1]
        self._begun.append((own, set()))
        for name, value in (resets | _changes(style, "reset", 0)).items():
            if name not in shared:
                self._begin(name, own if self._values.get(name) or (is_list and name == _ITEM) else shared)
            self._values[name][-1] = value
        steps, values = steps | _changes(style, "increment", 1), values | _changes(style, "set", 0)
        for name in steps | values:
            if not self._values.get(name):
                self._begin(name, shared)
            self._values[name][-1] = values.get(name, self._values[name][-1] + steps.get(name, 0))

    def leave(self) -> None:
        """End the element that was begun last."""
        for names in self._begun.pop():
            for name in names:
                self._values[name].pop()

    def text(self, name: str, kind: str, separator: str | None = None) -> str | None:
        """Return a counter as text; None if it is not known how.

        Args:
            name: The counter.
            kind: The counter style, such as "upper-roman".
            separator: Stands between the values of all counters of the name, the outermost first; by default the
                innermost alone is returned.
        """
        numbers = self._values.get(name) or [0]
        texts = [_format_number(number, kind) for number in numbers[-1 if separator is None else -_MAX_LEVELS :]]
        return None if None in texts else (separator or "").join(filter(None, texts))

    def marker(self, kind: str) -> str | None:
        """Return the marker of the list item that was begun last; None if it is not known."""
        if kind[0] in "\"'":
            return unescape(kind[1:-1])
        if kind in _SYMBOLS:
            return "* "
        text = "" if kind == "none" else self.text(_ITEM, kind)
        return f"{text}. " if text else text

    def _is_item(self, node: "LexborNode") -> bool:
        is_shown = "hidden" not in node.attributes and self._style_of(node).get("display", "list-item") == "list-item"
        return node.tag == "li" and is_shown

    def _begin(self, name: str, begun: set[str]) -> None:
        begun.add(name)
        self._values.setdefault(name, []).append(0)


def list_type(node: "LexborNode", style: Style, inherited: str) -> str:
    """Return the counter style of an element's list items, or a string that all of them begin with."""
    kind = style.get("list-style-type", "revert")
    if kind == "revert" and node.tag in (*LISTS, "li"):
        kind = node.attributes.get("type") or ""
        if kind in _TYPES or kind.lower() in (*_SYMBOLS, "none"):
            return _TYPES.get(kind, kind.lower())
        return {"li": inherited, "ol": "decimal"}.get(node.tag, "disc")
    return "disc" if kind == "initial" else inherited if kind in ("revert", "inherit", "unset") else kind


def unescape(string: str) -> str:
    """Return the text that a string of a style sheet stands for."""
    return _ESCAPE.sub(_unescaped, string)


def _unescaped(escape: re.Match[str]) -> str:
    code = int(escape[1] or "0", 16)
    return escape[2] or (chr(code) if 0 < code < 0xD800 or 0xDFFF < code < 0x110000 else "\ufffd")


def integer(value: str | None, default: _Default) -> int | _Default:
    """Return the leading number of an attribute, by the standard's rules."""
    match = re.match(rf"[{SPACES}]*([+-]?[0-9]{{1,9}})", value or "")
    return int(match[1]) if match else default


def _changes(style: Style, kind: str, default: int) -> dict[str, int]:
    """Return the numbers of a declaration such as `counter-reset`, by the counters' names."""
    if not (value := style.get(f"counter-{kind}")):
        return {}
    pairs = re.findall(r"(?<!\S)([a-z_-][\w-]*)(?:\s+([+-]?\d{1,9}))?(?!\S)", value)
    return {name: int(number or default) for name, number in pairs if name not in ("none", "inherit", "initial")}


def _format_number(number: int, kind: str) -> str | None:
    """Return a number in a counter style; None if the style is not known."""
    if kind in ("lower-roman", "upper-roman") and 0 < number < 4000:
        numeral = ""
        for letters, value in zip(_NUMERALS, _NUMERAL_VALUES, strict=True):
            numeral += letters * (number // value)
            number %= value
        return numeral.upper() if kind == "upper-roman" else numeral
    if (alphabet := _ALPHABETS.get(kind)) and number > 0:
        text = ""
        while number > 0:
            number, letter = divmod(number - 1, len(alphabet))
            text = alphabet[letter] + text
        return text
    if kind == "decimal-leading-zero":
        return f"{number:02}"
    return str(number) if kind in ("decimal", "lower-roman", "upper-roman", *_ALPHABETS) else None
