"""Every figure is drawn; tables of profiles and trainings, and the files that they refuse."""

import json
from io import BytesIO

import numpy as np
import pytest
from matplotlib.image import imread

from experiments.report.figures import plot_memory, plot_policies, plot_table, save_figure
from experiments.report.profile_table import build_prefill, read_profile
from experiments.report.training_table import build_training, read_curves
from lkv.errors import ReportError
from tests.commands import main
from tests.results import GRID, cells, many, table_of


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def lines_of(axes):
    return {item.get_label(): item for item in axes.get_lines()}


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sweep", {"retentions": (0.05, 0.15, 0.5)}),
        ("ruler", {"suite": "ruler", "lengths": (2048, 4096), "retentions": (0.15, 0.5)}),
        ("main", {}),
        ("ablation", {"methods": tuple(GRID)}),
    ],
)
def test_every_table_has_a_figure(tmp_path, name, options):
    suite = options.get("suite", "longbench")
    figure = plot_table(table_of(tmp_path, name, many(**options), suite=suite))
    save_figure(figure, tmp_path / "figure.png")
    assert imread(BytesIO((tmp_path / "figure.png").read_bytes())).std() > 0
    assert name == "ablation" or legend(figure)[:3] == ["Full cache", "SnapKV", "LKV"]


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_pictures_are_written_whole_or_not_at_all(tmp_path, kind, start):
    path = tmp_path / f"figure.{kind}"
    figure = plot_policies({"LKV": [[0.5]]}, 0.5)
    save_figure(figure, path)
    assert path.read_bytes().startswith(start) and [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(ReportError, match=r"end it with one of .png, .pdf, .svg"):
        save_figure(figure, tmp_path / "figure.gif")
    save_figure(figure, path)  # over a figure
    thesis = start + b" of somebody else"
    path.write_bytes(thesis)
    with pytest.raises(ReportError, match="is not a figure of matplotlib and would be overwritten; give another name"):
        save_figure(figure, path)
    assert path.read_bytes() == thesis


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
    with pytest.raises(ReportError, match="does not state the bytes of the weights"):
        plot_memory(read_profile(tmp_path / "p.json"), weights=True)


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (ROWS, {"name": "decode"}, "has no profile"),
        ([], {}, "has no profile"),
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
    picture = tmp_path / "curve.png"
    assert main(["report", "--training", *map(str, runs), "--figure", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and "second" in printed
    assert printed.splitlines()[2].split()[:3] == ["run", "step", "contexts"]  # no columns that runs have nothing for
