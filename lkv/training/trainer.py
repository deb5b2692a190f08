"""Training (Sec. 3.5, App. C): the frozen model with its full cache teaches itself with a compressed one."""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from lkv.config import ModelSpec, TrainingConfig, asdict, from_dict
from lkv.errors import DataError, PolicyMismatchError, TrainingError, TrainingStoppedError
from lkv.files import check_folder, replacing, write_text
from lkv.host.attention import attach, evaluation_mode
from lkv.policy import Policy
from lkv.policy_file import is_policy
from lkv.training.calibration import calibrate
from lkv.training.data.sample import TokenizedSample
from lkv.training.distillation import SampleDistillation, gumbel, hard_mask, soft_mask

_CHECKPOINT = "checkpoint.safetensors"
_CURVE = "curve.jsonl"
_CALIBRATION_SAMPLES, _CALIBRATION_TOKENS = 8, 2000


@dataclass(frozen=True)
class Schedule:
    """Learning rate, temperature and retention at one step (App. C.3)."""

    lr: float
    tau: float
    retention: float


def schedule(config: TrainingConfig, step: int) -> Schedule:
    """Linear warm-up and decay of the rate; exponential decay of tau and R, then `hold` at their final values."""
    if step < config.warmup:
        lr = config.lr * (step + 1) / config.warmup
    else:
        progress = (step - config.warmup) / max(1, config.steps - config.warmup)
        lr = config.lr + (config.lr_end - config.lr) * progress
    share = min(1.0, step / max(1.0, config.steps * (1 - config.hold)))
    return Schedule(
        lr=lr,
        tau=config.tau_start * (config.tau_end / config.tau_start) ** share,
        retention=config.retention_start * (config.retention_end / config.retention_start) ** share,
    )


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
    ):
        """`samples(i)` gives training sample i. `folder` takes checkpoint, curve and the finished policy.

        `calibrated`: the policy already holds its input statistics (it starts from another run). `warm_start` is
        called once, after they are measured.
        """
        self._model, self._policy, self._config = model, policy, config
        self._samples, self._validation, self._folder = samples, validation, folder
        self._accelerator, self._calibrated, self._warm_start = accelerator, calibrated, warm_start
        self._share = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
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
        self._step = 0

    def run(self, stop_after: int | None = None) -> Policy:
        """Train to the end (or `stop_after` steps from here), resuming a checkpoint in the folder. Returns the policy.

        The first interrupt (Ctrl-C) ends the step and saves it, then raises TrainingStoppedError; a second one stops at
        once. Raises TrainingError if the loss stops being a number (the last checkpoint stays as it was), and before
        the first step where the folder takes no files or holds damaged ones.
        """
        attach(self._model)
        self._model.requires_grad_(False)
        check_folder(self._folder, TrainingError, "the training")
        _read_curve(self._folder / _CURVE)
        with evaluation_mode(self._model), _first_interrupt() as interrupted:
            if (self._folder / _CHECKPOINT).exists():
                self._restore()
                self._tell(f"going on from step {self._step} of {self._config.steps}, saved in {self._folder}")
            elif not self._calibrated:
                samples = [self._samples(number) for number in range(_CALIBRATION_SAMPLES)]
                calibrate(self._model, self._policy, [sample.context[:_CALIBRATION_TOKENS] for sample in samples])
                if self._warm_start is not None:
                    self._warm_start()
                self._save()
            end = self._config.steps if stop_after is None else min(self._config.steps, self._step + stop_after)
            bar = tqdm(total=self._config.steps, initial=self._step, desc="training", disable=self._share[0] != 0)
            while self._step < end:
                losses = self._train_step()
                self._step += 1
                bar.update()
                bar.set_postfix({key: f"{value:.3f}" for key, value in losses.items()})
                last = self._step == self._config.steps
                if last or self._step % self._config.evaluate_every == 0:
                    self._record(losses)
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
        if self._share[1] == 1:
            return wish
        count = torch.tensor(float(wish), device=self._policy.tokens.mean.device)
        return bool(self._accelerator.reduce(count, reduction="sum").item())

    def _tell(self, sentence: str) -> None:
        if self._share[0] == 0:
            print(sentence, file=sys.stderr)

    def _train_step(self) -> dict[str, float]:
        now = schedule(self._config, self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = now.lr * group["rate"]
        self._optimizer.zero_grad(set_to_none=True)
        rank, count = self._share
        sums = {"kl": 0.0, "hidden": 0.0}
        broken = ""
        for index in range(rank, self._config.batch, count):
            number = self._step * self._config.batch + index
            generator = torch.Generator("cpu").manual_seed(self._config.seed * 1_000_003 + number)
            sample = self._samples(number)
            if not sample.continuations:
                continue
            run = SampleDistillation(self._model, sample)
            with torch.no_grad():
                teacher = run.run(None)
            scores = run.scores(self._policy)
            rows = len(sample.continuations)
            noise = gumbel((rows, *scores.shape), generator, scores.device)
            retention = self._retentions(rows, now.retention, generator)
            student = run.run(soft_mask(self._policy, scores, retention.to(scores.device), now.tau, noise))
            kl = run.kl(teacher, student, self._weights(retention).to(scores.device))
            hidden = run.hidden_distance(teacher, student, self._config.hidden_norm)
            loss = (kl + self._config.beta * hidden) / self._config.batch
            if not loss.isfinite():
                broken = f"{loss.item()} at step {self._step} (sample {number}, source {sample.source!r})"
                break
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

    def _retentions(self, rows: int, scheduled: float, generator: torch.Generator) -> Tensor:
        """R [n] of each continuation, drawn log-uniformly where the settings say so, else the schedule's."""
        low, high = self._config.retention_low, self._config.retention_high
        if not high:
            return torch.full((rows,), scheduled, device="cpu")
        share = torch.rand(rows, generator=generator, device="cpu")
        return low * (high / low) ** share

    def _weights(self, retention: Tensor) -> Tensor:
        """How much a continuation under each of `retention` counts."""
        if not self._config.retention_high:
            return torch.ones_like(retention)
        return (retention / self._config.retention_end) ** self._config.retention_power

    def _stop_if(self, broken: str) -> None:
        """Raise TrainingError if the loss of any process is no number, in all processes together."""
        count = torch.tensor(float(bool(broken)), device=self._policy.tokens.mean.device)
        if self._accelerator is not None:
            count = self._accelerator.reduce(count, reduction="sum")
        if count.item():
            raise TrainingError(
                f"the loss is {broken or 'no number in another process'}; training stopped and "
                f"{self._folder / _CHECKPOINT} keeps the last good state. Lower --lr, or load the model in float32."
            )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Fidelity of the hard-masked policy over the validation samples at the final retention, and at a third of it
        where it is trained for many."""
        means = {"kl": 0.0, "agreement": 0.0}
        measured = {"": self._config.retention_end}
        if self._config.retention_high:
            measured["_third"] = self._config.retention_end / 3
        for sample in self._validation:
            run = SampleDistillation(self._model, sample)
            scores, rows = run.scores(self._policy), len(sample.continuations)
            teacher = run.run(None)
            for end, retention in measured.items():
                student = run.run(hard_mask(self._policy, scores, retention, rows))
                for name, value in (("kl", run.kl(teacher, student)), ("agreement", run.agreement(teacher, student))):
                    means[name + end] = means.get(name + end, 0.0) + float(value) / len(self._validation)
        return means

    def _record(self, losses: dict[str, float]) -> None:
        if self._share[0] != 0:
            return
        row: dict[str, Any] = {"step": self._step, "contexts": self._step * self._config.batch}
        row |= {f"train_{key}": round(value, 5) for key, value in losses.items()}
        if self._validation:
            row |= {f"validation_{key}": round(value, 5) for key, value in self.evaluate().items()}
        # A run killed between this line and its checkpoint repeats the step: drop what lies ahead.
        path = self._folder / _CURVE
        rows = [*(old for old in _read_curve(path) if old["step"] < self._step), row]
        write_text(path, "".join(json.dumps(r) + "\n" for r in rows), TrainingError, "the training curve")

    def _save(self) -> None:
        if self._share[0] != 0:
            return
        tensors = {f"policy.{name}": tensor for name, tensor in self._policy.state_dict().items()}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state[parameter].items():
                tensors[f"optimizer.{key}.{name}"] = value
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {
            "step": str(self._step),
            "config": json.dumps(asdict(self._config)),
            "model": json.dumps(asdict(self._policy.spec)),
        }
        with replacing(self._folder / _CHECKPOINT, TrainingError, "the checkpoint") as temporary:
            temporary.write_bytes(save(tensors, metadata))

    def _restore(self) -> None:
        tensors, metadata = read_checkpoint(self._folder)
        theirs, ours = json.loads(metadata["config"]), asdict(self._config)
        if apart := [f"{n} {theirs.get(n)!r} instead of {ours.get(n)!r}" for n in ours if theirs.get(n) != ours[n]]:
            raise TrainingError(
                f"{self._folder / _CHECKPOINT} belongs to a run with other settings ({', '.join(apart)}); give the "
                "same settings to resume it, or another folder."
            )
        _check_model(self._policy, _spec_of(metadata), self._folder)
        _load_policy(self._policy, tensors, self._folder)
        for name, parameter in self._parameters.items():
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if (saved := tensors.get(f"optimizer.{key}.{name}")) is not None:
                    self._optimizer.state[parameter][key] = saved if key == "step" else saved.to(parameter.device)
        self._step = int(metadata["step"])


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata (step, config) of a run's checkpoint. Raises TrainingError if there is none to read."""
    path = folder / _CHECKPOINT
    try:
        with safe_open(path, "pt") as file:
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        if not metadata["step"].isdecimal() or not isinstance(json.loads(metadata["config"]), dict):
            raise ValueError("its metadata is not that of a run")
        return tensors, metadata
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise TrainingError(f"{path} cannot be read ({error}); give the folder of a training run.") from error


def _read_curve(path: Path) -> list[dict[str, Any]]:
    """The rows written so far. Raises TrainingError for a file that holds none: better now than after hours."""
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
            raise ValueError("a line is no step of a training")
    except (OSError, ValueError, RecursionError) as error:
        raise TrainingError(f"{path} is no training curve ({error}); delete it, or give another folder.") from error
    return rows


@contextmanager
def _first_interrupt() -> Iterator[threading.Event]:
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


def start_from(policy: Policy, folder: Path) -> tuple[dict[str, Any], Policy | None]:
    """Give `policy` the weights of a finished policy or of a run's checkpoint; returns what its card should tell.

    From a policy that reads other inputs it takes the head budgets, and gets that policy back to imitate its choices.
    """
    if is_policy(folder):
        finished = Policy.from_pretrained(folder)
        _check_model(policy, finished.spec, folder)
        if finished.inputs != policy.inputs:
            policy.heads.load_state_dict(finished.heads.state_dict())
            return finished.card, finished
        policy.load_state_dict(finished.state_dict())
        return finished.card, None
    tensors, metadata = read_checkpoint(folder)
    _check_model(policy, _spec_of(metadata), folder)
    _load_policy(policy, tensors, folder)
    return {"step": int(metadata["step"]), "training": json.loads(metadata["config"])}, None


def _load_policy(policy: Policy, tensors: dict[str, Tensor], folder: Path) -> None:
    """Take over the parameters of a checkpoint. Raises TrainingError where they are not those of `policy`."""
    state = {name.removeprefix("policy."): t for name, t in tensors.items() if name.startswith("policy.")}
    try:
        policy.load_state_dict(state)
    except RuntimeError as error:
        raise TrainingError(
            f"{folder / _CHECKPOINT} does not hold the parameters of a policy; give the folder of a training run."
        ) from error


def _spec_of(metadata: dict[str, str]) -> ModelSpec | None:
    return from_dict(ModelSpec, json.loads(metadata["model"])) if "model" in metadata else None


def _check_model(policy: Policy, spec: ModelSpec | None, folder: Path) -> None:
    try:
        if spec is not None:
            return policy.check_model(spec)
    except PolicyMismatchError:
        pass
    raise TrainingError(f"{folder} was trained for another model; give that model, or another folder.")


def require_samples(samples: list[TokenizedSample]) -> list[TokenizedSample]:
    """Raise DataError unless some sample has a continuation to learn from."""
    if not any(sample.continuations for sample in samples):
        raise DataError("no sample has a continuation to learn from; give longer texts, or lower --min-tokens.")
    return samples
