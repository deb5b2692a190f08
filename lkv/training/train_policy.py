"""`lkv train`: from settings to a finished policy, with early validation, calibration, a loss curve and checkpoints."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from lkv.errors import TrainingError, TrainingStoppedError
from lkv.hf.attention import input_device, patch_attention
from lkv.hf.loading import DEFAULT, load_config
from lkv.hf.prompt_kv import query_rotations
from lkv.hf.shapes import Shape
from lkv.hf.spec import evaluation_mode
from lkv.policy.policy import Policy, is_policy
from lkv.policy.scorer_inputs import num_knots
from lkv.training.checkpoint import (
    CHECKPOINT,
    append_to_curve,
    check_no_policy,
    initialize_from,
    lock_folder,
    read_checkpoint,
    read_curve,
    read_initial_policy,
    save_checkpoint,
)
from lkv.training.config import PRESETS, TrainingConfig, check_positions, fit_to_positions
from lkv.training.cost import context_flops, estimate, measure_speed
from lkv.training.data.samples import TokenizedSample
from lkv.training.datasets import Dataset, draw_sample, is_built, make_card, open_dataset, require_samples
from lkv.training.distillation import check_batching
from lkv.training.heldout import measure_policy, read_text
from lkv.training.loop import Batch, StepBudget, TrainingLoop
from lkv.training.processes import place_model, split_by_cost
from lkv.training.warm_start import CALIBRATION_SAMPLES, WARM_START_TOKENS, calibrate, warm_start
from lkv.utils.devices import distributed_state, is_gpu
from lkv.utils.durations import format_duration
from lkv.utils.files import check_is_not_data, check_writable_folder
from lkv.utils.progress import ProgressBar

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

Log = Callable[[dict[str, float], int], object]  # takes values by name, and the step


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
        model_name: Folder or hub id of the model; None for the demo model.
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
    check_no_policy(out)
    check_no_policy(out / "policy", out / CHECKPOINT)
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


def build(setup: TrainingSetup) -> "Trainer":
    """Load the model, make the policy and its trainer, and print the plan with a time estimate.

    Raises UnsupportedModelError for expected attention in a model whose query rotation cannot be undone.
    """
    config, accelerator, shape = setup.config, setup.accelerator, setup.shape
    is_main, is_sharded, processes = accelerator.is_main_process, setup.spread == "processes", accelerator.num_processes
    cost = estimate(shape, config)
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
        speed = measure_speed(model, config)
        if is_main:
            seconds = format_duration(cost.flops / speed / processes)
            print(f"{seconds} in all, as this machine is now", file=sys.stderr)
    torch.manual_seed(config.seed)
    card = make_card(model, setup.model_name, config, setup.data, config.max_tokens)
    policy = Policy(patch_attention(model).spec, card, config.inputs).to(input_device(model))
    if setup.init is not None:
        card["started_from"] = earlier_card = initialize_from(policy, setup.init)
        tokens = earlier_card.get("trained_tokens") or earlier_card.get("training", {}).get("max_tokens", 0)
        if not config.position or config.inputs.knots >= num_knots(max(1, tokens)):  # all knots are in use
            card["trained_tokens"] = max(config.max_tokens, tokens)

    draw = partial(draw_sample, model=model, tokenizer=tokenizer, config=config)
    samples = partial(draw, setup.data)
    validation = [draw(setup.validation_data, number) for number in range(config.validation_samples)]

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
    """Return the settings of a training. Raises TrainingError for invalid ones.

    Args:
        preset: The settings to start from; None for those that fit device and model.
        overrides: Settings that differ from these, by name.
        positions: The tokens that the model can read.
        device: Where it is trained.
    """
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


class Trainer:
    """Trains a policy deterministically: on a CPU a resumed run gives bitwise the same result.

    Args:
        model: The frozen model.
        policy: The policy, which is changed in place.
        config: The settings.
        samples: Returns a training sample by its number.
        validation: Held-out samples.
        folder: For checkpoints and the curve.
        initialize: Called before the first step of a new run; by default, it measures the statistics of k and v.
        is_sharded: Whether processes share the model's weights and must run the same passes.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        policy: Policy,
        config: TrainingConfig,
        samples: Callable[[int], TokenizedSample],
        validation: list[TokenizedSample],
        folder: Path,
        initialize: Callable[[], object] | None = None,
        is_sharded: bool = False,
    ):
        self.policy = policy
        self._model, self._config = model, config
        self._samples, self._validation, self._folder = samples, validation, folder
        self._initialize, self._is_sharded = initialize or self.calibrate, is_sharded
        self._log: Log = lambda values, step: None
        self._process, self._shape = distributed_state("train", "training"), Shape.of(model.config)
        remedy = (
            f"training stopped and {folder / CHECKPOINT} keeps the last good state. Continue from it in another "
            f"folder, with a lower --lr or --dtype float32: --init {folder} --out ANOTHER."
        )
        processes = self._process.num_processes
        self._loop = TrainingLoop(model, policy, config, self._draw_batch, remedy, is_sharded, processes)
        check_batching(config, model, processes if is_sharded else 1)

    def run(self, log: Log | None = None) -> Policy:
        """Train to the end, from the checkpoint in the folder if there is one.

        `log` takes values by name, and the step. The first interrupt (Ctrl-C) saves the step and raises
        TrainingStoppedError; a second one stops at once. A loss that is not finite raises TrainingError; the last
        checkpoint stays as it was.
        """
        config, is_main = self._config, self._process.is_main_process
        self._log = log or self._log
        patch_attention(self._model)
        self._model.requires_grad_(False)
        check_writable_folder(self._folder, TrainingError, "the training")
        with lock_folder(self._folder) if is_main else nullcontext(), evaluation_mode(self._model):
            read_curve(self._folder)
            self._restore_or_initialize()
            with ProgressBar(total=config.steps, initial=self._loop.step, desc="training", disable=not is_main) as bar:

                def finish_step(means: dict[str, float]) -> None:
                    bar.update()
                    bar.set_postfix({name: f"{value:.3f}" for name, value in means.items()})
                    self._log({f"train_{name}": value for name, value in means.items()}, self._loop.step)

                is_stopped = self._loop.run(StepBudget(config), self._validate, self._save, finish_step)
            if is_stopped and self._loop.step < config.steps:
                raise TrainingStoppedError(
                    f"training was stopped after step {self._loop.step} of {config.steps}, which is saved in "
                    f"{self._folder}; run the same command to continue."
                )
        return self.policy

    def calibrate(self) -> None:
        """Measure k, v and queries on the first training samples."""
        self._print(f"measuring k, v and queries of {CALIBRATION_SAMPLES} texts before the first step")
        texts = [self._samples(number).context[:WARM_START_TOKENS] for number in range(CALIBRATION_SAMPLES)]
        calibrate(self._model, self.policy, texts)

    def _restore_or_initialize(self) -> None:
        if (self._folder / CHECKPOINT).exists():
            checkpoint = read_checkpoint(self._folder)
            checkpoint.check_run(self._config)
            checkpoint.load_policy(self.policy)
            checkpoint.load_optimizer(self.policy, self._loop.optimizer)
            # The call that started the run recorded its initial policy and data.
            self.policy.card = checkpoint.card
            self._loop.step = checkpoint.step
            self._print(f"continuing from step {checkpoint.step} of {self._config.steps}, saved in {self._folder}")
        else:
            self._initialize()
            self._save()

    def _draw_batch(self, step: int) -> Batch:
        """Return this process's samples of a step, with balanced work among processes."""
        numbers = range(step * self._config.batch, (step + 1) * self._config.batch)
        samples, is_whole = [self._samples(number) for number in numbers], self._config.student == "full"
        costs = [
            context_flops(self._shape, len(sample.context), [len(ids) for ids, _ in sample.continuations], is_whole)
            for sample in samples
        ]
        items = split_by_cost(costs, self._process.num_processes)[self._process.process_index]
        return [(numbers[item], samples[item]) for item in items]

    def evaluate(self) -> dict[str, float]:
        """Return mean KL and agreement of the hard-masked policy on validation samples, at R and optionally R / 3."""
        retentions = {"": self._config.retention_end}
        if self._config.retention_high:
            retentions["_third"] = self._config.retention_end / 3
        samples = ProgressBar(
            self._validation, desc="validating", leave=False, disable=not self._process.is_main_process
        )
        texts = (read_text(self._model, sample) for sample in samples)
        fidelities = measure_policy(self.policy, texts, [*retentions.values()])
        return {
            f"{name}{suffix}": value
            for suffix, retention in retentions.items()
            for name, value in fidelities[retention]._asdict().items()
        }

    def _validate(self, means: dict[str, float]) -> None:
        """Add a row to the curve: means of the step's losses, and a validation."""
        is_main = self._process.is_main_process
        validation = self.evaluate() if self._validation and (self._is_sharded or is_main) else {}
        if not is_main:
            return
        row: dict[str, Any] = {"step": self._loop.step, "contexts": self._loop.step * self._config.batch}
        row |= {f"train_{name}": round(value, 5) for name, value in means.items()}
        if validation:
            validation = {f"validation_{name}": round(value, 5) for name, value in validation.items()}
            self._log(validation, self._loop.step)
        append_to_curve(self._folder, row | validation)

    def _save(self) -> None:
        if self._process.is_main_process:
            save_checkpoint(self._folder, self._loop.step, self._config, self.policy, self._loop.optimizer)

    def _print(self, message: str) -> None:
        if self._process.is_main_process:
            tqdm.write(message, file=sys.stderr)
