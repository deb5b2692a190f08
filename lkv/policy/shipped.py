"""The policies that come with the package, as their cards describe them; no torch here."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lkv.config import ModelSpec, ScorerInputs, from_dict

_POLICIES = Path(__file__).parent / "checkpoints"


@dataclass(frozen=True)
class Shipped:
    """One shipped policy: its folder, the model it is for, and its card."""

    folder: Path
    spec: ModelSpec
    card: dict[str, Any]
    inputs: ScorerInputs

    @property
    def name(self) -> str:
        """What it is called: its folder's name."""
        return self.folder.name

    @property
    def is_papers(self) -> bool:
        """Whether its scorer reads what the paper's does, k as cached and v, and nothing else."""
        return self.inputs == ScorerInputs()

    @property
    def hub_names(self) -> list[str]:
        """The models on the hub that it serves, however they are stored."""
        return self.card.get("hub", [])


def checked_line(card: dict[str, Any]) -> str:
    """A sentence on what a card says of overlap between training data and evaluated texts."""
    checked = card.get("decontamination")
    if not checked:
        return "not compared with evaluated texts"
    sets = checked["sets"]
    over = {name: entry["overlapping"] for name, entry in sets.items() if entry["overlapping"]}
    named = f" ({', '.join(f'{name} {count:,}' for name, count in over.items())})" if over else ""
    fate = "and were left out" if checked["removed"] else "and were trained on"
    return (
        f"{sum(entry['compared'] for entry in sets.values()):,} items of {len(sets)} sets compared with "
        f"{len(checked['files'])} evaluation files: {sum(over.values()):,} share {checked['share']:.0%} or more of a "
        f"piece's {checked['n']}-grams{named} {fate}"
    )


def card_lines(spec: ModelSpec, card: dict[str, Any]) -> list[str]:
    """What a policy is for, how it was trained and how faithful it is, a line each."""
    trained = f"on texts of up to {card['trained_tokens']:,} tokens" if card.get("trained_tokens") else "not told"
    return [
        f"model     {', '.join(card.get('hub', ())) or card.get('model', 'not told')}, in any storage "
        f"({spec.architecture}, {spec.layers} layers of {spec.kv_heads} KV heads)",
        f"trained   {trained}, at R {_retentions(card)}",
        f"overlap   {checked_line(card)}",
        *(f"fidelity  {_fidelity(row)}" for row in card.get("fidelity", [])),
    ]


def shipped() -> list[Shipped]:
    """All shipped policies, in the order of their names."""
    policies = []
    for path in sorted(_POLICIES.glob("*/config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        inputs = from_dict(ScorerInputs, config.get("inputs", {}))
        policies.append(Shipped(path.parent, from_dict(ModelSpec, config["model"]), config["card"], inputs))
    return policies


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
