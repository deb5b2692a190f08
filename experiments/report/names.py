"""Names of methods, tasks, tables and models: in result files, in the ablation's grid and in print."""

import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

from lkv.evaluation import longbench
from lkv.methods.registry import FULL, budgets, find_method, selectors
from lkv.methods.registry import method_label as registry_label

AVERAGE = "Avg."
TABLES = ("main", "ablation", "tasks", "sweep", "ruler", "fidelity")
FORMATS = ("terminal", "markdown", "csv", "latex")
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
    """(budget rule, selector) of a method; None for an unknown name and for a method with compensation."""
    spec = find_method(method)
    return (spec.budget, spec.selector) if spec and not spec.compensation else None


def method_label(method: str) -> str:
    """The name of a method in print."""
    return "Full cache" if method == FULL else registry_label(method)


def part_label(part: str) -> str:
    """The name of a budget rule or selector in print."""
    component = budgets().get(part) or selectors().get(part)
    return component.label if component else part


def is_lkv(method: str) -> bool:
    """Whether the method is LKV itself, under any of its names."""
    return budget_and_selector(method) == (RULES[-1], SELECTORS[-1])


def sort_methods(methods: Iterable[str]) -> list[str]:
    """The full cache first and LKV last, as in the paper's tables; the others in their order."""
    return sorted(dict.fromkeys(methods), key=lambda method: (method != FULL, is_lkv(method)))


@cache
def paper_numbers() -> dict[str, Any]:
    """The paper's tables as printed: table name, model, columns, rows."""
    return json.loads(resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8"))


def paper_models() -> dict[str, str]:
    """The models of the paper's tables by short name."""
    return dict(paper_numbers()["models"])


def paper_model_like(model: str) -> str:
    """The short name of the paper's model that `model` is; the paper's main model where it is none of them."""
    return next((name for name in paper_models() if name in model.lower()), next(iter(paper_models())))
