"""lkv eval: from a command line to a file that experiments.report reads; one clear sentence for each mistake."""

import json

import pytest

from lkv.cli.eval import _name_policies, _parse_policies
from lkv.errors import LkvError
from tests.commands import main, parse_arguments
from tests.conftest import save_model


@pytest.fixture
def model_folder(tmp_path):
    """A tiny random model of 2,048 positions and a byte-level tokenizer, saved as a user would have them."""
    return save_model(tmp_path / "model", max_position_embeddings=2048)


def test_longbench_from_local_files_to_a_report(model_folder, tmp_path, capsys):
    row = {"length": 20, "dataset": "hotpotqa", "language": "en", "all_classes": None}
    lines = [
        json.dumps(row | {"input": f"Who wrote book {i}?", "context": f"Book {i} was written by Ann{i}. " * 20,
                          "answers": [f"Ann{i}"], "_id": str(i)})
        for i in range(3)
    ]  # fmt: skip
    (tmp_path / "hotpotqa.jsonl").write_text("\n".join(lines))
    text, out = tmp_path / "long.txt", tmp_path / "out.jsonl"
    text.write_text("words to estimate a pattern from " * 20)
    command = ["eval", "longbench", "--data", str(tmp_path), "--tasks", "hotpotqa", "--samples", "2", "--model"]
    command += [str(model_folder), "--methods", "knorm", "duo", "--retention", "0.5", "0.25", "--out", str(out)]
    assert main([*command, "--pattern", str(text)]) == 0
    header, *lines = map(json.loads, out.read_text().splitlines())
    assert header["suite"] == "longbench" and header["protocol"] == "kvpress" and header["model"] == "model"
    assert header["dtype"] == "float32" and header["policy"] is None and header["pattern"]
    assert header["pattern_from"] == "estimated on long.txt, by the attention that a window would miss"
    assert [line["key"] for line in lines] == ["hotpotqa-0", "hotpotqa-1"]
    printed = capsys.readouterr().out
    assert "kept: the share of the KV entries" in printed and "knorm" in printed
    for at in (0.5, 0.25):
        (row,) = [line.split() for line in printed.splitlines() if line.startswith("knorm") and f" {at:g} " in line]
        own = [r for line in lines for r in line["rows"] if (r["method"], r["retention"]) == ("knorm", at)]
        assert float(row[2]) == pytest.approx(sum(r["score"] for r in own) / 2, abs=0.06)
        assert float(row[3]) == pytest.approx(sum(r["kl"] for r in own) / 2, abs=0.001) and row[-1] == "2"
    assert main(["report", str(out), "--table", "fidelity", "--retention", "0.25"]) == 0
    assert "duo" in capsys.readouterr().out.lower()
    # Shorter prompts lose the middle of their context, and nothing else.
    command = [*command[: command.index("--methods")], "--methods", "knorm", "--lengths", "800", "760"]
    assert main([*command, "--out", str(out.with_name("short.jsonl"))]) == 0
    _, *short = map(json.loads, out.with_name("short.jsonl").read_text().splitlines())
    assert [line["key"] for line in short] == [f"hotpotqa-{length}-{i}" for i in range(2) for length in (800, 760)]
    assert all(line["truncated"] for line in short) and not any(line["truncated"] for line in lines)
    cut = [line["prompt_tokens"] for line in short]
    assert [cut[0] - cut[1], cut[2] - cut[3]] == [40, 40] and cut[0] < lines[0]["prompt_tokens"]


