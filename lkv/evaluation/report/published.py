"""The paper's published numbers, as rows to stand beside measured ones."""

import json
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from lkv.evaluation.report.names import FULL, budget_and_selector, method_label, part_label
from lkv.evaluation.report.scores import DEFAULT_RETENTION
from lkv.evaluation.report.tables import Cell, Table, TableRow

MARK = "published"


@cache
def numbers() -> dict[str, Any]:
    """The paper's tables as they are printed: table name, model, columns, rows."""
    return json.loads(resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8"))


def models() -> dict[str, str]:
    """The models of the paper's tables by short name."""
    return dict(numbers()["models"])


def model_of(header_model: str) -> str:
    """The short name of the paper's model that results are of; the paper's main one where they are of another."""
    return next((name for name in models() if name in header_model.lower()), next(iter(models())))


def with_published(table: Table, model: str, suite: str, measured: str = "") -> Table:
    """`table` with a marked row for each published one, or a note where the paper prints no such numbers.

    Rows of another model than `measured`, where that is known, name it.
    """
    mark = MARK if not measured or model in measured.lower() else f"{MARK}, {models()[model]}"
    published = numbers().get(table.name, {}).get(model) if suite == "longbench" else None
    if published is None:
        return replace(
            table, notes=(*table.notes, f"The paper prints no numbers for this table with {models()[model]}.")
        )
    names = [f"R = {name:g}" if isinstance(name, float) else name for name in published["columns"]]
    rows = []
    for method, values in published["rows"].items():
        cells = {name: Cell(value) for name, value in zip(names, values, strict=True)}
        combination = budget_and_selector(method)
        in_grid = table.name == "ablation" and combination
        group = f"selection: {part_label(combination[1])}" if in_grid and combination else ""
        name = part_label(combination[0]) if in_grid and combination else method_label(method)
        retention = 1.0 if method == FULL else None if table.name == "sweep" else DEFAULT_RETENTION
        rows.append(TableRow(method, f"{name} ({mark})", cells, group, retention, published=True))
    # Beside the measured rows of the same group; groups that were not measured come last.
    groups = dict.fromkeys([row.group for row in table.rows] + [row.group for row in rows])
    merged = [row for group in groups for row in [*table.rows, *rows] if row.group == group]
    present = {column.name for column in table.columns}
    shown = [row for row in merged if not row.published or present & set(row.cells)]
    note = (
        f"Rows marked {MARK}: {models()[model]}, as the LKV paper prints them, on all of LongBench; its rivals are as "
        "kvpress has them."
    )
    return replace(table, rows=tuple(shown), notes=(*table.notes, note))
