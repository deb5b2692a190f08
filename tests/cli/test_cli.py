"""The command line: one clear sentence for each mistake, resume after an interruption, figures."""

import json
import shutil

import pytest
import torch

from lkv.cli.main import main
from lkv.config import PRESETS, replace
from lkv.policy.policy import Policy
from lkv.training import pipeline
from lkv.training.pipeline import train_policy
from tests.conftest import save_model
from tests.training.test_data import folder  # noqa: F401


@pytest.fixture
def model_folder(tmp_path):
    """A tiny random model and a byte-level tokenizer, saved as a user would have them."""
    return save_model(tmp_path / "model")


def arguments(model, data, out, *more):
    return ["train", "--preset", "cpu", "--model", str(model), "--data", str(data), "--out", str(out), *more]


SMALL = ("--steps", "4", "--min-tokens", "60", "--max-tokens", "120", "--batch", "2")


def test_train_writes_a_policy_that_asks(model_folder, folder, tmp_path, capsys, monkeypatch):  # noqa: F811
    out = tmp_path / "out"
    assert main(arguments(model_folder, folder, out, *SMALL)) == 0
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
    said = capsys.readouterr().out
    assert "3 layers of 2 KV heads" in said and "texts of up to 120 tokens, at R 0.03 to 0.5" in said
    assert main(["inspect", str(out / "policy"), "--json", "--retention", "0.3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["card"] == policy.card and told["shares"] == policy.inference_ratios(0.3).tolist()
    for card in ({"fidelity": 3}, {"training": {"steps": 1}}, {"trained_tokens": "many"}, {"hub": 1}):
        policy.card = card
        policy.save_pretrained(tmp_path / "odd")
        assert main(["inspect", str(tmp_path / "odd")]) == 0
        assert json.dumps(card) in capsys.readouterr().out
    # Another run in the same folder with other settings is refused before its model is loaded; the policy stays.
    monkeypatch.setattr(pipeline, "place_model", None)
    assert main(arguments(model_folder, folder, out, *SMALL, "--lr", "0.5")) == 2
    assert "other settings (lr " in capsys.readouterr().err


def test_trackers_are_given_what_the_curve_holds(model_folder, folder, tmp_path, capsys):  # noqa: F811
    from accelerate.tracking import GeneralTracker, on_main_process

    class Kept(GeneralTracker):
        name, requires_logging_directory = "kept", False

        def __init__(self):
            super().__init__()
            self.rows, self.ended = [], 0

        @property
        def tracker(self):
            return self.rows

        @on_main_process
        def log(self, values, step=None, **kwargs):
            self.rows.append((step, values))

        def finish(self):
            self.ended += 1

    tracker = Kept()
    given = {"steps": 2, "min_tokens": 60, "max_tokens": 120, "batch": 2, "validation_samples": 1}
    train_policy("cpu", given, str(model_folder), folder, tmp_path / "out", trackers=[tracker])
    curve = [json.loads(line) for line in (tmp_path / "out" / "curve.jsonl").read_text().splitlines()]
    assert [step for step, values in tracker.rows if "train_kl" in values] == [1, 2] and tracker.ended == 1
    for name in ("validation_kl", "validation_agreement"):
        assert [(step, values[name]) for step, values in tracker.rows if name in values] == [(2, curve[-1][name])]
    assert main(arguments(model_folder, folder, tmp_path / "none", *SMALL, "--track", "nowhere"))
    assert "there is no tracker 'nowhere' here" in capsys.readouterr().err


def test_a_second_stage_starts_from_the_weights_of_the_first(model_folder, folder, tmp_path, capsys):  # noqa: F811
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(arguments(model_folder, folder, first, *SMALL)) == 0
    assert (
        main(
            arguments(model_folder, folder, second, *SMALL, "--max-tokens", "110", "--init", str(first), "--lr", "1e-9")
        )
        == 0
    )
    one, two = (Policy.from_pretrained(run / "policy") for run in (first, second))
    assert two.card["started_from"]["step"] == 4
    assert two.card["training"]["max_tokens"] == 110 and two.trained_tokens == one.trained_tokens == 120
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], tensor, atol=1e-4, rtol=1e-3)
    # The same command without --init finds nothing to do, and the card still tells where the run began.
    assert main(arguments(model_folder, folder, second, *SMALL, "--max-tokens", "110", "--lr", "1e-9")) == 0
    assert Policy.from_pretrained(second / "policy").card == two.card
    assert main(arguments(model_folder, folder, tmp_path / "third", *SMALL, "--init", str(tmp_path))) == 2
    assert "give the folder of a training run" in capsys.readouterr().err


