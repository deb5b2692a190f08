"""The paper's tables and figures for the demo model, at lengths that fit a CPU.

python -m experiments.runs.small --ruler FOLDER [--longbench FOLDER]    (make reproduce-small RULER=FOLDER ...)

It measures RULER at 2k and 4k with every method at R = 0.15, the main methods at every retention, and eight methods on
LongBench if its data is given; then it writes tables and figures beside the results. Run it again to continue.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from examples.document import document
from experiments.report.__main__ import Report
from experiments.runs import budget_policies
from lkv.cli.main import main as main_of_command
from lkv.cli.options import find_needs
from lkv.hf.loading import load_default
from lkv.methods.registry import METHODS, PATTERN

SWEPT = ("snapkv", "pyramidkv", "adakv-snapkv", "kvzip", "lkv")
# The paper's Table 1 and three more; all of METHODS would make 8k tokens on a CPU an hour longer.
ON_LONGBENCH = ("lkv", "snapkv", "pyramidkv", "duo", "adakv-snapkv", "adakv-expected", "criticalkv", "kvzip")
RETENTIONS = ("0.5", "0.3", "0.2", "0.15", "0.1", "0.05")
LENGTHS = ("2048", "4096")
PATTERN_TOKENS = 4000  # of the text on which DuoAttention's retrieval heads are estimated


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status of the first step that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ruler", type=Path, required=True, help="folder with RULER's sources, the essays among them")
    parser.add_argument("--longbench", type=Path, help="folder with LongBench's files (default: left out)")
    parser.add_argument("--processes", type=int, default=2, help="how many share the samples, one thread each")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="on RULER at R = 0.15")
    parser.add_argument("--swept", nargs="+", default=list(SWEPT), help="on RULER at every retention")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--samples", type=int, default=4, help="of each RULER task and length")
    parser.add_argument("--swept-samples", type=int, default=5, help="of each RULER task, at every retention")
    parser.add_argument("--longbench-samples", type=int, default=2, help="of each LongBench task")
    parser.add_argument("--out", type=Path, default=Path("runs-local/small"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    text = options.out / "pattern.txt"
    if not text.is_file():
        text.write_text(document(load_default()[1], PATTERN_TOKENS), encoding="utf-8")
    return run(steps(options, text), lambda step: _command(step, options.processes)) or budget_policies.main(
        ["--text", str(text), "--out", str(options.out)]
    )


def run(commands: Iterator[list[str]], command: Callable[[list[str]], int]) -> int:
    """Run the commands in order, until one fails."""
    for arguments in commands:
        print("lkv " + " ".join(arguments), file=sys.stderr)
        if status := command(arguments):
            return status
    return 0


def _command(arguments: list[str], processes: int) -> int:
    """Run one step: reports in this process, measurements in processes of their own."""
    if arguments[0] == "report":
        return main_of_command(arguments[1:], Report, "python -m experiments.report")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.run([*launch, "-m", "lkv.cli.main", *arguments], env=one_thread, check=False).returncode


def steps(options: argparse.Namespace, text: Path) -> Iterator[list[str]]:
    """The `lkv` commands that measure and report."""
    ruler, swept, longbench = (str(options.out / f"{name}.jsonl") for name in ("ruler", "swept", "longbench"))
    source = ["--data", str(options.ruler)]
    shared, pattern = ["--retention", "0.15", "--dtype", options.dtype], ["--pattern", str(text)]
    on_ruler = shared + pattern if any(PATTERN in find_needs(name) for name in options.methods) else shared
    samples = ["--lengths", *LENGTHS, "--samples", str(options.samples)]
    yield ["eval", "ruler", *source, *samples, "--methods", *options.methods, *on_ruler, "--out", ruler]
    for table in ("ruler", "main", "tasks", "ablation", "fidelity"):
        yield from _report(options.out, "ruler", ruler, table, ["--min-full", "50"] if table == "ruler" else [])
    samples = ["--lengths", LENGTHS[0], "--samples", str(options.swept_samples)]
    swept_at = ["--retention", *RETENTIONS, "--dtype", options.dtype]
    yield ["eval", "ruler", *source, *samples, "--methods", *options.swept, *swept_at, "--out", swept]
    yield from _report(options.out, "swept", swept, "sweep", ["--min-full", "50"])
    if options.longbench:
        data = ["--data", str(options.longbench), "--samples", str(options.longbench_samples)]
        yield ["eval", "longbench", *data, "--methods", *ON_LONGBENCH, *shared, *pattern, "--out", longbench]
        # KVzip cannot repeat a text cut to the model's length, and a table counts only samples that all methods have.
        shown = ["--methods", *(name for name in ON_LONGBENCH if name != "kvzip")]
        for table, more in (("main", ["--published"]), ("tasks", ["--published"]), ("fidelity", [])):
            yield from _report(options.out, "longbench", longbench, table, [*more, *shown])


def _report(out: Path, name: str, file: str, table: str, more: Sequence[str]) -> Iterator[list[str]]:
    to = str(out / f"{name}_{table}")
    shown = ["report", file, "--table", table, *more]
    yield [*shown, "--format", "markdown", "--out", f"{to}.md", "--figure", f"{to}.png"]
    for form, ending in (("csv", "csv"), ("latex", "tex")):
        yield [*shown, "--format", form, "--out", f"{to}.{ending}"]


if __name__ == "__main__":
    sys.exit(main())
