"""Methods by name: a budget rule with a selector."""

from dataclasses import dataclass
from difflib import get_close_matches

from lkv.budget import Budget, LearnedBudget, Uniform
from lkv.errors import LkvError, check_retention
from lkv.policy import Policy
from lkv.selection import LearnedScores, Selector, SnapKV

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


def make_method(name: str, retention: float, policy: Policy | None) -> Method:
    """The method `name` at `retention`. Raises LkvError for an unknown name or a policy that is missing."""
    retention = check_retention(retention)
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=2) or sorted(NAMES)
        raise LkvError(f"there is no method {name!r}; did you mean {' or '.join(map(repr, near))}?")
    if not needs_policy(name):
        return Method(name, Uniform(retention), SnapKV())
    if policy is None:
        raise LkvError(f"the method {name!r} needs a policy; give one with Policy.from_pretrained(...).")
    budget = Uniform(retention) if name == "lkv-t" else LearnedBudget(policy, retention)
    selector = SnapKV() if name == "lkv-h+snapkv" else LearnedScores(policy)
    return Method(name, budget, selector)
