"""The text of an HTML page as browsers display it, by the HTML standard's rules. Does not import torch."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, TypeAlias

from lkv.context.css_counters import LISTS, Counters, Style, integer, list_type
from lkv.context.flow_text import SPACES, UNSEEN, FlowText, operand_text, script_text
from lkv.context.style_sheets import StyleSheets, gap, is_repeated, is_styled_apart, is_transparent, other_alternatives
from lkv.context.table_boxes import Boxes, line_breaks

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode


# Section "Rendering" of the standard: https://html.spec.whatwg.org/multipage/rendering.html
_DISPLAYS = {
    "none": "annotation annotation-xml area base basefont col colgroup datalist defs desc link meta metadata "
    "noembed noframes param rp selectedcontent source style symbol title track",
    "block": "address article aside body center dd details dialog div dt fieldset figcaption footer foreignObject form "
    "frameset header hgroup html legend main nav optgroup option search section select summary text",
    "spaced block": "blockquote dir dl figure h1 h2 h3 h4 h5 h6 hr listing menu ol p plaintext pre ul xmp",
    "inline-block": "button input marquee meter output progress textarea",
    "list-item": "li",
    "table": "mtable table",
    "table-row": "mlabeledtr mtr tr",
    "table-cell": "mtd td th",
    "table-caption": "caption",
    "table-header-group": "thead",
    "table-row-group": "tbody",
    "table-footer-group": "tfoot",
    "contents": "slot",
}
_DISPLAY = {tag: display for display, tags in _DISPLAYS.items() for tag in tags.split()}
_WITHOUT_BOX = ("none", "table-column", "table-column-group")
_DISPLAY_KEYWORDS = (None, "inherit", "revert", "revert-layer")
_PREFORMATTED = ("listing", "plaintext", "pre", "textarea", "xmp")
_NOT_READ = {name: name for name in ("audio", "canvas", "embed", "object", "script", "template", "video")}
_NOT_READ |= {"frame": "embedded page", "iframe": "embedded page"}
_SCRIPTED = ("mmultiscripts", "msub", "msup", "msubsup", "munder", "mover", "munderover")
_INPUTS_WITHOUT_TEXT = ("color", "file", "hidden", "password", "range")

_MAX_SPAN = 100  # columns of a cell; larger spans are mistakes or attacks

_MAX_DEPTH = 5000  # the parser takes quadratic time; browsers display 512 levels
_TAG = re.compile(
    r"""<!--(?:-?>|.*?(?:--!?>|\Z))|<(/?)([a-z][^\s/>]*)(?:=\s*"[^"]*"|=\s*'[^']*'|[^>])*+(?:>|\Z)""",
    re.DOTALL | re.IGNORECASE,
)
_RAW = ("iframe", "noembed", "noframes", "script", "style", "textarea", "title", "xmp")  # whose content is not markup
# Elements without an end tag, or with an implied one.
_UNCOUNTED = frozenset(
    "area base br col colgroup dd dt embed hr img input li link meta option p param source tbody td tfoot th thead tr "
    "track wbr".split()
)

_Step: TypeAlias = "LexborNode | Callable[[], None]"


def html_text(page: str) -> tuple[str, list[str]]:
    """Return the text of a page, and descriptions of skipped scripts, images and other content.

    Blocks and rows of tables are lines, cells are separated by tabs, and list items have their markers.

    Raises:
        RecursionError: If its elements are nested too deeply.
    """
    _check_depth(page)
    renderer = _Renderer()
    renderer.render(page)
    counts = sorted((+renderer.left_out).items())
    return renderer.text.value(), [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts]


def _check_depth(page: str) -> None:
    """Raise RecursionError for a page so deeply nested that parsing would take minutes."""
    opened: Counter[str] = Counter()
    place = 0
    while match := _TAG.search(page, place):
        place, name = match.end(), (match[2] or "").lower()
        is_foreign = opened["svg"] + opened["math"] > 0
        if not name or name in _UNCOUNTED or (is_foreign and match[0].endswith("/>")):
            continue
        if match[1]:
            opened[name] -= opened[name] > 0
        elif name in _RAW and not is_foreign:
            end = re.compile(f"</{name}", re.IGNORECASE).search(page, place)
            place = end.end() if end else len(page)
        else:
            opened[name] += 1
            if opened.total() > _MAX_DEPTH:
                raise RecursionError(f"more than {_MAX_DEPTH:,} elements within one another")


