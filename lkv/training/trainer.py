"""The training loop (Sec. 3.5, App. C): the frozen model with its full cache teaches itself with a compressed one."""

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from lkv.errors import DataError, TrainingError, TrainingStoppedError
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
from lkv.training.distillation import (
    SampleDistillation,
    check_batching,
    distillation_losses,
    group_samples,
    hard_mask,
    schedule,
)
from lkv.training.processes import all_reduce, average_gradients, split_by_cost
from lkv.training.warm_start import calibrate
from lkv.utils.devices import distributed_state
from lkv.utils.durations import format_duration
from lkv.utils.files import check_writable_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAMW_BETAS = (0.9, 0.98)
_TIMED_STEPS = 3  # after which the remaining time is printed


class Trainer:
    """Trains a policy, deterministically in settings and data: on a CPU a resumed run continues bit for bit.

    `samples` gives a training sample by its number; a policy that `is_calibrated` is neither measured nor given its
    `warm_start`; processes whose model `is_sharded` make the same passes; `log` takes values by name and the step.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        policy: Policy,
        config: TrainingConfig,
        samples: Callable[[int], TokenizedSample],
        validation: list[TokenizedSample],
        folder: Path,
        is_calibrated: bool = False,
        warm_start: Callable[[], Any] | None = None,
        is_sharded: bool = False,
        log: Callable[[dict[str, float], int], Any] = lambda values, step: None,
    ):
        self.policy = policy
        self._model, self._config = model, config
        self._samples, self._validation, self._folder = samples, validation, folder
        self._is_calibrated, self._warm_start, self._is_sharded, self._log = is_calibrated, warm_start, is_sharded, log
        self._process, self._shape = distributed_state("train", "training"), Shape.of(model.config)
        self._step, self._step_flops, self._timed_flops, self._timed_seconds = 0, 0.0, 0.0, 0.0
        self._optimizer = make_optimizer(policy, config)
        self._parameters = list(policy.parameters())
        check_batching(config, model, self._process.num_processes if is_sharded else 1)

    def run(self) -> Policy:
        """Train to the end, from the checkpoint in the folder if there is one.

        The first interrupt (Ctrl-C) saves the step and raises TrainingStoppedError; a second one stops at once. A loss
        that is not finite raises TrainingError; the last checkpoint stays as it was.
        """
        config, is_main = self._config, self._process.is_main_process
        patch_attention(self._model)
        self._model.requires_grad_(False)
        check_writable_folder(self._folder, TrainingError, "the training")
        with (
            lock_folder(self._folder) if is_main else nullcontext(),
            evaluation_mode(self._model),
            defer_interrupt() as interrupted,
        ):
            read_curve(self._folder)
            self._restore_or_initialize()
            bar = tqdm(total=config.steps, initial=self._step, desc="training", disable=not is_main)
            first_step = self._step
            while self._step < config.steps:
                start = time.perf_counter()
                means = self._train_step()
                self._step += 1
                is_last = self._step == config.steps
                self._time_step(self._step - first_step, time.perf_counter() - start)
                bar.update()
                bar.set_postfix({name: f"{value:.3f}" for name, value in means.items()})
                self._log({f"train_{name}": value for name, value in means.items()}, self._step)
                if is_last or self._step % config.evaluate_every == 0:
                    self._validate(means)
                is_stopped = not is_last and self._is_any(interrupted.is_set())
                if is_last or is_stopped or self._step % config.checkpoint_every == 0:
                    self._save()
                if is_stopped:
                    bar.close()
                    raise TrainingStoppedError(
                        f"training was stopped after step {self._step} of {config.steps}, which is saved in "
                        f"{self._folder}; run the same command to continue."
                    )
            bar.close()
        return self.policy

    def _restore_or_initialize(self) -> None:
        if (self._folder / CHECKPOINT).exists():
            checkpoint = read_checkpoint(self._folder)
            checkpoint.check_run(self._config)
            checkpoint.load_policy(self.policy)
            checkpoint.load_optimizer(self.policy, self._optimizer)
            # The call that began the run knows what it started from and on which data.
            self.policy.card = checkpoint.card
            self._step = checkpoint.step
            self._print(f"continuing from step {self._step} of {self._config.steps}, saved in {self._folder}")
        elif not self._is_calibrated:
            self._print(f"measuring k, v and queries of {CALIBRATION_SAMPLES} texts before the first step")
            texts = [self._samples(number).context[:WARM_START_TOKENS] for number in range(CALIBRATION_SAMPLES)]
            calibrate(self._model, self.policy, texts)
            if self._warm_start is not None:
                self._warm_start()
            self._save()

    def _train_step(self) -> dict[str, float]:
        config, now = self._config, schedule(self._config, self._step)
        numbers = range(self._step * config.batch, (self._step + 1) * config.batch)
        samples, is_whole = [self._samples(number) for number in numbers], config.student == "full"
        costs = [
            context_flops(self._shape, len(sample.context), [len(ids) for ids, _ in sample.continuations], is_whole)
            for sample in samples
        ]
        self._step_flops = sum(costs)
        # Every process gets about as much work.
        items = split_by_cost(costs, self._process.num_processes)[self._process.process_index]
        numbered = [(numbers[item], samples[item]) for item in items]
        set_learning_rate(self._optimizer, now.lr)
        self._optimizer.zero_grad(set_to_none=True)
        groups, losses = [], []
        for group in group_samples(numbered, config.contexts_per_forward, self._is_sharded):
            kl, hidden = distillation_losses(self._model, self.policy, group, config, now)
            loss = (kl + config.beta * hidden) / config.batch
            # Even where it is not finite: the other processes of a sharded model wait for this one.
            loss.backward()
            groups.append(group)
            losses.append(torch.stack([loss, kl, hidden]).detach().float().to(self._device))
        average_gradients(self._parameters, "sum")
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, config.max_grad_norm)
        # The host waits for the device once a step: here, before the weights change.
        table = torch.stack([*losses, norm.detach().float().to(self._device).expand(3)])
        *rows, (gradient_norm, _, _) = table.tolist()
        problem = next(
            (f"{row[0]} at step {self._step} ({group})" for group, row in zip(groups, rows, strict=True)
             if not math.isfinite(row[0])), "",
        )  # fmt: skip
        if not problem and not math.isfinite(gradient_norm):
            problem = f"finite, but not its gradient at step {self._step}"
        if self._is_any(bool(problem)):
            raise TrainingError(
                f"the loss is {problem or 'not finite in another process'}; training stopped and "
                f"{self._folder / CHECKPOINT} keeps the last good state. Continue from it in another folder, with a "
                f"lower --lr or --dtype float32: --init {self._folder} --out ANOTHER."
            )
        sums = [sum(row[column] for row in rows) / config.batch for column in (1, 2)]
        kl_mean, hidden_mean = self._sum(sums)
        self._optimizer.step()
        return {"kl": kl_mean, "hidden": hidden_mean, "grad": gradient_norm, "R": now.retention, "tau": now.tau}

    def _time_step(self, steps: int, seconds: float) -> None:
        """Print the remaining time after the first steps of this process; the first is slower and rarely counts."""
        timed_steps = min(_TIMED_STEPS, self._config.steps - 1)
        if steps > timed_steps:
            return
        if steps > 1 or timed_steps == 1:
            self._timed_seconds += seconds
            self._timed_flops += self._step_flops
        if steps == timed_steps and self._timed_flops:
            cost = estimate(self._shape, self._config)
            validations = cost.validations - self._step // self._config.evaluate_every
            # One process validates, unless the model is sharded over them.
            repeats = 1 if self._is_sharded else self._process.num_processes
            flops = (cost.steps - self._step) * cost.step_flops + validations * repeats * cost.validation_flops
            remaining = format_duration(flops / self._timed_flops * self._timed_seconds)
            self._print(f"{remaining} left, at the pace of the first steps")

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean KL and agreement of the hard-masked policy on the validation samples, at R and perhaps a third of it."""
        means = {"kl": 0.0, "agreement": 0.0}
        retentions = {"": self._config.retention_end}
        if self._config.retention_high:
            retentions["_third"] = self._config.retention_end / 3
        is_main = self._process.is_main_process
        for sample in tqdm(self._validation, desc="validating", leave=False, disable=not is_main):
            run = SampleDistillation(self._model, sample)
            scores, rows = run.scores(self.policy), len(sample.continuations)
            teacher = run.run(None)
            for suffix, retention in retentions.items():
                student = run.run(hard_mask(self.policy, scores, retention, rows))
                for name, value in (("kl", run.kl(teacher, student)), ("agreement", run.agreement(teacher, student))):
                    means[name + suffix] = means.get(name + suffix, 0.0) + float(value) / len(self._validation)
        return means

    def _validate(self, means: dict[str, float]) -> None:
        """Add a row to the curve: means of the step's losses, and a validation."""
        is_main = self._process.is_main_process
        validation = self.evaluate() if self._validation and (self._is_sharded or is_main) else {}
        if not is_main:
            return
        row: dict[str, Any] = {"step": self._step, "contexts": self._step * self._config.batch}
        row |= {f"train_{name}": round(value, 5) for name, value in means.items()}
        if validation:
            validation = {f"validation_{name}": round(value, 5) for name, value in validation.items()}
            self._log(validation, self._step)
        append_to_curve(self._folder, row | validation)

    def _save(self) -> None:
        if self._process.is_main_process:
            save_checkpoint(self._folder, self._step, self._config, self.policy, self._optimizer)

    @property
    def _device(self) -> torch.device:
        return self.policy.tokens.mean.device

    def _is_any(self, value: bool) -> bool:
        """Whether `value` is true in any process."""
        return bool(self._sum([float(value)])[0])

    def _sum(self, values: list[float]) -> list[float]:
        """The sums of `values` over all processes; one process asks nothing of its device."""
        if self._process.num_processes == 1:
            return values
        return all_reduce(torch.tensor(values, device=self._device)).tolist()

    def _print(self, message: str) -> None:
        if self._process.is_main_process:
            tqdm.write(message, file=sys.stderr)


