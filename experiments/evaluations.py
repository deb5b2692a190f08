"""What `lkv eval` measured as a result file: a row a method, retention, task and length, and for the means over tasks.

python -m experiments.evaluations FILE.jsonl    (writes ruler.json or longbench.json)
"""

import argparse
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.bootstrap import named_interval
from experiments.common import RESULTS
from experiments.report.names import CATEGORIES, FULL
from experiments.report.results_frame import Pair, Results, read_results
from experiments.report.scores import Scores, Unit, method_pairs
from experiments.result_file import write_results
from experiments.samples import keep_samples
from lkv.errors import ReportError
from lkv.hf.loading import DEFAULT
from lkv.utils.journal import FIDELITY_METRICS

LEAST_SCORE = 50.0  # of the full cache, for a task to say something about eviction
ABLE = f"full >= {LEAST_SCORE:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--name", default=None, help="of the result (default: the suite's)")
    parser.add_argument("--methods", nargs="+", default=(), help="only these (and the full cache)")
    parser.add_argument("--out", type=Path, default=None, help="(default: experiments/results/NAME.json)")
    options = parser.parse_args()
    results = read_results([options.file])
    header, frame = results.header, results.frame.dropna(subset=["kl"])
    name = options.name or str(header["suite"])
    out, rows = options.out or RESULTS / f"{name}.json", rows_of(results, options.methods)
    details = {key: header[key] for key in ("date", "machine", "versions", "policy") if header.get(key)}
    details["samples"] = keep_samples(out, {str(key): _sample(own) for key, own in frame.groupby("key", sort=False)})
    write_results(out, name, rows, header["seed"], _command(results), details)


def _sample(rows: pd.DataFrame) -> dict[str, Any]:
    """Return a sample as `experiments.paired` reads it."""
    figures = rows[["kl", "agreement", "score"]].round(5).to_numpy().tolist()
    return {"rows": rows[["method", "retention"]].to_numpy().tolist(), "measured": [figures]}


def rows_of(results: Results, methods: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows by method, retention and length for each task and for means over tasks.

    "all" is the mean over a length's tasks, "full >= 50" over those where the full cache scores that at every length.
    """
    pairs = method_pairs(results, methods)
    means = {"all": Scores(results, pairs)}
    with suppress(ReportError):  # the full cache is good at no task
        means[ABLE] = Scores(results, pairs, min_full=LEAST_SCORE)
    averages, rows = means["all"], []
    for length in dict.fromkeys(length for _, length in averages.units):
        groups = [
            (name, scores, [unit for unit in scores.units if unit[1] == length]) for name, scores in means.items()
        ]
        for task, scores, units in [*groups, *((unit[0], averages, [unit]) for unit in groups[0][2])]:
            rows += [_row(scores, pair, task, length, units) for pair in pairs if units]
    return [row for row in rows if row]


def _row(scores: Scores, pair: Pair, task: str, length: int | None, units: Sequence[Unit]) -> dict[str, Any]:
    cell = scores.value(pair, units)
    if cell is None:
        return {}
    row = {"method": pair[0], "task": task, "tokens": length, "retention": pair[1], "realised": cell.realised}
    row |= {"n": cell.n, "value": cell.value, "low": cell.low, "high": cell.high, "unit": "score, 0 to 100"}
    if cell.difference is not None:
        row |= {"against": scores.against, "difference": cell.difference}
        row |= {"difference_low": cell.difference_low, "difference_high": cell.difference_high}
    if pair[0] != FULL:
        for measure in FIDELITY_METRICS:
            fidelity = scores.value(pair, units, measure)
            row |= named_interval(measure, fidelity) if fidelity else {measure: None}
    return row


def _command(results: Results) -> str:
    header = results.header
    budget = "--memory" if header.get("budget") == "memory" else "--retention"
    words = ["lkv", "eval", header["suite"], "--data", "EVAL_FOLDER", "--methods", *header["methods"], budget]
    words += [*map(str, header["retentions"]), "--protocol", header["protocol"], "--dtype", header["dtype"]]
    if header["model"] != DEFAULT:
        words += ["--model", header["model"]]
    if header.get("seed"):
        words += ["--seed", str(header["seed"])]
    tasks = list(results.frame.task.unique())
    if set(tasks) < {task for names in CATEGORIES[header["suite"]].values() for task in names}:
        words += ["--tasks", *tasks]
    if header["pattern"]:
        words += ["--pattern", "LONG_TEXT"]
    return "; ".join(shlex.join([*words, *rest]) for rest in counts(results.frame))


def counts(frame: pd.DataFrame) -> list[list[str]]:
    """--lengths and --samples of the runs that measured `frame`: a run for all lengths with as many samples."""
    most = 1 + frame.groupby("length", dropna=False, sort=False).number.max()
    options = []
    for count, of in most.groupby(most, sort=False):
        lengths = [str(int(length)) for length in sorted(of.index.dropna())]
        options.append([*(["--lengths", *lengths] if lengths else []), "--samples", str(count)])
    return options


if __name__ == "__main__":
    main()