class _Renderer:
    """Renders without recursion, because pages may be nested arbitrarily deep."""

    def __init__(self) -> None:
        self._boxes = Boxes()
        self.left_out: Counter[str] = Counter()
        self._lists = 0  # within one another
        self._list_type = "disc"
        self._slots: list[dict[str, list[LexborNode]]] = []  # what shadow trees show of their hosts' content, by name
        self._white_space = "normal"
        self._is_visible = True
        self._quotes = 0

    @property
    def text(self) -> FlowText:
        return self._boxes.flow()

    def render(self, page: str) -> None:
        from selectolax.lexbor import LexborHTMLParser

        parser = LexborHTMLParser(page)
        self._sheets = StyleSheets(parser, page)
        self._counters = Counters(self._sheets.style)
        root = parser.root
        steps: list[_Step] = [root] if root is not None else []
        while steps:
            step = steps.pop()
            if callable(step):
                step()
            elif step.is_text_node:
                is_flowing = self._sheets.linked and not self._white_space.startswith(("pre", "break"))
                if is_flowing and is_styled_apart(step, self._boxes.text.last_character()):
                    self._boxes.text.add_space()
                self._write(step.text_content or "")
            elif step.is_element_node:
                steps.extend(reversed(self._enter(step)))
        self.left_out["style rule"] += self._sheets.unread
        self.left_out["linked style sheet"] += self._sheets.linked

    def _write(self, text: str) -> None:
        if not self._is_visible:
            self.left_out["hidden element"] += bool(text.strip())
        elif self._boxes.is_apart() and not text.strip(SPACES):
            return
        elif self._white_space in ("pre", "pre-wrap", "break-spaces"):
            self.text.write_verbatim(text.translate(UNSEEN))
        elif self._white_space == "pre-line":
            for number, line in enumerate(text.split("\n")):
                if number:
                    self.text.add_break()
                self.text.write(line)
        else:
            self.text.write(text)

    def _enter(self, node: "LexborNode") -> list[_Step]:
        """Begin an element; return its children and the steps between and after them."""
        tag, attributes = node.tag or "", node.attributes
        style = self._sheets.style(node)
        default = _DISPLAY.get(tag, "inline")
        is_default = style.get("display") in _DISPLAY_KEYWORDS
        has_margins = style.get("display") == "block" and default == "spaced block"
        display = default if is_default or has_margins else re.sub("^(initial|unset)$", "inline", style["display"])
        if tag in _NOT_READ:
            self._skip(tag, attributes)
            return [*_children(node)] if tag == "object" else []  # whose content stands in for it
        is_hidden = attributes.get("hidden", "until-found") != "until-found" or "popover" in attributes
        is_hidden |= tag == "dialog" and "open" not in attributes
        if display in _WITHOUT_BOX or _is_misplaced(node) or (is_hidden and is_default):
            self.left_out["hidden element"] += default != "none" and _has_text(node)
            return []
        if is_repeated(node):
            self.left_out["repeated formula"] += 1
            return []
        is_doubtful = node.mem_id in self._sheets.doubtful or is_transparent(style)
        self.left_out["perhaps hidden element"] += is_doubtful and _has_text(node)
        is_apart = re.search("flex|grid", self._boxes.outer_display())
        if is_apart or style.get("float") in ("left", "right") or style.get("position") in ("absolute", "fixed"):
            display = re.sub("^(?:inline-(?=table)|(?:inline|table-).*)", "", display) or "block"
        if display == "spaced block" and tag in LISTS and self._lists:
            display = "block"
        return self._render_box(node, display, style)

    def _skip(self, tag: str, attributes: dict[str, str | None]) -> None:
        if page := attributes.get("srcdoc"):
            self.text.separate(1)
            self.text.write_verbatim(html_text(page)[0])
            self.text.separate(1)
        else:
            self.left_out[_NOT_READ[tag]] += 1
            if tag not in ("script", "template", "object"):
                self.text.add_space()

    def _render_box(self, node: "LexborNode", display: str, style: Style) -> list[_Step]:
        breaks = line_breaks(display)
        white_space, is_visible, kind = self._white_space, self._is_visible, self._list_type
        is_in_row = self._boxes.outer_display() == "table-row"

        def separate(side: str) -> None:
            if breaks:
                self._boxes.text.separate(breaks)
            elif display.startswith("inline-"):
                self._boxes.text.add_space()
            elif display == "inline":
                self._boxes.text.add_gap(gap(node.tag, style, side))

        def leave() -> None:
            if display != "contents":
                self._boxes.leave()
            separate("right")
            self._white_space, self._is_visible, self._list_type = white_space, is_visible, kind
            self._lists -= node.tag in LISTS
            self._counters.leave()
            if display == "list-item":  # without text, browsers display its marker
                marker, self._boxes.text.marker = self._boxes.text.marker.rstrip(), ""
                self._boxes.text.write_verbatim(marker.rstrip("* "))

        if display == "table-cell":
            columns = max(1, min(integer(node.attributes.get("colspan"), 1), _MAX_SPAN))
            rows = integer(node.attributes.get("rowspan"), 1) or 2**16  # 0: to the end
            self._boxes.enter(display, columns, rows)
        elif display != "contents":
            self._boxes.enter(display)
        separate("left")
        self._counters.enter(style, node, display == "list-item")
        self._lists += node.tag in LISTS
        self._list_type = list_type(node, style, kind)
        self._white_space = style.get("white-space") or ("pre" if node.tag in _PREFORMATTED else white_space)
        self._is_visible = {"hidden": False, "collapse": False, "visible": True}.get(
            style.get("visibility", ""), is_visible
        )
        before, after = (partial(self._write_generated, node, place) for place in ("before", "after"))
        content = [before, *self._render_content(node, display, style), after]
        row = node.parent if is_in_row else None
        is_struck = _is_struck(node, style) or (row is not None and _is_struck(row, self._sheets.style(row)))
        if is_struck and not re.match("(?:inline-)?table(?!-c)", display) and _has_text(node):
            # Marked as in Markdown, so that it is not read as valid, nor as one with what replaces it.
            content = [lambda: self._write("~~"), *content, lambda: self._write("~~")]
        return [*content, leave]

    def _write_generated(self, node: "LexborNode", place: str) -> None:
        self._write(self._sheets.content(node, place, self._counters))

    def _render_content(self, node: "LexborNode", display: str, style: Style) -> list[_Step]:
        """Return what an element displays: its children, for most."""
        tag, attributes, own = node.tag or "", node.attributes, _children(node)
        if display == "inline":
            tag = {"super": "sup", "sub": "sub"}.get(style.get("vertical-align", ""), tag)
        if display == "list-item":
            self._mark_item(node)
        root = next((child for child in own if child.tag == "template" and "shadowrootmode" in child.attributes), None)
        if root is not None:
            return self._render_shadow(own, root)
        children: list[_Step] = [*own]
        if tag == "br":
            self.text.add_break()
        elif tag == "img":
            self._write_image(attributes)
        elif tag == "input":
            self._write(_input_text(attributes))
        elif tag in ("option", "optgroup"):
            self.text.marker = "[x] " if "selected" in attributes else ""
            self._write(attributes.get("label") or "")
            return [] if tag == "option" and attributes.get("label") else children
        elif tag == "q":
            return self._render_quote(children)
        elif tag == "sup":
            return self._capture(children, self._write_raised)
        elif tag == "sub":
            return self._capture(children, self._write_script)
        elif tag == "rt":
            return self._capture(children, lambda text: self.text.write_verbatim(f"({text})" if text else ""))
        elif tag == "mspace" or (tag == "tspan" and {"x", "y", "dx", "dy"} & attributes.keys()):
            self.text.add_space()
        elif tag in ("mfrac", "mroot", "msqrt", *_SCRIPTED):
            return self._render_formula(tag, list(node.iter()))
        elif tag == "slot" and self._slots and (assigned := self._slots[-1].pop(attributes.get("name") or "", None)):
            outer = self._slots.pop()
            return [*assigned, lambda: self._slots.append(outer)]
        elif tag == "switch" and (others := other_alternatives(node)):
            self.left_out["hidden element"] += sum(map(_has_text, others))
            return [child for child in own if child not in others]
        return children

    def _mark_item(self, node: "LexborNode") -> None:
        """Have the item of a list begin with its marker."""
        marker = self._sheets.content(node, "marker", self._counters) or self._counters.marker(self._list_type)
        self.left_out["list marker"] += marker is None
        marker = marker if self._is_visible else ""
        self.text.marker = (self.text.marker or "  " * (self._lists - 1)) + (marker or "")

    def _render_shadow(self, hosted: list["LexborNode"], root: "LexborNode") -> list[_Step]:
        """Return a declarative shadow tree, which shows the other children of its host in slots."""
        slots: dict[str, list[LexborNode]] = {}
        for child in hosted:
            if child.is_text_node or (child.is_element_node and child != root):
                name = child.attributes.get("slot") if child.is_element_node else ""
                slots.setdefault(name or "", []).append(child)
        self._slots.append(slots)

        def end() -> None:
            unused = [child for children in self._slots.pop().values() for child in children]
            self.left_out["hidden element"] += sum(map(_has_text, unused))

        return [*_children(root.template_fragments()[0]), end]

    def _capture(self, steps: Sequence[_Step], use: Callable[[str], None]) -> list[_Step]:
        """Return steps that render into a separate text and pass it to `use`."""
        return [self._boxes.capture, *steps, lambda: use(self._boxes.leave())]

    def _write_image(self, attributes: dict[str, str | None]) -> None:
        """Add an image's alternative text, apart from what is beside the image; an empty one marks decoration."""
        if attributes.get("alt") is None and "alt" not in attributes:
            self.left_out["image"] += 1
        text = attributes.get("alt") or ""
        width = float(not re.fullmatch(r"[^\W\d]?", text))  # an initial begins a word
        self.text.add_gap(width)
        self._write(text)
        self.text.add_gap(width)

    def _render_quote(self, children: list[_Step]) -> list[_Step]:
        opening, closing = ("\N{LEFT DOUBLE QUOTATION MARK}", "\N{RIGHT DOUBLE QUOTATION MARK}")
        if self._quotes % 2:
            opening, closing = "\N{LEFT SINGLE QUOTATION MARK}", "\N{RIGHT SINGLE QUOTATION MARK}"
        self._quotes += 1

        def end() -> None:
            self._quotes -= 1
            self.text.write_verbatim(closing)

        self.text.write_verbatim(opening)
        return [*children, end]

    def _write_raised(self, text: str) -> None:
        self._write_script(text, is_raised=True)

    def _write_script(self, text: str, is_raised: bool = False) -> None:
        script = script_text(text, self.text.last_character(), is_raised)
        (self.text.write if script == text else self.text.write_verbatim)(script)

    def _render_formula(self, tag: str, children: list["LexborNode"]) -> list[_Step]:
        def write_operand(text: str) -> None:
            self.text.write_verbatim(operand_text(text))

        first, rest = children[:1], children[1:]
        if tag == "mfrac":
            over = [lambda: self.text.write_verbatim("/"), *self._capture(rest, write_operand)]
            return [self._end_number, *self._capture(first, write_operand), *over]
        if tag in ("msqrt", "mroot"):
            index = self._capture(rest, self._write_raised) if tag == "mroot" else []
            radicand = first if tag == "mroot" else children
            return [*index, lambda: self.text.write_verbatim("√"), *self._capture(radicand, write_operand)]
        place = next((n for n, child in enumerate(rest) if child.tag == "mprescripts"), len(rest))
        uses = [self._write_script, self._write_raised][tag in ("msup", "mover") :]

        def scripts(children: list["LexborNode"]) -> list[_Step]:
            return [step for child, use in zip(children, cycle(uses)) for step in self._capture([child], use)]

        return [*scripts(rest[place + 1 :]), *first, *scripts(rest[:place])]

    def _end_number(self) -> None:
        """Set a fraction apart from a number before it."""
        if self.text.last_character().isdigit():
            self.text.add_space()


