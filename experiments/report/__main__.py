"""python -m experiments.report: make tables and figures from result files."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.report.names import FORMATS, TABLES, paper_model_like, paper_models
from lkv.cli.command import Command, option
from lkv.cli.main import main
from lkv.cli.options import Memory, Retention
from lkv.errors import ReportError
from lkv.methods.targets import MemoryTarget
from lkv.utils.extras import require
from lkv.utils.files import write_text

if TYPE_CHECKING:
    from experiments.report.tables import Table

_MATCHING = "matching"
_SCORES = ("--table", "--methods", "--retention", "--memory", "--against", "--min-full")
_Table = Literal[tuple(TABLES)]  # type: ignore[valid-type]
_Format = Literal[tuple(FORMATS)]  # type: ignore[valid-type]
_Model = Literal[(*paper_models(), _MATCHING)]  # type: ignore[valid-type]


class Report(Command):
    """Make tables and figures from result files."""

    files: list[Path] = option("result files of `lkv eval`", [], positional=True, nargs="*", metavar="[FILE ...]")
    profile: Path | None = option("result file of experiments.profile: prefill table and memory figure")
    training: tuple[Path, ...] = option("folders of `lkv train`: their curves side by side", ())
    table: _Table = option("which table", "main")  # type: ignore[valid-type]
    format: _Format = option("format of the table", "terminal")  # type: ignore[valid-type]
    out: Path | None = option("write the table to this file instead of printing it")
    figure: Path | None = option("draw the figure into this file (.png, .pdf or .svg)")
    weights: bool = option("memory figure: include the weights in the peak, as in Fig. 5", False)
    methods: tuple[str, ...] = option("only these methods (and the full cache)", ())
    retention: tuple[Retention, ...] = option("only these retentions", ())
    memory: tuple[Memory, ...] = option("only these shares of the 16-bit cache's bytes, as `lkv eval --memory` had", ())
    against: str = option("method that differences are computed against (default: lkv)", "")
    min_full: float = option("only tasks where the full cache scores at least this much", 0.0)
    published: _Model | None = option(  # type: ignore[valid-type]
        "add the paper's numbers, by default those of the results' model", nargs="?", const=_MATCHING
    )

    def run(self) -> None:
        """Print or write the table, and draw the figure if requested."""
        if bool(self.profile) + bool(self.files) + bool(self.training) != 1:
            raise ReportError(
                "give either result files of `lkv eval`, or --profile with a result file of experiments.profile, or "
                "--training with folders of `lkv train`."
            )
        if self.profile:
            self.refuse_unread("--profile", *_SCORES)
            if not self.figure:
                self.refuse_unread("--profile without --figure", "--weights", advice="name the figure's file")
        elif self.training:
            self.refuse_unread("--training", *_SCORES, "--weights", "--published")
        else:
            self.refuse_unread("a table of scores", "--weights")
            if self.table == "ablation":
                self.refuse_unread("the table ablation", "--against")
        require("plots", "python -m experiments.report", ["pandas", "scipy"])
        from experiments.report.figures import save_figure
        from experiments.report.tables import WRITERS

        make = self._report_profile if self.profile else self._report_training if self.training else self._report_eval
        table, figure = make()
        text = WRITERS[self.format](table)
        if self.out:
            write_text(self.out, text, ReportError, "the table")
        else:
            print(text, end="")
        if figure and self.figure:
            save_figure(figure, self.figure)
            print(f"the figure is in {self.figure}", file=sys.stderr)

    def _report_eval(self) -> tuple["Table", Any]:
        from experiments.report.figures import plot_table
        from experiments.report.results_frame import read_results
        from experiments.report.score_tables import TableRequest, build_table, with_published

        results = read_results(self.files)
        flag = "--memory" if self.memory else "--retention" if self.retention else results.option
        if flag != results.option:
            raise ReportError(f"these files hold budgets of another kind than {flag}; use {results.option}.")
        budgets = self.retention or tuple(MemoryTarget.parse(value).share or 0.0 for value in self.memory)
        request = TableRequest(self.methods, budgets, self.min_full, self.against)
        table = build_table(self.table, results, request)
        if self.published:
            model = str(results.header["model"])
            table = with_published(table, self._published_model(model), str(results.header["suite"]), model)
        return table, plot_table(table) if self.figure else None

    def _report_profile(self) -> tuple["Table", Any]:
        from experiments.report.figures import plot_memory
        from experiments.report.profile_table import build_prefill, read_profile

        assert self.profile is not None
        profile = read_profile(self.profile)
        model = self._published_model(profile.model) if self.published else ""
        return build_prefill(profile, model), plot_memory(profile, model, self.weights) if self.figure else None

    def _report_training(self) -> tuple["Table", Any]:
        from experiments.report.figures import plot_training
        from experiments.report.training_table import build_training, read_curves

        curves = read_curves(list(self.training))
        return build_training(curves), plot_training(curves) if self.figure else None

    def _published_model(self, measured: str) -> str:
        return paper_model_like(measured) if self.published == _MATCHING else str(self.published)


if __name__ == "__main__":
    sys.exit(main(command=Report, program="python -m experiments.report"))
