"""What a training leaves in its folder as it goes: a checkpoint to resume from, and the curve of its losses."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lkv.config import ModelSpec, ScorerInputs, TrainingConfig, asdict, from_dict, replace
from lkv.errors import PolicyMismatchError, TrainingError
from lkv.policy.policy import Policy
from lkv.policy.policy_file import is_policy
from lkv.utils.files import atomic_write, write_text

CHECKPOINT = "checkpoint.safetensors"
_CURVE = "curve.jsonl"


class TrainingState(NamedTuple):
    """What a checkpoint holds: the policy and its optimizer, under the settings of one training."""

    config: TrainingConfig
    policy: Policy
    optimizer: torch.optim.Optimizer

    def save(self, folder: Path, step: int) -> None:
        """Write the checkpoint of `step`, whole or not at all. Raises TrainingError."""
        tensors = {f"policy.{name}": tensor for name, tensor in self.policy.state_dict().items()}
        for name, parameter in self.policy.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{key}.{name}"] = value
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {
            "step": str(step),
            "config": json.dumps(asdict(self.config)),
            "model": json.dumps(asdict(self.policy.spec)),
            "card": json.dumps(self.policy.card),
        }
        with atomic_write(folder / CHECKPOINT, TrainingError, "the checkpoint") as temporary:
            temporary.write_bytes(save(tensors, metadata))

    def restore(self, folder: Path) -> int:
        """Take up the checkpoint in `folder`; returns its step. Raises TrainingError for one of another training."""
        tensors, metadata = read_checkpoint(folder)
        _check_settings(folder, metadata, self.config)
        _check_model(self.policy, _spec_of(metadata), folder)
        _load_policy(self.policy, tensors, folder)
        # What the run started from, and on what, is told by the call that began it.
        self.policy.card = json.loads(metadata["card"]) if "card" in metadata else self.policy.card
        for name, parameter in self.policy.named_parameters():
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if (value := tensors.get(f"optimizer.{key}.{name}")) is not None:
                    self.optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)
        return int(metadata["step"])


def check_settings(folder: Path, config: TrainingConfig) -> None:
    """Raises TrainingError unless the run in `folder` has the settings `config`; its tensors are not read."""
    _check_settings(folder, _read(folder, with_tensors=False)[1], config)


def check_data(folder: Path, digest: str) -> None:
    """Raises TrainingError where the run in `folder` was on other data than that of this digest."""
    card = json.loads(_read(folder, with_tensors=False)[1].get("card", "{}"))
    if card.get("data_digest", digest) != digest:
        raise TrainingError(
            f"{folder / CHECKPOINT} belongs to a run on other data; give the same --data to resume it, or another "
            f"folder (--init {folder} starts from its weights)."
        )


def _check_settings(folder: Path, metadata: dict[str, str], config: TrainingConfig) -> None:
    # A setting that the checkpoint does not know had its default then.
    saved, asked = asdict(TrainingConfig()) | json.loads(metadata["config"]), asdict(config)
    saved["warmup_contexts"] = saved.pop("imitated", saved["warmup_contexts"])  # its name in older checkpoints
    if apart := [f"{n} {saved.get(n)!r} instead of {asked.get(n)!r}" for n in asked if saved.get(n) != asked[n]]:
        raise TrainingError(
            f"{folder / CHECKPOINT} belongs to a run with other settings ({', '.join(apart)}); give the "
            "same settings to resume it, or another folder."
        )


def read_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata (step, config) of a run's checkpoint. Raises TrainingError if there is none to read."""
    return _read(folder, with_tensors=True)


def _read(folder: Path, with_tensors: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
    path = folder / CHECKPOINT
    try:
        with safe_open(path, "pt") as file:
            names = file.keys() if with_tensors else ()
            tensors, metadata = {name: file.get_tensor(name) for name in names}, file.metadata()
        if not metadata["step"].isdecimal() or not isinstance(json.loads(metadata["config"]), dict):
            raise ValueError("its metadata is not that of a run")
        return tensors, metadata
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise TrainingError(f"{path} cannot be read ({error}); give the folder of a training run.") from error


def initialize_from(policy: Policy, folder: Path) -> tuple[dict[str, Any], Policy | None]:
    """Give `policy` the weights of a finished policy or of a run's checkpoint; returns what its card should tell.

    From a policy that reads other inputs it takes the head budgets, and gets that policy back to imitate its choices.
    Position terms for other lengths are cut or go on flat, as they would beyond their last knot.
    """
    if is_policy(folder):
        finished = Policy.from_pretrained(folder)
        _check_model(policy, finished.spec, folder)
        if not _alike(finished.inputs, policy.inputs):
            policy.heads.load_state_dict(finished.heads.state_dict())
            return finished.card, finished
        policy.load_state_dict(_of_knots(finished.state_dict(), policy.inputs.knots))
        return finished.card, None
    tensors, metadata = read_checkpoint(folder)
    _check_model(policy, _spec_of(metadata), folder)
    _load_policy(policy, tensors, folder)
    return {"step": int(metadata["step"]), "training": json.loads(metadata["config"])}, None


def _load_policy(policy: Policy, tensors: dict[str, Tensor], folder: Path) -> None:
    """Take over the parameters of a checkpoint. Raises TrainingError where they are not those of `policy`."""
    state = {name.removeprefix("policy."): t for name, t in tensors.items() if name.startswith("policy.")}
    try:
        policy.load_state_dict(_of_knots(state, policy.inputs.knots))
    except RuntimeError as error:
        raise TrainingError(
            f"{folder / CHECKPOINT} does not hold the parameters of a policy that reads what this training asks for; "
            "give the folder of a run with the same --key, --attention and --position."
        ) from error


def _alike(saved: ScorerInputs, asked: ScorerInputs) -> bool:
    """Whether two policies read the same, up to the length that their position terms are for."""
    return bool(saved.knots) == bool(asked.knots) and replace(saved, knots=0) == replace(asked, knots=0)


def _of_knots(state: dict[str, Tensor], knots: int) -> dict[str, Tensor]:
    """`state` with position tables of `knots` knots where it has any: cut, or flat beyond the last one."""
    tables = {name: state[name] for name in ("tokens.start", "tokens.end") if name in state and knots}
    last = {name: table.shape[-1] - 1 for name, table in tables.items()}
    return state | {
        name: table[..., torch.arange(knots, device=table.device).clamp(max=last[name])]
        for name, table in tables.items()
    }


def _spec_of(metadata: dict[str, str]) -> ModelSpec | None:
    return from_dict(ModelSpec, json.loads(metadata["model"])) if "model" in metadata else None


def _check_model(policy: Policy, spec: ModelSpec | None, folder: Path) -> None:
    try:
        if spec is not None:
            return policy.check_model(spec)
    except PolicyMismatchError:
        pass
    raise TrainingError(f"{folder} was trained for another model; give that model, or another folder.")


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """The rows written so far. Raises TrainingError for a file that holds none: better now than after hours."""
    path = folder / _CURVE
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
            raise ValueError("a line is no step of a training")
    except (OSError, ValueError, RecursionError) as error:
        raise TrainingError(f"{path} is no training curve ({error}); delete it, or give another folder.") from error
    return rows


def extend_curve(folder: Path, row: dict[str, Any]) -> None:
    """Add the row of one step. Raises TrainingError."""
    # A run killed between this line and its checkpoint repeats the step: drop what lies ahead.
    rows = [*(old for old in read_curve(folder) if old["step"] < row["step"]), row]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    write_text(folder / _CURVE, text, TrainingError, "the training curve")
