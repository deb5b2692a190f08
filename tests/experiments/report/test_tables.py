"""Tables as text that reads back as the same numbers, the published numbers, and the command."""

import csv
import io
import re

import numpy as np
import pytest

from experiments.report import names
from experiments.report.names import paper_model_like, paper_numbers
from experiments.report.score_tables import with_published
from experiments.report.tables import WRITERS
from tests.commands import main
from tests.results import GRID, many, table_of, write

# Formats


@pytest.fixture
def table(tmp_path):
    lines = many(methods=("snapkv", "lkv-h+snapkv", "lkv"))
    made = table_of(tmp_path, "main", lines, header={"model": "org/Llama-3.1-8B_Instruct & co"})
    return with_published(made, "llama-3.1-8b", "longbench")


def parsed(cells_):
    """label and the numbers of each cell, bold and sizes dropped."""
    bare = [re.sub(r"\\textbf|\\scriptsize|[*{}>]", "", cell).strip() for cell in cells_]
    return bare[0], [[float(number) for number in re.findall(r"[-+]?\d+\.?\d*", cell)] for cell in bare[1:]]


def expected_lines(table):
    found = {}
    for first, own in table.rows():
        shown = [own.get(column.name) for column in table.columns]
        numbers = [[x for x in (c.value, c.low, c.high) if not np.isnan(x)] if c else [] for c in shown]
        found[first.label] = [[first.retention], [] if np.isnan(first.row_realised) else [first.row_realised], *numbers]
    return found


@pytest.mark.parametrize("form", ["markdown", "latex", "terminal"])
def test_tables_read_back_as_the_same_numbers(table, form):
    text = WRITERS[form](table)
    split = {"markdown": r"(?<!\\)\|", "latex": r"(?<!\\)&", "terminal": r" {2,}"}[form]
    expected = expected_lines(table)
    seen = []
    if form == "terminal":  # empty cells are blanks there: by the head's columns
        head = next(item for item in text.splitlines() if item.startswith("method"))
        starts = [match.start() for match in re.finditer(r"(?:^|(?<= {2}))\S", head)]
        rows = [[item[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)] for item in text.splitlines()]
    else:
        rows = [re.split(split, item.strip().strip("|").removesuffix("\\\\")) for item in text.splitlines()]
    for cells_ in rows:
        if len(cells_) == len(table.columns) + 3 and (label := parsed(cells_)[0]) in expected:
            seen.append(label)
            for got, want in zip(parsed(cells_)[1], expected[label], strict=True):
                assert got == pytest.approx(want, abs=0.051)
    assert sorted(seen) == sorted(expected)


# Published numbers


def test_the_papers_tables_agree_with_each_other():
    numbers, short = paper_numbers(), "llama-3.1-8b"
    for model in (short, "qwen3-8b"):
        tasks, sweep = numbers["tasks"][model]["rows"], numbers["sweep"][model]
        # The mean over sixteen tasks, not over six categories, which gives 47.35 for LKV.
        for average, *own in tasks.values():
            assert average == pytest.approx(np.mean(own), abs=0.0051)
        at = sweep["columns"].index(0.15)
        assert all(values[at] == tasks[method][0] for method, values in sweep["rows"].items())
    tasks, main, ablation = (numbers[name][short] for name in ("tasks", "main", "ablation"))
    for method, values in main["rows"].items():
        own = dict(zip(tasks["columns"], tasks["rows"][method], strict=True))
        for name, value in zip(main["columns"], values, strict=True):
            members = names.CATEGORIES["longbench"].get(name, ["Avg."])
            assert value == pytest.approx(np.mean([own[task] for task in members]), abs=0.0051)
    places = [main["columns"].index(name) for name in ablation["columns"]]
    for method, cell in (("snapkv", "uniform+snapkv"), ("adakv-snapkv", "ada+snapkv"), ("lkv", "lkv-h+lkv-t")):
        assert ablation["rows"][cell] == [main["rows"][method][place] for place in places]


def test_published_rows_are_marked_and_stand_beside_the_measured(tmp_path):
    lines = many(methods=tuple(GRID))
    table = with_published(table_of(tmp_path, "ablation", lines), "llama-3.1-8b", "longbench")
    group = [(row, own) for row, own in table.rows() if row.group == "selection: Expected Attention"]
    assert [row.label for row, _ in group[3:]] == ["Uniform (published)", "AdaKV (published)", "LKV-H (published)"]
    assert [own["Synthetic"].value for _, own in group[3:]] == [17.77, 23.26, 45.00]
    assert paper_model_like("Qwen/Qwen3-8B") == "qwen3-8b" and paper_model_like("smollm2") == "llama-3.1-8b"
    ruler = table_of(tmp_path, "main", many(suite="ruler", lengths=(2048,)), suite="ruler")
    marked = with_published(ruler, "llama-3.1-8b", "ruler")
    assert marked.cells.equals(ruler.cells) and "prints no numbers" in marked.notes[-1]


# The command


@pytest.mark.slow
def test_the_command_prints_and_writes(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", many(retentions=(0.15, 0.5)))
    assert main(["report", str(path), "--table", "sweep", "--format", "csv", "--published"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    published = [r for r in rows if r["source"] == "published" and r["method"] == "lkv"]
    assert {r["column"]: float(r["value"]) for r in published} == {"R = 0.5": 46.99, "R = 0.15": 46.73}
    out, figure = tmp_path / "new" / "table.md", tmp_path / "new" / "figure.png"
    assert main(["report", str(path), "--format", "markdown", "--out", str(out), "--figure", str(figure)]) == 0
    assert out.read_text().startswith("**LongBench, by category**") and figure.read_bytes()[1:4] == b"PNG"
    assert sorted(item.name for item in out.parent.iterdir()) == ["figure.png", "table.md"]


def test_the_command_refuses_in_one_sentence(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", many())
    for arguments, message in (
        ([], "give either result files"),
        ([str(path), "--profile", str(path)], "give either result files"),
        ([str(path), "--figure", str(tmp_path / "figure.docx")], "not the name of a figure"),
        ([str(path), "--out", str(path / "below")], "cannot be written"),
    ):
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err
