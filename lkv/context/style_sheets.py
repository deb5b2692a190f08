"""What the style sheets inside an HTML page say of its elements. Does not import torch."""

import re
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from lkv.context.css_counters import LISTS, Counters, Style, unescape

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

# Of a sheet: parts that end with a mark; comments, and strings, which may have such marks.
_PART = re.compile(r"([^{};]*)([{};]?)")
_NO_PARTS = re.compile(r"""/\*.*?(?:\*/|\Z)|<!--|-->|("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')""", re.DOTALL)
_IMPORT = re.compile(r"@import\s+([^;\s]+)", re.IGNORECASE)
# Of the declarations that are used, margins alone are left out where there are too many.
_USED = re.compile(
    r"(?<![\w-])(?:display|float|position|visibility|white-space|text-decoration\S*|vertical-align|opacity|content|counter-\S*|"
    r"list-style\S*|(margin|padding|border)(?:-left|-right|-style|-inline\S*)?)\s*:"
)
_APART = ("display", "float", "position", "vertical-align")
# Text before and after elements and for markers, but no icons, whose characters are for private use.
_PSEUDO_ELEMENT = re.compile(r"::?(before|after|marker)$", re.IGNORECASE)
_ICON = re.compile(r"""["'](?:\\[ef][0-9a-f]{3}|[\ue000-\uf8ff])""", re.IGNORECASE)
_STRING = r"""(?P<quote>["'])((?:\\.|(?!(?P=quote)).)*)(?P=quote)"""
# Strings, functions and words.
_CONTENT_PART = re.compile(rf"""{_STRING}|([\w-]+)\(((?:"[^"]*"|'[^']*'|[^()"'])*)\)|([^\s"'()]+)""", re.DOTALL)
_COUNTER = re.compile(rf"""\s*([\w-]+)\s*(?:,\s*{_STRING}\s*)?(?:,\s*([\w-]+)\s*)?""", re.DOTALL)
_VALUES = re.compile(r"(?:\((?:[^()]|\([^()]*\))*\)|[^\s(])+")  # between spaces
_LENGTH = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([a-z%]*)")
# Of lengths: em each, in text of the usual size; the window is 80 em wide.
_UNITS = {"": 0, "px": 1 / 16, "pt": 1 / 12, "ex": 0.5, "ch": 0.5, "%": 0.8, "vw": 0.8, "cm": 2.4, "mm": 0.24, "in": 6}
_INDENTED = ("blockquote", "dd", "figure", *LISTS)
_HIDES = re.compile(r"\b(?:display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse))")
_WIDTH = 1280  # pixels of the window
_FEATURE = re.compile(r"\(\s*(?:(min-|max-)width\s*:|width\s*([<>])=?)\s*([\d.]+)(px|r?em)\s*\)")
# Selectors of what is drawn beside an element, or for a moment; the others are false for a page as it is opened.
_MOMENTS = "hover|focus|focus-within|focus-visible|active|target|visited"
_OTHER_TIMES = re.compile(rf"::|:(?:before|after|first-l|{_MOMENTS})|:-")
_NOT_MOMENTS = re.compile(rf":not\(\s*:(?:{_MOMENTS})\s*\)")
_KNOWN_FEATURE = (
    r"(?:\(\s*(?:display\s*:\s*(?:block|contents|flow-root|(?:inline-)?(?:flex|grid|table))"
    r"|position\s*:\s*(?:-webkit-)?sticky|--[\w-]*\s*:[^()]*)\s*\)|selector\(\s*:(?:has|is|where)\([^()]*\)\s*\))"
)
_KNOWN_FEATURES = re.compile(rf"@supports\s*(?:not\s*)?{_KNOWN_FEATURE}(?:\s*(?:and|or)\s*{_KNOWN_FEATURE})*")
_LAYERS = re.compile(r"@layer\b(.*)", re.DOTALL | re.IGNORECASE)
_SCRIPT_TYPES = re.compile(r"|module|(?:text|application)/(?:java|ecma)script", re.IGNORECASE)
_SOLID = frozenset("code kbd mi mn mo mtext samp tspan tt var".split())  # whose parts are not apart
_MAX_RULES = 2000
_MAX_SEARCHED = 2 * 10**8  # characters; each rule is looked for in the whole page
_MAX_NESTED = 20  # blocks


