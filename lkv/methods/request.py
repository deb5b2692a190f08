"""`CompressionRequest`: settings that are validated once for all entry points; `resolve_method` builds their method.

How much a budget in bytes keeps is decided in `lkv.methods.targets`.
"""

import os
from dataclasses import InitVar, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from lkv.errors import (
    DEFAULT_MEMORY,
    DEFAULT_RETENTION,
    BudgetError,
    CacheError,
    LkvError,
    PolicyFileError,
    PromptError,
    RetentionError,
    check_count,
)
from lkv.hf.attention import patch_attention
from lkv.kernels import BITS_BY_NAME
from lkv.methods.base import MethodInputs, TierBudget
from lkv.methods.budgets import check_table
from lkv.methods.method import Method
from lkv.methods.registry import COMPENSATION, FULL, MethodSpec, parse_method
from lkv.methods.targets import (
    DECODE_SLOTS,
    DEFAULT_TABLE,
    SCORE_BITS,
    KVShape,
    MemoryTarget,
    RetentionTarget,
    TierTable,
    TierTarget,
)
from lkv.policy.lookup import resolve_policy
from lkv.policy.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_COUNT = 2**24  # rows, or tokens of slack: more than any memory can store
_NO_PATTERN = "the method {!r} does not use a pattern of retrieval heads; remove the pattern, or use 'duo'."


@dataclass(frozen=True, kw_only=True)
class CompressionRequest:
    """The settings of a compression. Creating and validating one needs no model.

    `RaggedCache` explains those that are not listed here.

    Attributes:
        method: As in `RaggedCache`, or "full" for the uncompressed cache.
        chunk: The chunk size in tokens for chunked prefill.
        protected: Positions of tokens that every head keeps, within the budget.

    Raises:
        RetentionError: If more than one of `memory`, `retention` and `budget_tokens` is set, `memory` and `bits` both
            are, or kvpress's `compression_ratio` is.
        BudgetError: For a pattern that the method does not use.
        PolicyFileError: For a policy of an invalid type.
        PromptError: For a `chunk` that is not a positive number, or `streaming` without `chunk`.
        CacheError: For other values that are out of range or exclude each other.
    """

    method: str | Method = "lkv"
    memory: float | int | str | None = None
    retention: float | None = None
    budget_tokens: int | None = None
    policy: Policy | str | os.PathLike[str] | None = None
    pattern: list[list[float]] | None = None
    bits: int | str | None = None
    slack: int | None = None
    chunk: int | None = None
    prompt_tokens: int | None = None
    streaming: bool = False
    decode_eviction: bool = False
    protected: tuple[int, ...] = ()
    compression_ratio: InitVar[None] = None

    @classmethod
    def of_text(cls, options: dict[str, Any]) -> Self:
        """Make a request from options of `lkv.compress`. Raises CacheError and PromptError for unknown options."""
        if "prompt_tokens" in options:
            raise PromptError("the whole text is the prompt here: leave prompt_tokens out, or use RaggedCache itself.")
        names = [field.name for field in fields(cls) if field.name not in ("prompt_tokens", "protected")]
        if unknown := sorted(options.keys() - {*names, "protected", "compression_ratio"}):
            raise CacheError(f"compress has no option {', '.join(unknown)}; it takes {', '.join(names)}, protect.")
        request = cls(**options)
        if request.streaming and request.chunk is None:
            raise PromptError(
                "streaming reads the text in parts; give their size in tokens as chunk, for example 1024."
            )
        return request

    def __post_init__(self, compression_ratio: float | None) -> None:
        if compression_ratio is not None:
            raise RetentionError(
                "compression_ratio is the share to remove; give the share to keep: instead of compression_ratio=0.85 "
                "give retention=0.15."
            )
        if not isinstance(self.method, str | Method):
            raise CacheError(
                f"method is {self.method!r}; pass a name that `lkv methods` lists or a Method of your own. To set how "
                "much to keep, pass retention=0.15."
            )
        if self.policy is not None and not isinstance(self.policy, Policy | str | os.PathLike):
            raise PolicyFileError(
                f"policy is {self.policy!r}; pass a Policy, its folder or its hub id. To set how much to keep, pass "
                "retention=0.15."
            )
        if isinstance(self.method, Method):
            self._check_own_budget(self.method)
        elif self.method == FULL:
            self._check_full()
        elif self.pattern is not None and not parse_method(self.method).needs_pattern:
            raise BudgetError(_NO_PATTERN.format(self.method))
        if self.memory is not None and any(x is not None for x in (self.retention, self.budget_tokens, self.bits)):
            raise RetentionError(
                "memory says how much to keep and in which precision: give it without retention, budget_tokens and "
                "bits."
            )
        if self.retention is not None and self.budget_tokens is not None:
            raise RetentionError(
                f"retention {self.retention!r} and budget_tokens {self.budget_tokens!r} both say how much to keep; "
                "give one of them."
            )
        for name, flag in (("streaming", self.streaming), ("decode_eviction", self.decode_eviction)):
            if not isinstance(flag, bool):
                raise CacheError(f"{name} is {flag!r}, but it is either True or False.")
        slots = f"it is a number of tokens: give one from 0 to {MAX_COUNT}, or None"
        self._convert("slack", slots, CacheError, 0, MAX_COUNT)
        self._convert("chunk", "a part of the text has at least one token", PromptError)
        self._convert("prompt_tokens", "a prompt has at least one token", CacheError)
        precisions = f"it must be one of {', '.join(map(repr, BITS_BY_NAME))}"
        if not isinstance(self.bits, str):
            self._convert("bits", precisions, CacheError)
        if self.bits not in (None, *BITS_BY_NAME):
            raise CacheError(f"bits is {self.bits!r}, but {precisions}.")

    def _convert(self, name: str, problem: str, error: type[LkvError], *bounds: int) -> None:
        """Convert the count `name` to an int as `check_count` does."""
        if (value := getattr(self, name)) is not None:
            object.__setattr__(self, name, check_count(value, error(f"{name} is {value!r}, but {problem}."), *bounds))

    def with_default_memory(self) -> Self:
        """Return the request with the default memory budget if it sets no memory, retention, budget_tokens or bits."""
        is_unset = self.memory is None and self.retention is None and self.budget_tokens is None and self.bits is None
        has_named_method = isinstance(self.method, str) and self.method != FULL
        return replace(self, memory=DEFAULT_MEMORY) if is_unset and has_named_method else self

    def _check_own_budget(self, method: Method) -> None:
        """Raise BudgetError, RetentionError or CacheError for an option that conflicts with a `Method` object."""
        if self.pattern is not None:
            raise BudgetError(_NO_PATTERN.format(method.name))
        if self.retention is not None or self.budget_tokens is not None or self.memory is not None:
            raise RetentionError(
                f"the method {method.name!r} has a budget of its own: leave retention, budget_tokens and memory out, "
                "or give a method by its name."
            )
        if self.protected:
            raise CacheError(
                f"the method {method.name!r} has a budget of its own, which counts no protected tokens: leave them "
                "out, or give a method by its name."
            )

    def _check_full(self) -> None:
        """Raise CacheError for options that the uncompressed cache does not support."""
        given = [
            field.name
            for field in fields(self)
            if field.name not in ("method", "memory", "retention", "policy", "chunk", "protected")
            and getattr(self, field.name) != field.default
        ]
        if given:
            raise CacheError(f"the uncompressed cache of {FULL!r} has no options; leave {', '.join(given)} out.")
        problem = f"{FULL!r} keeps everything"
        if self.retention not in (None, 1):
            raise CacheError(f"{problem}, not {self.retention!r}; leave retention out, or use another method.")
        if self.protected:
            raise CacheError(f"{problem}; leave protect out, or use another method.")
        if self.memory is not None:
            raise CacheError(f"{problem}; leave memory out, or use another method.")


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
        policy = request.policy if isinstance(request.policy, Policy) and spec.needs_policy else None
        inputs = replace(inputs, policy=policy)
    else:
        patched = patch_attention(model)
        layers, heads = patched.spec.layers, patched.spec.kv_heads
        policy = resolve_policy(model, request.policy).on(model.device) if spec.needs_policy else None
        if request.pattern is not None:
            check_table(request.pattern, layers, heads, "the pattern of retrieval heads")
        inputs = replace(inputs, policy=policy, heads=patched.heads, layers=layers)
    tiers: tuple[TierBudget, ...] = ()
    if request.memory is None:
        budget = spec.build_budget(inputs)
    else:
        table = tier_table or tier_table_of(policy)
        slots = None if not request.decode_eviction else DECODE_SLOTS if request.slack is None else request.slack
        tiers = build_tiers(spec, inputs, MemoryTarget.parse(request.memory), table, slots)
        budget, target = tiers[-1].budget, tiers[-1].target or target
    selector = spec.build_selector(inputs)
    return Method(spec.name, budget, selector, target, policy, spec.compensation, tiers, protected)


