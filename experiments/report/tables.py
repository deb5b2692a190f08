"""Tables as DataFrames of cells, and their text: terminal, Markdown, CSV, LaTeX (booktabs)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

import pandas as pd

from experiments.report.names import FULL, is_lkv
from lkv.evaluation.statistics import MIN_SAMPLES, Mean
from lkv.utils.journal import MEMORY

MEASURED, PUBLISHED = "measured", "published"
_ESCAPES = {c: "\\" + c for c in "&%$#_{}"} | {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "|": "\\textbar{}"}
_ESCAPED = str.maketrans(_ESCAPES)
_CSV = [
    "table", "group", "method", "label", "source", "column", "retention", "memory", "realised", "value", "low", "high",
    "n", "reference", "difference", "difference_low", "difference_high",
]  # fmt: skip


@dataclass(frozen=True)
class Column:
    """One column; `best` is 1 where the highest value wins, -1 where the lowest does, 0 where none is marked."""

    name: str
    best: int = 1
    digits: int = 2
    signed: bool = False  # a difference: written with its sign
    x: float | None = None  # its place on a figure's axis: a length, a retention


class Cell(NamedTuple):
    """A value; a published or derived one may have no interval and no number of samples."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    realised: float | None = None  # kept / all KV entries, mean over the cell's samples
    difference: float | None = None  # to the table's reference method, over the same samples
    difference_low: float | None = None
    difference_high: float | None = None

    @classmethod
    def of(cls, mean: Mean, limits: tuple[float, float] = (-inf, inf)) -> "Cell":
        """A measured cell, its interval cut to `limits`, between which its values lie; none where samples are few."""
        if mean.n < MIN_SAMPLES:
            return cls(mean.value, n=mean.n)
        return cls(mean.value, max(limits[0], mean.low), min(limits[1], mean.high), mean.n)


class TableRow(NamedTuple):
    """One method; `cells` by the column's name, None where nothing was measured."""

    method: str
    label: str
    cells: Mapping[str, Cell | None]
    group: str = ""
    retention: float | None = None
    realised: float | None = None
    source: str = MEASURED


@dataclass(frozen=True)
class Table:
    """Rows in groups (a retention, a metric, a selector), and what a reader must know.

    `cells` has one row a cell, with those of a table row under one number `row`; `make_cells` makes it.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    cells: pd.DataFrame
    notes: tuple[str, ...] = ()
    reference: str = ""  # the method that differences are taken to
    group_title: str = "group"
    axis: str = ""  # what the columns' x is
    value: str = "score, 0 to 100"  # what the cells are, with the unit
    shows_realised: bool = False  # in each cell, for a table whose columns are retentions
    best_in: Mapping[str, int] = field(default_factory=dict)  # a group's own `best`, where groups differ in it
    row_title: str = "method"
    caption: str = ""  # of a figure: model, R, n
    amount: str = "R"  # what the retentions are called: memory where methods were measured at equal bytes

    def rows(self) -> list[tuple[Any, dict[str, Any]]]:
        """Each row: its first cell, which states method, label, group, source, retention, and its cells by column."""
        return [
            (next(cells.itertuples()), {cell.column: cell for cell in cells.dropna(subset="value").itertuples()})
            for _, cells in self.cells.groupby("row", sort=False)
        ]


def make_cells(rows: Iterable[TableRow], columns: Iterable[Column], shows_realised: bool = False) -> pd.DataFrame:
    """The cells of `rows` in `columns`; those without a value too, so that a row without any stands in the table."""
    records = []
    for number, row in enumerate(rows):
        shared = {"row": number, "group": row.group, "method": row.method, "label": row.label, "source": row.source}
        for column in columns:
            cell = (row.cells.get(column.name) or Cell(float("nan")))._asdict()
            # Where columns are retentions each cell has its own.
            retention = column.x if shows_realised and row.method != FULL else row.retention
            records.append(
                cell | shared | {"column": column.name, "retention": retention, "row_realised": row.realised}
            )
    frame = pd.DataFrame(records).astype(dict.fromkeys([*Cell._fields, "retention", "row_realised"], float))
    return frame.assign(realised=frame.realised.fillna(frame.row_realised)).astype({"n": "Int64"})


def make_table(name: str, title: str, columns: Sequence[Column], rows: Iterable[TableRow], **more: Any) -> Table:
    """Build a table from rows; `more` are further fields of `Table`."""
    cells = make_cells(rows, columns, more.get("shows_realised", False))
    return Table(name, title, tuple(columns), cells, **more)


def add_rows(table: Table, rows: list[TableRow], *notes: str) -> Table:
    """`table` with `rows` behind those of the same group; new groups come last."""
    table = replace(table, notes=(*table.notes, *notes))
    if not rows:
        return table
    more = make_cells(rows, table.columns, table.shows_realised)
    cells = pd.concat([table.cells, more.assign(row=more.row + table.cells.row.max() + 1)], ignore_index=True)
    order = {group: place for place, group in enumerate(cells.group.unique())}
    return replace(table, cells=cells.sort_values("group", key=lambda groups: groups.map(order), kind="stable"))


def to_terminal(table: Table) -> str:
    """Aligned columns; * marks the best measured value of a group, > the rows of LKV, and the first note says so."""
    text = _format(table, best="{}*", strong="> {}")
    widths = [max(map(len, [name, *text[name]])) for name in text.columns]

    def line(cells: Iterable[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

    out = [table.title, "", line(text.columns), "-" * (sum(widths) + 2 * len(widths) - 2)]
    for group, rows in text.groupby(text.index, sort=False):
        out += (["", group] if out[-1][0] != "-" else [group]) if group else []
        out += [line(row) for row in rows.itertuples(index=False)]
    legend = "* marks the best value of a column, the full cache not counted, in each group of rows; > marks LKV."
    return "\n".join([*out, "", legend, *table.notes]) + "\n"


def to_markdown(table: Table) -> str:
    """A pipe table with the title above and the notes below; bold marks the best measured value and LKV."""
    text = _format(table, best="**{}**", strong="**{}**")
    if any(text.index):
        text.insert(0, table.group_title, text.index)
    notes = "\n".join(f"- {note}" for note in table.notes)
    head, *rows = ("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in (text, *text.to_numpy()))
    return "\n".join([f"**{table.title}**", "", head, "|" + " --- |" * len(text.columns), *rows, "", notes]) + "\n"


def to_latex(table: Table) -> str:
    """A booktabs table; bold marks the best measured value of a group."""
    text = _format(table, best="\\textbf{{{}}}", strong="{}", escape=_escape, interval="{{\\scriptsize {}}}")
    width = len(text.columns)
    body: list[str] = []
    for group, rows in text.groupby(text.index, sort=False):
        if group:
            body += ["\\midrule"] * bool(body) + [f"\\multicolumn{{{width}}}{{l}}{{{_escape(group)}}} \\\\"]
        body += [" & ".join(row) + " \\\\" for row in rows.itertuples(index=False)]
    lines = "\n".join(body)
    return f"""\\begin{{table}}[t]
