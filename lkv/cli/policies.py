"""lkv policies: what is shipped, for which models, how it was trained and how faithful it is."""

import argparse
from typing import Any

from lkv.policy.shipped import Shipped, card_lines, shipped

_TRAIN = "lkv train --preset cpu --model {} --data FOLDER --out FOLDER"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--model", default=None, help="tell what there is for this folder, GGUF file or hub id (default: list all)"
    )


def run(options: argparse.Namespace) -> None:
    """A paragraph a policy, then what there is for other models; or what there is for one model."""
    if options.model:
        print(_for_model(options.model))
        return
    for policy in shipped():
        print("\n".join(_lines(policy)) + "\n")
    print(
        f"Other models: `lkv methods` lists the methods that need no policy; `{_TRAIN.format('NAME')}` trains one; "
        "`lkv policies --model NAME` tells how long that takes."
    )


def _for_model(name: str) -> str:
    """What there is for a model, which is loaded: a policy knows it by its weights."""
    from lkv.integrations.transformers.attention import patch_attention
    from lkv.methods.registry import methods
    from lkv.models.loading import load_model
    from lkv.policy.model_match import model_difference

    model, tokenizer = load_model(name)
    spec = patch_attention(model).spec
    fitting = [policy for policy in shipped() if model_difference(policy.spec, spec) is None]
    if fitting:
        return "\n\n".join("\n".join(_lines(policy)) for policy in fitting)
    free = ", ".join(name for name, method in methods().items() if not method.needs_policy)
    lines = [
        f"No policy is shipped for {name} ({spec.architecture}, {spec.layers} layers of {spec.kv_heads} KV heads).",
        f"  methods   these need none: {free}",
        f"  training  `{_TRAIN.format(name)}`, {_training_times(model, tokenizer)}",
    ]
    return "\n".join(lines)


def _training_times(model: Any, tokenizer: Any) -> str:
    from lkv.config import PRESETS
    from lkv.training.pipeline import estimate_duration

    times = {preset: estimate_duration(model, tokenizer, PRESETS[preset]) for preset in ("cpu", "paper")}
    return f"{times['cpu']} on this machine as it is now ({times['paper']} with --preset paper)"


def _lines(policy: Shipped) -> list[str]:
    return [policy.name, *(f"  {line}" for line in card_lines(policy.spec, policy.card))]
