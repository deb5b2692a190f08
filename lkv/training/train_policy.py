"""From settings to a finished policy: early validation, the trainer, and the time estimate."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lkv.errors import TrainingError
from lkv.hf.attention import input_device, patch_attention
from lkv.hf.loading import DEFAULT, load_config
from lkv.hf.prompt_kv import query_rotations
from lkv.hf.shapes import Shape
from lkv.policy.policy import Policy, is_policy
from lkv.policy.scorer_inputs import num_knots
from lkv.training.checkpoint import (
    CHECKPOINT,
    initialize_from,
    lock_folder,
    read_checkpoint,
    read_initial_policy,
)
from lkv.training.config import PRESETS, TrainingConfig, check_positions, fit_to_positions
from lkv.training.cost import estimate
from lkv.training.data.built_dataset import is_built
from lkv.training.datasets import Dataset, draw_sample, make_card, open_dataset, require_samples
from lkv.training.processes import place_model
from lkv.training.speed import Speed
from lkv.training.trainer import Trainer
from lkv.training.warm_start import warm_start
from lkv.utils.devices import distributed_state, is_gpu
from lkv.utils.durations import format_duration
from lkv.utils.files import check_is_not_data, check_writable_folder

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class TrainingSetup:
    """The validated inputs of a training, before any weights are loaded.

    `validation_data` is the same for every seed, so that curves of different runs compare.
    """

    config: TrainingConfig
    model_name: str
    revision: str | None
    spread: str
    shape: Shape
    data: Dataset
    validation_data: Dataset
    out: Path
    init: Path | None
    accelerator: "Accelerator"


def train_policy(setup: TrainingSetup) -> Policy:
    """Train a policy, or resume its training, and save it in the folder `policy` of the run's folder."""
    is_main = setup.accelerator.is_main_process
    with lock_folder(setup.out) if is_main else nullcontext():
        policy = build(setup).run(setup.accelerator.log)
        if setup.accelerator.trackers:
            setup.accelerator.end_training()
        if is_main:
            policy.save_pretrained(setup.out / "policy", half=True)
            print(f"the policy is in {setup.out / 'policy'}")
    return policy


def prepare(
    preset: str | None,
    overrides: dict[str, Any],
    model_name: str | None,
    data: Path,
    out: Path,
    init: Path | None = None,
    revision: str | None = None,
    trackers: Sequence[Any] = (),
    spread: str = "no",
) -> TrainingSetup:
    """Validate all settings that do not need the model's weights, and index the data.

    Args:
        preset: The settings to start from; None for those that fit device and model.
        overrides: Settings that differ from these, by name.
        model_name: Folder or hub id of the model; None for the embedded one.
        data: Folder of texts, code and data sets, or of samples that `python -m experiments.data build` wrote.
        out: Folder of the run.
        init: Folder of a policy or of a run to start from.
        revision: The model's revision on the hub.
        trackers: Accelerate's names of trackers, or trackers of its kind.
        spread: Where the model's weights are, as for `place_model`.

    Raises:
        TrainingError: For settings, folders and runs that cannot be trained.
        DataError: For data that cannot be trained on.
    """
    device = distributed_state("train", "training").device
    from accelerate import Accelerator

    _check_trackers(trackers)
    _override_config(PRESETS[preset or _default_preset(device)], overrides)  # reject invalid settings first
    if not is_built(data):
        check_is_not_data(out, data, TrainingError)
    if is_policy(out):
        raise TrainingError(
            f"{out} already holds a policy, which would be used instead of the trained one; give another --out."
        )
    check_writable_folder(out, TrainingError, "the training")
    name = model_name or DEFAULT
    shape = Shape.of(load_config(name, revision))
    config = resolve_config(preset, overrides, shape.positions, device)
    if init is not None and is_policy(init):
        read_initial_policy(init, config.inputs)
    checkpoint = read_checkpoint(out) if (out / CHECKPOINT).exists() else None
    if checkpoint:
        checkpoint.check_run(config)
    dataset = open_dataset(data, config)
    if checkpoint:
        checkpoint.check_run(config, dataset.digest)
    validation = dataset.held_out(0)
    accelerator = Accelerator(log_with=list(trackers) or None, project_dir=out)
    if trackers:
        plain = {name: value for name, value in asdict(config).items() if isinstance(value, int | float | str | bool)}
        accelerator.init_trackers("lkv", config=plain)
    return TrainingSetup(config, name, revision, spread, shape, dataset, validation, out, init, accelerator)


