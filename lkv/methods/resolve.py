"""`resolve_method`: from a method's name, a model and what to keep to a `Method`."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lkv.errors import BudgetError, CacheError, LkvError, PolicyFileError, RetentionError
from lkv.hf.attention import patch_attention
from lkv.methods.base import INPUT_SOURCES, MethodInputs, TierBudget
from lkv.methods.budgets import check_table
from lkv.methods.method import Method
from lkv.methods.registry import REFIT, MethodSpec, parse_method
from lkv.methods.targets import DEFAULT_TABLE, SCORE_BITS, KVShape, MemoryTarget, RetentionTarget, TierTable, TierTarget
from lkv.policy.lookup import resolve_policy
from lkv.policy.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NO_PATTERN = "the method {!r} reads no pattern of retrieval heads: leave it out, or use 'duo'."


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
    if isinstance(method, Method):
        has_target = retention is not None or budget_tokens is not None or memory is not None
        _check_own_budget(method, pattern is not None, has_target, bool(protected))
        return method
    spec = parse_method(method)
    if pattern is not None and not spec.needs_pattern:
        raise BudgetError(_NO_PATTERN.format(method))
    if spec.needs_second_pass and tokenizer is None:
        raise CacheError(f"{method!r} reads the text a second time: use lkv.compress(..., method={method!r}).")
    if memory is not None and (retention is not None or budget_tokens is not None):
        raise RetentionError(
            "memory says how much to keep and in which precision: give it without retention, budget_tokens and bits."
        )
    if memory is not None and model is None:
        raise LkvError(f"memory needs a model; give {INPUT_SOURCES['model']}.")
    protected = tuple(sorted(set(protected)))
    target = RetentionTarget.from_arguments(retention, budget_tokens, len(protected))
    inputs = _method_inputs(spec, model, target, policy, pattern, tokenizer)
    tiers: tuple[TierBudget, ...] = ()
    if memory is None:
        budget = spec.build_budget(inputs)
    else:
        table = tier_table or tier_table_of(inputs.policy)
        tiers = build_tiers(spec, inputs, MemoryTarget.parse(memory), table, stores_scores)
        budget, target = tiers[-1].budget, tiers[-1].target or target
    selector = spec.build_selector(inputs)
    return Method(spec.name, budget, selector, target, inputs.policy, spec.compensation, tiers, protected)


def _check_own_budget(method: Method, has_pattern: bool, has_target: bool, has_protected: bool) -> None:
    """Raise BudgetError, RetentionError or CacheError for an option that a `Method` of the caller's does not take."""
    if has_pattern:
        raise BudgetError(_NO_PATTERN.format(method.name))
    if has_target:
        raise RetentionError(
            f"the method {method.name!r} has a budget of its own: leave retention, budget_tokens and memory out, "
            "or give a method by its name."
        )
    if has_protected:
        raise CacheError(
            f"the method {method.name!r} has a budget of its own, which counts no protected tokens: leave them "
            "out, or give a method by its name."
        )


def _method_inputs(
    spec: MethodSpec,
    model: "PreTrainedModel | None",
    target: RetentionTarget,
    policy: Policy | str | os.PathLike[str] | None,
    pattern: list[list[float]] | None,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> MethodInputs:
    """What the budget and the selector of `spec` are built from; arguments as in `resolve_method`."""
    if model is None:
        learned = policy if isinstance(policy, Policy) and spec.needs_policy else None
        return MethodInputs(target, learned, pattern=pattern, tokenizer=tokenizer)
    patched = patch_attention(model)
    learned = resolve_policy(model, policy).on(model.device) if spec.needs_policy else None
    if pattern is not None:
        check_table(pattern, patched.spec.layers, patched.spec.kv_heads, "the pattern of retrieval heads")
    return MethodInputs(target, learned, patched.heads, model, patched.spec.layers, pattern, tokenizer)


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
