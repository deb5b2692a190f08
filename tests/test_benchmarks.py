"""Benchmarks of several models: files of their own, lengths with numbers of their own, and what the README draws."""

import json
import random
import sys

import pytest
import torch

from benchmarks import heldout, length, readme
from benchmarks.common import RESULTS, Subject, per_length
from lkv.errors import LkvError
from lkv.host.attention import attach
from lkv.models import load_model
from lkv.policy import Policy
from tests.conftest import save_model


def test_lengths_have_one_number_or_one_each():
    assert per_length([10, 20], [3]) == {10: 3, 20: 3}
    assert per_length([10, 20], [3, 1]) == {10: 3, 20: 1}
    with pytest.raises(LkvError, match="2 numbers for 3 lengths; give one, or one for each"):
        per_length([1, 2, 3], [1, 2])


def test_each_model_has_result_files_of_its_own():
    place = lambda name: Subject(None, None, None, name).results("length")  # noqa: E731
    assert place("HuggingFaceTB/SmolLM2-135M-Instruct") == RESULTS / "length.json"
    assert place("Qwen/Qwen2.5-Coder-0.5B-Instruct") == RESULTS / "length-qwen2.5-coder-0.5b-instruct.json"


class Held:
    """Contexts as they are held out, without the data."""

    def __init__(self, *_):
        pass

    def case(self, task, number, tokens):
        rng = random.Random(f"{task}-{number}-{tokens}")
        return [rng.randint(3, 200) for _ in range(tokens)], [([rng.randint(3, 200) for _ in range(8)], 4)]


def test_another_model_is_measured_under_the_name_of_its_hub(tmp_path, monkeypatch, capsys):
    folder = save_model(tmp_path / "converted-1a2b", num_hidden_layers=2)
    spec = attach(load_model(str(folder))[0]).spec
    torch.manual_seed(0)
    Policy(spec, {"hub": ["owner/Tiny-Model"]}).save_pretrained(tmp_path / "policy")
    monkeypatch.setattr(length, "HeldOut", Held)
    arguments = ["--data", "nowhere", "--model", str(folder), "--policy", str(tmp_path / "policy")]
    arguments += [
        "--tokens",
        "40",
        "60",
        "--contexts",
        "2",
        "1",
        "--methods",
        "lkv",
        "knorm",
        "--retention",
        "0.5",
        "0.2",
    ]
    monkeypatch.setattr(sys, "argv", ["length", *arguments, "--out", str(tmp_path / "length-tiny-model.json")])
    length.main()
    document = json.loads((tmp_path / "length-tiny-model.json").read_text())
    rows = [row for row in document["rows"] if row["task"] == "all"]
    assert {row["model"] for row in rows} == {"owner/Tiny-Model"} and {row["method"] for row in rows} == {
        "full",
        "lkv",
        "knorm",
    }
    assert {(row["tokens"], row["contexts"]) for row in rows} == {(40, 10), (60, 5)}
    assert all(row["value"] > 0 for row in rows if row["method"] == "lkv")
    assert "--model owner/Tiny-Model" in document["command"] and str(tmp_path / "conv") not in document["command"]
    assert (tmp_path / "small" / "length-tiny-model.png").is_file()

    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    drawn = "\n\n".join(readme._other("tiny-model"))
    assert readme._others() == ["tiny-model"] and drawn.startswith("### Tiny-Model\n")
    assert "length-tiny-model.png" in drawn


def test_long_contexts_are_made_of_several_texts(monkeypatch):
    words = lambda rng, count: " ".join(f"w{rng.randint(0, 99)}" for _ in range(count))  # noqa: E731
    monkeypatch.setattr(heldout, "encode", lambda tokenizer, text: text.split())
    held = heldout.HeldOut.__new__(heldout.HeldOut)
    held._build, held._tokenizer = {"code": lambda rng, tokens: (words(rng, 700), [])}, None
    rng = random.Random(0)
    own = words(rng, 900)
    long = held._after_others(own, "code", rng, 3000)
    assert long.endswith(own) and 2800 <= len(long.split()) <= 3000
    assert held._after_others(own, "code", rng, 910) == own
