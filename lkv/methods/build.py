"""Methods by name: a budget rule with a selector. Any rule goes with any selector, as "RULE+SELECTOR"."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from lkv.errors import LkvError
from lkv.methods.budget import Ada, Budget, Duo, LearnedBudget, Pyramid, Share, Uniform, share
from lkv.methods.budget.duo import SINKS
from lkv.methods.selection import (
    H2O,
    TOVA,
    CriticalKV,
    DuoWindow,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    LearnedScores,
    Random,
    Selector,
    SnapKV,
    StreamingLLM,
)
from lkv.policy import Policy
from lkv.prefill import PromptLayer

FULL = "full"  # no method: transformers' own cache, uncompressed
KVZIP, CONTEST = "kvzip", "contest"


@dataclass(frozen=True)
class Method:
    """What one layer's eviction needs."""

    name: str
    budget: Budget
    selector: Selector


@dataclass(frozen=True)
class Source:
    """What a method is built from; `pattern` are DuoAttention's alphas [L][H] (`budget.read_pattern`); without `strict`
    a rule that cannot keep as little as it is asked to keeps the least it can."""

    share: Share
    policy: Policy | None = None
    heads: slice = field(default_factory=lambda: slice(None))
    model: Any = None
    layers: int | None = None
    pattern: list[list[float]] | None = None
    strict: bool = True

    def need(self, what: str, by: str) -> Any:
        """The field `what`. Raises LkvError where it was not given."""
        found = getattr(self, what)
        if found is None:
            raise LkvError(f"the method part {by!r} needs a {what}; give {_HOW[what]}.")
        return found


_HOW = {
    "policy": "one with Policy.from_pretrained(...)",
    "model": "the model to make_method, or its name to RaggedCache or compress",
    "layers": "the number of layers, or the method's name to RaggedCache or compress",
    "pattern": "one with pattern=budget.read_pattern(file, L, H), or pattern=budget.estimate_pattern(model, texts)",
}

RULES: dict[str, tuple[str, Callable[[Source], Budget]]] = {
    "uniform": ("every head keeps the same share", lambda s: Uniform(s.share)),
    "pyramid": ("lower layers keep more (PyramidKV)", lambda s: Pyramid(s.share, s.need("layers", "pyramid"))),
    "ada": ("the heads of a layer compete by their scores (AdaKV)", lambda s: Ada(s.share)),
    "duo": (
        "retrieval heads keep all, others sinks and recent tokens (DuoAttention)",
        lambda s: Duo(s.share, s.need("pattern", "duo"), heads=s.heads, strict=s.strict),
    ),
    "lkv-h": ("learned budgets (LKV-H)", lambda s: LearnedBudget(s.need("policy", "lkv-h"), s.share, s.heads)),
}
SELECTORS: dict[str, tuple[str, Callable[[Source], Selector]]] = {
    "lkv-t": ("learned scores of k and v (LKV-T)", lambda s: LearnedScores(s.need("policy", "lkv-t"), s.heads)),
    "snapkv": ("attention from the last 64 tokens, smoothed", lambda s: SnapKV()),
    "expected": ("attention expected of queries to come", lambda s: ExpectedAttention(s.need("model", "expected"))),
    "h2o": ("attention received from all tokens", lambda s: H2O()),
    "observed": ("attention received, divided by how many tokens saw it", lambda s: H2O(average=True)),
    "tova": ("attention from the last token", lambda s: TOVA()),
    "streaming-llm": ("the first and the most recent tokens", lambda s: StreamingLLM()),
    "duo-window": ("the first 128 and the most recent tokens (DuoAttention)", lambda s: DuoWindow(SINKS)),
    "knorm": ("small keys", lambda s: Knorm()),
    "keydiff": ("keys unlike the mean key", lambda s: KeyDiff()),
    "critical-snapkv": (
        "SnapKV, weighed by the size of the projected values (CriticalKV)",
        lambda s: CriticalKV(s.need("model", "critical-snapkv"), SnapKV()),
    ),
    "critical-expected": (
        "Expected Attention, weighed by the size of the projected values (CriticalKV)",
        lambda s: CriticalKV(
            s.need("model", "critical-expected"), ExpectedAttention(s.need("model", "expected"), value_norm=False)
        ),
    ),
    "random": ("chance", lambda s: Random()),
}


@dataclass(frozen=True)
class Entry:
    """A method by the name that people use."""

    rule: str
    selector: str
    paper: str


METHODS = {
    "lkv": Entry("lkv-h", "lkv-t", "LKV"),
    "lkv-t": Entry("uniform", "lkv-t", "LKV, ablation"),
    "snapkv": Entry("uniform", "snapkv", "Li et al. 2024"),
    "pyramidkv": Entry("pyramid", "snapkv", "Cai et al. 2024"),
    "adakv-snapkv": Entry("ada", "snapkv", "Feng et al. 2024"),
    "adakv-expected": Entry("ada", "expected", "Feng et al. 2024, Devoto et al. 2025"),
    "expected": Entry("uniform", "expected", "Devoto et al. 2025"),
    "duo": Entry("duo", "duo-window", "Xiao et al. 2024 (DuoAttention)"),
    "kvzip": Entry(CONTEST, KVZIP, "Kim et al. 2025"),
    "criticalkv": Entry("uniform", "critical-snapkv", "Feng et al. 2025"),
    "h2o": Entry("uniform", "h2o", "Zhang et al. 2023"),
    "observed-attention": Entry("uniform", "observed", "H2O as kvpress has it"),
    "tova": Entry("uniform", "tova", "Oren et al. 2024"),
    "streaming-llm": Entry("uniform", "streaming-llm", "Xiao et al. 2023"),
    "knorm": Entry("uniform", "knorm", "Devoto et al. 2024"),
    "keydiff": Entry("uniform", "keydiff", "Park et al. 2025"),
    "random": Entry("uniform", "random", ""),
    "lkv-h+snapkv": Entry("lkv-h", "snapkv", "LKV, ablation"),
    "lkv-h+expected": Entry("lkv-h", "expected", "LKV, ablation"),
    "ada+lkv-t": Entry("ada", "lkv-t", "LKV, ablation"),
    "lkv-h+kvzip": Entry("lkv-h", KVZIP, "KVzip's scores under learned budgets"),
}


