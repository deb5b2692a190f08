"""lkv train and lkv fit: train a policy for a model, with settings of your own or in minutes."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from lkv.cli.command import option
from lkv.cli.options import GPU_DEVICE, Dtype, ModelOptions, RunOptions
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


def _chosen(model: BaseModel, names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(model, name)) is not None}


class Fit(RunOptions):
    """Make a policy for a model in minutes."""

    model: str | None = option(
        "folder, GGUF file or Hub id of the model (default: the demo model, SmolLM2-135M)",
        positional=True,
        nargs="?",
        metavar="[MODEL]",
    )
    data: Path | None = option(
        "folder of your documents: .txt, .md, code, .jsonl, .html, .pdf; texts that come with Python and LKV are added"
    )
    against: tuple[Path, ...] = option(
        "files that you will evaluate on: documents that overlap with them are left out", (), metavar="FILE"
    )
    minutes: float = option("how long it may take", 10.0, gt=0)
    out: Path | None = option("folder for the policy (default: in the cache, where it is found for this model)")
    dtype: Dtype | None = option("dtype of the model (default: the faster one of float32 and bfloat16)")
    device: str | None = GPU_DEVICE

    def run(self) -> None:
        """Load the model and fit a policy, or continue where an earlier call was interrupted."""
        import torch

        from lkv.hf.loading import load_model
        from lkv.training import fitting
        from lkv.training.datasets import open_texts
        from lkv.utils.devices import faster_dtype, find_device, torch_dtype
        from lkv.utils.progress import ProgressBar

        started = fitting.clock()
        device = find_device(self.device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        texts = open_texts((), self.data, self.against)  # reports invalid texts before the model is loaded
        dtype = torch_dtype(self.dtype) or faster_dtype(device)
        with ProgressBar.without_total(f"loading {self.model_name}"):
            model, tokenizer = load_model(self.model_name, dtype, self.revision, device)
        fitting.fit_to(texts, model, tokenizer, self.minutes, self.out, self.model_name, started)
