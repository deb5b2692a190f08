"""The training loop of `lkv train` and `lkv fit`: updates until a budget of steps or of time is spent."""

import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from lkv.errors import TrainingError
from lkv.hf.attention import input_device
from lkv.policy.policy import Policy
from lkv.training.config import Schedule, TrainingConfig, schedule
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import SampleGroup, distillation_losses, group_samples
from lkv.training.processes import all_reduce, average_gradients, run_at_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAMW_BETAS = (0.9, 0.98)
Batch = list[tuple[int, TokenizedSample]]  # numbered samples


class StepActions(NamedTuple):
    """What to do after a step."""

    is_last: bool
    should_report: bool
    should_save: bool


class StepBudget:
    """A training of `config.steps` steps, which follow the schedule one by one."""

    def __init__(self, config: TrainingConfig):
        self._config = config

    def position(self, step: int) -> float | None:
        """Return the position of the next step on the schedule, in steps; None if the budget is spent."""
        return step if step < self._config.steps else None

    def finish_step(self, step: int) -> StepActions:
        """Return what to do after `step` steps."""
        config = self._config
        return StepActions(step == config.steps, step % config.evaluate_every == 0, step % config.checkpoint_every == 0)


class TimeBudget:
    """A training whose schedule of `steps` steps follows the clock, from `begin` to `end`.

    Args:
        steps: Steps of the schedule; the number of updates depends on their duration.
        elapsed: Returns the seconds so far.
        begin: The start of the training, in these seconds.
        end: The deadline: a step that would end later is not taken.
        report_interval: Seconds between two reports.
    """

    def __init__(self, steps: int, elapsed: Callable[[], float], begin: float, end: float, report_interval: float):
        self._steps, self._elapsed, self._begin, self._end = steps, elapsed, begin, end
        self._interval, self._reported = report_interval, elapsed()
        self._step_begin, self._step_seconds = 0.0, 0.0

    def position(self, step: int) -> float | None:
        """Return the position of the next step by the clock; None if the budget is spent."""
        self._step_begin = now = self._elapsed()
        if now + self._step_seconds >= self._end:
            return None
        return self._steps * (now - self._begin) / (self._end - self._begin)

    def finish_step(self, step: int) -> StepActions:
        """Return what to do after `step` steps."""
        now = self._elapsed()
        self._step_seconds = max(self._step_seconds / 2, now - self._step_begin)
        is_due = now - self._reported > self._interval
        self._reported = now if is_due else self._reported
        return StepActions(now + self._step_seconds >= self._end, is_due, is_due)


