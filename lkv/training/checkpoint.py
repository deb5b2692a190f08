"""The files of a training run: a checkpoint to resume from, the loss curve, and a lock."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lkv.errors import PolicyMismatchError, TrainingError
from lkv.hf.model_spec import ModelSpec
from lkv.policy.policy import Policy, is_policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.training.config import TrainingConfig
from lkv.utils import tensor_file
from lkv.utils.dataclass_json import from_dict
from lkv.utils.file_lock import exclusive_lock
from lkv.utils.files import write_text
from lkv.utils.tensor_file import FileKind

CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_KIND = FileKind("lkv_training", 1, "checkpoint", TrainingError, "give the folder of a training run")
CURVE = "curve.jsonl"
_OTHER_INPUTS = (
    "does not hold the parameters of a policy with these inputs; give the folder of a run with the same --key, "
    "--attention and --position."
)


class OtherRunError(TrainingError):
    """The checkpoint belongs to a run with other settings, other data or another model."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock `folder` against other training processes in the block. Raises TrainingError if it is locked."""
    busy = f"another training is running in {folder}; wait until it ends, or give another folder."
    with exclusive_lock(folder / ".lock", TrainingError, busy, is_reentrant=True):
        yield


def save_checkpoint(
    folder: Path, step: int, config: TrainingConfig, policy: Policy, optimizer: torch.optim.Optimizer
) -> None:
    """Write a checkpoint atomically.

    Args:
        folder: The run's folder.
        step: The number of steps taken.
        config: The settings of the run.
        policy: The policy after these steps.
        optimizer: Its optimizer.

    Raises:
        TrainingError: The file cannot be written.
    """
    tensors = {f"policy.{name}": tensor for name, tensor in policy.state_dict().items()}
    for name, parameter in policy.named_parameters():
        tensors |= {f"optimizer.{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    about = {"step": step, "config": asdict(config), "model": asdict(policy.spec), "card": policy.card}
    tensor_file.write(folder / CHECKPOINT, CHECKPOINT_KIND, tensors, about)


def check_no_policy(folder: Path, checkpoint: Path | None = None) -> None:
    """Raise TrainingError for a policy in `folder`, unless it is of the run with this `checkpoint`."""
    if is_policy(folder) and (checkpoint is None or not checkpoint.exists()):
        raise TrainingError(f"{folder} already holds a policy; give another --out, or delete it.")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory."""

    path: Path
    tensors: dict[str, Tensor]  # of the policy and of its optimizer
    step: int  # steps taken
    config: dict[str, Any]
    spec: ModelSpec
    card: dict[str, Any]  # of the policy

    def check_run(self, config: TrainingConfig, data_digest: str | None = None) -> None:
        """Raise TrainingError unless the run has the settings `config` and, if given, data with this digest."""
        saved, current = self.config, asdict(config)
        names = [name for name in current if saved.get(name) != current[name]]
        if changes := [f"{name} {saved.get(name)!r} instead of {current[name]!r}" for name in names]:
            raise OtherRunError(
                f"{self.path} belongs to a run with other settings ({', '.join(changes)}); give the same settings to "
                "resume it, or another folder."
            )
        if data_digest is not None and self.card.get("data_digest") != data_digest:
            raise OtherRunError(
                f"{self.path} belongs to a run on other data; give the same --data to resume it, or another folder "
                f"(--init {self.path.parent} starts from its weights)."
            )

    def load_policy(self, policy: Policy) -> None:
        """Load the parameters into `policy`. Raises TrainingError if its model or inputs do not match."""
        state = {n.removeprefix("policy."): tensor for n, tensor in self.tensors.items() if n.startswith("policy.")}
        _load_state(policy, state, self.spec, self.path.parent)

    def load_optimizer(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Load the state of AdamW for the parameters of `policy`. Raises TrainingError if it does not match."""
        for name, parameter in policy.named_parameters():
            shapes = {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
            state = {key: x for key in shapes if (x := self.tensors.get(f"optimizer.{key}.{name}")) is not None}
            if not state:  # a parameter without a gradient so far
                continue
            fits = state.keys() == shapes.keys() and all(
                x.is_floating_point() and x.shape == shapes[key] and (key == "exp_avg" or bool((x >= 0).all()))
                for key, x in state.items()
            )
            if not fits:
                raise TrainingError(f"{self.path} has no state of these parameters; give another folder.")
            optimizer.state[parameter] = {
                key: x.float() if key == "step" else x.to(parameter) for key, x in state.items()
            }


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint of the run in `folder`. Raises TrainingError if there is none, or it is damaged."""
    path = folder / CHECKPOINT
    tensors, about = tensor_file.read(path, CHECKPOINT_KIND)
    try:
        step, config, card = (about[name] for name in ("step", "config", "card"))
        if type(step) is not int or step < 0 or not isinstance(config, dict) or not isinstance(card, dict):
            raise ValueError("its header is not that of a run")
        if not all(bool(x.isfinite().all()) for x in tensors.values()):
            raise ValueError("it contains NaN or infinite values")
        return Checkpoint(path, tensors, step, config, from_dict(ModelSpec, about["model"]), card)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainingError(f"{path} cannot be read ({error}); {CHECKPOINT_KIND.remedy}.") from error


def initialize_from(policy: Policy, folder: Path) -> dict[str, Any]:
    """Initialise `policy` from a policy or run in `folder`; returns its card, with step and settings for a run."""
    if not is_policy(folder):
        checkpoint = read_checkpoint(folder)
        checkpoint.load_policy(policy)
        card = {name: value for name, value in checkpoint.card.items() if name != "progress"}  # of `lkv fit`
        return card | {"step": checkpoint.step, "training": checkpoint.config}
    earlier = read_initial_policy(folder, policy.inputs)
    _load_state(policy, earlier.state_dict(), earlier.spec, folder)
    return earlier.card


def read_initial_policy(folder: Path, inputs: ScorerInputs) -> Policy:
    """Load an initial policy for a policy with `inputs` from `folder`; raises TrainingError if they do not match."""
    policy = Policy.from_pretrained(folder)
    number = min(policy.inputs.knots, 1)  # the number of knots may differ
    if replace(policy.inputs, knots=number) != replace(inputs, knots=min(inputs.knots, 1)):
        raise TrainingError(f"{folder} {_OTHER_INPUTS}")
    return policy


def _load_state(policy: Policy, state: dict[str, Tensor], spec: ModelSpec, folder: Path) -> None:
    """Load `state` into `policy`, with position tables truncated, or extended with their last knot's value."""
    try:
        policy.check_model(spec)
    except PolicyMismatchError:
        raise OtherRunError(f"{folder} was trained for another model; give that model, or another folder.") from None
    knots = policy.inputs.knots
    for name in ("tokens.start", "tokens.end") if knots else ():
        if (table := state.get(name)) is not None:
            state[name] = table[..., torch.arange(knots, device=table.device).clamp(max=table.shape[-1] - 1)]
    try:
        policy.load_state_dict(state)
    except RuntimeError as error:
        raise OtherRunError(f"{folder} {_OTHER_INPUTS}") from error


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the training curve in `folder`, [] without one. Raises TrainingError for a damaged file."""
    path = folder / CURVE
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
            raise ValueError("a line is not a step of a training")
    except (OSError, ValueError, RecursionError) as error:
        raise TrainingError(f"{path} is not a training curve ({error}); delete it, or give another folder.") from error
    return rows


def append_to_curve(folder: Path, row: dict[str, Any]) -> None:
    """Add the row of one step to the training curve. Raises TrainingError."""
    # A run killed between this line and its checkpoint repeats the step: later rows are dropped.
    rows = [*(earlier for earlier in read_curve(folder) if earlier["step"] < row["step"]), row]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_text(folder / CURVE, text, TrainingError, "the training curve")
