"""What the benchmark scripts share."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lkv.methods.budget import Uniform
from lkv.methods.build import Method, make_method
from lkv.methods.selection import LearnedScores
from lkv.policy import Policy

_FOLDERS = ("data", "out")
RESULTS = Path(__file__).parent / "results"


def methods_of(names: Sequence[str], policy: Policy, retention: float, model: Any = None) -> list[Method]:
    """Methods by name, with "full" keeping everything."""
    full = Method("full", Uniform(1.0), LearnedScores(policy))
    layers = policy.spec.layers
    return [
        full if name == "full" else make_method(name, retention, policy, model=model, layers=layers) for name in names
    ]


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
