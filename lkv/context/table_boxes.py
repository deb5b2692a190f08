"""The open boxes of a page that is rendered, with the anonymous boxes that tables add. Does not import torch.

Section 17.2.1 of CSS 2.1: https://www.w3.org/TR/CSS21/tables.html#anonymous-boxes
"""

import re
from dataclasses import dataclass

from lkv.context.flow_text import Cell, FlowText, table_lines

_GROUPS = ("table-row-group", "table-header-group", "table-footer-group")
_KINDS = {"table": "table", "inline-table": "table", "table-row": "row", "table-cell": "cell"}
_KINDS |= dict.fromkeys(_GROUPS, "group")
# The anonymous boxes between a box and its child, by the kinds of both.
_BETWEEN: dict[str, dict[str, tuple[str, ...]]] = {
    "flow": {"flow": (), "cell": ("table", "row"), "row": ("table",), "group": ("table",)},
    "table": {"flow": ("row", "cell"), "cell": ("row",), "row": (), "group": ()},
    "group": {"flow": ("row", "cell"), "cell": ("row",), "row": (), "group": ("row", "cell", "table")},
    "row": {"flow": ("cell",), "cell": (), "row": ("cell", "table"), "group": ("cell", "table")},
}
_NO_BREAK = re.compile("inline|contents|table-(?!caption)")


@dataclass(slots=True)
class _Box:
    kind: str
    display: str = ""  # of an element; empty for an anonymous box
    columns: int = 1
    rows: int = 1
    outer_text: FlowText | None = None  # of a box with a text of its own


class _Table:
    """The rows of a table. The first header group is displayed at the top, the first footer group at the bottom."""

    def __init__(self) -> None:
        self.parts: dict[str, list[list[Cell]]] = {}
        self.leave_group()

    def enter_group(self, display: str) -> None:
        is_first = display not in self.parts
        self.rows = self.parts.setdefault(display if is_first else _GROUPS[0], [])

    def leave_group(self) -> None:
        self.rows = self.parts.setdefault(_GROUPS[0], [])

    def text(self) -> str:
        body, header, footer = (self.parts.get(name, []) for name in _GROUPS)
        return "\n".join(line for line in table_lines(header + body + footer) if line.strip())


class Boxes:
    """The boxes from the root to the content that comes next.

    Attributes:
        text: The innermost text that is being written: the page's or a cell's.
    """

    def __init__(self) -> None:
        self.text = FlowText()
        self._open = [_Box("flow", "block")]
        self._tables: list[_Table] = []

    def flow(self) -> FlowText:
        """Return the text for content that is no part of a table, in an anonymous cell if the box is none for it."""
        self._arrange("flow")
        return self.text

    def is_apart(self) -> bool:
        """Return whether white space is not displayed, as between cells."""
        return self._open[-1].kind in ("table", "row", "group")

    def outer_display(self) -> str:
        """Return the `display` of the innermost element with a box."""
        return self._open[self._base()].display

    def enter(self, display: str, columns: int = 1, rows: int = 1) -> None:
        """Begin the box of an element.

        Args:
            display: Its `display`; not "none" or "contents".
            columns: The columns that a cell spans.
            rows: The rows that a cell spans.
        """
        kind = _KINDS.get(display, "flow")
        self._arrange({"table": "flow"}.get(kind, "group" if display == "table-caption" else kind))
        self._push(_Box(kind, display, columns, rows))

    def capture(self) -> None:
        """Begin a box whose text is returned instead of written."""
        self._push(_Box("flow", "inline", outer_text=self.flow()))
        self.text = FlowText()

    def leave(self) -> str:
        """End the innermost box that is not anonymous; return its text if it has one of its own."""
        while not self._open[-1].display:
            self._pop()
        return self._pop()

    def _base(self) -> int:
        number = len(self._open) - 1
        while not self._open[number].display:
            number -= 1
        return number

    def _arrange(self, child: str) -> None:
        """Begin and end anonymous boxes until there can be a box of the kind `child`."""
        if child == "flow" and self._open[-1].kind in ("flow", "cell"):
            return
        base = self._base()
        wanted, place = _BETWEEN.get(self._open[base].kind, _BETWEEN["flow"])[child], base + 1
        for kind in wanted:
            if place < len(self._open) and self._open[place].kind != kind:
                break
            place += place < len(self._open)
        while len(self._open) > place:
            self._pop()
        for kind in wanted[place - base - 1 :]:
            self._push(_Box(kind))

    def _push(self, box: _Box) -> None:
        if box.kind == "table":
            if not box.display:
                self._separate_table()
            self._tables.append(_Table())
        elif box.kind == "group":
            self._tables[-1].enter_group(box.display)
        elif box.kind == "row":
            self._tables[-1].rows.append([])
        elif box.kind == "cell":
            box.outer_text, self.text = self.text, FlowText()
        self._open.append(box)

    def _pop(self) -> str:
        box, text = self._open.pop(), ""
        if box.outer_text is not None:
            text, self.text = self.text.value(), box.outer_text
        if box.kind == "table":
            self.text.write_verbatim(self._tables.pop().text())
            if not box.display:
                self._separate_table()
        elif box.kind == "group":
            self._tables[-1].leave_group()
        elif box.kind == "cell":
            self._tables[-1].rows[-1].append(Cell(text, box.columns, box.rows))
        return text

    def _separate_table(self) -> None:
        """Set an anonymous table apart from what is beside it."""
        if self._open[-1].display == "inline":
            self.text.add_space()
        else:
            self.text.separate(1)


def line_breaks(display: str) -> int:
    """Return the line breaks before and after an element's box."""
    return 0 if _NO_BREAK.match(display) else 2 if display == "spaced block" else 1
