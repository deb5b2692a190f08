"""Result files to tables: what is read, what is averaged, what is printed; numbers against plain numpy."""

import csv
import json

import numpy as np
import pytest

from experiments.evaluations import rows_of
from experiments.report import names
from experiments.report.results_frame import read_results
from experiments.report.score_tables import build_table
from experiments.report.tables import to_terminal
from lkv.errors import ReportError
from lkv.evaluation.statistics import macro_mean
from tests.commands import main
from tests.results import (
    GRID,
    HEADER,
    cells,
    line,
    many,
    mean_of_means,
    results_of,
    row,
    scores_of,
    table_of,
    values,
    write,
)

FEW = ("qasper", "trec", "passage_count", "passage_retrieval_en")


def few(**options):
    """The lines of `many` of a few tasks: each interval costs thousands of draws."""
    return [item for item in many(**options) if item["task"] in FEW]


def all_cells(table):
    """What `cells` returns, by method and group: the rows of a table are expensive to make."""
    columns = [column.name for column in table.columns]
    return {
        (own.method, own.group): {name: found.get(name) for name in columns}
        for own, found in table.rows()
        if own.source == "measured"
    }


# Reading


def test_what_is_missing_or_cut_is_noted(tmp_path):
    lines = [*scores_of("trec", [1, 2]), line("trec", 2, [], unusable="no room")]
    torn = read_results([write(tmp_path / "a.jsonl", lines[:2], tail='{"key": "trec-None-2", "ta')])
    assert torn.frame.key.nunique() == 2 and any("1 torn last line of" in note for note in torn.notes)
    keys = [item["key"] for item in lines]
    for planned in ([*keys, "trec-None-3"], ["trec-None-3", keys[0]]):
        path = write(tmp_path / "b.jsonl", lines, planned=planned)
        assert read_results([path]).notes[0].startswith(f"UNFINISHED: {path} holds 3 of 4 samples; run the command")
    for planned in (keys, keys[:2]):
        assert not any("UNFINISHED" in note for note in results_of(tmp_path / "c.jsonl", lines, planned=planned).notes)
    cut = [line("trec", i, [row("full", 1.0, 1.0)], truncated=i < 2, answer_lost=i < 1) for i in range(3)]
    notes = ("2 of 3 contexts were truncated; 1 of them lost their answer.",)
    assert results_of(tmp_path / "d.jsonl", cut).notes == notes


@pytest.mark.parametrize(
    ("field", "one", "other", "shown"),
    [(field, HEADER[field], "other", "other") for field in ("suite", "protocol", "model", "lkv", "policy", "dtype")]
    + [("versions", {"torch": "2.13.0", "python": "3.11"}, {"torch": "2.14.0", "python": "3.12"}, "2.14.0")],
)
def test_results_that_differ_are_refused_and_listed(tmp_path, field, one, other, shown):
    paths = [
        write(tmp_path / f"{task}.jsonl", scores_of(task, [1]), **{field: value})
        for task, value in (("trec", one), ("lcc", other))
    ]
    name, first = ("torch", "2.13.0") if field == "versions" else (field, one)
    with pytest.raises(
        ReportError, match=rf"differ in {name} \(.*trec.jsonl: {first}, .*lcc.jsonl: {shown}\)\. Report"
    ):
        read_results(paths)


def test_a_method_measured_later_stands_beside_the_others(tmp_path):
    one = write(tmp_path / "one.jsonl", scores_of("trec", [10, 20], "snapkv"), policy=None)
    two = write(tmp_path / "two.jsonl", scores_of("trec", [15, 45], "lkv"))
    table = build_table("main", read_results([one, two]))
    assert cells(table, "lkv")["Avg."].value == 30 and cells(table, "snapkv")["Avg."].value == 15
    assert cells(table, "snapkv")["Avg."].difference == -15 and cells(table, "full")["Avg."].n == 2
    other = [item | {"text_sha256": "of another text"} for item in scores_of("trec", [15, 45], "lkv")]
    with pytest.raises(ReportError, match="2 samples occur twice with the same method or with another text"):
        read_results([one, write(tmp_path / "three.jsonl", other)])
    with pytest.raises(ReportError, match=r"1 samples occur twice.*trec-None-0 \(again in .*four.jsonl, line 2\)"):
        read_results([two, write(tmp_path / "four.jsonl", scores_of("trec", [1]))])


