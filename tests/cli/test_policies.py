"""lkv policies for a model that has none."""

from dataclasses import replace

import pytest
import torch

from lkv.cli.main import main
from lkv.config import PRESETS
from lkv.models.shapes import Shape
from lkv.training import pipeline
from lkv.training.cost import Speed, estimate, format_duration
from tests.conftest import save_model, tiny_llama


def test_the_alternatives_for_a_model_without_a_policy_are_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "estimate_duration", lambda model, tokenizer, config: f"about {config.steps} minutes")
    folder = save_model(tmp_path / "tiny")
    assert main(["policies", "--model", str(folder)]) == 0
    output = capsys.readouterr().out
    assert f"No policy is shipped for {folder} (LlamaForCausalLM, 3 layers of 2 KV heads)." in output
    assert "snapkv, pyramidkv" in output and f"`lkv train --preset cpu --model {folder} --data" in output
    assert "about 200 minutes" in output and "about 1000 minutes with --preset paper" in output


def test_a_model_that_cannot_be_loaded_is_one_sentence(capsys):
    assert main(["policies", "--model", "no/such/model"]) == 2
    assert "lkv: no model could be loaded from 'no/such/model'" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [10, 4000])
def test_the_time_follows_from_the_speed_of_the_machine(monkeypatch, steps):
    model = tiny_llama(dtype=torch.float32, max_position_embeddings=8192)
    monkeypatch.setattr(pipeline, "measure_speed", lambda *_, **options: Speed(1e9, 1e9, 1e9))
    config = replace(PRESETS["cpu"], steps=steps)
    phrase = pipeline.estimate_duration(model, None, config)
    assert phrase == format_duration(estimate(Shape.of(model.config), config).flops / 1e9)
