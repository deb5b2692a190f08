"""The table of training runs, from the curves that `lkv train` writes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments.report.tables import Cell, Column, Table, TableRow, make_table
from lkv.errors import ReportError

_CURVE = "curve.jsonl"
_TRAINING = {  # field of the curve: column
    "step": Column("step", 0, 0),
    "contexts": Column("contexts", 0, 0),
    "validation_kl": Column("KL, final R", -1, 4),
    "validation_agreement": Column("agreement, final R", 1, 3),
    "validation_kl_third": Column("KL, R / 3", -1, 4),
    "validation_agreement_third": Column("agreement, R / 3", 1, 3),
}


def read_curves(folders: Sequence[Path]) -> dict[str, pd.DataFrame]:
    """The rows of each run by its name; `folders` are runs of `lkv train`, or their curve files.

    Raises:
        ReportError: For a folder without a curve, a malformed file, or a run without an evaluation yet.
    """
    curves: dict[str, pd.DataFrame] = {}
    for folder in folders:
        path = folder / _CURVE if folder.is_dir() else folder
        name = path.parent.name if path.name == _CURVE else path.stem
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError, RecursionError) as error:
            raise ReportError(
                f"{path} is not a training curve ({error}); give the --out folder of `lkv train`."
            ) from error
        malformed = any(not isinstance(row, dict) or not isinstance(row.get("step"), int) for row in rows)
        if malformed or not rows:
            why = "holds lines that are not steps" if malformed else "has no evaluation yet"
            raise ReportError(f"{path} {why}; give the --out folder of a run of `lkv train`.")
        curves[name if name not in curves else str(folder)] = pd.DataFrame(rows)
    return curves


def build_training(curves: Mapping[str, pd.DataFrame]) -> Table:
    """Each run at its last evaluation."""
    last = {name: run.iloc[-1].dropna() for name, run in curves.items()}
    columns = {key: column for key, column in _TRAINING.items() if any(key in row for row in last.values())}
    rows = [
        TableRow(name, name, {column.name: Cell(row[key]) for key, column in columns.items() if key in row})
        for name, row in last.items()
    ]
    note = (
        "Held-out samples; KL in nats per token and top-1 agreement with the full cache, at the run's final R and at a "
        "third of it. The samples are the same for runs, with any seed, that agree in data folder, model, "
        "--min-tokens, --max-tokens, --continuations, --tokens-a-continuation, --max-continuation and "
        "--validation-samples."
    )
    title = "training runs at their last evaluation"
    return make_table("training", title, list(columns.values()), rows, notes=(note,), row_title="run")
