"""`Method`, what a cache evicts by, and `resolve_method`, which makes one of a name, a model and what to keep."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lkv.errors import BudgetError, CacheError, LkvError, PolicyFileError, PromptError, RetentionError
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import LayerKV
from lkv.methods.budgets import ROUNDING, Budget, GlobalTopKBudget, RetentionTarget, check_table
from lkv.methods.memory_budget import (
    DEFAULT_TABLE,
    SCORE_BITS,
    KVShape,
    TierBudget,
    TierTable,
    TierTarget,
)
from lkv.methods.registry import REFIT, MethodSpec, parse_method
from lkv.methods.selectors import Selector
from lkv.methods.targets import MemoryTarget
from lkv.policy.lookup import resolve_policy
from lkv.policy.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Method:
    """A budget and a selector, resolved for one model: how a cache evicts.

    Attributes:
        name: the name that results are stored under.
        budget: how many tokens each KV head keeps.
        selector: which tokens.
        target: the retention or the number of tokens that the budget was built for, where `resolve_method` built it.
        policy: the learned policy, where the method reads one.
        compensation: whether kept entries are compensated (`lkv.methods.compensation`); a tuple gives one value a row.
        tiers: the precisions that entries are stored in, best first, where a memory budget says so; the last one's
            budget is `budget`.
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
        """Whether kept entries are compensated, for each row of a batch."""
        return self.compensation if isinstance(self.compensation, tuple) else (self.compensation,) * rows

    @property
    def reads_queries(self) -> bool:
        """Whether it needs the prompt's queries."""
        return self.selector.reads_queries or bool(self.compensation)

    @property
    def last_queries(self) -> int | None:
        """How many of the prompt's last queries it needs, None for all of those that it reads."""
        return None if self.compensation else self.selector.last_queries

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether it must see all layers of a prompt before it evicts from the first (`for_prompt`)."""
        needs_scores = isinstance(self.budget, GlobalTopKBudget) and self.budget.prompt_counts is None
        return self.selector.has_second_pass or needs_scores

    def check_length(self, tokens: int) -> None:
        """Raise PromptError if nothing but protected tokens would be kept of a prompt of `tokens` tokens."""
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
        fix = "more memory, or a longer prompt"
        if not isinstance(target, TierTarget):
            fix = f"at least {math.ceil(1 / target.retention)} tokens, or a higher retention"
        raise PromptError(f"the prompt has {tokens} tokens: at {target} nothing of it would be kept. Give {fix}.")

    def for_prompt(self, ids: Sequence[int], prompt: list[LayerKV]) -> "Method":
        """The method for the one prompt `ids`, already read into `prompt`: itself, for most methods.

        Raises what the selector's second pass raises.
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


@dataclass(frozen=True)
class MethodInputs:
    """What budgets and selectors are built from (`from_inputs`)."""

    target: RetentionTarget
    policy: Policy | None = None
    heads: slice = field(default_factory=lambda: slice(None))  # the KV heads that this process computes
    model: Any = None
    layers: int | None = None  # how many are evicted from
    pattern: list[list[float]] | None = None  # DuoAttention's alphas [L][H]
    tokenizer: Any = None
    strict: bool = True  # without it, a budget that cannot keep as little as `target` keeps the least it can

    def require(self, name: str) -> Any:
        """The input `name`. Raises LkvError where it is missing."""
        value = getattr(self, name)
        if value is None:
            raise LkvError(f"the method needs a {name}; give {_HOW[name]}.")
        return value


_HOW = {
    "policy": "one with policy=Policy.from_pretrained(...)",
    "model": "the model to resolve_method, or the method's name to RaggedCache or compress",
    "layers": "the model to resolve_method, or the method's name to RaggedCache or compress",
    "pattern": "one with pattern=read_pattern(file, L, H), or pattern=estimate_pattern(model, texts)",
    "tokenizer": "the method's name to compress, which has one",
}


