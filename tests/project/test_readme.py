"""The README and docs: generated tables, names of methods and files, links."""

import re

import pytest

from experiments.readme import README, RESULTS_PAGE, TIERS, bytes_beside, headline, readme_section
from experiments.results_page import compensation_changes, results_page
from experiments.tables import AT_4096, read
from lkv.methods.registry import METHODS, budgets, selectors

ROOT = README.parent
QWEN = "{}-qwen2.5-coder-0.5b-instruct"
PAGES = [
    README,
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY")),
]


def test_results_in_the_readme_come_from_the_files():
    readme = README.read_text(encoding="utf-8")
    assert headline() in readme and readme_section() in readme and len(readme.splitlines()) <= 120
    assert RESULTS_PAGE.read_text(encoding="utf-8") == results_page()


def test_the_headline_says_as_many_bytes_where_they_are_as_many():
    plain, tiers = ({"dtype": "float32", "realised": 0.15}, {"dtype": "float32", "realised": 0.48, "memory": 0.15})
    assert bytes_beside(tiers, plain) == "half as many bytes"
    half, in_tiers = plain | {"dtype": "bfloat16"}, tiers | {"dtype": "bfloat16"}
    assert bytes_beside(in_tiers, half | {"realised": 0.144}) == "as many bytes"
    assert bytes_beside(in_tiers, half | {"realised": 0.1}) == "1.50 times as many bytes"
    # Bytes that were counted go before shares.
    assert bytes_beside(tiers | {"nbytes": 96}, plain | {"nbytes": 100}) == "as many bytes"
    wanted = {"what": "token", "dtype": "float32", "threads": 1}
    (token,), (cheap,) = read("decode", **wanted, **AT_4096), read("decode", **wanted, **AT_4096 | {"method": TIERS})
    assert f"{cheap['value']:.2f} over {bytes_beside(cheap, token)} in 8 to 3 bits" in headline()


@pytest.mark.parametrize("page", ["methods.md", "guides/memory.md"])
def test_what_compensation_changes_is_what_the_result_files_say(page):
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    at_15, at_5 = (compensation_changes("memory", "memory", share) for share in (0.15, 0.05))
    rise = at_5.pop(2000)
    falls = [f"by {-max(changes.values()):.0%} to {-min(changes.values()):.0%}" for changes in (at_15, at_5)]
    assert f"KL falls {falls[0]} at 15% of the bytes, and at 5% {falls[1]} except at 2,000 tokens" in text
    assert f"where it rises by {rise:.0%}" in text
    (larger,), (least,) = (compensation_changes(QWEN.format("memory"), "memory", r).values() for r in (0.15, 0.05))
    assert re.search(rf"rises: by {larger:.0%} at 15% and|rises by {larger:.0%} at 15% of the bytes and", text)
    assert f"by {least:.0%} at 5%" in text
    if page == "methods.md":
        low, high = (list(compensation_changes("refit", "retention", r).values()) for r in (0.15, 0.05))
        assert f"by {-max(low):.0%} to {-min(low):.0%} at R = 0.15, and at R = 0.05 by" in text
        assert (
            f"{-max(high[:3]):.0%} to {-min(high[:3]):.0%} up to 4,000 tokens, while at 7,800 it rises by {high[3]:.0%}"
            in text
        )
        changes = compensation_changes(QWEN.format("refit"), "retention", 0.15)
        assert f"it falls by {-changes[2000]:.0%} at 2,000 tokens and by {-changes[4000]:.0%} at 4,000" in text


def test_every_method_is_named_and_no_file_that_is_not_there():
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for name in (*METHODS, *budgets(), *selectors()):
        assert f"`{name}`" in text, f"docs/methods.md does not name {name}"
    for page in PAGES:
        for path in re.findall(r"`((?:lkv|tests|examples|dev)/[\w/]+(?:\.\w+)?/?)`", page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.name} names {path}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {slug(title) for title in titles}, f"{page.name}: no section {target}"


def slug(title: str) -> str:
    """The anchor that forges and mkdocs make of a title."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
