"""Training curves: the fidelity on held-out samples of runs of `lkv train`, side by side."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lkv.errors import ReportError
from lkv.evaluation.report.figures import LKV_COLOUR, finish_figure, new_figure
from lkv.evaluation.report.tables import Cell, Column, Table, TableRow, make_cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE = "curve.jsonl"
_RUNS = ((LKV_COLOUR, "o"), ("#0072B2", "s"), ("#009E73", "D"), ("#CC79A7", "X"), ("#E69F00", "^"), ("#56B4E9", "v"))
# Column of the file: title, digits, which side is better.
_SHOWN = {
    "step": ("step", 0, 0),
    "contexts": ("contexts", 0, 0),
    "validation_kl": ("KL, final R", 4, -1),
    "validation_agreement": ("agreement, final R", 3, 1),
    "validation_kl_third": ("KL, R / 3", 4, -1),
    "validation_agreement_third": ("agreement, R / 3", 3, 1),
}
_PANELS = {
    "KL(full || compressed), nats a token": ("validation_kl", "validation_kl_third"),
    "top-1 agreement": ("validation_agreement", "validation_agreement_third"),
}

Curves = Mapping[str, Sequence[Mapping[str, Any]]]


def read_curves(folders: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each run by its name; `folders` are runs of `lkv train`, or their curve files.

    Raises:
        ReportError: For a folder without a curve, a malformed file, or a run without an evaluation yet.
    """
    curves: dict[str, list[dict[str, Any]]] = {}
    for folder in folders:
        path = folder / CURVE if folder.is_dir() else folder
        name = path.parent.name if path.name == CURVE else path.stem
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
        curves[name if name not in curves else str(folder)] = rows
    return curves


def build_training(curves: Curves) -> Table:
    """Each run at its last evaluation."""
    shown = [key for key in _SHOWN if any(key in rows[-1] for rows in curves.values())]
    columns = tuple(Column(title, best, digits) for title, digits, best in map(_SHOWN.__getitem__, shown))
    rows = [
        TableRow(name, name, {_SHOWN[key][0]: Cell(run[-1][key]) for key in shown if key in run[-1]})
        for name, run in curves.items()
    ]
    note = (
        "Held-out samples, the same for every run of one data folder; KL in nats a token and top-1 agreement with the "
        "full cache, at the preset's final retention R and at a third of it."
    )
    cells = make_cells(rows, columns)
    return Table("training", "training runs at their last evaluation", columns, cells, (note,), row_title="run")


def plot_training(curves: Curves) -> "Figure":
    """KL and agreement over the contexts seen; at a third of R dashed, where it was measured."""
    panels = {
        title: keys for title, keys in _PANELS.items() if any(keys[0] in row for run in curves.values() for row in run)
    }
    if not panels:
        raise ReportError("these runs have no held-out samples to draw; train with data that has some to spare.")
    figure = new_figure(0.6 + 5.2 * len(panels), 4.4)
    all_axes = list(figure.subplots(1, len(panels), squeeze=False)[0])
    for axes, (title, keys) in zip(all_axes, panels.items(), strict=True):
        for number, (name, run) in enumerate(curves.items()):
            colour, marker = _RUNS[number % len(_RUNS)]
            for key, line in zip(keys, ("-", "--"), strict=True):
                points = [(row["contexts"], row[key]) for row in run if key in row and "contexts" in row]
                label = name if line == "-" else f"{name}, R / 3"
                if points:
                    axes.plot(*zip(*points, strict=True), line, color=colour, marker=marker, markersize=4, label=label)
        axes.set_xlabel("contexts seen")
        axes.set_ylabel(title)
    if "KL" in next(iter(panels)):
        all_axes[0].set_yscale("log")
    finish_figure(figure, all_axes, "Fidelity on held-out samples while training")
    return figure
