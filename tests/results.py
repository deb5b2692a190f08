"""Small result files for the tests of the report."""

import json

import numpy as np

from experiments.report import names
from experiments.report.results_frame import read_results
from experiments.report.score_tables import TableRequest, build_table

HEADER = {
    "format": 1, "suite": "longbench", "protocol": "kvpress", "model": "tiny", "methods": [], "retentions": [],
    "policy": "p", "seed": 0, "dtype": "float32", "lkv": "0.1.0", "versions": {}, "machine": "m",
}  # fmt: skip


def row(method, retention, score, realised=None, **more):
    realised = retention if realised is None else realised
    return {"method": method, "retention": retention, "realised": realised, "score": score, "kl": None,
            "agreement": None, "hidden_error": None} | more  # fmt: skip


def line(task, number, rows, length=None, **more):
    return {"key": f"{task}-{length}-{number}", "task": task, "length": length, "number": number,
            "truncated": False, "answer_lost": False, "rows": rows} | more  # fmt: skip


def write(path, lines, tail="", **header):
    path.write_text("".join(json.dumps(item) + "\n" for item in [HEADER | header, *lines]) + tail, encoding="utf-8")
    return path


def results_of(path, lines, **header):
    return read_results([write(path, lines, **header)])


def table_of(folder, name, lines, suite="longbench", header=None, **request):
    """The table `name` of a result file with these lines; `request` is what to show."""
    return build_table(
        name, results_of(folder / "a.jsonl", lines, suite=suite, **(header or {})), TableRequest(**request)
    )


def scores_of(task, values, method="lkv", retention=0.15, length=None):
    """Samples with the full cache at 100 and one method at `values`."""
    return [
        line(task, i, [row("full", 1.0, 100.0), row(method, retention, float(v))], length) for i, v in enumerate(values)
    ]


def cells(table, method, group=""):
    """The cells of a measured row by column, None where there is no value."""
    found = next(own for row, own in table.rows() if (row.method, row.group, row.source) == (method, group, "measured"))
    return {column.name: found.get(column.name) for column in table.columns}


def many(seed=0, suite="longbench", lengths=(None,), retentions=(0.15,), methods=("snapkv", "lkv"), count=5):
    random = np.random.default_rng(seed)
    tasks = [task for found in names.CATEGORIES[suite].values() for task in found]
    return [
        line(
            task,
            i,
            [row("full", 1.0, random.uniform(50, 100), kl=0.0, agreement=1.0, hidden_error=0.0)]
            + [
                row(m, r, random.uniform(0, 80), r * 0.99, kl=random.uniform(0, 2), agreement=random.uniform(0, 1))
                for m in methods
                for r in retentions
            ],
            length,
        )
        for length in lengths
        for task in tasks
        for i in range(count)
    ]


def values(lines, method, retention=None, keep=lambda item: True, measure="score"):
    """{task: array}, by plain loops over the lines."""
    found = {}
    for item in filter(keep, lines):
        for own in item["rows"]:
            if own["method"] == method and retention in (None, own["retention"]):
                found.setdefault((item["task"], item["length"]), []).append(own[measure])
    return {key: np.array(own) for key, own in found.items()}


def mean_of_means(found, tasks=None):
    return np.mean([own.mean() for (task, _), own in found.items() if tasks is None or task in tasks])


GRID = {
    "snapkv": "uniform+snapkv", "adakv-snapkv": "ada+snapkv", "lkv-h+snapkv": "lkv-h+snapkv",
    "expected": "uniform+expected", "adakv-expected": "ada+expected", "lkv-h+expected": "lkv-h+expected",
    "lkv-t": "uniform+lkv-t", "ada+lkv-t": "ada+lkv-t", "lkv": "lkv-h+lkv-t",
}  # fmt: skip
