"""Nothing in the package grows beyond what is read at one go."""

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2] / "lkv"
LONGEST_CLASS, MEDIAN_FUNCTION = 200, 8


def definitions(*kinds: type) -> Iterator[tuple[str, int]]:
    """Name and lines, decorators left out, of everything of these kinds in the package."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                yield f"{path.relative_to(ROOT)}: {node.name}", node.end_lineno - node.lineno + 1


def test_no_class_is_long():
    sizes = dict(definitions(ast.ClassDef))
    assert len(sizes) > 100
    assert {name: lines for name, lines in sizes.items() if lines > LONGEST_CLASS} == {}


def test_functions_are_short():
    assert median(lines for _, lines in definitions(ast.FunctionDef, ast.AsyncFunctionDef)) <= MEDIAN_FUNCTION
