"""`Method`: a budget and a selector, resolved for one model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lkv.errors import PromptError
from lkv.hf.prompt_kv import LayerKV
from lkv.methods.base import ROUNDING, Budget, Selector, TierBudget
from lkv.methods.budgets import GlobalTopKBudget
from lkv.methods.targets import RetentionTarget, TierTarget
from lkv.policy.policy import Policy


@dataclass(frozen=True)
class Method:
    """An eviction method: a budget and a selector, resolved for one model.

    Attributes:
        name: the name of the method in results.
        budget: decides how many tokens each KV head keeps.
        selector: ranks the tokens.
        target: the budget's target if `resolve_method` built it.
        policy: the learned policy, if the method uses one.
        compensation: whether kept entries are compensated (`lkv.methods.compensation`); a tuple has one value per row.
        tiers: the precisions of stored entries under a memory budget, best first; the last one's budget is `budget`.
        protected: positions of tokens that every head keeps, in order; `target` counts them.
    """

    name: str
    budget: Budget
    selector: Selector
    target: RetentionTarget | None = None
    policy: Policy | None = None
    compensation: bool | tuple[bool, ...] = False
    tiers: tuple[TierBudget, ...] = ()
    protected: tuple[int, ...] = ()

    def compensates(self, rows: int) -> tuple[bool, ...]:
        """Return whether kept entries are compensated, for each row of a batch."""
        return self.compensation if isinstance(self.compensation, tuple) else (self.compensation,) * rows

    @property
    def reads_queries(self) -> bool:
        """Whether it needs the prompt's queries."""
        return self.selector.reads_queries or bool(self.compensation)

    @property
    def last_queries(self) -> int | None:
        """The number of the prompt's last queries it needs; None for all queries, if it reads any."""
        return None if self.compensation else self.selector.last_queries

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether it needs all layers of a prompt before the first eviction (`for_prompt`)."""
        needs_scores = isinstance(self.budget, GlobalTopKBudget) and self.budget.prompt_counts is None
        return self.selector.has_second_pass or needs_scores

    def check_length(self, tokens: int) -> None:
        """Raise PromptError if only protected tokens of a prompt of `tokens` tokens would be kept."""
        target, rest = self.target, tokens - len(self.protected)
        if self.protected and self.protected[-1] >= tokens:
            raise PromptError(f"token {self.protected[-1]} is protected, but the prompt has {tokens}; give less.")
        if target is None or rest * target.share(rest) + ROUNDING >= 1:
            return
        if self.protected:
            raise PromptError(
                f"the protected spans have {len(self.protected)} of the text's {tokens} tokens, which is all that "
                f"{target} keeps or more; protect less, or give more memory or a higher retention."
            )
        fix = f"at least {math.ceil(1 / target.retention)} tokens, or a higher retention"
        if isinstance(target, TierTarget):
            least = f"at least {target.least_nbytes():,} bytes"
            fix = least if target.memory.nbytes else "more memory, or a longer prompt"
        raise PromptError(f"the prompt has {tokens} tokens: at {target} nothing of it would be kept. Give {fix}.")

    def for_prompt(self, ids: Sequence[int], prompt: list[LayerKV]) -> "Method":
        """Return the method for the prompt `ids`, already prefilled as `prompt`; most methods return themselves.

        Raises the errors of the selector's second pass.
        """
        selector = self.selector.for_prompt(ids, prompt)

        def of_prompt(budget: Budget) -> Budget:
            if isinstance(budget, GlobalTopKBudget):
                return budget.for_prompt(selector, prompt, self.protected)
            return budget

        tokens = prompt[0].key.shape[2] - len(self.protected)
        tiers = tuple(
            tier if tier.is_empty(tokens) else replace(tier, budget=of_prompt(tier.budget)) for tier in self.tiers
        )
        return replace(
            self, selector=selector, budget=tiers[-1].budget if tiers else of_prompt(self.budget), tiers=tiers
        )


class _RowwiseMethods(Selector, Budget):
    """Applies method i to row i of the batch."""

    def __init__(self, methods: Sequence[Method]):
        self._methods = methods
        self.reads_queries = any(method.selector.reads_queries for method in methods)

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        # All rows hold the same prompt, so a shared selector scores it once.
        row = prompt.select(slice(1), slice(None))
        selectors = {id(method.selector): method.selector for method in self._methods}
        scores = {number: selector.scores(layer, row) for number, selector in selectors.items()}
        return torch.cat([scores[id(method.selector)] for method in self._methods])

    def refine(self, layer: int, prompt: LayerKV, scores: Tensor, counts: list[list[int]]) -> Tensor:
        row = prompt.select(slice(1), slice(None))
        rows = zip(self._methods, scores.split(1), counts, strict=True)
        return torch.cat([method.selector.refine(layer, row, part, [count]) for method, part, count in rows])

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        rows = zip(self._methods, scores.split(1), strict=True)
        return [method.budget.counts(layer, part)[0] for method, part in rows]


def combine_rowwise(methods: Sequence[Method]) -> Method:
    """Make a method for a batch of copies of one prompt that applies `methods[i]`, without memory budgets, to row i.

    Methods that hold the same selector object share its scores.
    """
    rows = _RowwiseMethods(methods)
    compensation = tuple(bool(method.compensation) for method in methods)
    name = " | ".join(method.name for method in methods)
    return Method(name, rows, rows, compensation=any(compensation) and compensation)
