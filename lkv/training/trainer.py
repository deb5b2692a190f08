"""The trainer of `lkv train`: the training loop with calibration, validation, the loss curve and checkpoints."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lkv.errors import TrainingError, TrainingStoppedError
from lkv.hf.attention import patch_attention
from lkv.hf.shapes import Shape
from lkv.hf.spec import evaluation_mode
from lkv.policy.policy import Policy
from lkv.training.checkpoint import (
    CHECKPOINT,
    append_to_curve,
    lock_folder,
    read_checkpoint,
    read_curve,
    save_checkpoint,
)
from lkv.training.config import TrainingConfig
from lkv.training.cost import CALIBRATION_SAMPLES, WARM_START_TOKENS, context_flops, estimate
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import check_batching
from lkv.training.heldout import measure_policy, read_text
from lkv.training.loop import Batch, StepBudget, TrainingLoop
from lkv.training.processes import split_by_cost
from lkv.training.speed import Speed
from lkv.training.warm_start import calibrate
from lkv.utils.devices import distributed_state
from lkv.utils.durations import format_duration
from lkv.utils.files import check_writable_folder
from lkv.utils.progress import ProgressBar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TIMED_STEPS = 3  # after which the remaining time is printed


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
        initialize: Callable[[], Any] | None = None,
        is_sharded: bool = False,
    ):
        self.policy = policy
        self._model, self._config = model, config
        self._samples, self._validation, self._folder = samples, validation, folder
        self._initialize, self._is_sharded = initialize or self.calibrate, is_sharded
        self._log: Callable[[dict[str, float], int], Any] = lambda values, step: None
        self._process, self._shape = distributed_state("train", "training"), Shape.of(model.config)
        self._step_flops, self._timed_flops, self._timed_seconds = 0.0, 0.0, 0.0
        remedy = (
            f"training stopped and {folder / CHECKPOINT} keeps the last good state. Continue from it in another "
            f"folder, with a lower --lr or --dtype float32: --init {folder} --out ANOTHER."
        )
        processes = self._process.num_processes
        self._loop = TrainingLoop(model, policy, config, self._draw_batch, remedy, is_sharded, processes)
        check_batching(config, model, processes if is_sharded else 1)

    def run(self, log: Callable[[dict[str, float], int], Any] | None = None) -> Policy:
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
            first_step = self._loop.step
            with ProgressBar(total=config.steps, initial=first_step, desc="training", disable=not is_main) as bar:

                def finish_step(means: dict[str, float], seconds: float) -> None:
                    self._time_step(self._loop.step - first_step, seconds)
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
        self._step_flops = sum(costs)
        items = split_by_cost(costs, self._process.num_processes)[self._process.process_index]
        return [(numbers[item], samples[item]) for item in items]

    def _time_step(self, steps: int, seconds: float) -> None:
        """Print the remaining time after the first steps of this process; the slower first step is usually excluded."""
        timed_steps = min(_TIMED_STEPS, self._config.steps - 1)
        if steps > timed_steps:
            return
        if steps > 1 or timed_steps == 1:
            self._timed_seconds += seconds
            self._timed_flops += self._step_flops
        if steps == timed_steps and self._timed_flops:
            cost = estimate(self._shape, self._config)
            left = cost.after(self._loop.step, self._loop.step // self._config.evaluate_every)
            # One process validates, unless the model is sharded over them.
            processes = 1 if self._is_sharded else self._process.num_processes
            rate = self._timed_flops / self._timed_seconds / processes
            remaining = format_duration(Speed(rate, rate, rate).seconds(left, processes))
            self._print(f"{remaining} left, at the pace of the first steps")

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