def _children(node: "LexborNode") -> list["LexborNode"]:
    children = []
    child = node.first_child
    while child is not None:
        children.append(child)
        child = child.next
    return children


def _has_text(node: "LexborNode") -> bool:
    return bool((node.text() or "").strip())


def _is_misplaced(node: "LexborNode") -> bool:
    """Return whether an element is a form or hidden input, which the standard's rules keep from being a cell."""
    parent = node.parent.tag if node.parent else None
    is_form = node.tag == "form" and parent in ("table", "tbody", "tfoot", "thead", "tr")
    return is_form or (node.tag == "input" and (node.attributes.get("type") or "").lower() == "hidden")


def _is_struck(node: "LexborNode", style: Style) -> bool:
    decoration = style.get("text-decoration-line") or style.get("text-decoration")
    return node.tag in ("del", "s", "strike") if decoration is None else "line-through" in decoration


def _input_text(attributes: dict[str, str | None]) -> str:
    kind = (attributes.get("type") or "text").lower()
    if kind in ("checkbox", "radio"):
        return "[x]" if "checked" in attributes else "[ ]"
    if kind in _INPUTS_WITHOUT_TEXT:
        return ""
    label = {"submit": "Submit", "reset": "Reset", "image": "Submit"}.get(kind, "")
    value = attributes.get("alt" if kind == "image" else "value")
    return value or attributes.get("placeholder") or label
