"""The training loop (Sec. 3.5, App. C)."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lkv.config import TrainingConfig
from lkv.errors import DataError, TrainingError, TrainingStoppedError
from lkv.integrations.transformers.attention import evaluation_mode, patch_attention
from lkv.models.shapes import Shape
from lkv.policy.policy import Policy
from lkv.training.checkpoint import CHECKPOINT, TrainingState, extend_curve, read_curve
from lkv.training.cost import CALIBRATION_SAMPLES, START_TOKENS, context_flops, split_by_cost
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import SampleDistillation, check_batching, distillation_losses, group_samples, hard_mask
from lkv.training.schedule import schedule
from lkv.training.warm_start import calibrate
from lkv.utils.files import check_writable_folder


@contextmanager
def first_interrupt() -> Iterator[threading.Event]:
    """An event in place of the first KeyboardInterrupt in the block; the next one is raised as ever."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def note(*_: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)
        print("\nstopping after this step; interrupt again to stop at once", file=sys.stderr)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


class Trainer:
    """The loop: deterministic in (config, data), so that a resumed run continues bit for bit on a CPU."""

    def __init__(
        self,
        model: Any,
        policy: Policy,
        config: TrainingConfig,
        samples: Callable[[int], TokenizedSample],
        validation: list[TokenizedSample],
        folder: Path,
        accelerator: Any = None,
        calibrated: bool = False,
        warm_start: Callable[[], Any] | None = None,
        sharded: bool = False,
    ):
        """`samples(i)` gives training sample i. `folder` takes checkpoint, curve and the finished policy.

        `calibrated`: the policy already holds its input statistics (it starts from another run). `warm_start` is
        called once, after they are measured. `sharded`: the model's weights are shared out over the processes, which
        therefore make the same forward passes at the same time. Raises TrainingError for settings and a model that do
        not go together.
        """
        self._model, self._policy, self._config = model, policy, config
        self._samples, self._validation, self._folder = samples, validation, folder
        self._accelerator, self._calibrated, self._warm_start = accelerator, calibrated, warm_start
        self._sharded = sharded
        self._process = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
        self._parameters = dict(policy.named_parameters())
        terms = {f"tokens.{name}" for name in ("attention_weight", "start", "end")}
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in self._parameters.items() if n not in terms], "rate": 1.0},
            {"params": [p for n, p in self._parameters.items() if n in terms], "rate": config.terms_lr},
        ]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=(0.9, 0.98),
        )
        self._state, self._step = TrainingState(config, policy, self._optimizer), 0
        check_batching(config, model, self._process[1] if sharded else 1)

    def run(self) -> Policy:
        """Train to the end, resuming a checkpoint in the folder. Returns the policy.

        The first interrupt (Ctrl-C) ends the step and saves it, then raises TrainingStoppedError; a second one stops at
        once. Raises TrainingError if the loss stops being a number (the last checkpoint stays as it was), and before
        the first step where the folder takes no files or holds damaged ones.
        """
        patch_attention(self._model)
        self._model.requires_grad_(False)
        check_writable_folder(self._folder, TrainingError, "the training")
        read_curve(self._folder)
        with evaluation_mode(self._model), first_interrupt() as interrupted:
            if (self._folder / CHECKPOINT).exists():
                self._step = self._state.restore(self._folder)
                self._tell(f"going on from step {self._step} of {self._config.steps}, saved in {self._folder}")
            elif not self._calibrated:
                self._tell(f"measuring k, v and queries of {CALIBRATION_SAMPLES} texts before the first step")
                samples = [self._samples(number) for number in range(CALIBRATION_SAMPLES)]
                calibrate(self._model, self._policy, [sample.context[:START_TOKENS] for sample in samples])
                if self._warm_start is not None:
                    self._warm_start()
                self._save()
            bar = tqdm(total=self._config.steps, initial=self._step, desc="training", disable=self._process[0] != 0)
            while self._step < self._config.steps:
                means = self._train_step()
                self._step += 1
                bar.update()
                bar.set_postfix({key: f"{value:.3f}" for key, value in means.items()})
                self._track({f"train_{key}": value for key, value in means.items()})
                last = self._step == self._config.steps
                if last or self._step % self._config.evaluate_every == 0:
                    self._record(means)
                stopped = not last and self._agreed(interrupted.is_set())
                if last or stopped or self._step % self._config.checkpoint_every == 0:
                    self._save()
                if stopped:
                    bar.close()
                    raise TrainingStoppedError(
                        f"training was stopped after step {self._step} of {self._config.steps}, which is saved in "
                        f"{self._folder}; run the same command to go on."
                    )
            bar.close()
        return self._policy

    def _agreed(self, wish: bool) -> bool:
        """Whether any process wishes so: they all stop after the same step."""
        if self._process[1] == 1:
            return wish
        count = torch.tensor(float(wish), device=self._policy.tokens.mean.device)
        return bool(self._accelerator.reduce(count, reduction="sum").item())

    def _track(self, values: dict[str, float]) -> None:
        """Give `values` to the accelerator's trackers, if it has any."""
        if self._accelerator is not None:
            self._accelerator.log(values, step=self._step)

    def _tell(self, sentence: str) -> None:
        if self._process[0] == 0:
            print(sentence, file=sys.stderr)

    def _train_step(self) -> dict[str, float]:
        now = schedule(self._config, self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = now.lr * group["rate"]
        self._optimizer.zero_grad(set_to_none=True)
        sums = {"kl": 0.0, "hidden": 0.0}
        broken = ""
        for together in group_samples(self._share(), self._config.contexts_per_forward, self._sharded):
            kl, hidden = distillation_losses(self._model, self._policy, together, self._config, now)
            loss = (kl + self._config.beta * hidden) / self._config.batch
            if not broken and not loss.isfinite():
                broken = f"{loss.item()} at step {self._step} ({together.named})"
            # Even then: the other processes of a sharded model wait for this one.
            loss.backward()
            sums["kl"] += kl.item() / self._config.batch
            sums["hidden"] += hidden.item() / self._config.batch
        self._stop_if(broken)
        if self._accelerator is not None:
            for parameter in self._parameters.values():
                grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                parameter.grad = self._accelerator.reduce(grad, reduction="sum")
            total = torch.tensor(list(sums.values()), device=self._policy.tokens.mean.device)
            sums = dict(zip(sums, self._accelerator.reduce(total, reduction="sum").tolist(), strict=True))
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm)
        self._optimizer.step()
        return sums | {"grad": float(norm), "R": now.retention, "tau": now.tau}

    def _share(self) -> list[tuple[int, TokenizedSample]]:
        """This process's samples of the step, with their numbers: all have about as much to do, for all wait for the
        last one."""
        rank, count = self._process
        numbers = range(self._step * self._config.batch, (self._step + 1) * self._config.batch)
        if count == 1:
            return [(number, self._samples(number)) for number in numbers]
        samples = [self._samples(number) for number in numbers]
        shape = Shape.of(self._model.config)
        whole = self._config.student == "full"
        costs = [context_flops(shape, len(s.context), [len(ids) for ids, _ in s.continuations], whole) for s in samples]
        return [(numbers[item], samples[item]) for item in split_by_cost(costs, count)[rank]]

    def _stop_if(self, broken: str) -> None:
        """Raise TrainingError if the loss of any process is no number, in all processes together."""
        count = torch.tensor(float(bool(broken)), device=self._policy.tokens.mean.device)
        if self._accelerator is not None:
            count = self._accelerator.reduce(count, reduction="sum")
        if count.item():
            raise TrainingError(
                f"the loss is {broken or 'no number in another process'}; training stopped and "
                f"{self._folder / CHECKPOINT} keeps the last good state. Go on from it in another folder, with a "
                f"lower --lr or --dtype float32: --init {self._folder} --out ANOTHER."
            )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Fidelity of the hard-masked policy over the validation samples at the final retention, and at a third of it
        where it is trained for many."""
        means = {"kl": 0.0, "agreement": 0.0}
        measured = {"": self._config.retention_end}
        if self._config.retention_high:
            measured["_third"] = self._config.retention_end / 3
        for sample in tqdm(self._validation, desc="validating", leave=False, disable=self._process[0] != 0):
            run = SampleDistillation(self._model, sample)
            scores, rows = run.scores(self._policy), len(sample.continuations)
            teacher = run.run(None)
            for end, retention in measured.items():
                student = run.run(hard_mask(self._policy, scores, retention, rows))
                for name, value in (("kl", run.kl(teacher, student)), ("agreement", run.agreement(teacher, student))):
                    means[name + end] = means.get(name + end, 0.0) + float(value) / len(self._validation)
        return means

    def _record(self, means: dict[str, float]) -> None:
        measured = self.evaluate() if self._validation and (self._sharded or self._process[0] == 0) else {}
        if self._process[0] != 0:
            return
        row: dict[str, Any] = {"step": self._step, "contexts": self._step * self._config.batch}
        row |= {f"train_{key}": round(value, 5) for key, value in means.items()}
        if measured:
            measured = {f"validation_{key}": round(value, 5) for key, value in measured.items()}
            self._track(measured)
            row |= measured
        extend_curve(self._folder, row)

    def _save(self) -> None:
        if self._process[0] == 0:
            self._state.save(self._folder, self._step)


def require_samples(samples: list[TokenizedSample]) -> list[TokenizedSample]:
    """The samples that have continuations to learn from. Raises DataError where none has."""
    if samples and not any(sample.continuations for sample in samples):
        raise DataError("no sample has a continuation to learn from; give longer texts, or lower --min-tokens.")
    return [sample for sample in samples if sample.continuations]
