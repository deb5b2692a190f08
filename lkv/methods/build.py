"""Methods by name, built: a budget rule with a selector."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lkv.errors import LkvError
from lkv.integrations.transformers.prefill import LayerKV
from lkv.methods.budgets import (
    Ada,
    Budget,
    Duo,
    DuoOfHeads,
    GlobalTopKBudget,
    LearnedBudget,
    Pyramid,
    PyramidOfKvpress,
    RetentionTarget,
    Uniform,
    as_target,
)
from lkv.methods.budgets.duo import SINKS
from lkv.methods.kvzip import KVzip
from lkv.methods.registry import builder_of, find, needs_policy
from lkv.methods.selectors import (
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
from lkv.policy.policy import Policy


@dataclass(frozen=True)
class Method:
    """What one layer's eviction needs; `target` and `policy` tell what it was built from, where it was by name.

    `compensation`: whether kept entries are compensated (`methods.compensation`); a tuple gives one value a row.

    """

    name: str
    budget: Budget
    selector: Selector
    target: RetentionTarget | None = None
    policy: Policy | None = None
    compensation: bool | tuple[bool, ...] = False

    def compensates(self, rows: int) -> tuple[bool, ...]:
        """Whether what is kept is refitted, for each row of a batch."""
        return self.compensation if isinstance(self.compensation, tuple) else (self.compensation,) * rows

    @property
    def reads_queries(self) -> bool:
        """Whether the prompt's queries must be at hand."""
        return self.selector.reads_queries or bool(self.compensation)

    @property
    def of_whole_prompts(self) -> bool:
        """Whether it must see all layers of a prompt before it evicts from the first (`for_prompt`)."""
        return self.selector.has_second_pass or (
            isinstance(self.budget, GlobalTopKBudget) and not self.budget.has_counts
        )

    def for_prompt(self, ids: Sequence[int], prompt: list[LayerKV]) -> "Method":
        """The method for the one prompt `ids`, already read into `prompt`: itself, for most.

        Raises what the selector's second pass raises.
        """
        selector = self.selector.for_prompt(ids, prompt)
        budget = self.budget.for_prompt(selector, prompt) if isinstance(self.budget, GlobalTopKBudget) else self.budget
        return replace(self, selector=selector, budget=budget)


@dataclass(frozen=True)
class MethodInputs:
    """What a method is built from; `pattern` are DuoAttention's alphas [L][H] (`budget.read_pattern`); without `strict`
    a rule that cannot keep as little as it is asked to keeps the least it can."""

    target: RetentionTarget
    policy: Policy | None = None
    heads: slice = field(default_factory=lambda: slice(None))
    model: Any = None
    layers: int | None = None
    pattern: list[list[float]] | None = None
    tokenizer: Any = None
    strict: bool = True

    def need(self, wanted: str, by: str) -> Any:
        """The field `wanted`. Raises LkvError where it was not given."""
        value = getattr(self, wanted)
        if value is None:
            raise LkvError(f"the method part {by!r} needs a {wanted}; give {_HOW[wanted]}.")
        return value


_HOW = {
    "policy": "one with Policy.from_pretrained(...)",
    "model": "the model to make_method, or its name to RaggedCache or compress",
    "layers": "the number of layers, or the method's name to RaggedCache or compress",
    "pattern": "one with pattern=budget.read_pattern(file, L, H), or pattern=budget.estimate_pattern(model, texts)",
    "tokenizer": "the method's name to compress, which has one",
}