class _Rule(NamedTuple):
    selector: str
    declarations: str
    layer: tuple[float, ...]  # the numbers of its cascade layers, the outermost first; then infinity

    def precedence(self, is_important: bool) -> tuple[tuple[float, ...], tuple[int, int, int]]:
        """Return a key; of two rules, the one with the greater key applies."""
        return tuple(-number if is_important else number for number in self.layer), _specificity(self.selector)


class _Block(NamedTuple):
    selectors: str | None  # "" outside of rules and None where nothing applies
    declarations: list[str]
    layer: tuple[str, ...] = ()  # names, the outermost first
    is_doubtful: bool = False  # whether it is for browsers with a feature that is not known

    def rule_declarations(self) -> str:
        is_hiding = [self.is_doubtful and _HIDES.search(part.lower()) for part in self.declarations]
        return ";".join(part for part, hides in zip(self.declarations, is_hiding, strict=True) if part and not hides)


class StyleSheets:
    """The declarations of a page's rules, by the element's `mem_id`.

    Attributes:
        doubtful: Elements that a rule hides, in a page with scripts that may show them; they count as shown.
        linked: The number of sheets that the page names but does not contain.
        unread: The number of rules that are not understood or too many.
    """

    def __init__(self, parser: "LexborHTMLParser", page: str) -> None:
        from selectolax.lexbor import SelectolaxError

        self.doubtful: set[int] = set()
        self.unread, self.linked = 0, len(_linked_sheets(parser))
        self._styles: dict[tuple[int, str], tuple[Style, Style]] = {}
        rules = [rule for rule in _page_rules(parser) if _USED.search(rule.declarations.lower())]
        most = min(_MAX_RULES, _MAX_SEARCHED // len(page or " "))
        if len(rules) > most:
            rules = [rule for rule in rules if not all(_USED.findall(rule.declarations.lower()))]
        self.unread += len(rules[most:])
        for is_important in (False, True):
            for rule in sorted(rules[:most], key=lambda rule: rule.precedence(is_important)):
                if not (style := _parse(rule.declarations)[is_important]):
                    continue
                pseudo = _PSEUDO_ELEMENT.search(rule.selector)
                own = rule.selector[: pseudo.start()] if pseudo else rule.selector
                try:
                    nodes = parser.css(_NOT_MOMENTS.sub("", own) or "*")
                except SelectolaxError:
                    self.unread += _hides(style) and not _OTHER_TIMES.search(rule.selector)
                    continue
                for node in nodes:
                    key = node.mem_id, pseudo[1].lower() if pseudo else ""
                    self._styles.setdefault(key, ({}, {}))[is_important].update(style)
        if _is_scripted(parser, page):
            for (number, place), styles in self._styles.items():
                for style in () if place else styles:
                    for name in [name for name, value in style.items() if _HIDES.fullmatch(f"{name}:{value}")]:
                        del style[name]
                        self.doubtful.add(number)

    def content(self, node: "LexborNode", place: str, counters: Counters) -> str:
        """Return the text that rules draw "before" or "after" an element's own, or as its "marker"."""
        normal, important = self._styles.get((node.mem_id, place), ({}, {}))
        style = normal | important
        if "content" not in style:
            return ""
        content = style["content"]
        if not re.search("[\"'(]", content) or _ICON.match(content) or _hides(style):
            return ""
        counters.enter(style)
        text = ""
        for _, string, function, arguments, other in _CONTENT_PART.findall(content):
            if other == "/":  # what screen readers say instead
                break
            own: str | None = unescape(string)
            if function.lower() == "attr":
                own = node.attributes.get(arguments.strip().lower()) or ""
            elif function or other:
                own = _counter_text(function.lower(), arguments, counters)
            self.unread += own is None  # such as an image
            text += own or ""
        counters.leave()
        is_apart = not style.keys().isdisjoint(_APART)
        before, after = (" " if is_apart or gap(None, style, side) else "" for side in ("left", "right"))
        return before + text + after

    def style(self, node: "LexborNode") -> Style:
        """Return an element's declarations, its attribute `style` included."""
        normal, important = self._styles.get((node.mem_id, ""), ({}, {}))
        own_normal, own_important = _parse(_NO_PARTS.sub(_without_marks, node.attributes.get("style") or ""))
        return _drawing_style(node) | normal | own_normal | important | own_important


def gap(tag: str | None, style: Style, side: str) -> float:
    """Return the width in em of an inline element's margin, border and padding on a side."""
    if side == "left" and tag in _INDENTED:
        style = {"margin-left": "40px"} | style
    if not style:
        return 0.0
    border = re.search(r"solid|dashed|dotted|double|groove|ridge|inset|outset", style.get(f"border-{side}", ""))
    margin, padding = (_length(style.get(f"{name}-{side}", "0")) for name in ("margin", "padding"))
    return margin + max(0.0, padding) + (border is not None)


def _hides(style: Style) -> bool:
    return any(_HIDES.fullmatch(f"{name}:{value}") for name, value in style.items())


def is_transparent(style: Style) -> bool:
    """Return whether nothing of an element can be seen, though it takes its place."""
    return re.fullmatch(r"0*\.?0+%?", style.get("opacity", "")) is not None


def is_styled_apart(node: "LexborNode", before: str) -> bool:
    """Return whether a text after `before` begins an element that an unread sheet may set apart, such as a date."""
    after = (node.text_content or "")[:1]
    while node.prev is None and node.parent is not None:
        node = node.parent
    last, outer = node.prev, node.parent
    if last is None or outer is None or not (last.is_element_node and node.is_element_node):
        return False
    is_word = all(character.isdigit() or character.isupper() or character.islower() for character in (before, after))
    begins = before.isdigit() or after.isdigit() or after.isupper() or node.tag == last.tag == "a"
    is_apart = is_word and begins and _SOLID.isdisjoint((node.tag, outer.tag))
    return is_apart and not len(node.text()) == len(last.text()) == 1  # characters of a number or name


def is_repeated(node: "LexborNode") -> bool:
    """Return whether an element draws the formula before it again, which KaTeX's style sheet hides."""
    is_drawn, last = node.attributes.get("aria-hidden") == "true", node.prev
    return is_drawn and last is not None and last.is_element_node and last.css_first("math") is not None


def _length(value: str) -> float:
    if match := _LENGTH.fullmatch(value):
        return float(match[1]) * _UNITS.get(match[2], 1)
    return 1.0 if "(" in value else 0.0  # a formula or a variable


def _drawing_style(node: "LexborNode") -> Style:
    """Return the declarations that elements of SVG have as attributes."""
    hints = {name: value for name in ("display", "visibility") if (value := node.attributes.get(name))}
    return hints if hints and _is_in_drawing(node) else {}


def _is_in_drawing(node: "LexborNode") -> bool:
    parent = node if node.tag == "svg" else node.parent
    while parent is not None and parent.tag not in ("svg", "foreignObject"):
        parent = parent.parent
    return parent is not None and parent.tag == "svg"


def other_alternatives(node: "LexborNode") -> list["LexborNode"]:
    """Return the children of a drawing's `switch` that browsers in English do not display: one is displayed."""
    children = list(node.iter())
    languages = [child.attributes.get("systemlanguage", child.attributes.get("systemLanguage")) for child in children]
    fits = [words is None or "en" in re.findall("[a-z]+", words.lower()) for words in languages]
    shown = children[fits.index(True)] if True in fits else None
    return [child for child in children if child != shown] if _is_in_drawing(node) else []


def _counter_text(function: str, arguments: str, counters: Counters) -> str | None:
    """Return the text of `counter(NAME, STYLE)` or `counters(NAME, "SEPARATOR", STYLE)`; None for anything else."""
    if function not in ("counter", "counters") or not (match := _COUNTER.fullmatch(arguments)):
        return None
    separator = unescape(match[3]) if match[2] else None
    return counters.text(match[1].lower(), (match[4] or "decimal").lower(), separator)


def _linked_sheets(parser: "LexborHTMLParser") -> set[str]:
    """Return the addresses of the sheets that apply to a page but are not in it."""
    sheets = {name for node in parser.css("style") for name in _IMPORT.findall(node.text())}
    for attributes in (node.attributes for node in parser.css("link[href]")):
        kinds, media = (attributes.get("rel") or "").lower().split(), attributes.get("media") or "all"
        is_sheet = "stylesheet" in kinds or ("preload" in kinds and attributes.get("as") == "style")
        # Sheets that load later are for another medium until then.
        if is_sheet and "alternate" not in kinds and ("onload" in attributes or _applies(f"@media {media}")):
            sheets.add(attributes["href"] or "")
    return sheets


def _page_rules(parser: "LexborHTMLParser") -> Iterator[_Rule]:
    """Yield a rule for each selector, in the order of the page."""
    layers: dict[tuple[str, ...], int] = {}
    for node in parser.css("style"):
        if (node.attributes.get("type") or "text/css").lower() != "text/css":
            continue
        css, media = _NO_PARTS.sub(_without_marks, node.text()), node.attributes.get("media")
        for block in _blocks(f"@media {media} {{{css}}}" if media else css, layers):
            numbers = [layers[block.layer[:depth]] for depth in range(1, len(block.layer) + 1)]
            for selector in re.split(r",(?![^(\[]*[)\]])", block.selectors or ""):
                yield _Rule(selector.strip(), block.rule_declarations(), (*numbers, inf))


def _without_marks(part: re.Match[str]) -> str:
    """Return a string with escapes for the marks that end parts of a sheet, and nothing of a comment."""
    return re.sub("[{};!()]", lambda mark: f"\\{ord(mark[0]):x} ", part[1] or "")


def _blocks(css: str, layers: dict[tuple[str, ...], int]) -> list[_Block]:
    """Return the rules of a sheet that apply to a window of `_WIDTH` pixels.

    Args:
        css: The sheet.
        layers: The numbers of the layers by their names, which the sheet's own are added to.
    """
    rules: list[_Block] = []
    blocks = [_Block("", [])]  # the open ones
    for head, mark in _PART.findall(css):
        outer, head = blocks[-1], head.strip()
        names = _LAYERS.fullmatch(head) if outer.selectors is not None else None
        layer = outer.layer
        for name in names[1].split(",") if names else ():
            layer = _add_layer(outer.layer, name.strip(), layers)
        if mark != "{":
            outer.declarations.append(head)
            if mark == "}" and len(blocks) > 1:
                blocks.pop()
            continue
        selectors: str | None = head
        if outer.selectors is None or len(blocks) > _MAX_NESTED:
            selectors = None
        elif head.startswith("@"):
            selectors = outer.selectors if _applies(head) else None
        elif outer.selectors:
            parents = f":is({outer.selectors})"
            selectors = head.replace("&", parents) if "&" in head else f"{parents} {head}"
        is_doubtful = head.lower().startswith("@supports") and not _KNOWN_FEATURES.fullmatch(head.lower())
        blocks.append(_Block(selectors, [], layer, outer.is_doubtful or is_doubtful))
        if selectors:
            rules.append(blocks[-1])
    return rules


def _add_layer(outer: tuple[str, ...], name: str, layers: dict[tuple[str, ...], int]) -> tuple[str, ...]:
    """Add a layer if it is new; return its names with those of the layers around it."""
    for part in name.split(".") if name else [f" {len(layers)}"]:  # no other has the name of one without
        outer = (*outer, part)
        layers.setdefault(outer, len(layers))
    return outer


def _applies(head: str) -> bool:
    """Return whether the block of an at-rule applies."""
    match = re.fullmatch(r"@(media|layer|supports)\b\s*(.*)", head.lower(), re.DOTALL)
    if not match or match[1] != "media":
        return match is not None and not match[2].startswith("not")
    return any(_fits(query.strip()) for query in match[2].split(","))


def _fits(query: str) -> bool:
    """Return whether a media query fits a screen; of its features, only the window's width is known."""
    if query.startswith("not "):
        return not _fits(query.removeprefix("not ").strip())
    kind, *features = re.split(r"\s+and\s+", query.removeprefix("only ").strip())
    if kind.startswith("("):
        kind, features = "screen", [kind, *features]
    for feature in features:
        if not (match := _FEATURE.fullmatch(feature)):
            return False
        pixels = float(match[3]) * (1 if match[4] == "px" else 16)
        if pixels > _WIDTH if (match[1] == "min-" or match[2] == ">") else pixels < _WIDTH:
            return False
    return kind in ("", "all", "screen")


def _specificity(selector: str) -> tuple[int, int, int]:
    selector = re.sub(r":where\([^()]*\)|\[[^\]]*\]", lambda match: "" if match[0][0] == ":" else ".x", selector)
    names = re.findall(r"(?:^|[\s>+~(])[a-z]", selector, re.IGNORECASE)
    return selector.count("#"), len(re.findall(r"\.|(?<!:):(?!not|is|has)", selector)), len(names)


def _parse(text: str) -> tuple[Style, Style]:
    """Return the declarations of a rule or an attribute `style`: usual ones, and important ones."""
    styles: tuple[Style, Style] = {}, {}
    for part in text.split(";") if text else ():
        name, _, value = part.partition(":")
        value, mark, _ = value.partition("!")
        value = value.strip() if re.search("[\"']", value) else value.strip().lower()
        if value:
            styles[bool(mark)].update(_longhands(name.strip().lower(), value))
    return styles


def _longhands(name: str, value: str) -> Style:
    """Return a declaration as one or several without shorthands and without other names for the same."""
    if name in ("margin", "padding"):
        values = _VALUES.findall(value) or [value]
        right = values[min(1, len(values) - 1)]
        return {f"{name}-left": values[3] if len(values) > 3 else right, f"{name}-right": right}
    if name in ("margin-inline", "padding-inline", "border-inline"):
        values = [value] if name[0] == "b" else _VALUES.findall(value) or [value]
        return {name.replace("inline", "left"): values[0], name.replace("inline", "right"): values[-1]}
    if name in ("border", "border-style"):
        return {"border-left": value, "border-right": value}
    if name == "list-style":
        kinds = re.sub(r"\b(?:inside|outside|url\([^)]*\))", "", value).strip()
        return {"list-style-type": re.sub(r"^none\s+|\s+none$", "", kinds) or "disc"}
    name = name.replace("inline-start", "left").replace("inline-end", "right")
    return {"display" if name == "all" else name: value}


def _is_scripted(parser: "LexborHTMLParser", page: str) -> bool:
    """Return whether a page has scripts, which may show what its style sheets hide."""
    kinds = [node.attributes.get("type") or "" for node in parser.css("script")]
    return any(map(_SCRIPT_TYPES.fullmatch, kinds)) or bool(
        re.search(r"<[a-z][^<>]*\son[a-z]+\s*=", page, re.IGNORECASE)
    )
