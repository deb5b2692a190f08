"""Methods by name: a budget rule with a selector."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor

from lkv.budget import Budget, LearnedBudget, Share, Uniform, share
from lkv.errors import LkvError
from lkv.policy import Policy
from lkv.selection import LearnedScores, Selector, SnapKV

FULL = "full"  # no method: transformers' own cache, uncompressed
NAMES = {
    "lkv": "learned budgets (LKV-H) and learned token scores (LKV-T)",
    "lkv-t": "uniform budgets, learned token scores (LKV-T)",
    "snapkv": "uniform budgets, attention from the last tokens (SnapKV)",
    "lkv-h+snapkv": "learned budgets (LKV-H), attention from the last tokens (SnapKV)",
}


@dataclass(frozen=True)
class Method:
    """What one layer's eviction needs."""

    name: str
    budget: Budget
    selector: Selector


def needs_policy(name: str) -> bool:
    """Whether the method `name` reads a learned policy."""
    return name != "snapkv"


def make_method(name: str, amount: float | Share, policy: Policy | None, heads: slice = slice(None)) -> Method:
    """The method `name` that keeps `amount`, for the KV heads `heads` of the model.

    Raises LkvError for an unknown name or a policy that is missing.
    """
    retention = share(amount)
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=2) or sorted(NAMES)
        raise LkvError(f"there is no method {name!r}; did you mean {' or '.join(map(repr, near))}?")
    if not needs_policy(name):
        return Method(name, Uniform(retention), SnapKV())
    if policy is None:
        raise LkvError(f"the method {name!r} needs a policy; give one with Policy.from_pretrained(...).")
    budget = Uniform(retention) if name == "lkv-t" else LearnedBudget(policy, retention, heads)
    selector = SnapKV() if name == "lkv-h+snapkv" else LearnedScores(policy, heads)
    return Method(name, budget, selector)


class _Rows(Selector):
    """Row i of the batch follows method i."""

    reads_queries = True

    def __init__(self, methods: Sequence[Method]):
        self._methods = methods

    def scores(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Tensor:
        rows = []
        for i, method in enumerate(self._methods):
            own = slice(i, i + 1)
            q = None if query is None else query[own]
            rows.append(method.selector.scores(layer, q, key[own], value[own], scale).float())
        return torch.cat(rows)

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        return [m.budget.counts(layer, scores[i : i + 1])[0] for i, m in enumerate(self._methods)]


def side_by_side(methods: Sequence[Method]) -> Method:
    """A method for a batch whose row i is evicted by `methods[i]`: many methods in one pass over one prompt."""
    rows = _Rows(methods)
    return Method(" | ".join(method.name for method in methods), rows, rows)