def test_policies_have_names_of_their_own(capsys, tmp_path):
    assert _parse_policies(()) == {} and _parse_policies(["policies/mine"]) == {"": "policies/mine"}
    assert _parse_policies(["a=x/y", "b=hub/id"]) == {"a": "x/y", "b": "hub/id"}
    (tmp_path / "odd=name").mkdir()
    assert _parse_policies([str(tmp_path / "odd=name")]) == {"": str(tmp_path / "odd=name")}
    assert _name_policies(["lkv", "knorm", "full", "lkv-h+knorm"], ["a", "b"]) == [
        "lkv@a", "lkv@b", "knorm", "full", "lkv-h+knorm@a", "lkv-h+knorm@b",
    ]  # fmt: skip
    # A method that names its policy reads that one alone.
    assert _name_policies(["lkv@b", "lkv", "knorm"], ["a", "b"]) == ["lkv@b", "lkv@a", "knorm"]
    for names, advice in (([""], "--policy b=PATH"), (["a"], "--policy b=PATH")):
        with pytest.raises(LkvError, match=f"'lkv@b' names a policy that is not there; give it as {advice}"):
            _name_policies(["lkv@b"], names)
    for given in (["a=x", "y"], ["a=x", "a=y"], ["a+b=x", "c=y"]):
        command = ["eval", "ruler", "--policy", *given, "--out", str(tmp_path / "x.jsonl")]
        assert main(command) == 2
        assert "several policies need different names" in (error := capsys.readouterr().err) or "use another" in error


def test_ladder_and_preset_stand_for_retentions(tmp_path, capsys):
    base = ["eval", "ruler", "--out", str(tmp_path / "x.jsonl")]
    assert parse_arguments([*base, "--ladder"]).retentions == (0.5, 0.25, 0.125, 0.0625)
    assert parse_arguments(base).retentions == (0.15,)
    # The leaderboard states compression ratios.
    evicted = [round(1 - kept, 2) for kept in parse_arguments([*base, "--preset", "kvpress"]).retentions]
    assert evicted == [0.1, 0.25, 0.5, 0.75, 0.9]


@pytest.mark.slow
def test_ruler_at_two_lengths(model_folder, tmp_path):
    out = tmp_path / "out.jsonl"
    command = ["eval", "ruler", "--data", str(tmp_path), "--tasks", "niah_single_1", "--lengths", "1400", "1500"]
    command += ["--samples", "1", "--seed", "3", "--model", str(model_folder), "--methods", "keydiff"]
    command += ["--out", str(out)]
    assert main(command) == 0
    header, *lines = map(json.loads, out.read_text().splitlines())
    keys = [f"niah_single_1-{length}-0" for length in (1400, 1500)]
    assert [line["key"] for line in lines] == keys and header["seed"] == 3
    for line in lines:
        assert line["prompt_tokens"] < line["length"] and not line["truncated"]
        assert [row["method"] for row in line["rows"]] == ["full", "keydiff"]


@pytest.mark.parametrize(
    ("suite", "change", "message"),
    [
        ("ruler", ["--lengths", "1500", "4096"], "--lengths has 4096, but"),
        ("ruler", ["--methods", "duo"], "give --pattern"),
        ("ruler", ["--device", "nowhere"], "cannot be put on the device 'nowhere'"),
        ("ruler", ["--tasks", "vt", "niah_multivalue"], "name a text file or such a folder with --haystack"),
        ("ruler", ["--haystack", "nowhere"], "nowhere does not exist; give --haystack a text file"),
        ("ruler", ["--methods", "lkv"], "there is no policy for this model"),
        ("ruler", ["--methods", "duo", "--pattern", "nowhere.txt"], "nowhere.txt does not exist"),
        ("longbench", ["--data", "nowhere", "--tasks", "qasper"], "nowhere"),
    ],
)
def test_mistakes_are_one_sentence(model_folder, tmp_path, capsys, suite, change, message):
    command = ["eval", suite, "--data", str(tmp_path), "--tasks", "niah_single_1" if suite == "ruler" else "hotpotqa"]
    command += ["--samples", "1", "--methods", "knorm", "--model", str(model_folder)]
    command += ["--lengths", "1500"] if suite == "ruler" else []
    assert main([*command, "--out", str(tmp_path / "x.jsonl"), *change]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error and error.startswith("lkv: ")
    assert not (tmp_path / "x.jsonl").exists()
