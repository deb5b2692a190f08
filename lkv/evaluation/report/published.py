"""The paper's published numbers, as rows beside measured ones."""

from dataclasses import replace

import pandas as pd

from lkv.evaluation.report.names import (
    FULL,
    budget_and_selector,
    method_label,
    paper_models,
    paper_numbers,
    part_label,
)
from lkv.evaluation.report.scores import DEFAULT_RETENTION
from lkv.evaluation.report.tables import PUBLISHED, Cell, Table, TableRow, make_cells


def with_published(table: Table, model: str, suite: str, measured: str = "") -> Table:
    """`table` with a marked row for each published one, or a note where the paper prints no such numbers.

    Args:
        table: The measured table.
        model: Short name of a model of the paper.
        suite: What was measured; the paper's numbers are LongBench's.
        measured: The measured model; rows of another one name it.
    """
    name = paper_models()[model]
    mark = PUBLISHED if not measured or model in measured.lower() else f"{PUBLISHED}, {name}"
    published = paper_numbers().get(table.name, {}).get(model) if suite == "longbench" else None
    if published is None:
        return replace(table, notes=(*table.notes, f"The paper prints no numbers for this table with {name}."))
    titles = [f"R = {title:g}" if isinstance(title, float) else title for title in published["columns"]]
    present = {column.name for column in table.columns}
    rows = []
    for method, values in published["rows"].items():
        cells = {title: Cell(value) for title, value in zip(titles, values, strict=True) if title in present}
        combination = budget_and_selector(method) if table.name == "ablation" else None
        group = f"selection: {part_label(combination[1])}" if combination else ""
        label = part_label(combination[0]) if combination else method_label(method)
        retention = 1.0 if method == FULL else None if table.shows_realised else DEFAULT_RETENTION
        if cells:
            rows.append(TableRow(method, f"{label} ({mark})", cells, group, retention, source=PUBLISHED))
    note = (
        f"Rows marked {PUBLISHED}: {name}, as the LKV paper prints them, on all of LongBench; its baselines are those "
        "of kvpress."
    )
    return replace(add_rows(table, rows), notes=(*table.notes, note))


def add_rows(table: Table, rows: list[TableRow]) -> Table:
    """`table` with `rows` behind those of the same group; new groups come last."""
    if not rows:
        return table
    more = make_cells(rows, table.columns, table.shows_realised)
    cells = pd.concat([table.cells, more.assign(row=more.row + table.cells.row.max() + 1)], ignore_index=True)
    order = {group: place for place, group in enumerate(cells.group.unique())}
    return replace(table, cells=cells.sort_values("group", key=lambda own: own.map(order), kind="stable"))
