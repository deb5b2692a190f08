"""Random pages of lists, tables, counters and white space: the words that Chromium prints are those that are read."""

import random
import re
import shutil
import subprocess

import pypdf
import pytest

from lkv.context.document_reader import parse_document

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="there is no chromium here")]
PARTS = 25
TYPES = [*"decimal lower-alpha upper-roman lower-roman upper-latin decimal-leading-zero disc none".split(), "'- '"]
SPACES = ["", "", " ", "\n", "<!-- c -->", "<br>", "&nbsp;", "&emsp;", "<span></span>", "<b> </b>"]
NULS = ["\0", *[""] * 9]  # which browsers ignore
WHITE_SPACES = ("pre", "nowrap", "pre-line", "pre-wrap")
DISPLAYS = ["block", "contents", "flex", "grid", "inline", "inline-block", "inline-flex", "inline-table", "flow-root"]
DISPLAYS += ["table", "table-cell", "table-row", "table-row-group", "table-header-group", "table-footer-group"]
COUNTERS = ".n::before { counter-increment: x; content: counter(x, upper-roman) '/' counters(x, '.') ') ' }"


class Page:
    """Draws parts of a page; each word is another."""

    def __init__(self, seed: int) -> None:
        self._random, self._words = random.Random(seed), 0

    def _style(self, *choices: tuple[float, str, tuple[str, ...] | list[str]]) -> str:
        drawn = [
            f"{name}:{self._random.choice(values)}" for share, name, values in choices if self._random.random() < share
        ]
        return f' style="{";".join(drawn)}"' if drawn else ""

    def _line(self, depth: int = 0) -> str:
        text = ""
        for _ in range(self._random.randint(1, 4)):
            if self._random.random() < 0.5 or depth > 2:
                self._words += 1
                text += f"w{self._random.choice(NULS)}{self._words}"
            else:
                gap = (0.3, "margin-right", ("1px", "12px", "1em")), (0.2, "padding", ("0 8px", "0 0 0 1em"))
                style = self._style(*gap, (0.2, "white-space", WHITE_SPACES), (0.1, "counter-increment", ("x", "y 2")))
                text += f"<span{style}>{self._line(depth + 1)}</span>"
            text += self._random.choice(SPACES)
        return text

    def _list(self, depth: int) -> str:
        tag = self._random.choice(["ol", "ol", "ul"])
        attributes = {"start": "-3", "reversed": "", "type": "A"} if tag == "ol" else {}
        text = "".join(f' {name}="{value}"' for name, value in attributes.items() if self._random.random() < 0.15)
        text = f"<{tag}{text}{self._style((0.3, 'list-style-type', TYPES), (0.1, 'counter-reset', ('x', 'y 4')))}>"
        for _ in range(self._random.randint(1, 4)):
            value = " value=17" if self._random.random() < 0.1 else ""
            hidden = (0.05, "display", ("none",)), (0.05, "visibility", ("hidden",))
            counts = (0.1, "counter-reset", ("x 3",)), (0.1, "counter-increment", ("list-item 2", "x", "list-item 0 x"))
            text += f"<li{value}{self._style((0.2, 'list-style-type', TYPES), *hidden, *counts)}>"
            text += self._random.choice([self._line(), self._line(), ""])
            text += self.draw(depth + 1) if self._random.random() < 0.3 else ""
            text += "</li>" + (self.draw(depth + 1) if self._random.random() < 0.1 else "")
        return f"{text}</{tag}>"

    def _table(self, depth: int, *tags: str) -> str:
        """Return an element whose parts have the next of the tags; those of the last are blocks."""
        text = f"<{tags[0]}{self._style((0.2, 'display', DISPLAYS))}>"
        for _ in range(self._random.randint(1, 3)):
            if tags[1:]:
                text += self._table(depth, *tags[1:]) + self._random.choice(["", " ", "\n"])
            else:
                part = self._line() if self._random.random() < 0.8 else self.draw(depth + 2)
                text += f"&nbsp;{part}&nbsp;"
        return f"{text}</{tags[0]}>"

    def draw(self, depth: int = 0) -> str:
        """Return a block: a paragraph, a list, a table, or several of them."""
        kind = self._random.choice(["p", "list", "list", "table", "div"]) if depth < 3 else "p"
        if kind == "list":
            return self._list(depth)
        if kind == "table":
            groups = self._random.choice(["tbody", "thead", "tfoot"])
            return self._table(depth, *self._random.choice([("table", groups, "tr", "td"), ("div", "div", "div")]))
        style = self._style((0.1, "counter-reset", ("x 2",)), (0.2, "list-style-type", TYPES))
        if kind == "p":
            return f"<div{self._random.choice(['', ' class=n'])}{style}>{self._line()}</div>"
        return f"<div{style}>{self.draw(depth + 1)}{self.draw(depth + 1)}</div>"


def words(text: str) -> list[list[str]]:
    """Return the words of each part, without bullets, which are drawn."""
    return [[word for word in part.split() if not re.fullmatch("[*•]", word)] for part in text.split("END")]


@pytest.mark.parametrize("seed", range(3))
def test_words_and_numbers_are_those_that_a_browser_prints(tmp_path, seed):
    page = Page(seed)
    parts = [page.draw() + page.draw() for _ in range(PARTS)]
    style = "@page { size: 4000px 4000px } body { font: 16px/20px sans-serif; padding-left: 200px } * { gap: 8px }"
    text = f"<!doctype html><meta charset=utf-8><style>{style} {COUNTERS}</style>"
    text += "".join(f'<section style="break-after: page">{part}<p>END</section>' for part in parts)
    (tmp_path / "page.html").write_text(text)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    command += [f"--print-to-pdf={tmp_path / 'page.pdf'}", str(tmp_path / "page.html")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    printed = "\n".join(page.extract_text() for page in pypdf.PdfReader(tmp_path / "page.pdf").pages)
    read = words(parse_document(text.encode(), "page.html").text)
    assert len(read) == PARTS + 1
    for part, own, expected in zip(parts, read, words(printed), strict=False):
        assert own == expected, part
