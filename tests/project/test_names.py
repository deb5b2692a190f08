"""Names are words of the field: a pronoun tells nobody what a variable holds."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "lkv"
PRONOUNS = frozenset(
    """own found every place each one other others both some same what which whose here there thing things it this that
    these those""".split()
)


def given(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a file gives to variables, attributes and parameters, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def pronouns(source: str) -> list[tuple[str, int]]:
    return [(name, line) for name, line in given(ast.parse(source)) if name.strip("_").lower() in PRONOUNS]


@pytest.mark.parametrize(
    "source",
    [
        "own = 1",
        "for place in x: pass",
        "def f(other): pass",
        "self._found = 2",
        "y = [each for each in x]",
        "_ONE = 1",
    ],
)
def test_pronouns_are_seen(source):
    assert len(pronouns(source)) == 1


def test_other_words_pass():
    assert pronouns("owner = places = x.own\nf(place=2)\nfor row in every: pass") == []


def test_no_name_is_a_pronoun():
    told = {path: pronouns(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
    assert {str(path.relative_to(ROOT)): names for path, names in told.items() if names} == {}