class TrainingLoop:
    """Updates of a policy by distillation.

    Args:
        model: The frozen model.
        policy: The policy, which is changed in place.
        config: The settings.
        batches: Returns this process's numbered samples of a step.
        remedy: Advice for a non-finite loss, for the error message.
        is_sharded: Whether processes share the model's weights and must run the same passes.
        num_processes: The number of processes that share each step.
        contexts_at_once: The maximum number of contexts that a CPU processes concurrently in threads.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        policy: Policy,
        config: TrainingConfig,
        batches: Callable[[int], Batch],
        remedy: str,
        is_sharded: bool = False,
        num_processes: int = 1,
        contexts_at_once: int = 1,
    ):
        self.policy, self.config, self.step = policy, config, 0
        self.optimizer = make_optimizer(policy, config)
        self._model, self._batches, self._remedy = model, batches, remedy
        self._is_sharded, self._num_processes, self._contexts_at_once = is_sharded, num_processes, contexts_at_once

    def run(
        self,
        budget: StepBudget | TimeBudget,
        report: Callable[[dict[str, float]], None],
        save: Callable[[], None],
        on_step: Callable[[dict[str, float]], None] = lambda means: None,
    ) -> bool:
        """Take steps until `budget` is spent. The first Ctrl-C ends and saves the step; a second one stops at once.

        Args:
            budget: Steps or time.
            report: Called with the means of a step if a report is due, and after the last step.
            save: Called if a checkpoint is due, after the last step, and before an interrupt stops the loop.
            on_step: Called after each step with its means.

        Returns:
            Whether Ctrl-C stopped the loop.

        Raises:
            TrainingError: If a loss or its gradient is not finite; the weights are then as before the step.
        """
        with defer_interrupt() as interrupted:
            while (position := budget.position(self.step)) is not None:
                means = self.update(schedule(self.config, position))
                self.step += 1
                actions = budget.finish_step(self.step)
                on_step(means)
                is_stopped = self._is_any(interrupted.is_set())
                if actions.is_last or actions.should_report:
                    report(means)
                if actions.is_last or actions.should_save or is_stopped:
                    save()
                if is_stopped:
                    return True
        return False

    def update(self, values: Schedule) -> dict[str, float]:
        """Take one step with these schedule values (learning rate, temperature, retention); return the mean losses."""
        config = self.config
        set_learning_rate(self.optimizer, values.lr)
        self.optimizer.zero_grad(set_to_none=True)
        groups = group_samples(self._batches(self.step), config.contexts_per_forward, self._is_sharded)

        def add_gradients(group: SampleGroup) -> torch.Tensor:
            kl, hidden = distillation_losses(self._model, self.policy, group, config, values)
            loss = (kl + config.beta * hidden) / config.batch
            # Run backward even if the loss is non-finite: the other processes of a sharded model wait for it.
            loss.backward()
            return torch.stack([loss, kl, hidden]).detach().float().to(self._device)

        losses = run_at_once(add_gradients, groups, input_device(self._model), self._contexts_at_once)
        parameters = list(self.policy.parameters())
        if self._num_processes > 1:
            average_gradients(parameters, "sum")
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        # The only synchronisation of a step, before the weights change.
        table = torch.stack([*losses, norm.detach().float().to(self._device).expand(3)])
        *rows, (gradient_norm, _, _) = table.tolist()
        pairs = zip(groups, (row[0] for row in rows), strict=True)
        problems = [f"{loss} at step {self.step} ({group})" for group, loss in pairs if not math.isfinite(loss)]
        if not math.isfinite(gradient_norm):
            problems.append(f"finite, but not its gradient at step {self.step}")
        if self._is_any(bool(problems)):
            problem = problems[0] if problems else "not finite in another process"
            raise TrainingError(f"the loss is {problem}; {self._remedy}")
        kl_mean, hidden_mean = self._sum([sum(row[column] for row in rows) / config.batch for column in (1, 2)])
        self.optimizer.step()
        return {"kl": kl_mean, "hidden": hidden_mean, "grad": gradient_norm, "R": values.retention, "tau": values.tau}

    @property
    def _device(self) -> torch.device:
        return self.policy.tokens.mean.device

    def _is_any(self, value: bool) -> bool:
        """Return whether `value` is true in any process."""
        return bool(self._sum([float(value)])[0])

    def _sum(self, values: list[float]) -> list[float]:
        """Return the sums of `values` over all processes; a single process does not use its device."""
        if self._num_processes == 1:
            return values
        return all_reduce(torch.tensor(values, device=self._device)).tolist()


def make_optimizer(policy: Policy, config: TrainingConfig) -> torch.optim.AdamW:
    """Make AdamW for the parameters of `policy`; the `lr_scale` of a group multiplies the learning rate."""
    scales: dict[float, list[torch.nn.Parameter]] = {}
    for name, parameter in policy.named_parameters():
        part, _, own_name = name.partition(".")
        lr_scale = config.terms_lr if own_name in ("attention_weight", "start", "end") else 1.0
        scales.setdefault(config.heads_lr if part == "heads" else lr_scale, []).append(parameter)
    groups = [{"params": parameters, "lr_scale": lr_scale} for lr_scale, parameters in scales.items()]
    return torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay, betas=ADAMW_BETAS)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group of `make_optimizer`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


@contextmanager
def defer_interrupt() -> Iterator[threading.Event]:
    """Set an event at the first Ctrl-C instead of raising KeyboardInterrupt.

    Outside the main thread, which alone gets signals, do nothing.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, previous)
        print("\nstopping after this step; interrupt again to stop at once", file=sys.stderr)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
