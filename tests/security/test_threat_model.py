"""Every test that SECURITY.md and dev/ATTACKS.md name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["SECURITY.md", "dev/ATTACKS.md"])
def test_the_tests_that_are_named_are_there(page):
    named = set(re.findall(r"`(test_\w+\.py)::(\w+)(?:::\w+)?`", (ROOT / page).read_text(encoding="utf-8")))
    assert len(named) > 20
    for file, test in sorted(named):
        sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(file)]
        assert any(re.search(rf"^((def|class) {test}\b|{test} = )", text, re.M) for text in sources), (file, test)