def find(name: str) -> Entry:
    """The method `name`: one of METHODS, or "RULE+SELECTOR". Raises LkvError for an unknown name."""
    if name in METHODS:
        return METHODS[name]
    rule, plus, selector = name.partition("+")
    selectors, rules = {*SELECTORS, KVZIP}, {*RULES, *([CONTEST] if selector == KVZIP else [])}
    if plus and rule in rules and selector in selectors:
        return Entry(rule, selector, "")
    if plus and (rule in rules) != (selector in selectors):
        known, part = (selectors, selector) if rule in rules else (rules, rule)
        raise LkvError(f"there is no {part!r} to make {name!r} of; use one of {', '.join(sorted(known))}.")
    if name == FULL:
        raise LkvError(f"{FULL!r} keeps everything: use transformers' own DynamicCache, or lkv.compress for a context.")
    near = get_close_matches(name, METHODS, n=2) or sorted(METHODS)
    raise LkvError(
        f"there is no method {name!r}; did you mean {' or '.join(map(repr, near))}? `lkv methods` lists them all."
    )


def needs_policy(name: str) -> bool:
    """Whether the method `name` reads a learned policy."""
    entry = find(name)
    return entry.rule == "lkv-h" or entry.selector == "lkv-t"


def needs_second_pass(name: str) -> bool:
    """Whether the method `name` reads the text twice, and so works with `compress` alone."""
    return find(name).selector == KVZIP


def describe(name: str) -> str:
    """One line: how much, which, whose, and what the method needs."""
    entry = find(name)
    if entry.selector == KVZIP:
        which = "attention received while the text is repeated (KVzip)"
        needs = ["a second pass"]
    else:
        which = SELECTORS[entry.selector][0]
        needs = ["queries"] if _reads_queries(entry.selector) else []
    much = "all heads compete by their scores" if entry.rule == CONTEST else RULES[entry.rule][0]
    needs += ["a policy"] if needs_policy(name) else []
    needs += ["a pattern of retrieval heads"] if entry.rule == "duo" else []
    tail = f" [{entry.paper}]" if entry.paper else ""
    return f"{much}; {which}{tail}; needs {', '.join(needs) or 'nothing more'}"


def _reads_queries(selector: str) -> bool:
    return selector not in ("lkv-t", "streaming-llm", "duo-window", "knorm", "keydiff", "random")


def make_method(
    name: str,
    amount: float | Share,
    policy: Policy | None = None,
    heads: slice = slice(None),
    model: Any = None,
    layers: int | None = None,
    pattern: list[list[float]] | None = None,
) -> Method:
    """The method `name` that keeps `amount`, for the KV heads `heads` of `model`.

    Raises LkvError for an unknown name, or where something is missing that the method needs.
    """
    entry = find(name)
    if entry.selector == KVZIP:
        raise LkvError(f"{name!r} reads the text a second time: use lkv.compress(..., method={name!r}).")
    source = Source(share(amount), policy, heads, model, layers, pattern)
    return Method(name, RULES[entry.rule][1](source), SELECTORS[entry.selector][1](source))


def make_rule(
    name: str,
    amount: float | Share,
    policy: Policy | None = None,
    layers: int | None = None,
    pattern: list[list[float]] | None = None,
) -> Budget:
    """The budget rule `name` by itself. Raises LkvError where something is missing that it needs."""
    return RULES[name][1](Source(share(amount), policy, layers=layers, pattern=pattern))


class _Rows(Selector):
    """Row i of the batch follows method i."""

    def __init__(self, methods: Sequence[Method]):
        self._methods = methods
        self.reads_queries = any(method.selector.reads_queries for method in methods)

    def scores(self, layer: int, prompt: PromptLayer) -> Tensor:
        # All rows hold one prompt, so a selector that several methods share scores it once.
        one = prompt.part(slice(1), slice(None))
        selectors = {id(method.selector): method.selector for method in self._methods}
        found = {number: selector.scores(layer, one) for number, selector in selectors.items()}
        return torch.cat([found[id(method.selector)] for method in self._methods])

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        return [m.budget.counts(layer, scores[i : i + 1])[0] for i, m in enumerate(self._methods)]


def side_by_side(methods: Sequence[Method]) -> Method:
    """A method for a batch of copies of one prompt whose row i is evicted by `methods[i]`.

    Methods that hold the same selector object share its scores.
    """
    rows = _Rows(methods)
    return Method(" | ".join(method.name for method in methods), rows, rows)