def _check_trackers(trackers: Sequence[Any]) -> None:
    """Raise TrainingError for the name of a tracker that is not installed."""
    from accelerate.tracking import get_available_trackers

    available = [str(kind) for kind in get_available_trackers()]
    if missing := [name for name in trackers if isinstance(name, str) and name not in available]:
        raise TrainingError(
            f"there is no tracker {missing[0]!r} here; install its package, or leave it out (here: "
            f"{', '.join(available) or 'none'})."
        )


def build(setup: TrainingSetup) -> Trainer:
    """Load the model, make the policy and its trainer, and print the plan with a time estimate.

    Raises UnsupportedModelError for expected attention in a model whose query rotation cannot be undone.
    """
    config, accelerator, shape = setup.config, setup.accelerator, setup.shape
    is_main, is_sharded, processes = accelerator.is_main_process, setup.spread == "processes", accelerator.num_processes
    is_initialized = setup.init is not None or (setup.out / CHECKPOINT).exists()
    cost = estimate(shape, config, is_initialized=is_initialized)
    if is_main:
        retention = f"R {config.retention_start:g} to {config.retention_end:g}"
        if config.retention_high:
            retention = f"R drawn from {config.retention_low:g} to {config.retention_high:g}"
        print(
            *setup.data.lines,
            f"a policy for a model of {shape.layers} layers, {shape.parameters / 1e9:.2f} billion weights, "
            f"{config.dtype}",
            f"{config.steps:,} steps of {config.batch} contexts in {processes} process{'es' if processes > 1 else ''}, "
            f"{config.min_tokens:,} to {config.max_tokens:,} tokens each; {retention}, temperature "
            f"{config.tau_start:g} to {config.tau_end:g}, learning rate {config.lr:g} to {config.lr_end:g}",
            cost,
            sep="\n",
            file=sys.stderr,
        )
    model, tokenizer = place_model(setup.model_name, getattr(torch, config.dtype), setup.revision, setup.spread)
    if config.attention == "learned":
        query_rotations(model, "`lkv train --attention learned`")
    if is_main or is_sharded:
        speed = Speed.measure(model, tokenizer, config, has_warm_start=cost.warm_start_flops > 0)
        if is_main:
            print(f"{format_duration(speed.seconds(cost, processes))} in all, as this machine is now", file=sys.stderr)
    torch.manual_seed(config.seed)
    card = make_card(model, setup.model_name, config, setup.data, config.max_tokens)
    policy = Policy(patch_attention(model).spec, card, config.inputs).to(input_device(model))
    if setup.init is not None:
        card["started_from"] = earlier_card = initialize_from(policy, setup.init)
        tokens = earlier_card.get("trained_tokens") or earlier_card.get("training", {}).get("max_tokens", 0)
        if not config.position or config.inputs.knots >= num_knots(max(1, tokens)):  # all knots are in use
            card["trained_tokens"] = max(config.max_tokens, tokens)

    samples = partial(draw_sample, setup.data, tokenizer=tokenizer, config=config)
    validation = [
        draw_sample(setup.validation_data, number, tokenizer, config) for number in range(config.validation_samples)
    ]

    def initialize() -> None:
        if setup.init is None:
            trainer.calibrate()
            if config.warmup_contexts:
                warm_start(model, tokenizer, policy, samples, config.warmup_contexts)

    trainer = Trainer(model, policy, config, samples, require_samples(validation), setup.out, initialize, is_sharded)
    return trainer


def resolve_config(
    preset: str | None, overrides: dict[str, Any], positions: int, device: torch.device
) -> TrainingConfig:
    """Return the settings of `preset`, by default one for device and model, with `overrides`. Raises TrainingError."""
    base = PRESETS[preset] if preset else fit_to_positions(PRESETS[_default_preset(device)], positions)
    config = _override_config(base, overrides)
    check_positions(config, positions)
    return config


def _default_preset(device: torch.device) -> str:
    return "gpu" if is_gpu(device) else "cpu"


def _override_config(base: TrainingConfig, overrides: dict[str, Any]) -> TrainingConfig:
    """Return `base` with `overrides`; a lower `max_tokens` alone lowers `min_tokens` too."""
    longest = overrides.get("max_tokens")
    if isinstance(longest, int) and 0 < longest < base.min_tokens and "min_tokens" not in overrides:
        overrides = {**overrides, "min_tokens": max(1, longest // 2)}
    return replace(base, **overrides)
