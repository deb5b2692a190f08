"""What a training costs and which settings fit a model: against counted weights and operations."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config

from experiments.profile.random_models import read_config
from lkv.errors import UnsupportedModelError
from lkv.hf.loading import load_model
from lkv.hf.shapes import Shape
from lkv.training.config import PRESETS
from lkv.training.cost import context_flops, estimate, mean_length, measure_speed
from lkv.training.processes import split_by_cost
from lkv.utils.durations import format_duration
from tests.conftest import save_model, tiny_llama


@pytest.mark.parametrize("seen", [0, 40])
def test_operations_are_those_that_pytorch_counts(seen):
    model = tiny_llama(dtype=torch.float32)
    model.set_attn_implementation("eager")
    shape, ids = Shape.of(model.config), torch.randint(3, 60, (1, 24))
    cache = model(torch.randint(3, 60, (1, seen)), use_cache=True).past_key_values if seen else None
    with FlopCounterMode(display=False) as counted:
        model(ids, past_key_values=cache)
    # Eager attention computes the pairs that it then masks.
    masked = 4 * shape.layers * shape.heads * shape.head_dim * (24 * 24 - 24 * 25 / 2)
    norms = 2 * shape.layers * 2 * shape.hidden * 24  # weights that multiply without a matrix product
    expected = shape.forward_flops(24, seen, logits=24) + masked - norms
    # Older versions of transformers make the angles of the rotation by a matrix product.
    assert counted.get_total_flops() == pytest.approx(expected, rel=2e-4)


def test_operations_of_a_training_by_hand():
    shape = Shape.of(read_config("llama-3.1-8b"))
    config = replace(PRESETS["paper"], validation_samples=0)
    one = estimate(shape, config)
    # A prompt of the mean length, one continuation of 120 tokens read once and three times.
    tokens = mean_length(2000, 16_000)
    assert tokens == pytest.approx(14_000 / 2.0794415, rel=1e-6)
    scores = 6 * 32 * 8 * tokens * (2 * 128**2 + 128)
    continuation = shape.forward_flops(120, tokens, 120)
    steps = 64_000 * (shape.forward_flops(tokens) + 4 * continuation + scores)
    assert one.contexts == 64_000 and one.flops == pytest.approx(steps)
    validations = 10 * 16 * (shape.forward_flops(tokens) + 2 * continuation)
    assert estimate(shape, PRESETS["paper"]).flops == pytest.approx(steps + validations)
    assert [format_duration(s) for s in (30, 600, 36_000)] == ["about 30 s", "about 10 minutes", "about 10.0 hours"]


def test_the_speed_is_measured_and_changes_nothing(tmp_path):
    model, _ = load_model(str(save_model(tmp_path)), torch.float32)
    config = replace(PRESETS["cpu"], max_tokens=64, min_tokens=32, max_continuation=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert 0 < measure_speed(model, config) < 1e12
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_configuration_without_a_field_is_named():
    with pytest.raises(UnsupportedModelError, match="has no 'intermediate_size'"):
        Shape.of(GPT2Config())


@given(st.lists(st.floats(0.1, 100), max_size=24), st.integers(1, 8))
def test_a_step_is_shared_out_by_cost(costs, processes):
    shared = split_by_cost(costs, processes)
    assert sorted(item for items in shared for item in items) == list(range(len(costs)))
    assert [len(items) for items in shared] == [len(range(p, len(costs), processes)) for p in range(processes)]
    # Who comes last has at most one item more to do than the least busy of those that could have taken it.
    sums = [sum(costs[item] for item in items) for items in shared]
    assert max(sums, default=0) - min(sums, default=0) <= max(costs, default=0) * (1 + 1e-9)


def test_operations_of_contexts_with_their_continuations():
    shape = Shape.of(tiny_llama().config)
    once = context_flops(shape, 700, [30, 30]) - context_flops(shape, 700, [30])
    assert once == 4 * shape.forward_flops(30, seen=700, logits=30)
    whole = context_flops(shape, 700, [30, 30], whole=True) - context_flops(shape, 700, [30], whole=True)
    assert whole == pytest.approx(5 * shape.forward_flops(730, logits=30))  # layers are computed again
    assert context_flops(shape, 700, []) == 0