_RULES: dict[str, Callable[[MethodInputs], Budget]] = {
    "uniform": lambda s: Uniform(s.target),
    "pyramid": lambda s: Pyramid(s.target, s.need("layers", "pyramid")),
    "pyramid-kvpress": lambda s: PyramidOfKvpress(s.target, s.need("layers", "pyramid-kvpress")),
    "ada": lambda s: Ada(s.target),
    "duo": lambda s: Duo(s.target, s.need("pattern", "duo"), heads=s.heads, strict=s.strict),
    "duo-heads": lambda s: DuoOfHeads(s.target, s.need("pattern", "duo-heads"), heads=s.heads),
    "lkv-h": lambda s: LearnedBudget(s.need("policy", "lkv-h"), s.target, s.heads),
    "global": lambda s: GlobalTopKBudget(s.target),
}
_SELECTORS: dict[str, Callable[[MethodInputs], Selector]] = {
    "lkv-t": lambda s: LearnedScores(s.need("policy", "lkv-t"), s.heads),
    "snapkv": lambda s: SnapKV(),
    "expected": lambda s: ExpectedAttention(s.need("model", "expected")),
    "expected-e2": lambda s: ExpectedAttention(s.need("model", "expected-e2"), epsilon=0.01),
    "h2o": lambda s: H2O(),
    "observed": lambda s: H2O(average=True),
    "tova": lambda s: TOVA(),
    "streaming-llm": lambda s: StreamingLLM(),
    "duo-window": lambda s: DuoWindow(SINKS),
    "knorm": lambda s: Knorm(),
    "keydiff": lambda s: KeyDiff(),
    "critical-snapkv": lambda s: CriticalKV(s.need("model", "critical-snapkv"), SnapKV()),
    "critical-expected": lambda s: CriticalKV(
        s.need("model", "critical-expected"), ExpectedAttention(s.need("model", "expected"), value_norm=False)
    ),
    "random": lambda s: Random(),
    "kvzip": lambda s: KVzip(s.need("model", "kvzip"), s.need("tokenizer", "kvzip")),
}


def build_rule(name: str, inputs: MethodInputs) -> Budget:
    """The budget rule `name`. Raises LkvError where something is missing that it needs."""
    return (builder_of("rule", name) or _RULES[name])(inputs)


def build_selector(name: str, inputs: MethodInputs) -> Selector:
    """The selector `name`. Raises LkvError where something is missing that it needs."""
    return (builder_of("selector", name) or _SELECTORS[name])(inputs)


def make_method(
    name: str,
    target: float | RetentionTarget,
    policy: Policy | None = None,
    heads: slice = slice(None),
    model: Any = None,
    layers: int | None = None,
    pattern: list[list[float]] | None = None,
    tokenizer: Any = None,
) -> Method:
    """The method `name` that keeps `target`, for the KV heads `heads` of `model`.

    Raises LkvError for an unknown name, or where something is missing that the method needs.
    """
    entry = find(name)
    inputs = MethodInputs(as_target(target), policy, heads, model, layers, pattern, tokenizer)
    rule, selector = build_rule(entry.rule, inputs), build_selector(entry.selector, inputs)
    return Method(name, rule, selector, inputs.target, policy if needs_policy(name) else None, entry.compensation)


class _SideBySide(Selector):
    """Row i of the batch follows method i."""

    def __init__(self, methods: Sequence[Method]):
        self._methods = methods
        self.reads_queries = any(method.selector.reads_queries for method in methods)

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        # All rows hold one prompt, so a selector that several methods share scores it once.
        row = prompt.select(slice(1), slice(None))
        selectors = {id(method.selector): method.selector for method in self._methods}
        scores = {number: selector.scores(layer, row) for number, selector in selectors.items()}
        return torch.cat([scores[id(method.selector)] for method in self._methods])

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        return [m.budget.counts(layer, scores[i : i + 1])[0] for i, m in enumerate(self._methods)]


def side_by_side(methods: Sequence[Method]) -> Method:
    """A method for a batch of copies of one prompt whose row i is evicted by `methods[i]`.

    Methods that hold the same selector object share its scores.
    """
    rows = _SideBySide(methods)
    compensation = tuple(bool(method.compensation) for method in methods)
    return Method(
        " | ".join(method.name for method in methods), rows, rows, compensation=any(compensation) and compensation
    )
