"""`resolve_method`: from a request and a model to a `Method`."""

from dataclasses import replace
from typing import TYPE_CHECKING

from lkv.errors import BudgetError, CacheError, LkvError
from lkv.hf.attention import patch_attention
from lkv.methods.base import INPUT_SOURCES, MethodInputs, TierBudget
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
        request: What to keep. A `Method` in it is returned as it is.
        model: The model to evict from. Without one, methods that need no model can be resolved.
        tokenizer: The model's tokenizer, for methods that read the text a second time.
        tier_table: How `memory` is spent on precisions; by default as `tier_table_of` the policy says.

    Returns:
        The method.

    Raises:
        LkvError: If something is missing that the method needs.
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
    if request.memory is not None and model is None:
        raise LkvError(f"memory needs a model; give {INPUT_SOURCES['model']}.")
    protected = tuple(sorted(set(request.protected)))
    target = RetentionTarget.from_arguments(request.retention, request.budget_tokens, len(protected))
    inputs = _method_inputs(spec, request, target, model, tokenizer)
    tiers: tuple[TierBudget, ...] = ()
    if request.memory is None:
        budget = spec.build_budget(inputs)
    else:
        table = tier_table or tier_table_of(inputs.policy)
        tiers = build_tiers(spec, inputs, MemoryTarget.parse(request.memory), table, request.decode_eviction)
        budget, target = tiers[-1].budget, tiers[-1].target or target
    selector = spec.build_selector(inputs)
    return Method(spec.name, budget, selector, target, inputs.policy, spec.compensation, tiers, protected)


def _method_inputs(
    spec: MethodSpec,
    request: CompressionRequest,
    target: RetentionTarget,
    model: "PreTrainedModel | None",
    tokenizer: "PreTrainedTokenizerBase | None",
) -> MethodInputs:
    """Return what the budget and the selector of `spec` are built from; arguments as in `resolve_method`."""
    policy, pattern = request.policy, request.pattern
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

    `stores_scores`: whether scores are stored with the
    entries, which takes memory, too. Raises BudgetError for a budget that may keep more than its target.
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
        exact = parse_method(f"{exact_name}+{spec.selector}{COMPENSATION if spec.compensation else ''}").canonical
        raise BudgetError(f"{spec.name!r} may keep more than memory allows; use {exact!r}, or give a retention.")
    pairs = zip(targets, budgets, strict=True)
    return tuple(TierBudget(target.precision, budget, target) for target, budget in pairs)
