"""`resolve_method`: from a request and a model to a `Method`."""

from dataclasses import replace
from typing import TYPE_CHECKING

from lkv.errors import DEFAULT_RETENTION, BudgetError, CacheError
from lkv.hf.attention import patch_attention
from lkv.methods.base import MethodInputs, TierBudget
from lkv.methods.budgets import check_table
from lkv.methods.method import Method
from lkv.methods.registry import COMPENSATION, MethodSpec, parse_method
from lkv.methods.request import CompressionRequest
from lkv.methods.targets import DEFAULT_TABLE, SCORE_BITS, KVShape, MemoryTarget, RetentionTarget, TierTable, TierTarget
from lkv.policy.lookup import resolve_policy
from lkv.policy.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def resolve_method(
    request: CompressionRequest,
    model: "PreTrainedModel | None" = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    tier_table: TierTable | None = None,
) -> Method:
    """Build the budget and the selector of a request for a model.

    Args:
        request: The compression settings. A `Method` in it is returned unchanged.
        model: The model to evict from. Without one, methods that need no model can be resolved.
        tokenizer: The model's tokenizer, for methods that read the text a second time.
        tier_table: The split of `memory` among precisions; by default `tier_table_of(policy)`.

    Returns:
        The method.

    Raises:
        LkvError: If an input of the method is missing.
        RetentionError: If the retention, the number of tokens or the memory is out of range.
        PolicyMismatchError: If the policy was trained for another model.
        BudgetError: If the pattern does not fit the model.
    """
    if isinstance(request.method, Method):
        return request.method
    spec = parse_method(request.method)
    if spec.needs_second_pass and tokenizer is None:
        raise CacheError(
            f"{request.method!r} reads the text a second time: use lkv.compress(..., method={request.method!r})."
        )
    protected = tuple(sorted(set(request.protected)))
    retention = DEFAULT_RETENTION if request.retention is None else request.retention
    target = RetentionTarget(retention, request.budget_tokens, len(protected))
    inputs = MethodInputs(target, pattern=request.pattern, model=model, tokenizer=tokenizer)
    if model is None:
        learned = request.policy if isinstance(request.policy, Policy) and spec.needs_policy else None
        inputs = replace(inputs, policy=learned)
    else:
        patched = patch_attention(model)
        layers, heads = patched.spec.layers, patched.spec.kv_heads
        learned = resolve_policy(model, request.policy).on(model.device) if spec.needs_policy else None
        if request.pattern is not None:
            check_table(request.pattern, layers, heads, "the pattern of retrieval heads")
        inputs = replace(inputs, policy=learned, heads=patched.heads, layers=layers)
    tiers: tuple[TierBudget, ...] = ()
    if request.memory is None:
        budget = spec.build_budget(inputs)
    else:
        table = tier_table or tier_table_of(learned)
        tiers = build_tiers(spec, inputs, MemoryTarget.parse(request.memory), table, request.decode_eviction)
        budget, target = tiers[-1].budget, tiers[-1].target or target
    selector = spec.build_selector(inputs)
    return Method(spec.name, budget, selector, target, learned, spec.compensation, tiers, protected)


def tier_table_of(policy: Policy | None) -> TierTable:
    """Return the policy card's tier table, else `DEFAULT_TABLE`. Raises PolicyFileError."""
    rows = None if policy is None else policy.card.get("tiers")
    return DEFAULT_TABLE if rows is None else TierTable.from_json(rows)


def build_tiers(
    spec: MethodSpec, inputs: MethodInputs, memory: MemoryTarget, table: TierTable, stores_scores: bool = False
) -> tuple[TierBudget, ...]:
    """Build the tiers of a method within a memory budget, best first.

    Args:
        spec: The method.
        inputs: The inputs of its budget, including the model.
        memory: The memory budget.
        table: The split of the budget among precisions.
        stores_scores: Whether scores are stored with the entries, which counts in the budget.

    Raises:
        BudgetError: For a budget that may keep more than its target.
        LkvError: If an input of the budget is missing.
    """
    model = inputs.require("model")
    patched = patch_attention(model)
    heads = patched.spec.layers * len(range(patched.spec.kv_heads)[inputs.heads])
    shape = KVShape(heads, patched.spec.head_dim, model.dtype.itemsize, SCORE_BITS * stores_scores)
    targets = [
        TierTarget(memory=memory, shape=shape, table=table, precision=each, protected=inputs.target.protected)
        for each in table.precisions
    ]
    budgets = [spec.build_budget(replace(inputs, target=target)) for target in targets]
    if exact_name := budgets[0].exact_name:
        exact = parse_method(f"{exact_name}+{spec.selector}{COMPENSATION * spec.compensation}").canonical
        raise BudgetError(f"{spec.name!r} may keep more than memory allows; use {exact!r}, or give a retention.")
    pairs = zip(targets, budgets, strict=True)
    return tuple(TierBudget(target.precision, budget, target) for target, budget in pairs)
