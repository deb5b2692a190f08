"""lkv train: train a policy for a model."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from lkv.cli.command import option
from lkv.cli.options import GPU_DEVICE, ModelOptions
from lkv.errors import TrainingError, describe_invalid_value
from lkv.training.config import PRESETS, SETTINGS

_GROUP = "settings: keys of --config as well; an option takes precedence"
_Preset = Literal[tuple(sorted(PRESETS))]  # type: ignore[valid-type]
# Every setting of a training is optional here: what is not set is the preset's.
_FIELDS: dict[str, Any] = {
    name: (
        Annotated[field.annotation, *(field.metadata or [None])] | None,
        option(f"{field.description} (paper: {field.default})", group=_GROUP),
    )
    for name, field in SETTINGS.items()
}
_Settings: Any = create_model("_Settings", **_FIELDS)


class _File(_Settings):
    """What a file of --config may hold."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    preset: _Preset | None = None  # type: ignore[valid-type]


class Train(_Settings, ModelOptions):
    """Train a policy for a model, or resume the training."""

    preset: _Preset | None = option(  # type: ignore[valid-type]
        "settings to start from (default: gpu on a GPU, else cpu, shortened to what the model can read)"
    )
    data: Path = option("folder from experiments.data, or with data sets, JSON lines, text or code", ...)
    out: Path = option("folder for checkpoints and the policy; the same command resumes from it", ...)
    init: Path | None = option("policy or training folder to start from (preset finish)")
    track: tuple[str, ...] = option("log the curve to tensorboard, wandb, ... as well", (), metavar="TRACKER")
    spread: Literal["no", "devices", "processes"] = option(
        "a model larger than one GPU: over all devices of one process, or over processes", "no"
    )
    device: str | None = GPU_DEVICE
    config: Path | None = option("TOML file with any of the settings below")

    def run(self) -> None:
        """Train, or resume from the last checkpoint."""
        from lkv.training.data.public_datasets import check_data_folder
        from lkv.utils.extras import require

        require("train", "lkv train")
        settings = _read(self.config) if self.config else {}
        settings |= _chosen(self, SETTINGS)
        preset = self.preset or settings.pop("preset", None)
        settings.pop("preset", None)
        check_data_folder(self.data)
        from lkv.training.processes import select_device
        from lkv.training.train_policy import prepare, train_policy

        if self.device:
            select_device(self.device)
        setup = prepare(
            preset, settings, self.model, self.data, self.out, self.init, self.revision, self.track, self.spread
        )
        train_policy(setup)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read as TOML ({error}); write lines such as steps = 1000.") from error
    try:
        return _chosen(_File.model_validate(values), _File.model_fields)
    except ValidationError as error:
        message = describe_invalid_value(error, _File.model_fields)
        raise TrainingError(f"{path}: {message} `lkv train --help` lists the settings.") from None


def _chosen(model: BaseModel, names: Any) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(model, name)) is not None}
