"""lkv train: a policy for a model."""

import argparse
from dataclasses import fields
from pathlib import Path

from lkv.commands.options import add_model, add_revision, positive
from lkv.config import HIDDEN_NORMS, PRESETS, TrainingConfig, replace

_OPTIONS = (
    "steps", "batch", "continuations", "lr", "lr_end", "warmup", "tau_start", "tau_end", "seed", "min_tokens",
    "max_tokens", "hidden_norm",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--preset", choices=sorted(PRESETS), default="paper")
    add_model(parser)
    add_revision(parser)
    parser.add_argument("--data", type=Path, required=True, help="folder with data sets, text or code")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the policy")
    parser.add_argument("--init", type=Path, default=None, help="policy or run to start from (preset finish)")
    parser.add_argument(
        "--track", nargs="+", default=(), metavar="TRACKER", help="give the curve to tensorboard, wandb, ... as well"
    )
    types = {f.name: type(getattr(TrainingConfig(), f.name)) for f in fields(TrainingConfig)}
    for name in _OPTIONS:
        choices = HIDDEN_NORMS if name == "hidden_norm" else None
        kind = positive if types[name] is int and name != "seed" else types[name]
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=None, choices=choices)


def run(options: argparse.Namespace) -> None:
    """Train, or go on from the last checkpoint."""
    from lkv.extras import require

    require("train", "lkv train")
    from lkv.training.pipeline import train_policy

    chosen = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    config = replace(PRESETS[options.preset], **chosen)
    train_policy(
        config, options.model, options.data, options.out, options.init, options.revision, trackers=options.track
    )
