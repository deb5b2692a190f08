"""The stages of a training, and which settings fit a model."""

import json
import os
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from lkv.errors import TrainingError, UnsupportedModelError
from lkv.hf.spec import inspect_model
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.training.checkpoint import initialize_from, save_checkpoint
from lkv.training.config import PRESETS, check_positions, fit_to_positions
from lkv.training.loop import make_optimizer
from lkv.training.processes import select_device
from lkv.training.train_policy import build, prepare, resolve_config, train_policy
from tests.commands import main
from tests.conftest import save_model, tiny_llama
from tests.families import build as build_family

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_warm_start(monkeypatch):
    """Few steps for the budgets: tests/training/test_warm_start.py checks what all of them reach."""
    monkeypatch.setattr("lkv.training.warm_start._HEAD_UPDATES", 20)


def test_the_stages_of_a_training_one_by_one(tmp_path, data_folder):
    model, out = save_model(tmp_path / "model"), tmp_path / "out"
    weights = (model / "model.safetensors").rename(tmp_path / "weights")
    overrides = {
        "steps": 1,
        "batch": 2,
        "min_tokens": 60,
        "max_tokens": 120,
        "validation_samples": 1,
        "warmup_contexts": 2,
    }
    setup = prepare("paper-cpu", overrides, str(model), data_folder, out)
    assert setup.config.steps == 1 and setup.shape.layers == 3
    weights.rename(model / "model.safetensors")  # which nothing has read so far
    before = build(setup).policy.tokens.output.detach().clone()
    policy = train_policy(prepare("paper-cpu", overrides, str(model), data_folder, out))
    assert not torch.equal(policy.tokens.output, before)
    card = Policy.from_pretrained(out / "policy").card
    assert card["data_digest"] == setup.data.digest and card["model"] == "model"  # not where it is on this machine
    with pytest.raises(TrainingError, match=r"other settings \(lr "):
        prepare("paper-cpu", overrides | {"lr": 0.5}, str(model), data_folder, out)


@pytest.mark.parametrize("positions", [512, 2048, 8192, 131_072])
@pytest.mark.parametrize("preset", PRESETS)
def test_settings_without_a_preset_fit_any_model(positions, preset):
    config = fit_to_positions(PRESETS[preset], positions)
    check_positions(config, positions)
    assert config.min_tokens <= config.max_tokens
    if positions == 131_072:
        assert config == PRESETS[preset]


def test_the_default_is_the_better_recipe_on_either_device():
    chosen = [resolve_config(None, {}, 131_072, torch.device(device)) for device in ("cuda", "cuda:1", "cpu", "mps")]
    assert chosen == [PRESETS["gpu"], PRESETS["gpu"], PRESETS["cpu"], PRESETS["cpu"]]
    for config in chosen:
        assert (config.key, config.attention, config.position) == ("unrotated", "learned", True)
        assert config.warmup_contexts and config.retention_low < 0.15 < config.retention_high


def test_lengths_beyond_the_positions_are_refused():
    config = resolve_config(None, {}, 8192, CPU)
    assert config.max_tokens + config.max_continuation <= 8192
    assert resolve_config(None, {"max_tokens": 100}, 512, CPU).min_tokens == 50
    for preset, chosen in (("paper", {}), (None, {"max_tokens": 8100}), ("cpu", {"max_continuation": 512})):
        with pytest.raises(TrainingError, match="are more than the 8,192 positions of this model"):
            resolve_config(preset, chosen, 8192, CPU)