def test_a_run_interrupted_while_it_adds_methods_is_read(tmp_path):
    """The line of a sample is written again, with the rows of the added methods or why they were skipped."""
    one, two = scores_of("trec", [10, 20], "snapkv")
    skipped = one | {"skipped": [{"method": "duo", "retention": 0.15, "reason": "too short"}]}
    longer = two | {"rows": [*two["rows"], row("lkv", 0.15, 50.0)]}
    added = write(tmp_path / "added.jsonl", [one, two, skipped, longer])
    other = write(tmp_path / "tova.jsonl", scores_of("trec", [30, 40], "tova"))
    expected = {("full", 0): 100, ("full", 1): 100, ("snapkv", 0): 10, ("snapkv", 1): 20, ("lkv", 1): 50}
    tova = {("tova", 0): 30, ("tova", 1): 40}
    for paths, more in (([added], {}), ([other, added], tova), ([added, other], tova)):
        found = [((item.method, item.number), item.score) for item in read_results(paths).frame.itertuples()]
        assert sorted(found) == sorted((expected | more).items())
    changed = two | {"rows": [*scores_of("trec", [10, 30], "snapkv")[1]["rows"], row("lkv", 0.15, 50.0)]}
    with pytest.raises(ReportError, match=r"1 samples occur twice.*trec-None-1 \(again in .*other.jsonl, line 4\)"):
        results_of(tmp_path / "other.jsonl", [one, two, changed])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER, []], "line 2 is not a JSON object"),
        ([HEADER, "torn", "torn"], "line 2 is not a JSON object"),
        ([HEADER, {"key": "a", "task": "trec", "length": None, "number": 0}], "line 2 has no field 'rows'"),
        ([HEADER, line("trec", 0, [row("lkv", 0.15, float("nan"))])], "line 2: score is nan"),
        ([HEADER, line("trec", 0, [row("lkv", 0.15, 1.0)] * 2)], "line 2: the method 'lkv' occurs twice"),
        ([HEADER, line("trec", 0, [row("lkv", "much", 1.0)])], "line 2 is malformed"),
        ([HEADER], "no finished samples"),
        ([], "cannot be read"),
        ([line("trec", 0, [])], "does not start with a header"),
        ([HEADER | {"format": 2}], "format 2, but this version reads 1"),
        ([HEADER | {"planned": "all"}], "header's 'planned' is 'all'"),
    ],
)
def test_a_malformed_file_is_named_with_line_and_field(tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    if lines:
        path.write_text("".join(json.dumps(item) + "\n" for item in lines), encoding="utf-8")
    with pytest.raises(ReportError, match=message):
        read_results([path])


# Tables


def test_main_averages_tasks_within_categories_and_over_all_tasks(tmp_path):
    lines = many()
    table = table_of(tmp_path, "main", lines)
    for method in ("full", "snapkv", "lkv"):
        own = values(lines, method)
        assert cells(table, method)["Avg."].value == pytest.approx(mean_of_means(own))
        for category, tasks in names.CATEGORIES["longbench"].items():
            assert cells(table, method)[category].value == pytest.approx(mean_of_means(own, tasks))
            assert cells(table, method)[category].n == 5 * len(tasks)
    assert [row.method for row, _ in table.rows()] == ["full", "snapkv", "lkv"]
    row, _ = table.rows()[1]
    assert row.row_realised == pytest.approx(0.15 * 0.99) and row.retention == 0.15


def test_differences_and_shares_are_of_the_same_samples(tmp_path):
    lines = many()
    snapkv = cells(table_of(tmp_path, "main", lines), "snapkv")
    own, lkv = values(lines, "snapkv"), values(lines, "lkv")
    expected = np.mean([(own[task] - lkv[task]).mean() for task in own])
    assert snapkv["Avg."].difference == snapkv["Avg. - LKV"].value == pytest.approx(expected)
    share = snapkv["of full, %"]
    assert share.value == pytest.approx(100 * mean_of_means(own) / mean_of_means(values(lines, "full")))
    assert share.low < share.value < share.high
    # A constant difference has no width, however much the scores themselves vary.
    shifted = [
        line("trec", i, [row("lkv", 0.15, v), row("snapkv", 0.15, v - 4)])
        for i, v in enumerate([10.0, 20.0, 40.0, 80.0, 90.0])
    ]
    mean = cells(table_of(tmp_path, "main", shifted), "snapkv")["Avg."]
    assert (mean.difference, mean.difference_low, mean.difference_high) == pytest.approx((-4, -4, -4))
    assert mean.high - mean.low > 10


def test_no_share_of_a_full_cache_that_scores_nothing(tmp_path):
    lines = [line("trec", i, [row("full", 1.0, 0.0), row("lkv", 0.15, 20.0 * i)]) for i in range(5)]
    lkv = cells(table_of(tmp_path, "main", lines), "lkv")
    assert lkv["Avg."].value == pytest.approx(40) and lkv["of full, %"] is None


@pytest.mark.parametrize("count", [4, 5])
def test_an_interval_needs_five_samples_and_stays_where_scores_can_lie(tmp_path, count):
    own = [0.0, 100.0, 100.0, 100.0, 100.0][:count]
    lines = [
        line("trec", i, [row("full", 1.0, 100.0), row("lkv", 0.15, v), row("snapkv", 0.15, 0.0)])
        for i, v in enumerate(own)
    ]
    table = table_of(tmp_path, "main", lines)
    lkv, snapkv = cells(table, "lkv"), cells(table, "snapkv")
    average = snapkv["Avg."]
    intervals = [(c.low, c.high) for c in (lkv["Avg."], lkv["of full, %"], snapkv["Avg. - LKV"])]
    intervals.append((average.difference_low, average.difference_high))
    if count == 4:
        assert np.isnan(intervals).all() and lkv["Avg."].n == 4
        assert "[" not in to_terminal(table).split("n ")[0].replace("95%", "")
        return
    # Unclipped they would go beyond what any text can score.
    assert macro_mean([own]).high > 100 and lkv["Avg."].high == 100
    assert lkv["of full, %"].high == 100
    assert macro_mean([[-value for value in own]]).low < -100 and average.difference_low == -100
    assert np.isfinite(intervals).all()
    # Marginal means too.
    table = table_of(
        tmp_path, "ablation", [line("trec", i, [row(m, 0.15, v) for m in GRID]) for i, v in enumerate(own)]
    )
    means = [own["Avg."] for row, own in table.rows() if row.group.startswith("mean over")]
    assert len(means) == 6 and all(cell.high == pytest.approx(100) for cell in means)


def test_samples_that_not_all_methods_have_are_left_out_and_stated(tmp_path):
    lines = scores_of("trec", [10, 20, 60])
    lines[2]["rows"] += [row("snapkv", 0.15, 5.0)]
    lines[1]["rows"] += [row("snapkv", 0.15, 7.0)]
    table = table_of(tmp_path, "main", lines)
    assert cells(table, "lkv")["Avg."].value == 40 and cells(table, "lkv")["Avg."].n == 2
    assert "Avg. is over 1 of the 16 tasks." in table.notes
    assert any("1 of 3 samples left out" in note and "snapkv at R = 0.15 1" in note for note in table.notes)
    alone = table_of(tmp_path, "main", lines, methods=("lkv",))
    assert cells(alone, "lkv")["Avg."].value == 30 and not any("left out" in note for note in alone.notes)


def test_a_method_that_ran_nowhere_is_named_with_the_reason(tmp_path):
    skipped = [{"method": "kvzip", "retention": 0.15, "reason": "the text is too long."}]
    lines = [item | {"skipped": skipped} for item in scores_of("trec", [1, 2])]
    assert "kvzip at R = 0.15 ran on no sample: the text is too long." in table_of(tmp_path, "main", lines).notes
    with pytest.raises(ReportError, match="'kvzip' ran on no sample: the text is too long"):
        table_of(tmp_path, "main", lines, methods=("kvzip",))
    lines[0]["rows"] += [row("kvzip", 0.15, 5.0)]
    assert not any("ran on no sample" in note for note in table_of(tmp_path, "main", lines).notes)
    with pytest.raises(ReportError, match="line 2 is malformed"):
        table_of(tmp_path, "main", [lines[0] | {"skipped": [3]}])


def test_sweep_over_retention_with_the_realised_one(tmp_path):
    lines = many(retentions=(0.05, 0.15, 0.5))
    table = table_of(tmp_path, "sweep", lines)
    assert [column.x for column in table.columns] == [0.5, 0.15, 0.05]
    for retention in (0.05, 0.15, 0.5):
        cell = cells(table, "snapkv")[f"R = {retention:g}"]
        assert cell.value == pytest.approx(mean_of_means(values(lines, "snapkv", retention)))
        assert cell.realised == pytest.approx(0.99 * retention)
        lkv = values(lines, "lkv", retention)
        expected = np.mean([(v - lkv[k]).mean() for k, v in values(lines, "snapkv", retention).items()])
        assert cell.difference == pytest.approx(expected)


def test_one_retention_is_chosen_or_asked_for(tmp_path):
    grid = many(retentions=(0.05, 0.15), methods=("snapkv", "adakv-snapkv"))
    assert set(table_of(tmp_path, "ablation", grid).cells.retention) == {1.0, 0.15}
    lines = many(retentions=(0.05, 0.15))
    with pytest.raises(ReportError, match=r"no retention 0.3; they hold 0.15, 0.05"):
        table_of(tmp_path, "main", lines, retentions=(0.3,))
    with pytest.raises(ReportError, match=r"the files hold 0.5, 0.05; choose one"):
        table_of(tmp_path, "ablation", many(retentions=(0.05, 0.5)))


def test_ruler_keeps_tasks_where_the_full_cache_is_good_enough(tmp_path):
    full = {("vt", 2048): 60.0, ("cwe", 2048): 70.0, ("qa_1", 2048): 90.0, ("vt", 4096): 80.0, ("cwe", 4096): 10.0}
    own = {("vt", 2048): 1.0, ("cwe", 2048): 40.0, ("qa_1", 2048): 70.0, ("vt", 4096): 64.0, ("cwe", 4096): 9.0}
    lines = [
        line(task, 0, [row("full", 1.0, full[task, at]), row("lkv", 0.15, own[task, at])], at) for task, at in full
    ]
    table = table_of(tmp_path, "ruler", lines, suite="ruler", min_full=50)
    found = cells(table, "lkv", "R = 0.15")
    # cwe is good enough at one length only, so it counts at neither; qa_1 is at every length that it has.
    assert found["2,048 tokens"].value == (1 + 70) / 2 and found["4,096 tokens"].value == 64
    assert found["Avg."].value == pytest.approx((1 + 70 + 64) / 3)
    assert found["of full, %"].value == pytest.approx(100 * (1 + 70 + 64) / (60 + 90 + 80))
    assert any("at least 50 at every length: vt, qa_1." in note for note in table.notes)
    every = cells(table_of(tmp_path, "ruler", lines, suite="ruler"), "lkv", "R = 0.15")
    assert every["2,048 tokens"].value == 37
    with pytest.raises(ReportError, match="at least 95 on no task"):
        table_of(tmp_path, "ruler", lines, suite="ruler", min_full=95)


def selection(method):
    return f"selection: {names.part_label(method.split('+')[1])}"


@pytest.mark.parametrize("aliases", [True, False])
def test_ablation_grid_gains_and_marginal_means(tmp_path, aliases):
    lines = few(methods=tuple(GRID if aliases else GRID.values()))
    found_cells = all_cells(table_of(tmp_path, "ablation", lines))
    average = {own: mean_of_means(values(lines, alias if aliases else own)) for alias, own in GRID.items()}
    for own, mean in average.items():
        found = found_cells[own, selection(own)]
        assert found["Avg."].value == pytest.approx(mean)
        rule, selector = own.split("+")
        gain = found.get("gain over uniform")
        assert (gain is None) == (rule == "uniform")
        assert gain is None or gain.value == pytest.approx(mean - average[f"uniform+{selector}"])
    for rule in names.RULES:
        expected = np.mean([average[f"{rule}+{selector}"] for selector in names.SELECTORS])
        assert found_cells[rule, "mean over selectors"]["Avg."].value == pytest.approx(expected)
    for selector in names.SELECTORS:
        expected = np.mean([average[f"{rule}+{selector}"] for rule in names.RULES])
        assert found_cells[selector, "mean over budget rules"]["Avg."].value == pytest.approx(expected)
    synthetic = mean_of_means(
        values(lines, "lkv" if aliases else "lkv-h+lkv-t"), ["passage_count", "passage_retrieval_en"]
    )
    assert found_cells["lkv-h+lkv-t", selection("lkv-h+lkv-t")]["Synthetic"].value == pytest.approx(synthetic)


def test_an_incomplete_grid_says_what_is_missing(tmp_path):
    table = table_of(tmp_path, "ablation", many(methods=("snapkv", "adakv-snapkv", "lkv")))
    assert set(table.cells.group) == {"", "selection: SnapKV", "selection: LKV-T"}  # no means of a part
    assert (
        "Not measured: uniform+expected, uniform+lkv-t, ada+expected, ada+lkv-t, lkv-h+snapkv, lkv-h+expected."
        in table.notes
    )
    with pytest.raises(ReportError, match=r"the ablation needs methods of the grid"):
        table_of(tmp_path, "ablation", many(methods=("kvzip", "lkv")))


def test_fidelity_by_task(tmp_path):
    lines = many(suite="ruler", lengths=(2048, 4096))
    table = table_of(tmp_path, "fidelity", lines, suite="ruler")
    for measure, group in (("kl", "KL(full || compressed), nats"), ("agreement", "top-1 agreement")):
        own = values(lines, "snapkv", measure=measure)
        found = cells(table, "snapkv", group)
        assert found["Avg."].value == pytest.approx(mean_of_means(own))
        assert found["vt"].value == pytest.approx(mean_of_means(own, ["vt"]))
    assert any("Not measured: relative hidden-state error" in note for note in table.notes)
    lines = scores_of("trec", [1, 2])
    with pytest.raises(ReportError, match="hold no fidelity"):
        table_of(tmp_path, "fidelity", lines)


def test_budgets_by_memory_are_called_so_and_chosen_with_their_option(tmp_path, capsys):
    rows = [row("full", 1.0, 90.0), row("lkv", 0.1, 80.0, realised=0.638), row("lkv", 0.05, 60.0, realised=0.2)]
    lines = [line("trec", number, rows) for number in range(5)]
    path = str(write(tmp_path / "memory.jsonl", lines, budget="memory"))
    assert main(["report", path, "--table", "ablation"]) == 2
    assert "shows one memory, and the files hold 0.1, 0.05; choose one with --memory 0.1" in capsys.readouterr().err
    assert main(["report", path]) == 0
    said = capsys.readouterr().out
    assert said.index("memory = 0.1\n") < said.index("memory = 0.05\n")
    assert main(["report", path, "--memory", "5%"]) == 0
    said = capsys.readouterr().out
    head, values = (next(text for text in said.splitlines() if text.startswith(start)) for start in ("method", "> LKV"))
    assert head.split()[:3] == ["method", "memory", "kept"] and values.split()[2:5] == ["0.05", "0.2", "60.00"]
    assert "memory is the share of the 16-bit cache's bytes" in said
    assert main(["report", path, "--memory", "5%", "--format", "csv"]) == 0
    cell = next(cell for cell in csv.DictReader(capsys.readouterr().out.splitlines()) if cell["method"] == "lkv")
    assert cell["retention"] == "" and cell["memory"] == "0.05"
    for arguments, says in (
        (["--retention", "0.1"], "budgets of another kind than --retention; use --memory"),
        (["--memory", "0.2"], "hold no memory 0.2; they hold 0.1, 0.05"),
    ):
        assert main(["report", path, *arguments]) == 2 and says in capsys.readouterr().err
    path = str(write(tmp_path / "entries.jsonl", lines))
    assert main(["report", path, "--memory", "0.1"]) == 2
    assert "use --retention" in capsys.readouterr().err


def test_result_files_have_intervals_of_fidelity_too(tmp_path):
    lines = few()
    found = next(
        r for r in rows_of(results_of(tmp_path / "a.jsonl", lines)) if (r["method"], r["task"]) == ("lkv", "all")
    )
    for measure in ("kl", "agreement"):
        expected = macro_mean(list(values(lines, "lkv", measure=measure).values()))
        assert found[measure] == pytest.approx(expected.value)
        assert found[f"{measure}_low"] < found[measure] < found[f"{measure}_high"]