def test_a_run_goes_on_with_its_own_data_alone(model_folder, folder, tmp_path, capsys, monkeypatch):  # noqa: F811
    out, other = tmp_path / "out", tmp_path / "other"
    assert main(arguments(model_folder, folder, out, *SMALL)) == 0
    before = (out / "policy" / "config.json").read_bytes()
    shutil.copytree(folder, other)
    assert main(arguments(model_folder, other, out, *SMALL)) == 0  # the same files elsewhere
    next(other.glob("*.txt")).write_text("other words of the same file. " * 900)
    capsys.readouterr()
    monkeypatch.setattr(pipeline, "place_model", None)  # before the model is loaded
    assert main(arguments(model_folder, other, out, *SMALL)) == 2
    assert "belongs to a run on other data; give the same --data to resume it" in capsys.readouterr().err
    assert main(arguments(model_folder, folder, folder / "runs" / "mine", *SMALL)) == 2
    assert "would be read as data; give an --out elsewhere" in capsys.readouterr().err
    assert (out / "policy" / "config.json").read_bytes() == before and not (folder / "runs" / "mine").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--retention", "1.5"], "must lie in (0, 1]"),
        (["--policy", "nowhere"], "there is no policy folder 'nowhere'"),
    ],
)
def test_ask_mistakes_are_one_sentence(tmp_path, capsys, change, message):
    text = tmp_path / "text.txt"
    text.write_text("words " * 50)
    assert main(["ask", str(text), "why?", *change]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("lkv: ") and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--method", "snapvk"], "there is no method 'snapvk'"),
        (["--method", "duo"], "'duo' needs the retrieval heads of the model; give --pattern with"),
        (["--method", "duo", "--pattern", "nowhere.tsv"], "nowhere.tsv does not exist"),
        (["--method", "knorm", "--pattern", "nowhere.tsv"], "takes no --pattern"),
        ([], "no policy is shipped for this model (LlamaForCausalLM, 3 layers of 2 KV heads);"),
    ],
)
def test_methods_without_what_they_need_are_one_sentence(tmp_path, model_folder, capsys, change, message):
    text = tmp_path / "text.txt"
    text.write_text("words " * 50)
    capsys.readouterr()
    assert main(["ask", str(text), "why?", "--model", str(model_folder), *change]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lkv: ")]
    assert len(error) == 1 and message in error[0]


def test_ask_says_what_was_really_kept(tmp_path, model_folder, capsys):
    text, pattern = tmp_path / "text.txt", tmp_path / "full_attention_heads.tsv"
    text.write_text("words " * 75)
    pattern.write_text("0.9\t0.1\n" * 3)
    ask = ["ask", str(text), "why?", "--model", str(model_folder), "--max-new-tokens", "2", "--retention"]
    for retention, how, realised in [
        ("0.5", ["--method", "knorm"], 225 / 450),
        ("0.333", ["--method", "knorm"], 149 / 450),
        ("0.95", ["--method", "duo", "--pattern", str(pattern)], (3 * 450 + 3 * 384) / (6 * 450)),
        ("0.2", ["--method", "full"], 1.0),
    ]:
        assert main([*ask, retention, *how]) == 0
        asked = "1" if "full" in how else retention
        assert f"; {realised:.4f} of the KV entries kept, {asked} requested;" in capsys.readouterr().err


def test_unreadable_files_are_named(tmp_path, capsys, model_folder):
    assert main(["ask", str(tmp_path / "no.txt"), "why?"]) == 2
    assert "cannot be read as text" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert main(["ask", str(tmp_path / "binary"), "why?"]) == 2
    assert "cannot be read as text" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(arguments(model_folder, tmp_path / "empty", tmp_path / "out", *SMALL)) == 2
    assert "holds no data to train on" in capsys.readouterr().err


def test_presets_differ_where_they_should():
    paper, cpu = PRESETS["paper"], PRESETS["cpu"]
    assert (cpu.retention_start, cpu.retention_end, cpu.beta, cpu.max_grad_norm) == (0.5, 0.15, 0.5, 1.0)
    assert replace(paper, steps=5).steps == 5
