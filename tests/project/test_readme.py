"""The README tells what the result files hold."""

import re

from benchmarks.readme import EARLIER, README, earlier, section
from lkv.methods.catalogue import METHODS, RULES, SELECTORS


def test_results_in_the_readme_come_from_the_files():
    assert section() in README.read_text(encoding="utf-8")
    assert EARLIER.read_text(encoding="utf-8") == earlier()


def test_the_readme_names_every_method_and_no_file_that_is_not_there():
    text = README.read_text(encoding="utf-8")
    for name in (*METHODS, *RULES, *SELECTORS):
        assert f"`{name}`" in text, f"the README does not name {name}"
    for path in re.findall(r"`(lkv/[\w/]+(?:\.py)?/?)`", text):
        assert (README.parent / path).exists(), f"the README names {path}, which is not there"
