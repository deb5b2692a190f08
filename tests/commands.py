"""The command lines of `lkv` and of the programs in experiments/, under one function for tests."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from experiments.data.__main__ import Data
from experiments.profile.__main__ import Profile
from experiments.report.__main__ import Report
from lkv.cli import main as command_line

PROGRAMS = {name: {"command": command, "program": f"python -m experiments.{name}"} for name, command in
             (("data", Data), ("profile", Profile), ("report", Report))}  # fmt: skip


def main(words: Sequence[Any]) -> int:
    """Run `lkv WORDS`, or `python -m experiments.PROGRAM` where the first word is a program's name."""
    return _run(command_line.main, words)


def parse_arguments(words: Sequence[Any]) -> Any:
    """Parse the words as `main` does."""
    return _run(command_line.parse_arguments, words)


def _run(function: Callable[..., Any], words: Sequence[Any]) -> Any:
    own = PROGRAMS.get(str(words[0])) if words else None
    return function(words) if own is None else partial(function, **own)(words[1:])
