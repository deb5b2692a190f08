"""What a training costs and which settings fit a model: against counted weights and operations."""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config

from lkv.cli.main import main
from lkv.config import PRESETS, check_positions, fit_to_positions, replace
from lkv.errors import TrainingError, UnsupportedModelError
from lkv.evaluation.profiling.random_models import CONFIGS, read_config
from lkv.models.loading import load_model
from lkv.models.shapes import Shape
from lkv.training.cost import Speed, context_flops, estimate, estimate_seconds, format_duration, mean_length
from lkv.training.pipeline import measure_speed, resolve_config
from lkv.training.processes import split_by_cost
from tests.conftest import save_model, tiny_llama
from tests.training.test_data import folder  # noqa: F401


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_that_transformers_makes(name):
    config = read_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert Shape.of(config).parameters == sum(p.numel() for p in model.parameters())


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


def test_operations_and_seconds_of_a_training_by_hand():
    shape = Shape.of(read_config("llama-3.1-8b"))
    config = replace(PRESETS["paper"], validation_samples=0)
    one = estimate(shape, config)
    # A prompt of the mean length, one continuation of 120 tokens read once and three times.
    tokens = mean_length(2000, 16_000)
    assert tokens == pytest.approx(14_000 / 2.0794415, rel=1e-6)
    scores = 6 * 32 * 8 * tokens * (2 * 128**2 + 128)
    continuation = shape.forward_flops(120, tokens, 120)
    steps = 64_000 * (shape.forward_flops(tokens) + 4 * continuation + scores)
    # Before the first step 8 texts of 2,000 tokens are measured, 16 read twice by KVzip and LKV-T fitted four times.
    read, replay = shape.forward_flops(2000), shape.forward_flops(2000, 2000)
    assert one.contexts == 64_000 and one.flops == pytest.approx(steps + 8 * read)
    assert estimate(shape, config, is_initialized=True).flops == pytest.approx(steps)
    warm = estimate(shape, replace(config, warmup_contexts=16, attention="learned"))
    assert warm.calibration_flops == pytest.approx(18 * read) and one.kvzip_flops == 0
    assert warm.kvzip_flops == pytest.approx(16 * (read + replay + 4 * scores * 2000 / tokens))
    validated = estimate(shape, replace(config, validation_samples=16, steps=1001))
    assert validated.validations == 11
    assert validated.validation_flops == pytest.approx(16 * (shape.forward_flops(tokens) + 2 * continuation))
    seconds = estimate_seconds(warm, Speed(1e12, 2e12, 4e12), processes=8)
    assert seconds == pytest.approx(18 * read / 1e12 + warm.kvzip_flops / 16e12 + steps / 32e12)
    assert [format_duration(s) for s in (30, 600, 36_000)] == ["about 30 s", "about 10 minutes", "about 10.0 hours"]


def test_the_speed_is_measured_and_changes_nothing(tmp_path):
    model, tokenizer = load_model(str(save_model(tmp_path)), torch.float32)
    config = replace(PRESETS["cpu"], max_tokens=64, min_tokens=32, max_continuation=16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(0 < speed < 1e12 for speed in measure_speed(model, tokenizer, config))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_configuration_without_a_field_is_named():
    with pytest.raises(UnsupportedModelError, match="has no 'intermediate_size'"):
        Shape.of(GPT2Config())


@pytest.mark.parametrize("positions", [512, 2048, 8192, 131_072])
@pytest.mark.parametrize("preset", PRESETS)
def test_settings_without_a_preset_fit_any_model(positions, preset):
    config = fit_to_positions(PRESETS[preset], positions)
    check_positions(config, positions)
    assert config.min_tokens <= config.max_tokens
    if positions == 131_072:
        assert config == PRESETS[preset]


def test_lengths_beyond_the_positions_are_refused():
    assert resolve_config(None, {}, 8192).max_tokens + resolve_config(None, {}, 8192).max_continuation <= 8192
    assert resolve_config(None, {"max_tokens": 100}, 512).min_tokens == 50
    for preset, chosen in (("paper", {}), (None, {"max_tokens": 8100}), ("cpu", {"max_continuation": 512})):
        with pytest.raises(TrainingError, match="are more than the 8,192 positions of this model"):
            resolve_config(preset, chosen, 8192)


def train(model, data, out, *more):
    return main(["train", "--model", str(model), "--data", str(data), "--out", str(out), *more])


def test_settings_come_from_a_file_and_options_win(tmp_path, folder, capsys):  # noqa: F811
    model = save_model(tmp_path / "model")
    file = tmp_path / "run.toml"
    file.write_text(
        "preset = 'cpu'\nsteps = 9\nmax_tokens = 120\nmin_tokens = 60\nbatch = 2\nbeta = 0.25\nposition = true\n"
        "checkpoint_every = 1\nmax_continuation = 60\nvalidation_samples = 2\ndtype = 'float32'\n"
    )
    assert train(model, folder, tmp_path / "out", "--config", str(file), "--steps", "2", "--no-position") == 0
    said = json.loads((tmp_path / "out" / "policy" / "config.json").read_text())["card"]["training"]
    assert (said["steps"], said["beta"], said["position"], said["lr"]) == (2, 0.25, False, PRESETS["cpu"].lr)
    told = capsys.readouterr().err
    assert "2 steps of 2 contexts in 1 process, 60 to 120 tokens each; R drawn from 0.03 to 0.5" in told
    assert re.search(r"4 contexts, about [1-9]\d\d tokens", told) and re.search(r"about \d+ s in all", told)
    assert re.search(r"about \d+ s left, at the pace of the first steps", told)
    assert "squad: squad_train_subset.jsonl.gz" in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes = 3", "there is no setting 'stpes'; did you mean 'steps'?"),
        ("steps = ", "cannot be read as TOML"),
        ("preset = 'big'", "preset is 'big', but must be 'cpu', 'finish', 'paper'"),
        ("steps = 2.5", "steps is 2.5, but must be a whole number of at least 1"),
        ("dtype = 'int8'", "dtype is 'int8', but must be 'float32', 'bfloat16' or 'float16'"),
        ("position = 1", "position is 1, but must be true or false"),
        ("lr = nan", "lr is nan, but must be a number"),
    ],
)
def test_a_file_of_settings_that_cannot_be_is_named_before_the_model_loads(tmp_path, capsys, text, message):
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert train("no/such", tmp_path, tmp_path / "out", "--config", str(file)) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_lengths_are_checked_against_the_model_before_its_weights_load(tmp_path, folder, capsys):  # noqa: F811
    model = save_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"not read")
    assert train(model, folder, tmp_path / "out", "--preset", "paper") == 2
    assert "are more than the 512 positions of this model" in capsys.readouterr().err


def test_weights_go_straight_to_their_device(tmp_path, monkeypatch):
    """Eight processes of a node would else hold eight copies of the weights on the CPU first."""
    saved, asked = save_model(tmp_path / "model"), []
    load = AutoModelForCausalLM.from_pretrained

    def watched(path, device_map=None, **options):
        asked.append(device_map)
        return load(path, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    for device in (None, torch.device("cpu"), torch.device("cuda", 3)):
        load_model(str(saved), torch.float32, device=device)
    assert asked == [None, None, {"": torch.device("cuda", 3)}]


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
    assert whole == pytest.approx(4 * shape.forward_flops(730, logits=30))
    assert context_flops(shape, 700, []) == 0
