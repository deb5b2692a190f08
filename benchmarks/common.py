"""What the benchmark scripts share."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lkv.evals.roster import Roster
from lkv.methods.budget import Uniform
from lkv.methods.build import Method, make_method
from lkv.methods.catalogue import FULL
from lkv.methods.selection import LearnedScores
from lkv.models import default_policy
from lkv.policy import Policy
from lkv.prefill import PromptLayer

_FOLDERS = ("data", "out")
RESULTS = Path(__file__).parent / "results"


def methods_of(names: Sequence[str], policy: Policy, retention: float, model: Any = None) -> list[Method]:
    """Methods by name, with "full" keeping everything."""
    full = Method("full", Uniform(1.0), LearnedScores(policy))
    layers = policy.spec.layers
    return [
        full if name == "full" else make_method(name, retention, policy, model=model, layers=layers) for name in names
    ]


def rosters_of(
    model: Any, tokenizer: Any, names: Sequence[str], retentions: Sequence[float], policy: Policy
) -> dict[str, Roster]:
    """The methods `names` under `policy`, and LKV with the paper's own scorer (k as cached, no other term), by what is
    put behind their names."""
    return {
        "": Roster(model, tokenizer, names, retentions, policy),
        "-paper": Roster(model, tokenizer, ["lkv"], retentions, default_policy(paper=True)),
    }


def rows_of(rosters: dict[str, Roster], ids: list[int], prompt: list[PromptLayer]) -> list[tuple[str, float, Method]]:
    """(name, retention, method) of all that can serve the prompt; the full cache comes first, once."""
    rows = []
    for end, roster in rosters.items():
        ready, _ = roster.for_prompt(ids, prompt)
        rows += [(row.name + end, row.retention, row.method) for row in ready if row.name != FULL or not end]
    return rows


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a result depends on: every option but the folders."""
    return {key: str(value) for key, value in vars(options).items() if key not in _FOLDERS and value is not None}


def command_of(module: str, options: argparse.Namespace) -> str:
    """The command that makes a result again."""
    words = ["python", "-m", module, *(["--data", "EVAL_FOLDER"] if "data" in options else [])]
    for key, value in vars(options).items():
        if key not in _FOLDERS and value is not None:
            words += [f"--{key.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)
