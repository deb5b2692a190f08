"""Training (Sec. 3.5, App. C): the frozen model with its full cache teaches itself with a compressed one."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from lkv.config import ModelSpec, TrainingConfig, asdict, from_dict
from lkv.errors import DataError, PolicyMismatchError, TrainingError
from lkv.host.attention import attach, evaluation_mode
from lkv.policy import Policy, is_policy
from lkv.prefill import read_prompt
from lkv.training.data.sample import TokenizedSample
from lkv.training.distillation import Distiller, gumbel, hard_mask, soft_mask

_CHECKPOINT = "checkpoint.safetensors"
_CURVE = "curve.jsonl"


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
    ):
        """`samples(i)` gives training sample i. `folder` takes checkpoint, curve and the finished policy.

        `calibrated`: the policy already holds its input statistics (it starts from another run).
        """
        self._model, self._policy, self._config = model, policy, config
        self._samples, self._validation, self._folder = samples, validation, folder
        self._accelerator, self._calibrated = accelerator, calibrated
        self._share = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
        self._parameters = dict(policy.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.98)
        )
        self._step = 0

    def run(self, stop_after: int | None = None) -> Policy:
        """Train to the end (or `stop_after` steps from here), resuming a checkpoint in the folder. Returns the policy.

        Raises TrainingError if the loss stops being a number; the last checkpoint stays as it was.
        """
        attach(self._model)
        self._model.requires_grad_(False)
        self._folder.mkdir(parents=True, exist_ok=True)
        with evaluation_mode(self._model):
            if (self._folder / _CHECKPOINT).is_file():
                self._restore()
            elif not self._calibrated:
                self._calibrate()
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
                if last or self._step % self._config.checkpoint_every == 0:
                    self._save()
            bar.close()
        return self._policy

    def _train_step(self) -> dict[str, float]:
        now = schedule(self._config, self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = now.lr
        self._optimizer.zero_grad(set_to_none=True)
        index, count = self._share
        sums = {"kl": 0.0, "hidden": 0.0}
        broken = ""
        for place in range(index, self._config.batch, count):
            number = self._step * self._config.batch + place
            generator = torch.Generator("cpu").manual_seed(self._config.seed * 1_000_003 + number)
            sample = self._samples(number)
            if not sample.continuations:
                continue
            run = Distiller(self._model, sample)
            with torch.no_grad():
                teacher = run.run(None)
            scores = run.scores(self._policy)
            noise = gumbel((len(sample.continuations), *scores.shape), generator, scores.device)
            student = run.run(soft_mask(self._policy, scores, now.retention, now.tau, noise))
            kl = run.kl(teacher, student)
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
    def _calibrate(self, count: int = 12) -> None:
        """Measure mean and deviation of k and v of each head on the first training samples."""
        sums: list[Tensor] = []
        total = 0
        for number in range(count):
            sample = self._samples(number)
            device = self._policy.tokens.mean.device
            prompt = read_prompt(self._model, torch.tensor([sample.context], device=device))
            kv = torch.cat([torch.cat([layer.key, layer.value], -1) for layer in prompt]).double()
            sums.append(torch.stack([kv.sum(2), kv.square().sum(2)]))
            total += kv.shape[2]
        first, second = torch.stack(sums).sum(0) / total
        self._policy.tokens.mean.copy_(first)
        self._policy.tokens.std.copy_((second - first.square()).clamp(min=1e-6).sqrt())

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Fidelity of the hard-masked policy at the final retention over the validation samples."""
        kl = agreement = 0.0
        for sample in self._validation:
            run = Distiller(self._model, sample)
            scores = run.scores(self._policy)
            teacher = run.run(None)
            student = run.run(hard_mask(self._policy, scores, self._config.retention_end, len(sample.continuations)))
            kl += float(run.kl(teacher, student)) / len(self._validation)
            agreement += run.agreement(teacher, student) / len(self._validation)
        return {"kl": kl, "agreement": agreement}

    def _record(self, losses: dict[str, float]) -> None:
        if self._share[0] != 0:
            return
        row: dict[str, Any] = {"step": self._step, "contexts": self._step * self._config.batch}
        row |= {f"train_{key}": round(value, 5) for key, value in losses.items()}
        if self._validation:
            row |= {f"validation_{key}": round(value, 5) for key, value in self.evaluate().items()}
        # A run killed between this line and its checkpoint repeats the step: drop what lies ahead.
        path = self._folder / _CURVE
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        rows = [*(old for old in rows if old["step"] < self._step), row]
        _replace_text(path, "".join(json.dumps(r) + "\n" for r in rows))

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
        target = self._folder / _CHECKPOINT
        temporary = target.with_suffix(".tmp")
        save_file(tensors, temporary, metadata)
        os.replace(temporary, target)

    def _restore(self) -> None:
        tensors, metadata = read_checkpoint(self._folder)
        if json.loads(metadata["config"]) != asdict(self._config):
            raise TrainingError(
                f"{self._folder / _CHECKPOINT} belongs to a run with other settings; give the same settings to resume "
                "it, or another folder."
            )
        _check_model(self._policy, _spec_of(metadata), self._folder)
        state = {name.removeprefix("policy."): t for name, t in tensors.items() if name.startswith("policy.")}
        self._policy.load_state_dict(state)
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
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{path} cannot be read ({error}); give the folder of a training run.") from error


def start_from(policy: Policy, folder: Path) -> dict[str, Any]:
    """Give `policy` the weights of a finished policy or of a run's checkpoint; returns what its card should tell."""
    if is_policy(folder):
        finished = Policy.from_pretrained(folder)
        _check_model(policy, finished.spec, folder)
        policy.load_state_dict(finished.state_dict())
        return finished.card
    tensors, metadata = read_checkpoint(folder)
    _check_model(policy, _spec_of(metadata), folder)
    policy.load_state_dict({n.removeprefix("policy."): t for n, t in tensors.items() if n.startswith("policy.")})
    return {"step": int(metadata["step"]), "training": json.loads(metadata["config"])}


def _spec_of(metadata: dict[str, str]) -> ModelSpec | None:
    return from_dict(ModelSpec, json.loads(metadata["model"])) if "model" in metadata else None


def _check_model(policy: Policy, spec: ModelSpec | None, folder: Path) -> None:
    try:
        if spec is not None:
            return policy.check_model(spec)
    except PolicyMismatchError:
        pass
    raise TrainingError(f"{folder} was trained for another model; give that model, or another folder.")


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def require_samples(samples: list[TokenizedSample]) -> list[TokenizedSample]:
    """Raise DataError unless some sample has a continuation to learn from."""
    if not any(sample.continuations for sample in samples):
        raise DataError("no sample has a continuation to learn from; give longer texts, or lower --min-tokens.")
    return samples
