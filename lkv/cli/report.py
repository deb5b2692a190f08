"""`lkv report`."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lkv.errors import ReportError
from lkv.evaluation.report.names import FORMATS, TABLES, paper_model_like, paper_models
from lkv.utils.extras import require
from lkv.utils.files import write_text

if TYPE_CHECKING:
    from lkv.evaluation.report.tables import Table

_MATCHING = "matching"


def add_arguments(report: argparse.ArgumentParser) -> None:
    """The options of the command."""
    report.add_argument("files", type=Path, nargs="*", help="what `lkv eval` wrote")
    report.add_argument(
        "--weights", action="store_true", help="memory figure: with the weights in the peak, as in Fig. 5"
    )
    report.add_argument("--profile", type=Path, help="what `lkv profile` wrote: prefill table and memory figure")
    report.add_argument("--training", type=Path, nargs="+", help="folders of `lkv train`: their curves, side by side")
    report.add_argument("--table", choices=TABLES, default="main")
    report.add_argument("--format", choices=FORMATS, default="terminal")
    report.add_argument("--out", type=Path, help="write the table here instead of printing it")
    report.add_argument("--figure", type=Path, help="write the figure here, as .png, .pdf or .svg")
    report.add_argument("--methods", nargs="+", default=(), help="only these (and the full cache)")
    report.add_argument("--retention", nargs="+", type=float, default=(), help="only these")
    report.add_argument("--against", default="", help="the method that differences are taken to (default: lkv)")
    report.add_argument("--min-full", type=float, default=0.0, help="only tasks where the full cache scores this much")
    report.add_argument(
        "--published",
        nargs="?",
        const=_MATCHING,
        choices=[*paper_models(), _MATCHING],
        help="add the paper's numbers, by default of the model that the results are of",
    )


def run(options: argparse.Namespace) -> None:
    """Print or write the table, and draw the figure where one is asked for."""
    if bool(options.profile) + bool(options.files) + bool(options.training) != 1:
        raise ReportError(
            "give either result files of `lkv eval`, or --profile with one file of `lkv profile`, or --training with "
            "folders of `lkv train`."
        )
    require("plots", "lkv report", ["pandas", "scipy"])
    from lkv.evaluation.report.figures import save_figure
    from lkv.evaluation.report.tables import WRITERS

    make = _from_profile if options.profile else _from_training if options.training else _from_evaluation
    table, figure = make(options)
    text = WRITERS[options.format](table)
    if options.out:
        write_text(options.out, text, ReportError, "the table")
    else:
        print(text, end="")
    if figure:
        save_figure(figure, options.figure)
        print(f"the figure is in {options.figure}", file=sys.stderr)


def _from_evaluation(options: argparse.Namespace) -> tuple["Table", Any]:
    from lkv.evaluation.report.builders import TableRequest, build_table
    from lkv.evaluation.report.plots import plot_table
    from lkv.evaluation.report.published import with_published
    from lkv.evaluation.report.results import read_results

    results = read_results(options.files)
    request = TableRequest(tuple(options.methods), tuple(options.retention), options.min_full, options.against)
    table = build_table(options.table, results, request)
    if options.published:
        measured = str(results.header["model"])
        table = with_published(table, _paper_model(options, measured), str(results.header["suite"]), measured)
    return table, plot_table(table) if options.figure else None


def _from_profile(options: argparse.Namespace) -> tuple["Table", Any]:
    from lkv.evaluation.report.profiles import build_prefill, plot_memory, published_prefill, read_profile

    profile = read_profile(options.profile)
    model = _paper_model(options, profile.model) if options.published else ""
    table = build_prefill(profile)
    if model:
        table = published_prefill(table, model)
    return table, plot_memory(profile, model, options.weights) if options.figure else None


def _from_training(options: argparse.Namespace) -> tuple["Table", Any]:
    from lkv.evaluation.report.training_curves import build_training, plot_training, read_curves

    curves = read_curves(options.training)
    return build_training(curves), plot_training(curves) if options.figure else None


def _paper_model(options: argparse.Namespace, evaluated: str) -> str:
    return paper_model_like(evaluated) if options.published == _MATCHING else options.published
