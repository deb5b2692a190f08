"""Tables as text: terminal, Markdown, CSV, LaTeX (booktabs)."""

import csv
import io
from collections.abc import Callable, Sequence

from lkv.evaluation.report.names import FULL, is_lkv
from lkv.evaluation.report.tables import Cell, Column, Table, TableRow, winners

_ESCAPED = {c: "\\" + c for c in "&%$#_{}"} | {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "|": "\\textbar{}"}
_CSV = (
    "table", "group", "method", "label", "source", "column", "retention", "realised", "value", "low", "high", "n",
    "reference", "difference", "difference_low", "difference_high",
)  # fmt: skip


def to_terminal(table: Table) -> str:
    """Aligned columns; * marks the best measured value of a group, > the rows of LKV."""
    head, body = _cells(table, best=lambda text: text + "*", strong=lambda text: "> " + text)
    widths = [max(len(line[i]) for line in [head, *[line for _, line in body]]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (text.ljust(width) for text, width in zip(cells, widths, strict=True))
        return "  ".join([first, *rest]).rstrip()

    out, group = [table.title, "", line(head), "-" * (sum(widths) + 2 * len(widths) - 2)], ""
    for row, cells in body:
        if row.group != group:
            group = row.group
            out += ["", group] if out[-1][0] != "-" else [group]
        out.append(line(cells))
    return "\n".join([*out, "", *table.notes]) + "\n"


def to_markdown(table: Table) -> str:
    """A pipe table with the title above and the notes below; bold marks the best measured value and LKV."""
    head, body = _cells(table, best="**{}**".format, strong="**{}**".format)
    grouped = any(row.group for row in table.rows)
    rows = [[row.group, *cells] if grouped else list(cells) for row, cells in body]
    titles = [table.group_title or "group", *head] if grouped else list(head)

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"

    rule = "|" + " --- |" * len(titles)
    notes = "\n".join(f"- {note}" for note in table.notes)
    return "\n".join([f"**{table.title}**", "", line(titles), rule, *map(line, rows), "", notes]) + "\n"


def to_latex(table: Table) -> str:
    """A booktabs table; bold marks the best measured value of a group."""
    head, body = _cells(table, best="\\textbf{{{}}}".format, strong=str, escape=_escape, interval=_small)
    out = [
        "\\begin{table}[t]",
        "\\centering",
        f"\\caption{{{_escape(table.title)}. {_escape(' '.join(table.notes))}}}",
        f"\\label{{tab:{table.name}}}",
        f"\\begin{{tabular}}{{l{'c' * (len(head) - 1)}}}",
        "\\toprule",
        " & ".join(_escape(name) for name in head) + " \\\\",
        "\\midrule",
    ]
    group = ""
    for i, (row, cells) in enumerate(body):
        if row.group != group:
            group = row.group
            out += (["\\midrule"] if i else []) + [f"\\multicolumn{{{len(head)}}}{{l}}{{{_escape(group)}}} \\\\"]
        out.append(" & ".join(cells) + " \\\\")
    return "\n".join([*out, "\\bottomrule", "\\end{tabular}", "\\end{table}"]) + "\n"


def to_csv(table: Table) -> str:
    """One line a cell: value, interval, n, asked and realised retention, paired difference to the reference."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV)
    for row in table.rows:
        for column in table.columns:
            if cell := row.cells.get(column.name):
                retention = column.x if table.realised_in_cells and row.method != FULL else row.retention
                realised = row.realised if cell.realised is None else cell.realised
                source = "published" if row.published else "measured"
                apart = cell.difference
                difference = (apart.value, apart.low, apart.high) if apart else (None, None, None)
                start = (table.name, row.group, row.method, row.label, source, column.name)
                values = (retention, realised, cell.value, cell.low, cell.high, cell.n)
                writer.writerow(
                    [*start, *map(_plain, values), table.reference if cell.difference else "", *map(_plain, difference)]
                )
    return out.getvalue()


FORMATS: dict[str, Callable[[Table], str]] = {
    "terminal": to_terminal,
    "markdown": to_markdown,
    "csv": to_csv,
    "latex": to_latex,
}


def _cells(
    table: Table,
    best: Callable[[str], str],
    strong: Callable[[str], str],
    escape: Callable[[str], str] = str,
    interval: Callable[[str], str] = str,
) -> tuple[list[str], list[tuple[TableRow, list[str]]]]:
    """Head and rows as text: method, asked and realised retention (where there are any), the columns; last their n."""
    retained = any(row.retention is not None or row.realised is not None for row in table.rows)
    amounts = ["R", "kept"] if retained and not table.realised_in_cells else []
    head = [table.rows_are, *amounts, *(column.name for column in table.columns)]
    body = []
    for group, rows in table.groups():
        top = winners(table, group, rows, FULL)
        for i, row in enumerate(rows):
            name = escape(row.label)
            line = [strong(name) if is_lkv(row.method) and not row.published else name]
            line += [_amount(row.retention), _amount(row.realised)] if amounts else []
            for column in table.columns:
                cell = row.cells.get(column.name)
                text = _text(cell, column, table.realised_in_cells, interval) if cell else ""
                line.append(best(text) if (i, column.name) in top else text)
            body.append((row, line))
    counts = [_count(table, column) for column in table.columns]
    if any(counts):
        body.append((TableRow("", "", {}, table.rows[-1].group), ["n", *[""] * len(amounts), *counts]))
    return head, body


def _text(cell: Cell, column: Column, realised: bool, interval: Callable[[str], str]) -> str:
    form = f"{'+' if column.signed else ''}.{column.digits}f"
    text = format(cell.value, form)
    if cell.low is not None and cell.high is not None:
        text += " " + interval(f"[{cell.low:{form}}, {cell.high:{form}}]")
    return text + (f" @{cell.realised:.3f}" if realised and cell.realised is not None else "")


def _count(table: Table, column: Column) -> str:
    """How many samples the measured cells of a column have, if it is one number."""
    cells = [row.cells.get(column.name) for row in table.rows if not row.published]
    counts = {str(cell.n) for cell in cells if cell and cell.n is not None}
    return counts.pop() if len(counts) == 1 else ""


def _amount(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")


def _plain(value: float | int | None) -> str:
    return "" if value is None else repr(value) if isinstance(value, int) else f"{value:.6g}"


def _escape(text: str) -> str:
    return "".join(_ESCAPED.get(character, character) for character in text)


def _small(text: str) -> str:
    return f"{{\\scriptsize {text}}}"
