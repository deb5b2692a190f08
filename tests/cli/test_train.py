"""lkv train: a policy that other commands use, a second stage, resuming, trackers."""

import json
import shutil

import pytest
import torch

from lkv.policy.policy import Policy
from lkv.training.train_policy import prepare, train_policy
from tests.commands import main
from tests.conftest import save_model

SMALL = tuple("--steps 4 --min-tokens 60 --max-tokens 120 --batch 2 --warmup-contexts 2 --validation-samples 2".split())


@pytest.fixture(autouse=True)
def short_warm_start(monkeypatch):
    """Few steps for the budgets: tests/training/test_warm_start.py checks what all of them reach."""
    monkeypatch.setattr("lkv.training.warm_start._HEAD_UPDATES", 20)


@pytest.fixture
def model_folder(tmp_path):
    """A tiny random model and a byte-level tokenizer, saved as a user would have them."""
    return save_model(tmp_path / "model")


@pytest.fixture
def train(model_folder):
    """Run a short training, and return the exit status."""
    base = ["train", "--preset", "cpu", "--model", str(model_folder), *SMALL]
    return lambda data, out, *more: main([*base, "--data", str(data), "--out", str(out), *more])


def test_train_writes_a_policy_that_asks(model_folder, train, data_folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    assert train(data_folder, out) == 0
    policy = Policy.from_pretrained(out / "policy")
    assert policy.card["training"]["steps"] == 4
    assert set(policy.card["data"]) == {"squad", "multihop", "prose", "code", "python", "facts"}
    rows = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 4 and rows[-1]["validation_kl"] >= 0
    text = tmp_path / "text.txt"
    text.write_text("a few words of text " * 5)
    command = ["ask", str(text), "why?", "--model", str(model_folder), "--policy", str(out / "policy")]
    assert main([*command, "--max-new-tokens", "3", "--retention", "0.5"]) == 0
    assert main(["inspect", str(out / "policy"), "--figure", str(tmp_path / "budgets.png")]) == 0
    assert (tmp_path / "budgets.png").read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert "3 layers of 2 KV heads" in output and "texts of up to 120 tokens, at R 0.03 to 0.5" in output
    assert main(["inspect", str(out / "policy"), "--json", "--retention", "0.3"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["card"] == policy.card and output["shares"] == policy.inference_ratios(0.3).tolist()
    for card in ({"fidelity": 3}, {"training": {"steps": 1}}, {"trained_tokens": "many"}, {"hub": 1}):
        policy.card = card
        policy.save_pretrained(tmp_path / "odd")
        assert main(["inspect", str(tmp_path / "odd")]) == 0
        assert json.dumps(card) in capsys.readouterr().out
    # Another run in the same folder with other settings is refused before its model is loaded; the policy stays.
    monkeypatch.setattr("lkv.training.train_policy.place_model", None)
    assert train(data_folder, out, "--lr", "0.5") == 2
    assert "other settings (lr " in capsys.readouterr().err


def test_trackers_are_given_what_the_curve_holds(model_folder, train, data_folder, tmp_path, capsys):
    from accelerate.tracking import GeneralTracker, on_main_process

    class Recorder(GeneralTracker):
        name, requires_logging_directory, tracker = "recorder", False, None

        def __init__(self):
            super().__init__()
            self.rows, self.ended = [], 0

        @on_main_process
        def log(self, values, step=None, **kwargs):
            self.rows.append((step, values))

        def finish(self):
            self.ended += 1

    tracker = Recorder()
    overrides = {"steps": 2, "min_tokens": 60, "max_tokens": 120, "batch": 2}
    overrides |= {"warmup_contexts": 2, "validation_samples": 1}
    train_policy(prepare("cpu", overrides, str(model_folder), data_folder, tmp_path / "out", trackers=[tracker]))
    curve = [json.loads(line) for line in (tmp_path / "out" / "curve.jsonl").read_text().splitlines()]
    assert [step for step, values in tracker.rows if "train_kl" in values] == [1, 2] and tracker.ended == 1
    for name in ("validation_kl", "validation_agreement"):
        assert [(step, values[name]) for step, values in tracker.rows if name in values] == [(2, curve[-1][name])]
    assert train(data_folder, tmp_path / "none", "--track", "nowhere")
    assert "there is no tracker 'nowhere' here" in capsys.readouterr().err


@pytest.mark.slow
def test_a_second_stage_starts_from_the_weights_of_the_first(train, data_folder, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(data_folder, first) == 0
    more = ("--max-tokens", "110", "--lr", "1e-9")
    assert train(data_folder, second, *more, "--init", str(first)) == 0
    one, two = (Policy.from_pretrained(run / "policy") for run in (first, second))
    assert two.card["started_from"]["step"] == 4
    assert two.card["training"]["max_tokens"] == 110 and two.trained_tokens == one.trained_tokens == 120
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], tensor, atol=1e-4, rtol=1e-3)
    # The same command without --init finds nothing to do, and the card still tells where the run began.
    assert train(data_folder, second, *more) == 0
    assert Policy.from_pretrained(second / "policy").card == two.card
    assert train(data_folder, tmp_path / "third", "--init", str(tmp_path)) == 2
    assert "give the folder of a training run" in capsys.readouterr().err


def test_a_run_goes_on_with_its_own_data_alone(train, data_folder, tmp_path, capsys, monkeypatch):
    out, other = tmp_path / "out", tmp_path / "other"
    assert train(data_folder, out) == 0
    before = (out / "policy" / "config.json").read_bytes()
    shutil.copytree(data_folder, other)
    assert train(other, out) == 0  # the same files elsewhere
    next(other.glob("*.txt")).write_text("other words of the same file. " * 900)
    capsys.readouterr()
    monkeypatch.setattr("lkv.training.train_policy.place_model", None)  # before the model is loaded
    assert train(other, out) == 2
    assert "belongs to a run on other data; give the same --data to resume it" in capsys.readouterr().err
    assert train(data_folder, data_folder / "runs" / "mine") == 2
    assert "would be read as data; give an --out elsewhere" in capsys.readouterr().err
    assert (out / "policy" / "config.json").read_bytes() == before and not (data_folder / "runs" / "mine").exists()


def test_what_cannot_be_trained_is_named(train, data_folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    for data, options, message in (
        (data_folder, ("--device", "nowhere"), "cannot be put on the device 'nowhere'"),
        (tmp_path / "none", (), "there is no data folder"),
        (tmp_path / "empty", (), "has no data to train on"),
    ):
        assert train(data, out, *options) == 2 and message in capsys.readouterr().err
        assert not options or not out.exists()
