"""What methods, tasks and models are called: in result files, in the ablation's grid and in print."""

from collections.abc import Iterable

from lkv.evaluation import longbench
from lkv.methods.registry import FULL, named_like
from lkv.methods.registry import RULES as RULE_PARTS
from lkv.methods.registry import SELECTORS as SELECTOR_PARTS
from lkv.methods.registry import label as registry_label

LKV = "lkv"
AVERAGE = "Avg."
SUITES = {"longbench": "LongBench", "ruler": "RULER"}
RULES = ("uniform", "ada", "lkv-h")  # the ablation's grid (Table 2)
SELECTORS = ("snapkv", "expected", "lkv-t")

# Categories as in the paper's Table 1 (LongBench), and RULER's own (Hsieh et al. 2024, Sec. 3).
CATEGORIES = {
    "longbench": longbench.CATEGORIES,
    "ruler": {
        "Retrieval": (
            "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
            "niah_multikey_3", "niah_multivalue", "niah_multiquery",
        ),
        "Multi-hop": ("vt",),
        "Aggregation": ("cwe", "fwe"),
        "QA": ("qa_1", "qa_2"),
    },
}  # fmt: skip


def budget_and_selector(method: str) -> tuple[str, str] | None:
    """(budget rule, selector) of a method, or None for a name that is not known or a refitted method."""
    known = named_like(method)
    return (known[1].rule, known[1].selector) if known and not known[1].compensation else None


def method_label(method: str) -> str:
    """The method as it is called in print."""
    return "Full cache" if method == FULL else registry_label(method)


def part_label(part: str) -> str:
    """A budget rule or selector as it is called in print."""
    known = RULE_PARTS.get(part) or SELECTOR_PARTS.get(part)
    return known.label if known else part


def is_lkv(method: str) -> bool:
    """Whether the method is LKV itself, under any of its names."""
    return (combination := budget_and_selector(method)) is not None and combination == budget_and_selector(LKV)


def sort_methods(methods: Iterable[str]) -> list[str]:
    """The full cache first and LKV last, as in the paper's tables; the others as they come."""
    return sorted(dict.fromkeys(methods), key=lambda method: (method != FULL, is_lkv(method)))
