"""lkv train: a policy for a model."""

import argparse
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from lkv.cli.options import add_model, add_revision
from lkv.config import CHOICES, HELP, PRESETS, SPREADS, TrainingConfig
from lkv.errors import TrainingError

_NAMES = tuple(f.name for f in fields(TrainingConfig))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command: files and folders, then every setting of a training."""
    parser.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        default=None,
        help="settings to start from (default: paper on a GPU, else cpu; either cut to what the model can read)",
    )
    add_model(parser)
    add_revision(parser)
    data = "what `lkv data build` wrote, or a folder with data sets, own JSON lines, text or code"
    parser.add_argument("--data", type=Path, required=True, help=data)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the policy")
    parser.add_argument("--init", type=Path, default=None, help="policy or run to start from (preset finish)")
    parser.add_argument(
        "--track", nargs="+", default=(), metavar="TRACKER", help="give the curve to tensorboard, wandb, ... as well"
    )
    parser.add_argument(
        "--spread",
        choices=SPREADS,
        default=SPREADS[0],
        help="a model larger than one GPU: over all devices of one process, or shared out over the processes",
    )
    parser.add_argument("--config", type=Path, default=None, help="TOML file with any of the settings below")
    settings = parser.add_argument_group("settings", "each also a key of --config; an option takes precedence")
    for name in _NAMES:
        _add_setting(settings, name, type(getattr(TrainingConfig(), name)))


def _add_setting(group: argparse._ArgumentGroup, name: str, kind: type) -> None:
    option = "--" + name.replace("_", "-")
    if kind is bool:
        group.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=HELP[name])
    elif name in CHOICES:
        group.add_argument(option, choices=CHOICES[name], default=None, help=HELP[name])
    else:
        group.add_argument(option, type=kind, default=None, help=HELP[name], metavar="N" if kind is int else "X")


def run(options: argparse.Namespace) -> None:
    """Train, or go on from the last checkpoint."""
    from lkv.utils.extras import require

    require("train", "lkv train")
    given = _read(options.config) if options.config else {}
    given |= {name: value for name in _NAMES if (value := getattr(options, name)) is not None}
    preset = options.preset or given.pop("preset", None)
    given.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise TrainingError(f"preset is {preset!r}; give one of {', '.join(sorted(PRESETS))}.")
    from lkv.training.pipeline import train_policy

    train_policy(
        preset, given, options.model, options.data, options.out, options.init, options.revision, options.track,
        options.spread,
    )  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    """The settings of a TOML file. Raises TrainingError for one that cannot be read or names others."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read as TOML ({error}); write lines such as steps = 1000.") from error
    if strange := sorted(set(settings) - {*_NAMES, "preset"}):
        raise TrainingError(f"{path} sets {', '.join(strange)}, which is no setting; `lkv train --help` lists them.")
    return settings