def tier_table_of(policy: Policy | None) -> TierTable:
    """Return the policy card's tier table, else `DEFAULT_TABLE`. Raises PolicyFileError."""
    rows = None if policy is None else policy.card.get("tiers")
    return DEFAULT_TABLE if rows is None else TierTable.from_json(rows)


def build_tiers(
    spec: MethodSpec, inputs: MethodInputs, memory: MemoryTarget, table: TierTable, decode_slots: int | None = None
) -> tuple[TierBudget, ...]:
    """Build the tiers of a method within a memory budget, best first.

    Args:
        spec: The method.
        inputs: The inputs of its budget, including the model.
        memory: The memory budget.
        table: The split of the budget among precisions.
        decode_slots: Free slots of each head, if decoding evicts; these and the stored scores count in the budget.

    Raises:
        BudgetError: For a budget that may keep more than its target.
        LkvError: If an input of the budget is missing.
    """
    model = inputs.require("model")
    patched = patch_attention(model)
    heads = patched.spec.layers * len(range(patched.spec.kv_heads)[inputs.heads])
    extra_bits = 0 if decode_slots is None else SCORE_BITS
    shape = KVShape(heads, patched.spec.head_dim, model.dtype.itemsize, extra_bits, decode_slots or 0)
    targets = TierTarget.of_table(memory, shape, table, inputs.target.protected)
    tiers = tuple(
        TierBudget(target.precision, spec.build_budget(replace(inputs, target=target)), target) for target in targets
    )
    if exact_name := tiers[0].budget.exact_name:
        exact = parse_method(f"{exact_name}+{spec.selector}{COMPENSATION * spec.compensation}").canonical
        raise BudgetError(f"{spec.name!r} may keep more than memory allows; use {exact!r}, or give a retention.")
    return tiers