def resolve_method(
    method: str | Method,
    model: "PreTrainedModel | None" = None,
    *,
    retention: float | None = None,
    budget_tokens: int | None = None,
    memory: float | int | str | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    pattern: list[list[float]] | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    tier_table: TierTable | None = None,
    stores_scores: bool = False,
    protected: Sequence[int] = (),
) -> Method:
    """Resolve a method's name for a model.

    Args:
        method: a name that `lkv methods` lists, any "BUDGET+SELECTOR", or a `Method`, which is returned as it is.
        model: the model to evict from. Without one, methods that need no model can be resolved.
        retention: the share of a prompt's entries to keep, in (0, 1]; 0.15 by default.
        budget_tokens: how many tokens a head keeps on average, instead of `retention`.
        memory: what k and v of a text may take in full-attention layers, instead of `retention`: a share of their full
            cache in the model's dtype (0.1 or "10%"), or bytes (200_000_000 or "200MB"). It needs `model`.
        policy: the policy, its folder or its hub id; the one shipped for the model by default.
        pattern: DuoAttention's alphas [L][H], for the budget "duo".
        tokenizer: the model's tokenizer, for methods that read the text a second time.
        tier_table: how `memory` is spent on precisions; by default as `tier_table_of` the policy says.
        stores_scores: whether scores are stored with the entries, which takes memory, too.
        protected: positions of tokens that every head keeps, within the budget.

    Returns:
        The method with its budget and selector built.

    Raises:
        LkvError: If there is no such method, or something is missing that it needs.
        RetentionError: If `retention`, `budget_tokens` or `memory` is out of range, or two of them are given.
        PolicyMismatchError: If the policy was trained for another model.
        BudgetError: If `pattern` does not fit the model, or the method reads none.
    """
    if not isinstance(method, str | Method):
        raise CacheError(f"method is {method!r}; give a name that `lkv methods` lists, or a Method of your own.")
    if policy is not None and not isinstance(policy, Policy | str | os.PathLike):
        raise PolicyFileError(
            f"policy is {policy!r}; give a Policy, its folder or its hub id, and how much is kept as retention=0.15."
        )
    no_pattern = "the method {!r} reads no pattern of retrieval heads: leave it out, or use 'duo'."
    if isinstance(method, Method):
        if pattern is not None:
            raise BudgetError(no_pattern.format(method.name))
        if retention is not None or budget_tokens is not None or memory is not None:
            raise RetentionError(
                f"the method {method.name!r} has a budget of its own: leave retention, budget_tokens and memory out, "
                "or give a method by its name."
            )
        if protected:
            raise CacheError(
                f"the method {method.name!r} has a budget of its own, which counts no protected tokens: leave them "
                "out, or give a method by its name."
            )
        return method
    spec = parse_method(method)
    if pattern is not None and not spec.needs_pattern:
        raise BudgetError(no_pattern.format(method))
    if spec.needs_second_pass and tokenizer is None:
        raise CacheError(f"{method!r} reads the text a second time: use lkv.compress(..., method={method!r}).")
    if memory is not None and (retention is not None or budget_tokens is not None):
        raise RetentionError(
            "memory says how much to keep and in which precision: give it without retention, budget_tokens and bits."
        )
    if memory is not None and model is None:
        raise LkvError(f"memory needs a model; give {_HOW['model']}.")
    protected = tuple(sorted(set(protected)))
    target = RetentionTarget.from_arguments(retention, budget_tokens, len(protected))
    if model is None:
        learned = policy if isinstance(policy, Policy) and spec.needs_policy else None
        inputs = MethodInputs(target, learned, pattern=pattern, tokenizer=tokenizer)
    else:
        patched = patch_attention(model)
        layers, kv_heads = patched.spec.layers, patched.spec.kv_heads
        learned = resolve_policy(model, policy).on(model.device) if spec.needs_policy else None
        if pattern is not None:
            check_table(pattern, layers, kv_heads, "the pattern of retrieval heads")
        inputs = MethodInputs(target, learned, patched.heads, model, layers, pattern, tokenizer)
    tiers: tuple[TierBudget, ...] = ()
    if memory is None:
        budget = spec.build_budget(inputs)
    else:
        table = tier_table or tier_table_of(learned)
        tiers = build_tiers(spec, inputs, MemoryTarget.parse(memory), table, stores_scores)
        budget, target = tiers[-1].budget, tiers[-1].target or target
    selector = spec.build_selector(inputs)
    return Method(spec.name, budget, selector, target, learned, spec.compensation, tiers, protected)


def tier_table_of(policy: Policy | None) -> TierTable:
    """How a memory budget is spent: as the policy's card says, else `DEFAULT_TABLE`. Raises PolicyFileError."""
    rows = None if policy is None else policy.card.get("tiers")
    return DEFAULT_TABLE if rows is None else TierTable.from_json(rows)


def build_tiers(
    spec: MethodSpec, inputs: MethodInputs, memory: MemoryTarget, table: TierTable, stores_scores: bool = False
) -> tuple[TierBudget, ...]:
    """The tiers of a method within a memory budget, best first, for the model of `inputs`.

    `stores_scores`: as in `resolve_method`. Raises BudgetError for a budget that may keep more than its target.
    """
    patched, model = patch_attention(inputs.require("model")), inputs.model
    heads, width = len(range(patched.spec.kv_heads)[inputs.heads]), patched.spec.head_dim
    shape = KVShape(patched.spec.layers * heads, width, width, model.dtype.itemsize, SCORE_BITS * stores_scores)
    targets = [
        TierTarget(memory=memory, shape=shape, table=table, precision=each, protected=inputs.target.protected)
        for each in table.precisions
    ]
    budgets = [spec.build_budget(replace(inputs, target=target)) for target in targets]
    if exact_name := budgets[0].exact_name:
        exact = parse_method(f"{exact_name}+{spec.selector}{REFIT if spec.compensation else ''}").canonical
        raise BudgetError(f"{spec.name!r} may keep more than memory allows; use {exact!r}, or give a retention.")
    pairs = zip(targets, budgets, strict=True)
    return tuple(TierBudget(target.precision, budget, target) for target, budget in pairs)


class _RowwiseMethods(Selector, Budget):
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

    def refine(self, layer: int, prompt: LayerKV, scores: Tensor, counts: list[list[int]]) -> Tensor:
        row = prompt.select(slice(1), slice(None))
        rows = zip(self._methods, scores.split(1), counts, strict=True)
        return torch.cat([method.selector.refine(layer, row, part, [count]) for method, part, count in rows])

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        rows = zip(self._methods, scores.split(1), strict=True)
        return [method.budget.counts(layer, part)[0] for method, part in rows]


def combine_rowwise(methods: Sequence[Method]) -> Method:
    """A method for a batch of copies of one prompt whose row i is evicted by `methods[i]`, none with a memory budget.

    Methods that hold the same selector object share its scores.
    """
    rows = _RowwiseMethods(methods)
    compensation = tuple(bool(method.compensation) for method in methods)
    name = " | ".join(method.name for method in methods)
    return Method(name, rows, rows, compensation=any(compensation) and compensation)