\\centering
\\caption{{{_escape(table.title)}. {_escape(" ".join(table.notes))}}}
\\label{{tab:{table.name}}}
\\begin{{tabular}}{{l{"c" * (width - 1)}}}
\\toprule
{" & ".join(map(_escape, text.columns))} \\\\
\\midrule
{lines}
\\bottomrule
\\end{{tabular}}
\\end{{table}}
"""


def to_csv(table: Table) -> str:
    """One line a cell: value, interval, n, budget, realised retention, paired difference to the reference."""
    cells = table.cells.dropna(subset="value").assign(memory=None)
    if table.amount == MEMORY:
        cells = cells.assign(memory=cells.retention, retention=None)
    cells = cells.assign(table=table.name, reference=cells.difference.notna().map({True: table.reference, False: ""}))
    return cells.to_csv(columns=_CSV, index=False, float_format="%.6g", lineterminator="\n")


WRITERS = {"terminal": to_terminal, "markdown": to_markdown, "csv": to_csv, "latex": to_latex}


def _format(
    table: Table, best: str, strong: str, escape: Callable[[str], str] = str, interval: str = "{}"
) -> pd.DataFrame:
    """The table as text, its groups as the index: method, retentions (where there are any), the columns; n last."""
    columns = {column.name: column for column in table.columns}
    winners = _winners(table, columns)

    def format_cell(cell: Any) -> str:
        if pd.isna(cell.value):
            return ""
        column = columns[cell.column]
        form = f"{'+' if column.signed else ''}.{column.digits}f"
        text = format(cell.value, form)
        if pd.notna(cell.low) and pd.notna(cell.high):
            text += " " + interval.format(f"[{cell.low:{form}}, {cell.high:{form}}]")
        if table.shows_realised and pd.notna(cell.realised):
            text += f" @{cell.realised:.3f}"
        return best.format(text) if cell.Index in winners else text

    cells = table.cells.assign(text=[format_cell(cell) for cell in table.cells.itertuples()])
    rows = cells.drop_duplicates("row").set_index("row")
    is_strong = rows.method.map(is_lkv) & (rows.source == MEASURED)
    labels = rows.label.map(escape)
    text = pd.DataFrame({table.row_title: labels.where(~is_strong, labels.map(strong.format))})
    if not table.shows_realised and rows[["retention", "row_realised"]].notna().any(axis=None):
        text[table.amount], text["kept"] = rows.retention.map(_format_share), rows.row_realised.map(_format_share)
    text = text.join(cells.pivot(index="row", columns="column", values="text")[list(columns)])
    counts = cells[cells.source == MEASURED].groupby("column").n.agg(lambda n: set(n.dropna())).reindex(columns)
    if counts.map(len).any():
        sizes = {name: str(*n) if len(n) == 1 else "" for name, n in counts.items()}
        text.loc[-1] = dict.fromkeys(text.columns, "") | {table.row_title: "n"} | sizes
    return text.set_axis([*rows.group, *rows.group[-1:]][: len(text)])


def _winners(table: Table, columns: Mapping[str, Column]) -> set[int]:
    """The cells with the best measured value of their group and column, the full cache not counted.

    Where several show the same number none is marked.
    """
    winners = set()
    cells = table.cells[(table.cells.source == MEASURED) & (table.cells.method != FULL)].dropna(subset="value")
    for (group, name), column_cells in cells.groupby(["group", "column"], sort=False):
        best = columns[name].best and table.best_in.get(group, columns[name].best)
        values = best * column_cells.value.round(columns[name].digits)
        if best and len(column_cells) > 1 and (values == values.max()).sum() == 1:
            winners.add(values.idxmax())
    return winners


def _format_share(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.3f}".rstrip("0").rstrip(".")


def _escape(text: str) -> str:
    return text.translate(_ESCAPED)
