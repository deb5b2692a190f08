"""What the style sheets inside an HTML page say of its elements. Does not import torch."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

# Of a sheet: parts that end with a mark; comments, and strings, which may have such marks.
_PART = re.compile(r"([^{};]*)([{};]?)")
_NO_PARTS = re.compile(r"""/\*.*?(?:\*/|\Z)|<!--|-->|("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')""", re.DOTALL)
_USED = re.compile(r"\b(?:display|float|position|visibility|white-space|text-decoration\S*|vertical-align)\s*:")
# Text before and after elements, but no icons, whose characters are for private use.
_PSEUDO_ELEMENT = re.compile(r"::?(before|after)$", re.IGNORECASE)
_ICON = r"""\s*["'](?:\\[ef][0-9a-f]{3}|[\ue000-\uf8ff])"""
_GENERATES = re.compile(rf"""(?:^|;)\s*content\s*:(?!{_ICON})([^;]*["'(][^;]*)""", re.IGNORECASE)
_CONTENT_PART = re.compile(r"""(["'])(.*?)(?<!\\)\1|attr\(\s*([\w-]+)\s*\)|!.*|([^\s"']+)""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:([0-9a-fA-F]{1,6})\s?|(.))")
_HIDES = re.compile(r"\b(?:display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse))")
_WIDTH = 1280  # pixels of the window
_FEATURE = re.compile(r"\(\s*(?:(min-|max-)width\s*:|width\s*([<>])=?)\s*([\d.]+)(px|r?em)\s*\)")
# Selectors of what is drawn beside an element, or for a moment; the others are false for a page as it is opened.
_MOMENTS = "hover|focus|focus-within|focus-visible|active|target|visited"
_OTHER_TIMES = re.compile(rf"::|:(?:before|after|first-l|{_MOMENTS})|:-")
_NOT_MOMENTS = re.compile(rf":not\(\s*:(?:{_MOMENTS})\s*\)")
_SCRIPT_TYPES = re.compile(r"|module|(?:text|application)/(?:java|ecma)script", re.IGNORECASE)
_MAX_RULES = 2000
_MAX_SEARCHED = 2 * 10**8  # characters; each rule is looked for in the whole page
_MAX_NESTED = 20  # blocks

Style = dict[str, str]


class StyleSheets:
    """The declarations of a page's rules, by the element's `mem_id`.

    Attributes:
        doubtful: Elements that a rule hides, in a page with scripts that may show them; they count as shown.
        unread: The number of rules that are not understood or too many.
    """

    def __init__(self, parser: "LexborHTMLParser", page: str) -> None:
        from selectolax.lexbor import SelectolaxError

        self.doubtful: set[int] = set()
        self.unread = 0
        self._styles: dict[int, tuple[Style, Style]] = {}
        self._contents: dict[tuple[int, str], str] = {}
        rules = [rule for rule in _page_rules(parser) if _is_used(*rule)]
        most = min(_MAX_RULES, _MAX_SEARCHED // len(page or " "))
        self.unread += len(rules[most:])
        for selector, declarations in sorted(rules[:most], key=lambda rule: _specificity(rule[0])):
            pseudo = _PSEUDO_ELEMENT.search(selector)
            own = selector[: pseudo.start()] if pseudo else selector
            try:
                nodes = parser.css(_NOT_MOMENTS.sub("", own) or "*")
            except SelectolaxError:
                self.unread += bool(_HIDES.search(declarations.lower())) and not _OTHER_TIMES.search(selector)
                continue
            for node in nodes:
                if pseudo:
                    self._contents[node.mem_id, pseudo[1].lower()] = declarations
                    continue
                styles = self._styles.setdefault(node.mem_id, ({}, {}))
                for style, more in zip(styles, _parse(declarations), strict=True):
                    style.update(more)
        if _is_scripted(parser, page):
            for number, styles in self._styles.items():
                for style in styles:
                    for name in [name for name, value in style.items() if _HIDES.fullmatch(f"{name}:{value}")]:
                        del style[name]
                        self.doubtful.add(number)

    def content(self, node: "LexborNode", place: str) -> str:
        """Return the text that rules draw "before" or "after" an element's own."""
        declarations = self._contents.get((node.mem_id, place), "")
        if not (generated := _GENERATES.search(declarations)) or _HIDES.search(declarations.lower()):
            return ""
        text = ""
        for _, string, attribute, other in _CONTENT_PART.findall(generated[1]):
            self.unread += bool(other)  # such as a counter or an image
            text += _ESCAPE.sub(_unescaped, string) if not attribute else node.attributes.get(attribute.lower()) or ""
        return text if not _USED.search(declarations) else f" {text} "

    def style(self, node: "LexborNode") -> Style:
        """Return an element's declarations, its attribute `style` included."""
        normal, important = self._styles.get(node.mem_id, ({}, {}))
        own_normal, own_important = _parse(node.attributes.get("style") or "")
        return normal | own_normal | important | own_important


def _page_rules(parser: "LexborHTMLParser") -> Iterator[tuple[str, str]]:
    """Yield each selector and its declarations, in the order of the page."""
    for node in parser.css("style"):
        if (node.attributes.get("type") or "text/css").lower() != "text/css":
            continue
        css, media = _NO_PARTS.sub(_without_marks, node.text()), node.attributes.get("media")
        for selectors, declarations in _rules(f"@media {media} {{{css}}}" if media else css):
            for selector in re.split(r",(?![^(\[]*[)\]])", selectors):
                yield selector.strip(), declarations


def _without_marks(part: re.Match[str]) -> str:
    """Return a string with escapes for the marks that end parts of a sheet, and nothing of a comment."""
    return re.sub("[{};]", lambda mark: f"\\{ord(mark[0]):x} ", part[1] or "")


def _is_used(selector: str, declarations: str) -> bool:
    if _PSEUDO_ELEMENT.search(selector):
        return _GENERATES.search(declarations) is not None
    return _USED.search(declarations.lower()) is not None


def _unescaped(escape: re.Match[str]) -> str:
    code = int(escape[1] or "0", 16)
    return escape[2] or (chr(code) if 0 < code < 0xD800 or 0xDFFF < code < 0x110000 else "\ufffd")


def _rules(css: str) -> list[tuple[str, str]]:
    """Return the selectors and declarations of a sheet's rules that apply to a window of `_WIDTH` pixels."""
    rules: list[tuple[str, list[str]]] = []
    # The open blocks: their selectors, "" outside of rules and None where nothing applies, and declarations.
    blocks: list[tuple[str | None, list[str]]] = [("", [])]
    for head, mark in _PART.findall(css):
        (outer, declarations), head = blocks[-1], head.strip()
        if mark != "{":
            declarations.append(head)
            if mark == "}" and len(blocks) > 1:
                blocks.pop()
            continue
        selectors: str | None = head
        if outer is None or len(blocks) > _MAX_NESTED:
            selectors = None
        elif head.startswith("@"):
            selectors = outer if _applies(head) else None
        elif outer:
            selectors = head.replace("&", f":is({outer})") if "&" in head else f":is({outer}) {head}"
        blocks.append((selectors, []))
        if selectors:
            rules.append((selectors, blocks[-1][1]))
    return [(selectors, ";".join(filter(None, declarations))) for selectors, declarations in rules]


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
    for part in text.lower().split(";"):
        name, _, value = part.partition(":")
        value, mark, _ = value.partition("!")
        if value.strip():
            styles[bool(mark)]["display" if name.strip() == "all" else name.strip()] = value.strip()
    return styles


def _is_scripted(parser: "LexborHTMLParser", page: str) -> bool:
    """Return whether a page has scripts, which may show what its style sheets hide."""
    kinds = [node.attributes.get("type") or "" for node in parser.css("script")]
    return any(map(_SCRIPT_TYPES.fullmatch, kinds)) or bool(
        re.search(r"<[a-z][^<>]*\son[a-z]+\s*=", page, re.IGNORECASE)
    )
