"""lkv inspect: what a policy learned."""

import argparse
import json
from pathlib import Path

from lkv.commands.options import add_policy_revision


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("policy", nargs="?", default=None, help="folder or hub id (default: the embedded model's)")
    add_policy_revision(parser)
    parser.add_argument("--retention", type=float, default=0.15)
    parser.add_argument("--figure", type=Path, default=None, help="write the budgets as a picture")


def run(options: argparse.Namespace) -> None:
    """Print the budgets of every head, and draw them where a picture is asked for."""
    from lkv.models import DEFAULT, load_policy

    policy = load_policy(options.policy or DEFAULT, revision=options.policy_revision)
    ratios = policy.inference_ratios(options.retention)
    print(f"{policy.spec.architecture}: {policy.spec.layers} layers x {policy.spec.kv_heads} KV heads")
    print(f"card: {json.dumps(policy.card)}")
    for layer, row in enumerate(ratios.tolist()):
        print(f"layer {layer:3}: " + " ".join(f"{ratio:.3f}" for ratio in row))
    if options.figure:
        from lkv.report.figures import draw_budgets

        draw_budgets(ratios.tolist(), options.retention, options.figure)
        print(f"the picture is in {options.figure}")
