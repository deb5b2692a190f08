"""dev/ATTACKS.md: every test that it names is there."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_attack_names_a_test_that_exists():
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", (TESTS.parent / "dev" / "ATTACKS.md").read_text(encoding="utf-8"))
    assert len(named) > 50
    defined = {}
    for file in {file for file, _ in named}:
        (path,) = TESTS.rglob(file)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        defined[file] |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                          if isinstance(target, ast.Name)}  # fmt: skip
    assert not [(file, name) for file, name in named if name not in defined[file]]
