"""What a table is: rows of methods, columns of averages; every format and figure is made from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from lkv.utils.statistics import Mean

LEAST = 5  # samples that an interval needs
EVERYWHERE = (-inf, inf)


@dataclass(frozen=True)
class Column:
    """One column; `best` is 1 where the highest value wins, -1 where the lowest does, 0 where none is set off."""

    name: str
    best: int = 1
    digits: int = 2
    signed: bool = False  # a difference: written with its sign
    x: float | None = None  # its place on a figure's axis: a length, a retention


@dataclass(frozen=True)
class Cell:
    """A value; a published or computed one may have no interval (low and high None) and no samples (n None)."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    realised: float | None = None  # kept entries / all entries, mean over the cell's samples
    difference: "Cell | None" = None  # to the table's reference method, over the same samples


@dataclass(frozen=True)
class TableRow:
    """One method; `cells` by the column's name, None or absent where nothing was measured."""

    method: str
    label: str
    cells: Mapping[str, Cell | None]
    group: str = ""
    retention: float | None = None
    realised: float | None = None
    published: bool = False


@dataclass(frozen=True)
class Table:
    """Rows in groups (a retention, a measure, a selector), and what a reader must know."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = ()
    reference: str = ""  # the method that Cell.difference compares with
    group_title: str = ""
    axis: str = ""  # what the columns' x is
    value: str = "score, 0 to 100"  # what the cells are, with the unit
    realised_in_cells: bool = False
    best_in: Mapping[str, int] = field(default_factory=dict)  # a group's own `best`, where groups differ in it
    rows_are: str = "method"
    caption: str = ""  # what a picture of it is of: model, R, n

    def groups(self) -> list[tuple[str, list[TableRow]]]:
        """The rows by group, in order."""
        groups: dict[str, list[TableRow]] = {}
        for row in self.rows:
            groups.setdefault(row.group, []).append(row)
        return list(groups.items())


def from_mean(
    mean: Mean, realised: float | None = None, difference: Cell | None = None, limits: tuple[float, float] = EVERYWHERE
) -> Cell:
    """A measured cell, its interval cut to `limits`, between which its values lie; no interval where they are few."""
    if mean.n < LEAST:
        return Cell(mean.value, None, None, mean.n, realised, difference)
    least, most = limits
    return Cell(mean.value, max(least, mean.low), min(most, mean.high), mean.n, realised, difference)


def winners(table: Table, group: str, rows: list[TableRow], full: str) -> set[tuple[int, str]]:
    """(index into `rows`, column) of the best measured values of a group, the method `full` not counted.

    Where several share it none is: as shown, none of them is better.
    """
    won = set()
    for column in table.columns:
        best = column.best and table.best_in.get(group, column.best)
        cells = [
            (i, row.cells.get(column.name)) for i, row in enumerate(rows) if not row.published and row.method != full
        ]
        values = [(i, round(cell.value, column.digits)) for i, cell in cells if cell]
        if best and len(values) > 1:
            top = max(best * value for _, value in values)
            first = [i for i, value in values if best * value == top]
            won |= {(i, column.name) for i in first if len(first) == 1}
    return won
