"""lkv report --training: the curves of runs side by side; trackers see what the curve holds."""

import json

import pytest

from lkv.cli.main import main
from lkv.evaluation.report.builders import build_training, read_curves
from lkv.evaluation.report.figures import plot_training


def write(folder, kls):
    folder.mkdir()
    names = ("step", "contexts", "validation_kl", "validation_agreement", "validation_kl_third")
    rows = [dict(zip(names, (i, 8 * i, kl, 1 - kl, 3 * kl), strict=True)) for i, kl in enumerate(kls, 1)]
    (folder / "curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_stand_side_by_side(tmp_path, capsys):
    runs = [write(tmp_path / "first", [0.5, 0.2]), write(tmp_path / "second", [0.4, 0.3, 0.1])]
    table = build_training(read_curves(runs))
    assert [(row.label, own["contexts"].value, own["KL, final R"].value) for row, own in table.rows()] == [
        ("first", 16, 0.2),
        ("second", 24, 0.1),
    ]
    assert table.rows()[1][1]["KL, R / 3"].value == pytest.approx(0.3)
    pytest.importorskip("matplotlib")
    left, right = plot_training(read_curves(runs)).axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in left.lines}
    assert drawn["first"] == ([8, 16], [0.5, 0.2]) and drawn["second, R / 3"][1] == pytest.approx([1.2, 0.9, 0.3])
    assert left.get_xlabel() == "contexts seen" and "nats" in left.get_ylabel() and "agreement" in right.get_ylabel()
    colours = {line.get_label(): line.get_color() for line in left.lines}
    assert colours["first"] == colours["first, R / 3"] != colours["second"]
    picture = tmp_path / "curve.png"
    assert main(["report", "--training", *map(str, runs), "--figure", str(picture)]) == 0
    said = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and "second" in said
    assert said.splitlines()[2].split()[:3] == ["run", "step", "contexts"]  # no columns that runs have nothing for


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a training curve"),
        ("", "has no evaluation yet"),
        ("[1]\n", "lines that are not steps"),
        ("{", "is not"),
    ],
)
def test_what_is_no_run_is_one_sentence(tmp_path, content, message, capsys):
    if content is not None:
        (tmp_path / "curve.jsonl").write_text(content)
    assert main(["report", "--training", str(tmp_path)])
    said = capsys.readouterr().err
    assert message in said and "lkv train" in said