def make_optimizer(policy: Policy, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over the parameters of `policy`; the `rate` of a group multiplies the learning rate."""
    rates: dict[float, list[torch.nn.Parameter]] = {}
    for name, parameter in policy.named_parameters():
        part, _, own_name = name.partition(".")
        rate = config.terms_lr if own_name in ("attention_weight", "start", "end") else 1.0
        rates.setdefault(config.heads_lr if part == "heads" else rate, []).append(parameter)
    groups = [{"params": parameters, "rate": rate} for rate, parameters in rates.items()]
    return torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay, betas=ADAMW_BETAS)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group of `make_optimizer`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["rate"]


def require_samples(samples: list[TokenizedSample]) -> list[TokenizedSample]:
    """The samples that have continuations to learn from. Raises DataError where none has."""
    if samples and not any(sample.continuations for sample in samples):
        raise DataError("no sample has a continuation to learn from; give longer texts, or lower --min-tokens.")
    return [sample for sample in samples if sample.continuations]


@contextmanager
def defer_interrupt() -> Iterator[threading.Event]:
    """Set an event at the first Ctrl-C instead of raising KeyboardInterrupt, in the main thread, which gets signals."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(*_: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, previous)
        print("\nstopping after this step; interrupt again to stop at once", file=sys.stderr)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
