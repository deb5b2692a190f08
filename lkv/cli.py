"""The command line: lkv ask | train | inspect."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from lkv.config import PRESETS, TrainingConfig, replace
from lkv.errors import LkvError

_TRAINING_OPTIONS = ("steps", "batch", "continuations", "lr", "seed", "min_tokens", "max_tokens", "hidden_norm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. Errors a user can meet are one sentence on stderr."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except LkvError as error:
        print(f"lkv: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lkv", description="Learned KV cache eviction for transformers models.")
    commands = parser.add_subparsers(required=True)

    train = commands.add_parser("train", help="train a policy for a model, or resume the training")
    train.add_argument("--preset", choices=sorted(PRESETS), default="paper")
    train.add_argument("--model", default=None, help="folder or hub id (default: the embedded SmolLM2-135M)")
    train.add_argument("--data", type=Path, required=True, help="folder with data sets, text or code")
    train.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the policy")
    types = {f.name: type(getattr(TrainingConfig(), f.name)) for f in fields(TrainingConfig)}
    for name in _TRAINING_OPTIONS:
        train.add_argument("--" + name.replace("_", "-"), type=types[name], default=None)
    train.set_defaults(run=_train)
    return parser


def _train(options: argparse.Namespace) -> None:
    from lkv.recipes import train_policy

    chosen = {name: getattr(options, name) for name in _TRAINING_OPTIONS if getattr(options, name) is not None}
    train_policy(replace(PRESETS[options.preset], **chosen), options.model, options.data, options.out)


if __name__ == "__main__":
    sys.exit(main())