def test_the_default_preset_is_that_of_the_device(tmp_path, data_folder, monkeypatch):
    model = str(save_model(tmp_path / "model"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as with --device cpu beside a GPU
    config = prepare(None, {"retention_high": 0.4}, model, data_folder, tmp_path / "out").config
    assert (config.retention_low, config.retention_high, config.dtype) == (0.03, 0.4, "float32")
    with pytest.raises(TrainingError, match=r"retention_low is 0\.6 and retention_high 0\.5"):
        prepare(None, {"retention_low": 0.6}, "no/such", data_folder, tmp_path / "other")


def test_each_process_of_a_machine_takes_its_own_device(monkeypatch):
    for name in ("ACCELERATE_TORCH_DEVICE", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    state = SimpleNamespace(device=torch.device("cuda", 3))
    monkeypatch.setattr("lkv.training.processes.distributed_state", lambda *_: state)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    select_device("cuda")
    assert not {"ACCELERATE_TORCH_DEVICE", "ACCELERATE_USE_CPU"} & os.environ.keys()
    with pytest.raises(TrainingError, match=r"8 processes would share the device 'cuda:3'; give --device cuda, "):
        select_device("cuda:3")
    with pytest.raises(TrainingError, match=r"cannot train on the device 'mps'; give --device cuda or cpu, "):
        select_device("mps")
    select_device("cpu")  # with gloo instead of NCCL
    assert os.environ["ACCELERATE_USE_CPU"] == "true" and "ACCELERATE_TORCH_DEVICE" not in os.environ
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    select_device("meta")
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "meta"


def train(model, data, out, *more):
    return main(["train", "--model", str(model), "--data", str(data), "--out", str(out), *more])


def test_settings_come_from_a_file_and_options_win(tmp_path, data_folder, capsys):
    model = save_model(tmp_path / "model")
    file = tmp_path / "run.toml"
    file.write_text(
        "preset = 'cpu'\nsteps = 9\nmax_tokens = 120\nmin_tokens = 60\nbatch = 2\nbeta = 0.25\nposition = true\n"
        "checkpoint_every = 1\nmax_continuation = 60\nvalidation_samples = 2\nwarmup_contexts = 2\ndtype = 'float32'\n"
    )
    assert train(model, data_folder, tmp_path / "out", "--config", str(file), "--steps", "2", "--no-position") == 0
    said = json.loads((tmp_path / "out" / "policy" / "config.json").read_text())["card"]["training"]
    assert (said["steps"], said["beta"], said["position"], said["lr"]) == (2, 0.25, False, PRESETS["cpu"].lr)
    told = capsys.readouterr().err
    assert "2 steps of 2 contexts in 1 process, 60 to 120 tokens each; R drawn from 0.03 to 0.5" in told
    assert re.search(r"4 contexts, about [1-9]\d\d tokens", told) and re.search(r"about \d+ s in all", told)
    assert "squad: squad_train_subset.jsonl.gz" in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes = 3", "there is no setting 'stpes'; did you mean 'steps'?"),
        ("steps = ", "cannot be read as TOML"),
        ("preset = 'big'", "preset is 'big', but must be 'cpu', 'finish', 'gpu', 'paper'"),
        ("steps = 2.5", "steps is 2.5, but must be a valid integer"),
        ("dtype = 'int8'", "dtype is 'int8', but must be 'float32', 'bfloat16' or 'float16'"),
        ("position = 1", "position is 1, but must be a valid boolean"),
        ("lr = nan", "lr is nan, but must be a finite number"),
    ],
)
def test_a_file_of_settings_that_cannot_be_is_named_before_the_model_loads(tmp_path, capsys, text, message):
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert train("no/such", tmp_path, tmp_path / "out", "--config", str(file)) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_lengths_are_checked_against_the_model_before_its_weights_load(tmp_path, data_folder, capsys):
    model = save_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"not read")
    assert train(model, data_folder, tmp_path / "out", "--preset", "paper") == 2
    assert "are more than the 512 positions of this model" in capsys.readouterr().err


def test_a_policy_that_cannot_be_started_from_is_refused_before_the_model_loads(tmp_path, data_folder):
    model, other = save_model(tmp_path / "model"), tmp_path / "other"
    (model / "model.safetensors").write_bytes(b"not read")
    Policy(inspect_model(tiny_llama()), inputs=ScorerInputs("unrotated")).save_pretrained(other)
    settings = {"min_tokens": 60, "max_tokens": 120}
    with pytest.raises(TrainingError, match="does not hold the parameters of a policy with these inputs"):
        prepare("paper-cpu", settings, str(model), data_folder, tmp_path / "out", init=other)
    assert prepare("paper-cpu", settings | {"key": "unrotated"}, str(model), data_folder, tmp_path / "out", init=other)


def test_a_run_to_start_from_gives_the_card_of_all_its_stages(tmp_path):
    card = {"model": "tiny", "data": {"prose": "texts"}, "trained_tokens": 4000, "started_from": {"step": 3}}
    config, policy = PRESETS["finish"], Policy(inspect_model(tiny_llama()), card | {"progress": {"stage": 3}})
    save_checkpoint(tmp_path, 5, config, policy, make_optimizer(policy, config))
    assert initialize_from(Policy(policy.spec), tmp_path) == card | {"step": 5, "training": asdict(config)}


def test_a_training_into_the_folder_of_a_policy_is_refused(tmp_path, data_folder):
    """Given that folder, every command takes the policy in it, and not the trained one in the folder policy below."""
    Policy(inspect_model(tiny_llama())).save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match=r"already holds a policy; give another --out"):
        prepare("paper-cpu", {}, "no/such", data_folder, tmp_path, init=tmp_path)
    (tmp_path / "run").mkdir()
    Policy(inspect_model(tiny_llama())).save_pretrained(tmp_path / "run" / "policy")
    with pytest.raises(TrainingError, match=r"policy already holds a policy; give another --out, or delete it"):
        prepare("paper-cpu", {}, "no/such", data_folder, tmp_path / "run")


def test_queries_that_are_changed_after_rope_are_refused_for_expected_attention(tmp_path, data_folder):
    saved = save_model(tmp_path / "model")
    model = build_family("HunYuanDenseV1", torch.float32, vocab_size=300)
    for weight in model.parameters():
        if weight.dim() == 1:  # of norms, those of q and k among them
            torch.nn.init.uniform_(weight, 0.2, 2.2)
    model.save_pretrained(saved)
    setup = prepare(
        "cpu", {"min_tokens": 60, "max_tokens": 120, "validation_samples": 1}, str(saved), data_folder, tmp_path / "out"
    )
    with pytest.raises(UnsupportedModelError, match="in a way that `lkv train --attention learned` cannot undo"):
        build(setup)
    assert build(replace(setup, config=replace(setup.config, attention="none", key="cached")))
