"""Policies shipped with the package or made here by `lkv fit`, and their cards. Does not import torch."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lkv.errors import DEFAULT_RETENTION
from lkv.hf.model_spec import ModelSpec
from lkv.policy.model_match import model_difference
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.utils.dataclass_json import from_dict
from lkv.utils.files import cache_folder

_POLICIES = Path(__file__).parent / "checkpoints"


@dataclass(frozen=True)
class StoredPolicy:
    """One policy on this machine: its folder, the model it is for, and its card."""

    folder: Path
    spec: ModelSpec
    card: dict[str, Any]
    inputs: ScorerInputs

    @property
    def name(self) -> str:
        """Its name: the folder's name."""
        return self.folder.name

    @property
    def has_paper_scorer(self) -> bool:
        """Whether its scorer is the paper's."""
        return self.inputs.is_paper

    @property
    def hub_names(self) -> list[str]:
        """The hub ids of its model, in all weight formats."""
        return self.card.get("hub", [])

    def is_for(self, model: ModelSpec | str) -> bool:
        """Return whether it is for the model with this description, local name or hub id."""
        if isinstance(model, ModelSpec):
            return model_difference(self.spec, model) is None
        return model.lower() in map(str.lower, (self.name.removesuffix("-paper"), *self.hub_names))

    @property
    def is_preferred(self) -> bool:
        """Whether it beat SnapKV and a policy shipped for the model on the held-out texts of `lkv fit`."""
        return self.card.get("fit", {}).get("preferred", False)


def describe_overlap(card: dict[str, Any]) -> str:
    """Describe the overlap of training data and evaluated texts recorded in a card, in one sentence."""
    checked = card.get("decontamination")
    if not checked:
        return "not compared with evaluated texts"
    sets = checked["sets"]
    over = {name: entry["overlapping"] for name, entry in sets.items() if entry["overlapping"]}
    named = f" ({', '.join(f'{name} {count:,}' for name, count in over.items())})" if over else ""
    fate = "and were left out" if checked["removed"] else "and were trained on"
    if left := checked.get("not_removed"):  # short texts, which were not checked when the policy was trained
        counts = ", ".join(f"{name} {count:,}" for name, count in left.items())
        fate += f", but not {sum(left.values()):,} more with a short text inside an evaluated one ({counts})"
    # None for a stage on a built data set without decontamination.
    earlier = [(stage.get("decontamination") or {}).get("removed") for stage in list(card_stages(card))[1:]]
    if checked["removed"] and not all(earlier):
        other = "trained on them" if False in earlier else "were not compared"
        fate += f"; earlier stages of training {other}"
    return (
        f"{sum(entry['compared'] for entry in sets.values()):,} items of {len(sets)} sets compared with "
        f"{len(checked['files'])} evaluation files: {sum(over.values()):,} share {checked['share']:.0%} or more of a "
        f"piece's {checked['n']}-grams{named} {fate}"
    )


def describe_card(spec: ModelSpec, card: dict[str, Any]) -> list[str]:
    """Describe a policy in a few lines; falls back to the JSON of cards that `lkv train` did not write."""
    try:
        return _describe_training(spec, card)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return [f"model     {spec.architecture}", "card      " + json.dumps(card)]


def _describe_training(spec: ModelSpec, card: dict[str, Any]) -> list[str]:
    """Return one line each on the model, the training, the overlap and the fidelity."""
    trained = f"on texts of up to {card['trained_tokens']:,} tokens" if card.get("trained_tokens") else "unknown"
    full = 2 * 2 * spec.layers * spec.kv_heads * spec.head_dim * 1000 / 1e6  # MB of 1,000 tokens in 16 bits
    return [
        f"model     {', '.join(card.get('hub', ())) or card.get('model', 'unknown')}, in any storage "
        f"({spec.architecture}, {spec.layers} layers of {spec.kv_heads} KV heads)",
        f"memory    1,000 tokens take {full:.1f} MB uncompressed in 16 bits, {DEFAULT_RETENTION * full:.1f} MB at R "
        f"{DEFAULT_RETENTION:g}",
        f"trained   {trained}, at R {_retentions(card)}",
        f"overlap   {describe_overlap(card)}",
        *(
            f"fidelity  KL {row['kl']:.3f}, top-1 agreement {row['agreement']:.3f} to the full cache at R "
            f"{row['retention']:g}, {text_lengths(row)} tokens{_number_of_texts(row)}"
            for row in card.get("fidelity", [])
        ),
    ]


def _number_of_texts(row: dict[str, Any]) -> str:
    return f", {row['texts']} text{'s' * (row['texts'] != 1)}" if "texts" in row else ""


def shipped_policies() -> list[StoredPolicy]:
    """Return all shipped policies, sorted by name."""
    return [_read_policy(path) for path in sorted(_POLICIES.glob("*/config.json"))]


def fitted_policies() -> list[StoredPolicy]:
    """Return the readable policies that `lkv fit` saved in the cache folder, newest first."""
    policies = []
    paths = [path for path in (cache_folder() / "policies").glob("*/config.json") if path.is_file()]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            policies.append(_read_policy(path))
    return policies


def named_policy(name: str) -> StoredPolicy | None:
    """Return the policy on this machine with this name in `lkv policies`, ignoring case."""
    return next((each for each in (*shipped_policies(), *fitted_policies()) if each.name.lower() == name.lower()), None)


def fitted_folder(model_name: str, spec: ModelSpec) -> Path:
    """Return the folder in which `lkv fit` saves the policy of a model, by its name and fingerprint."""
    name = re.sub(r"[^a-z0-9.]+", "-", Path(model_name).name.lower()).strip("-.") or "model"
    return cache_folder() / "policies" / f"{name}-{spec.digest()[:12]}"


def _read_policy(path: Path) -> StoredPolicy:
    config = json.loads(path.read_text(encoding="utf-8"))
    inputs = from_dict(ScorerInputs, config.get("inputs", {}))
    policy = StoredPolicy(path.parent, from_dict(ModelSpec, config["model"]), config["card"], inputs)
    if not (isinstance(policy.hub_names, list) and all(isinstance(name, str) for name in policy.hub_names)):
        raise TypeError("hub is not a list of names")
    if not isinstance(policy.card.get("fit", {}), dict):
        raise TypeError("fit is not an object")
    return policy


def card_stages(card: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return a card's stages of training, the last one first."""
    while card:
        yield card
        card = card.get("started_from", {})


def _retentions(card: dict[str, Any]) -> str:
    """Return the smallest and largest retention of all stages of the training."""
    used = []
    for training in (stage["training"] for stage in card_stages(card) if stage.get("training")):
        retentions = [training[name] for name in ("retention_low", "retention_high") if training.get(name)]
        used += retentions or [training["retention_start"], training["retention_end"]]
    if not used:
        return "unknown"
    return f"{min(used):g}" if min(used) == max(used) else f"{min(used):g} to {max(used):g}"


def text_lengths(row: dict[str, Any]) -> str:
    """Return the lengths of the texts that a row of a card's fidelity was measured on."""
    shortest, longest = row["tokens"]
    return f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
