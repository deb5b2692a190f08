"""How long a training takes, told before it is begun."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lkv.commands.main import main
from lkv.config import PRESETS, TrainingConfig, replace
from lkv.training import estimate
from tests.conftest import save_model, tiny_llama


def test_operations_are_those_that_pytorch_counts():
    """The context once forwards; the continuation twice forwards, and backwards without gradients of weights."""
    model = tiny_llama(dtype=torch.float32, hidden_size=128, intermediate_size=384, vocab_size=500, head_dim=32)
    model.set_attn_implementation("eager")
    model.requires_grad_(False)
    config = TrainingConfig(steps=3, batch=2, continuations=2, max_continuation=20, min_tokens=40, max_tokens=40)
    with FlopCounterMode(display=False) as reading:
        model.model(torch.zeros(1, 40, dtype=torch.long))
    with FlopCounterMode(display=False) as twice:
        embedded = model.get_input_embeddings()(torch.zeros(2, 20, dtype=torch.long)).requires_grad_()
        model(inputs_embeds=embedded).logits.sum().backward()
    counted = 6 * (reading.get_total_flops() + 1.5 * twice.get_total_flops())
    assert estimate.training_operations(model, config) == pytest.approx(counted, rel=0.1)


def test_time_grows_with_the_training_and_shrinks_with_the_machine(model, monkeypatch):
    monkeypatch.setattr(estimate, "operations_a_second", lambda model, dtype: 1e6)
    config = PRESETS["cpu"]
    seconds = estimate.training_operations(model, config) / 1e6
    assert estimate.training_time(model, config) == estimate.in_words(seconds)
    longer = replace(config, steps=4 * config.steps)
    assert estimate.training_operations(model, longer) == pytest.approx(4e6 * seconds)


def test_a_product_is_timed(model):
    assert 1e6 < estimate.operations_a_second(model, torch.float32) < 1e16


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (3, "about 1 minute"),
        (400, "about 7 minutes"),
        (5300, "about 88 minutes"),
        (5500, "about 2 hours"),
        (90_000, "about 25 hours"),
        (400_000_000, "about 4,630 days"),
    ],
)
def test_durations_in_words(seconds, words):
    assert estimate.in_words(seconds) == words


def test_a_model_without_a_policy_is_told_what_there_is_for_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(estimate, "training_time", lambda model, config: f"about {config.steps} minutes")
    folder = save_model(tmp_path / "tiny")
    assert main(["policies", "--model", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"No policy is shipped for {folder} (LlamaForCausalLM, 3 layers of 2 KV heads)." in said
    assert "these need none: snapkv, pyramidkv" in said
    command = f"`lkv train --preset cpu --model {folder} --data FOLDER --out FOLDER`"
    assert f"{command}, about 200 minutes on this machine as it is now (about 1000 minutes with --preset paper)" in said


def test_a_model_that_cannot_be_loaded_is_one_sentence(capsys):
    assert main(["policies", "--model", "no/such/model"]) == 2
    assert "lkv: no model could be loaded from 'no/such/model'" in capsys.readouterr().err
