"""Figures: what is plotted, labelled and listed, asked of matplotlib's own objects; and profiles."""

import json
from io import BytesIO

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.image import imread

from experiments.report import names
from experiments.report.figures import (
    LKV_COLOUR,
    plot_memory,
    plot_policies,
    plot_table,
    plot_training,
    save_figure,
)
from experiments.report.profile_table import build_prefill, read_profile
from experiments.report.score_tables import with_published
from experiments.report.training_table import build_training, read_curves
from lkv.errors import ReportError
from tests.commands import main
from tests.results import GRID, cells, many, mean_of_means, table_of, values


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def lines_of(axes):
    return {item.get_label(): item for item in axes.get_lines()}


def test_the_sweep_plots_the_averages_at_the_realised_retention(tmp_path):
    lines = many(retentions=(0.05, 0.15, 0.5))
    table = table_of(tmp_path, "sweep", lines)
    figure = plot_table(with_published(table, "llama-3.1-8b", "longbench"))
    (axes,) = figure.axes
    drawn = lines_of(axes)
    expected = [mean_of_means(values(lines, "lkv", r)) for r in (0.05, 0.15, 0.5)]
    np.testing.assert_allclose(drawn["LKV"].get_xdata(), np.array([0.05, 0.15, 0.5]) * 0.99)
    np.testing.assert_allclose(drawn["LKV"].get_ydata(), expected)
    np.testing.assert_allclose(drawn["Full cache"].get_ydata(), [mean_of_means(values(lines, "full"))] * 2)
    published = drawn["LKV (published)"]
    np.testing.assert_allclose(published.get_xdata(), [0.15, 0.5])  # of its six, those that the table has
    np.testing.assert_allclose(published.get_ydata(), [46.73, 46.99])
    assert published.get_linestyle() == "--" and drawn["LKV"].get_linestyle() == "-"
    assert axes.get_xlabel() == "retention (kept / all entries)" and axes.get_ylabel() == "score, 0 to 100"
    assert legend(figure)[:3] == ["Full cache", "SnapKV", "LKV"] and "SnapKV (published)" in legend(figure)
    # LKV is set off, and its band is its interval.
    assert drawn["LKV"].get_color() == LKV_COLOUR and drawn["LKV"].get_linewidth() > drawn["SnapKV"].get_linewidth()
    band = next(
        c for c in axes.collections if c.get_facecolor()[0][:3] == pytest.approx(matplotlib.colors.to_rgb(LKV_COLOUR))
    )
    cell = cells(table, "lkv")["R = 0.5"]
    edge = {y for x, y in band.get_paths()[0].vertices if x == pytest.approx(0.495)}
    assert min(edge) == pytest.approx(cell.low) and max(edge) == pytest.approx(cell.high)


def test_ruler_is_plotted_over_length_and_over_retention(tmp_path):
    lines = many(suite="ruler", lengths=(2048, 4096), retentions=(0.15, 0.5))
    figure = plot_table(table_of(tmp_path, "ruler", lines, suite="ruler"))
    over_length, over_retention = figure.axes
    by_length = {at: [i for i in lines if i["length"] == at] for at in (2048, 4096)}
    own = lines_of(over_length)["SnapKV"]
    np.testing.assert_array_equal(own.get_xdata(), [2048, 4096])
    np.testing.assert_allclose(
        own.get_ydata(), [mean_of_means(values(found, "snapkv", 0.15)) for found in by_length.values()]
    )
    assert [text.get_text() for text in over_length.get_xticklabels()] == ["2k", "4k"]
    assert over_length.get_title() == "R = 0.15" and over_length.get_xlabel() == "context length (tokens)"
    own = lines_of(over_retention)["SnapKV"]
    np.testing.assert_allclose(own.get_xdata(), [0.15 * 0.99, 0.5 * 0.99])
    np.testing.assert_allclose(
        own.get_ydata(), [mean_of_means(values(by_length[4096], "snapkv", r)) for r in (0.15, 0.5)]
    )
    full = [mean_of_means(values(found, "full")) for found in by_length.values()]
    np.testing.assert_allclose(lines_of(over_length)["Full cache"].get_ydata(), full)
    np.testing.assert_allclose(lines_of(over_retention)["Full cache"].get_ydata(), full[1:] * 2)
    assert over_retention.get_title() == "4,096 tokens"


