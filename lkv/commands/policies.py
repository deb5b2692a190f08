"""lkv policies: what is shipped, for which models, how it was trained and how faithful it is."""

import argparse
from typing import Any

from lkv.shipped import Shipped, shipped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> None:
    """A paragraph a policy, then what there is for other models."""
    for policy in shipped():
        print("\n".join(_lines(policy)) + "\n")
    print(
        "Other models: `lkv methods` lists the methods that need no policy; "
        "`lkv train --model NAME --data FOLDER --out FOLDER` trains one."
    )


def _lines(policy: Shipped) -> list[str]:
    spec, card = policy.spec, policy.card
    return [
        policy.name,
        f"  model     {', '.join(policy.hub_names) or card.get('model', 'not told')}, in any storage "
        f"({spec.architecture}, {spec.layers} layers of {spec.kv_heads} KV heads)",
        f"  trained   on texts of up to {card['trained_tokens']:,} tokens, at R {_retentions(card)}",
        *(f"  fidelity  {_fidelity(row)}" for row in card.get("fidelity", [])),
    ]


def _retentions(card: dict[str, Any]) -> str:
    """Every retention that some stage of the training held, smallest and largest."""
    held, stage = [], card
    while training := stage.get("training"):
        drawn = [training[name] for name in ("retention_low", "retention_high") if training.get(name)]
        held += drawn or [training["retention_start"], training["retention_end"]]
        stage = stage.get("started_from", {})
    if not held:
        return "not told"
    return f"{min(held):g}" if min(held) == max(held) else f"{min(held):g} to {max(held):g}"


def _fidelity(row: dict[str, Any]) -> str:
    shortest, longest = row["tokens"]
    return (
        f"KL {row['kl']:.3f}, top-1 agreement {row['agreement']:.3f} to the full cache at R {row['retention']:g}, "
        + (f"{longest:,} tokens" if shortest == longest else f"{shortest:,} to {longest:,} tokens")
    )
