"""What methods, tasks and models are called: in result files, in the ablation's grid and in print."""

from collections.abc import Iterable

from lkv.evals import longbench

FULL, LKV = "full", "lkv"
AVERAGE = "Avg."
SUITES = {"longbench": "LongBench", "ruler": "RULER"}
RULES = ("uniform", "ada", "lkv-h")  # the ablation's grid (Table 2)
SELECTORS = ("snapkv", "expected", "lkv-t")

# Methods whose name does not say their rule and selector, as `lkv.methods.build.METHODS` has them.
_PARTS = {
    "lkv": ("lkv-h", "lkv-t"),
    "lkv-t": ("uniform", "lkv-t"),
    "snapkv": ("uniform", "snapkv"),
    "expected": ("uniform", "expected"),
    "adakv-snapkv": ("ada", "snapkv"),
    "adakv-expected": ("ada", "expected"),
    "pyramidkv": ("pyramid", "snapkv"),
}
_LABELS = {
    FULL: "Full cache",
    LKV: "LKV",
    "lkv-t": "LKV-T, uniform budgets",
    "snapkv": "SnapKV",
    "expected": "Expected Attention",
    "adakv-snapkv": "Ada-SnapKV",
    "adakv-expected": "Ada-Expected Attention",
    "pyramidkv": "PyramidKV",
    "duo": "DuoAttention",
    "kvzip": "KVzip (two passes)",
    "criticalkv": "CriticalKV",
    "h2o": "H2O",
    "observed-attention": "Observed Attention",
    "tova": "TOVA",
    "streaming-llm": "StreamingLLM",
    "knorm": "Knorm",
    "keydiff": "KeyDiff",
    "random": "Random",
}
_PART_LABELS = {
    "uniform": "Uniform",
    "ada": "AdaKV",
    "lkv-h": "LKV-H",
    "pyramid": "PyramidKV",
    "contest": "Global contest",
    "snapkv": "SnapKV",
    "expected": "Expected Attention",
    "lkv-t": "LKV-T",
    "kvzip": "KVzip",
}

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


def parts(method: str) -> tuple[str, str] | None:
    """(budget rule, selector) of a method, or None where it has no such parts by name."""
    rule, plus, selector = method.partition("+")
    return (rule, selector) if plus else _PARTS.get(method)


def label(method: str) -> str:
    """The method as it is called in print; "uniform+snapkv" is SnapKV as "snapkv" is."""
    alias = next((alias for alias, own in _PARTS.items() if own == parts(method)), method)
    if alias in _LABELS:
        return _LABELS[alias]
    rule, plus, selector = method.partition("+")
    return f"{part_label(selector)}, {part_label(rule)} budgets" if plus else method


def part_label(part: str) -> str:
    """A budget rule or selector as it is called in print."""
    return _PART_LABELS.get(part) or _LABELS.get(part, part)


def is_lkv(method: str) -> bool:
    """Whether the method is LKV itself, under any of its names."""
    return parts(method) == parts(LKV)


def ordered(methods: Iterable[str]) -> list[str]:
    """The full cache first and LKV last, as in the paper's tables; the others as they come."""
    return sorted(dict.fromkeys(methods), key=lambda method: (method != FULL, is_lkv(method)))
