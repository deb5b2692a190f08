"""The policies that come with the package, as their cards describe them; no torch here."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lkv.config import ModelSpec, ScorerInputs, from_dict

_POLICIES = Path(__file__).parent / "policies"


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


def shipped() -> list[Shipped]:
    """All shipped policies, in the order of their names."""
    policies = []
    for path in sorted(_POLICIES.glob("*/config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        inputs = from_dict(ScorerInputs, config.get("inputs", {}))
        policies.append(Shipped(path.parent, from_dict(ModelSpec, config["model"]), config["card"], inputs))
    return policies