def test_points_stand_at_their_values_with_their_intervals(tmp_path):
    table = table_of(tmp_path, "main", many())
    figure = plot_table(table)
    (axes,) = figure.axes
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert ticks == ["Avg.", *names.CATEGORIES["longbench"]]  # neither the difference nor the share
    found = {container.get_label(): container for container in axes.containers}
    assert list(found) == legend(figure) == ["Full cache", "SnapKV", "LKV"]
    own = [cells(table, "snapkv")[name] for name in ticks]
    line, _, (bars,) = found["SnapKV"]
    np.testing.assert_allclose(np.asarray(line.get_ydata(), float), [cell.value for cell in own])
    assert np.round(np.asarray(line.get_xdata(), float)).tolist() == list(range(7))
    np.testing.assert_allclose([item[:, 1] for item in bars.get_segments()], [[c.low, c.high] for c in own])


def test_the_ablation_is_a_grid_with_its_numbers(tmp_path):
    lines = many(methods=tuple(GRID))
    table = table_of(tmp_path, "ablation", lines)
    figure = plot_table(with_published(table, "llama-3.1-8b", "longbench"))
    measured, published = figure.axes
    expected = [
        [
            mean_of_means(values(lines, next(alias for alias, own in GRID.items() if own == f"{rule}+{selector}")))
            for selector in names.SELECTORS
        ]
        for rule in names.RULES
    ]
    np.testing.assert_allclose(measured.get_images()[0].get_array(), expected)
    assert measured.texts[-1].get_text().startswith(f"{expected[2][2]:.2f}\n[")
    assert [text.get_text() for text in published.texts] == (
        "38.05 37.12 39.74 39.06 38.16 43.45 44.06 45.72 46.73".split()
    )
    assert [text.get_text() for text in measured.get_xticklabels()] == ["SnapKV", "Expected Attention", "LKV-T"]
    assert [text.get_text() for text in measured.get_yticklabels()] == ["Uniform", "AdaKV", "LKV-H"]
    assert (measured.patches[0].get_x(), measured.patches[0].get_y()) == (1.5, 1.5)  # the frame around LKV


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_pictures_are_written_whole_or_not_at_all(tmp_path, kind, start):
    path = tmp_path / f"figure.{kind}"
    figure = plot_policies({"LKV": [[0.5]]}, 0.5)
    save_figure(figure, path)
    assert path.read_bytes().startswith(start) and [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(ReportError, match=r"end it with one of .png, .pdf, .svg"):
        save_figure(figure, tmp_path / "figure.gif")
    if kind == "png":
        assert imread(BytesIO(path.read_bytes())).std() > 0


# Profiles


def profile_row(method, tokens, seconds, ratio, size, model="llama-3.1-8b", peak=None, retention=0.15):
    return {
        "model": model, "device": "cpu", "method": method, "tokens": tokens, "batch": 1,
        "retention": 1.0 if method == "full" else retention, "realised": 0.16, "prefill_seconds": seconds,
        "prefill_ratio": ratio, "decode_ms": 5.0, "decode_ratio": 0.5, "peak_bytes": peak, "kv_bytes": size,
    }  # fmt: skip


def profile_file(path, rows, **more):
    path.write_text(json.dumps({"name": "profile", "machine": "m", "versions": {}, "rows": rows} | more))
    return path


ROWS = [
    profile_row("full", 1024, 1.0, 1.0, 2**27, peak=3 * 2**30),
    profile_row("lkv", 1024, 1.1, 1.1, 2**24, peak=2**30),
    profile_row("full", 4096, 8.0, 1.0, 2**29, peak=4 * 2**30),
    profile_row("lkv", 4096, 8.4, 1.05, 2**26, peak=2**31),
]


def test_the_prefill_table(tmp_path):
    profile = read_profile(profile_file(tmp_path / "p.json", ROWS))
    table = build_prefill(profile)
    lkv = cells(table, "lkv", "4,096 tokens")
    assert lkv["prefill, s"].value == 8.4 and lkv["overhead, %"].value == pytest.approx(5)
    assert lkv["k and v, MiB"].value == 64 and lkv["peak, MiB"].value == 2048
    assert cells(table, "full", "1,024 tokens")["overhead, %"] is None
    marked = build_prefill(profile, "llama-3.1-8b")
    published = [(row, own) for row, own in marked.rows() if row.source == "published"]
    assert [row.label for row, _ in published] == [
        "Full cache (published)", "DuoAttention (published)", "Ada-SnapKV (published)", "LKV (published)",
    ]  # fmt: skip
    assert [own["prefill, s"].value for _, own in published] == [82.40, 87.21, 88.37, 88.76]
    assert any("LKV O(T)" in note for note in marked.notes)
    with pytest.raises(ReportError, match="no prefill times with Qwen3-8B"):
        build_prefill(profile, "qwen3-8b")


def test_the_memory_figure(tmp_path):
    figure = plot_memory(read_profile(profile_file(tmp_path / "p.json", ROWS)))
    peak, held = figure.axes
    np.testing.assert_allclose(lines_of(peak)["LKV"].get_xydata(), [[1024, 1], [4096, 2]])
    np.testing.assert_allclose(lines_of(held)["Full cache"].get_xydata(), [[1024, 128], [4096, 512]])
    assert peak.get_ylabel() == "peak memory (GiB)" and held.get_ylabel() == "k and v held (MiB)"
    for axes in figure.axes:
        assert axes.get_xscale() == axes.get_yscale() == "linear"
        assert axes.get_xlim()[0] == axes.get_ylim()[0] == 0
        assert axes.get_xlabel() == "context length (tokens)"
    assert legend(figure) == ["Full cache", "LKV"]
    with pytest.raises(ReportError, match="does not state the bytes of the weights"):
        plot_memory(read_profile(tmp_path / "p.json"), weights=True)
    # With the weights, as the paper draws it, and where memory ran out.
    rows = [row | {"weight_bytes": 16 * 2**30} for row in ROWS]
    rows[2] = rows[2] | {"failed_at": 4608}
    peak, held = plot_memory(read_profile(profile_file(tmp_path / "p.json", rows)), weights=True).axes
    drawn = {label: list(line.get_ydata()) for label, line in lines_of(peak).items()}
    assert "weights included" in peak.get_ylabel()
    assert drawn["Full cache"] == [19.0, 20.0] and drawn["LKV"] == [17.0, 18.0]
    assert list(lines_of(held)["Full cache"].get_ydata()) == [128.0, 512.0]
    assert [list(line.get_xdata()) for line in peak.lines if line.get_linestyle() == "--"] == [[4608, 4608]]
    # Retentions of one method are lines of their own; without a peak there is one panel.
    rows = [profile_row("lkv", 1024, 1.0, 1.1, 2**20, retention=r) for r in (0.15, 0.5)]
    figure = plot_memory(read_profile(profile_file(tmp_path / "p.json", rows)))
    assert len(figure.axes) == 1 and legend(figure) == ["LKV, R = 0.15", "LKV, R = 0.5"]


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (ROWS, {"name": "decode"}, "holds no profile"),
        ([], {}, "holds no profile"),
        ([{k: v for k, v in ROWS[0].items() if k != "kv_bytes"}], {}, "row 1: kv_bytes is 'missing'"),
        ([ROWS[0] | {"decode_ms": "fast"}], {}, "row 1: decode_ms is 'fast'"),
        ([ROWS[0], ROWS[1] | {"model": "tiny"}], {}, r"mixes values of model \(llama-3.1-8b, tiny\)"),
    ],
)
def test_a_malformed_profile_is_refused(tmp_path, rows, more, message):
    (tmp_path / "torn.json").write_text("{")
    for name, problem in (("torn", "is not a profile"), ("none", "cannot be read")):
        with pytest.raises(ReportError, match=problem):
            read_profile(tmp_path / f"{name}.json")
    with pytest.raises(ReportError, match=message):
        read_profile(profile_file(tmp_path / "p.json", rows, **more))


