"""Text laid out as in a browser: lines, collapsed white space, and tables."""

import re
from typing import NamedTuple

SPACES = " \t\n\r\f"
# Displayed as spaces, or not at all: soft hyphens, zero-width spaces, word joiners, byte order marks.
UNSEEN = {0xA0: " ", 0xAD: None, 0x200B: None, 0x2060: None, 0xFEFF: None}
_SUPERSCRIPTS = str.maketrans("0123456789+-\N{MINUS SIGN}=()ni", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿⁱ")
_SUBSCRIPTS = str.maketrans("0123456789+-\N{MINUS SIGN}=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎")
_MAX_COLUMNS = 200  # of a table whose columns are aligned
_MAX_CELL = 300  # characters of a cell of several lines that is put on one
_WORD_GAP = 0.249  # em; a space of common fonts
_CLOSING = re.compile(r"[,.;:!?)\]}\u2019\u201d](?!\d)")  # what a gap does not separate from the word before it


class FlowText:
    """A text builder that collapses white space and line breaks."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._breaks = self._explicit_breaks = 0
        self._has_space = False
        self._gap = 0.0
        self.marker = ""  # of a list item, in front of its first text

    def write(self, text: str) -> None:
        """Add text whose white space collapses."""
        words = text.strip(SPACES)
        self._has_space |= text != "" and text[0] in SPACES
        if words:
            self.write_verbatim(re.sub(f"[{SPACES}]+", " ", words).translate(UNSEEN))
            self._has_space = text[-1] in SPACES

    def write_verbatim(self, text: str) -> None:
        """Add text as it is."""
        if not text:
            return
        if self._pieces and (breaks := max(self._breaks, self._explicit_breaks)):
            self._pieces[-1] = self._pieces[-1].rstrip("\n")
            self._pieces.append("\n" * min(breaks, 2))
        elif self._is_apart(text) and self._pieces and not self._pieces[-1].endswith("\n"):
            self._pieces.append(" ")
        self._pieces.append(self.marker + text)
        self._breaks = self._explicit_breaks = 0
        self._has_space, self._gap, self.marker = False, 0.0, ""

    def add_space(self) -> None:
        """Add a space before the next text on the line."""
        self._has_space = True

    def add_gap(self, width: float) -> None:
        """Add `width` em of space that is not a character, such as a margin."""
        self._gap += width

    def _is_apart(self, text: str = "") -> bool:
        """Return whether `text` would follow after a space."""
        return self._has_space or (self._gap >= _WORD_GAP and not _CLOSING.match(text))

    def add_break(self) -> None:
        """Add a line break that a line can end with."""
        self._explicit_breaks += 1

    def separate(self, breaks: int) -> None:
        """Add at least `breaks` line breaks before the next text."""
        self._breaks = max(self._breaks, breaks)

    def last_character(self) -> str:
        """Return the character that the next piece would follow without a gap."""
        is_apart = self._is_apart() or self._breaks or self._explicit_breaks or not self._pieces
        return "" if is_apart else self._pieces[-1][-1:]

    def value(self) -> str:
        """Return the text so far."""
        return "".join(self._pieces).strip("\n")


def script_text(text: str, before: str, is_raised: bool) -> str:
    """Return a power, an index or a footnote's number: 10⁶, x_max and e^(2x), not the other numbers 106 and e2x.

    Args:
        text: The superscript or subscript.
        before: The character that it follows without a gap; empty for none.
        is_raised: Whether it is a superscript.
    """
    characters = _SUPERSCRIPTS if is_raised else _SUBSCRIPTS
    if all(ord(character) in characters for character in text):
        return text.translate(characters)
    is_raised_word = is_raised and re.fullmatch("st|[nr]d|th|er|re|ère|ème|TM|SM", text)
    if is_raised_word or not before or not re.search(r"\w", text):
        return text
    is_one = len(text) == 1 or re.fullmatch(r"\[.*\]" if is_raised else r"\[.*\]|\w+", text)
    return ("^" if is_raised else "_") + (text if is_one else f"({text})")


def operand_text(text: str) -> str:
    """Return what is above or below the line of a fraction, or under a root: in brackets, but numbers and letters."""
    return text if re.fullmatch(r"[\d.,]+|\w", text) else f"({text})"


class Cell(NamedTuple):
    """A cell of a table, and how many columns and rows it takes."""

    text: str
    columns: int
    rows: int


def table_lines(rows: list[list[Cell]]) -> list[str]:
    """Return rows of cells as lines, with empty cells for columns and rows that a cell spans."""
    placed_rows: list[dict[int, str]] = []
    taken: dict[int, int] = {}  # rows for which a column is taken
    for row in rows:
        column, placed, begun = 0, dict[int, str](), dict[int, int]()
        for cell in row:
            while taken.get(column):
                column += 1
            placed[column] = cell.text
            begun |= dict.fromkeys(range(column, column + cell.columns), cell.rows)
            column += cell.columns
        placed_rows.append(placed)
        taken = {column: number - 1 for column, number in (taken | begun).items() if number > 1}
        taken = taken if len(taken) <= _MAX_COLUMNS else {}
    columns = sorted(set[int]().union(*placed_rows))
    is_aligned = len(columns) <= _MAX_COLUMNS
    return [
        _row_line([placed.get(column, "") for column in columns] if is_aligned else list(placed.values()))
        for placed in placed_rows
    ]


def _row_line(texts: list[str]) -> str:
    """Return the cells of a row on one line, or those of a layout one after the other."""
    if len(texts) == 1:
        return texts[0]
    several = [text for text in texts if "\n" in text]
    if any("\t" in text or len(text) > _MAX_CELL for text in several):
        return "\n".join(text for text in texts if text)
    return "\t".join(re.sub(r"\s*\n\s*", " ", text) for text in texts).rstrip("\t")