# Training curves


def write_curve(folder, kls):
    folder.mkdir()
    names = ("step", "contexts", "validation_kl", "validation_agreement", "validation_kl_third")
    rows = [dict(zip(names, (i, 8 * i, kl, 1 - kl, 3 * kl), strict=True)) for i, kl in enumerate(kls, 1)]
    (folder / "curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_training_runs_stand_side_by_side(tmp_path, capsys):
    runs = [write_curve(tmp_path / "first", [0.5, 0.2]), write_curve(tmp_path / "second", [0.4, 0.3, 0.1])]
    rows = build_training(read_curves(runs)).rows()
    shown = [(row.label, own["contexts"].value, own["KL, final R"].value) for row, own in rows]
    assert shown == [("first", 16, 0.2), ("second", 24, 0.1)] and rows[1][1]["KL, R / 3"].value == pytest.approx(0.3)
    left, right = plot_training(read_curves(runs)).axes
    drawn = {label: (list(line.get_xdata()), list(line.get_ydata())) for label, line in lines_of(left).items()}
    assert drawn["first"] == ([8, 16], [0.5, 0.2]) and drawn["second, R / 3"][1] == pytest.approx([1.2, 0.9, 0.3])
    assert left.get_xlabel() == "contexts seen" and "nats" in left.get_ylabel() and "agreement" in right.get_ylabel()
    colours = {label: line.get_color() for label, line in lines_of(left).items()}
    assert colours["first"] == colours["first, R / 3"] != colours["second"]
    picture = tmp_path / "curve.png"
    assert main(["report", "--training", *map(str, runs), "--figure", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and "second" in printed
    assert printed.splitlines()[2].split()[:3] == ["run", "step", "contexts"]  # no columns that runs have nothing for
