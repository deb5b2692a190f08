"""The interfaces of selectors and budgets, their inputs, and shared checks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lkv.errors import CacheError, LkvError, PromptError
from lkv.hf.prompt_kv import LayerKV, to_fp32
from lkv.methods.stored_entries import ArrivedEntries, StoredEntries
from lkv.methods.targets import Precision, RetentionTarget, TierTarget
from lkv.policy.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# r t is rounded down (Sec. 3.3); the margin keeps 0.15 x 4000 = 599.9999 from losing a token to rounding.
ROUNDING = 1e-6
_BLOCK = 256  # attention rows computed at a time
SINKS, RECENT = 128, 256  # first and most recent tokens that a streaming head of DuoAttention keeps
# How to provide the inputs of `MethodInputs`, for error messages.
INPUT_SOURCES = {
    "policy": "pass policy=Policy.from_pretrained(...)",
    "model": "pass the model to resolve_method, or pass the method by name to RaggedCache or lkv.compress",
    "layers": "pass the model to resolve_method, or pass the method by name to RaggedCache or lkv.compress",
    "pattern": "pass pattern=read_pattern(file, L, H) or pattern=estimate_pattern(model, texts)",
    "tokenizer": "pass the method by name to lkv.compress, which has the tokenizer",
}


@dataclass(frozen=True)
class MethodInputs:
    """The inputs from which budgets and selectors are built (`from_inputs`)."""

    target: RetentionTarget
    policy: Policy | None = None
    heads: slice = field(default_factory=lambda: slice(None))  # the KV heads that this process computes
    model: "PreTrainedModel | None" = None
    layers: int | None = None  # the number of layers with eviction
    pattern: list[list[float]] | None = None  # DuoAttention's alphas [L][H]
    tokenizer: "PreTrainedTokenizerBase | None" = None
    strict: bool = True  # if False, a budget that cannot reach `target` keeps the least it can

    def require(self, name: str) -> Any:
        """Return the input `name`. Raises LkvError if it is missing."""
        value = getattr(self, name)
        if value is None:
            raise LkvError(f"the method needs {name!r}, which is missing; {INPUT_SOURCES[name]}.")
        return value


class MethodComponent:
    """Base of budgets and selectors, which are built from `MethodInputs`."""

    required_inputs: tuple[str, ...] = ()  # the constructor's first arguments, such as "model" or "policy"

    @classmethod
    def from_inputs(cls, inputs: MethodInputs, **options: Any) -> Self:
        """Build the component for one model, with its registered options. Raises LkvError for missing inputs."""
        return cls(*(inputs.require(name) for name in cls.required_inputs), **options)


def attention_blocks(prompt: LayerKV, first: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Yield the causal attention of a prompt's queries from token `first` on, a block of n tokens at a time.

    Each block comes as its first token, and its weights [B, H, G, n, T] over the T tokens up to its last one.
    """
    key, queries = prompt.key, prompt.grouped_query
    for start in range(first, key.shape[2], _BLOCK):
        block = queries[..., start : start + _BLOCK, :]
        end = start + block.shape[3]
        logits = to_fp32(prompt.logits(block, key[:, :, None, :end]))
        future = torch.ones(end - start, end, dtype=torch.bool, device=key.device).triu(start + 1)
        yield start, prompt.softmax(logits.masked_fill_(future, -torch.inf))


class Selector(MethodComponent, ABC):
    """Scores the tokens of a prompt after a layer has attended over it.

    A subclass implements `scores`, declares its inputs, and is registered with
    `lkv.methods.registry.register_selector` (in this package) or `lkv.register_method` (in any other).

    Attributes:
        reads_queries: whether it reads `prompt.query`.
        last_queries: the number of the prompt's last queries it reads; None for all.
        is_local: whether a token's score needs no other token: only its own k and v, its position and the length of the
            text. Then chunks can be evicted from during prefill: `score_on_arrival` computes what is final,
            `score_at_eviction` the rest.
        scores_entries: whether the entries that are left of a text can be scored as a prompt of their own, with the
            queries of the last tokens. Then decoding can evict, as with local selectors.
        recent_window: how many of the last tokens decoding ranks first, at most a third of a head's entries.
        has_second_pass: whether it needs the whole prefilled prompt before it scores (`for_prompt`).
        uses_counts: whether its ranking depends on how many tokens each head keeps (`refine`).
    """

    reads_queries = False
    last_queries: int | None = None
    is_local = False
    scores_entries = False
    recent_window = 0
    has_second_pass = False
    uses_counts = False

    def for_prompt(self, ids: Sequence[int], prompt: list[LayerKV]) -> "Selector":
        """Return the selector for the prompt `ids`, already prefilled as `prompt`; most selectors return themselves."""
        return self

    @abstractmethod
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Score the tokens of one layer of a prompt.

        Args:
            layer: index among the layers with eviction.
            prompt: its keys and values [B, H, T, d] after RoPE, and the other inputs that the class declares.

        Returns:
            Scores [B, H, T]; each head keeps the tokens with the highest scores.
        """

    def refine(self, layer: int, prompt: LayerKV, scores: Tensor, counts: list[list[int]]) -> Tensor:
        """Rank the tokens again, given the number that each head keeps.

        Args:
            layer: index among the layers with eviction.
            prompt: as in `scores`.
            scores: the result of `scores`, [B, H, T].
            counts: how many tokens each head keeps, as lists [B, H].

        Returns:
            New scores [B, H, T].
        """
        return scores

    def score_on_arrival(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return the part [B, H, T] of the scores that is final on arrival: 0 for selectors that are not local."""
        return self.scores(layer, prompt) if self.is_local else prompt.key.new_zeros(prompt.key.shape[:3])

    def score_at_eviction(self, layer: int, head: int, entries: ArrivedEntries) -> Tensor:
        """Return the completed scores [n] of the `entries` of head `head`, indexed within this process."""
        return entries.scores

    def score_stored(self, layer: int, entries: StoredEntries) -> Tensor:
        """Return the completed scores [B * H, n] of all `entries` of a layer, -inf beyond a head's last entry.

        New entries first get their scores on arrival.
        """
        if entries.num_new:
            entries.score_new_entries(lambda kv: check_shape(self, self.score_on_arrival(layer, kv), kv.key))
        if self.is_local:
            scores = [self.score_at_eviction(layer, head, arrived) for head, arrived in entries.heads()]
        else:
            scores = []
            for places, prompt in entries.as_prompts():
                own = check_shape(self, self.scores(layer, prompt), prompt.key).flatten(0, 1)
                scores += torch.empty_like(own).scatter_(-1, places, own)
        return pad_sequence(scores, batch_first=True, padding_value=-math.inf)


class PrecomputedScores(Selector):
    """Precomputed scores, as a table [L, B, H, T]."""

    def __init__(self, table: Tensor):
        self._table = table

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return the layer's part of the table."""
        # A model's layers may be on several devices; the table is on one.
        return self._table[layer].to(prompt.key.device)


def check_shape(selector: Selector, scores: Tensor, key: Tensor) -> Tensor:
    """Return `scores`, or raise CacheError, naming the selector, if their shape is not [B, H, T] as for `key`."""
    name, shape = type(selector).__name__, tuple(key.shape[:3])
    if not isinstance(scores, Tensor) or tuple(scores.shape) != shape:
        actual = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise CacheError(
            f"expected scores of shape {shape} from the selector {name} but got {actual}; make its scores() return one "
            "number for every token, [B, H, T]."
        )
    return scores


def contains_nan(scores: Tensor) -> Tensor:
    """Return whether `scores` contain NaN, as a tensor on their device, without synchronising."""
    # The maximum of numbers that include NaN is NaN; a mask would cost memory.
    return scores.amax().isnan()


def any_flag(flags: Sequence[Tensor]) -> bool:
    """Return whether one of `flags` [] is set, on whatever devices they are; waits for them once."""
    # A single one needs no further kernel launch.
    return bool(flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[-1].device) for flag in flags]).any())


def check_no_nan(selector: Selector, checks: Sequence[Tensor]) -> None:
    """Raise CacheError, naming the selector, if one of `checks` (`contains_nan` of its scores) is true."""
    if checks and any_flag(checks):
        raise CacheError(
            f"the scores of the selector {type(selector).__name__} contain NaN, so tokens cannot be ranked by them; "
            "make its scores() return numbers."
        )


def check_sinks(selector: Selector, tokens: int, sinks: int) -> None:
    """Raise PromptError for a prompt that has no token besides the first `sinks`."""
    if tokens <= sinks:
        raise PromptError(
            f"the prompt has {tokens} tokens, but {type(selector).__name__} always keeps the first {sinks} and needs "
            "more than that; give a longer prompt, fewer sinks or another method."
        )


class Budget(MethodComponent, ABC):
    """Decides how many tokens each KV head keeps.

    A subclass implements `counts` and is registered with `lkv.methods.registry.register_budget` (in this package) or
    `lkv.register_method` (in any other).

    Attributes:
        compares_heads: whether heads compete by their scores, which must then be comparable across heads.
        exact_name: if the budget may keep more than its target, the name of the variant that does not.
    """

    required_inputs: tuple[str, ...] = ("target",)
    compares_heads = False
    exact_name: str | None = None

    @abstractmethod
    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        """Count the tokens to keep.

        Args:
            layer: index among the layers with eviction.
            scores: the selector's scores of its tokens, [B, H, T].

        Returns:
            The number of tokens each head keeps, `[B][H]`, each from 0 to T.
        """


class FixedBudget(Budget):
    """A budget that depends only on the prompt's length, so that it can be applied during prefill."""

    @abstractmethod
    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        """Return the share of its tokens that each head keeps.

        Args:
            layer: index among the layers with eviction.
            heads: the number of KV heads of this process.
            tokens: length of the prompt.

        Returns:
            A number from 0 to 1 for each head.
        """

    def limits(self, layer: int, heads: int, tokens: int) -> list[int]:
        """Count floor(r t) for each head, [H]. Raises CacheError for unusable ratios."""
        ratios = self.ratios(layer, heads, tokens)
        if len(ratios) != heads:
            raise CacheError(
                f"the budget {type(self).__name__} gives {len(ratios)} ratios, but there are {heads} heads here."
            )
        if not all(ratio >= 0 for ratio in ratios):  # NaN fails, too
            raise CacheError(
                f"the budget {type(self).__name__} gives layer {layer} the ratios {ratios}; give numbers from 0 to 1."
            )
        return [min(tokens, int(ratio * tokens + ROUNDING)) for ratio in ratios]

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        """Return the same `limits` for every row."""
        batch, heads, tokens = scores.shape
        return [self.limits(layer, heads, tokens)] * batch


@dataclass(frozen=True)
class TierBudget:
    """One tier of a method.

    `budget` counts the entries of this and all better tiers together; those that no better tier has are stored in
    `precision`. `target` is the budget's target; None if the method has only this tier.
    """

    precision: Precision
    budget: Budget
    target: TierTarget | None = None

    def is_empty(self, tokens: int) -> bool:
        """Return whether this and all better tiers are empty for `tokens` unprotected tokens."""
        return self.target is not None and self.target.share(tokens) <= 0


def tier_counts(
    tiers: Sequence[TierBudget],
    tokens: int,
    heads: int,
    rows: int,
    count: Callable[[Budget], list[list[int]]],
    protected: int = 0,
) -> list[list[list[int]]]:
    """Count the entries of each row and head, cumulative over the tiers from the best on.

    Args:
        tiers: the tiers, best first.
        tokens: unprotected tokens of a row.
        heads: KV heads.
        rows: rows of the batch.
        count: gives the counts [B][H] of one budget.
        protected: protected tokens, which are in the best tier in use.

    Returns:
        The counts [tiers][B][H], non-decreasing from tier to tier.
    """
    table: list[list[list[int]]] = []
    for number, tier in enumerate(tiers):
        before = table[-1] if table else [[0] * heads] * rows
        previous = tiers[number - 1].target if number else None
        is_same = previous and tier.target and previous.share(tokens) == tier.target.share(tokens)
        if is_same or tier.is_empty(tokens):
            table.append(before)
            continue
        counts = count(tier.budget)
        table.append([[max(pair) for pair in zip(*rows, strict=True)] for rows in zip(before, counts, strict=True)])
    if not protected:
        return table
    first = [protected if tier.target is None else tier.target.protected_entries(tokens) for tier in tiers]
    return [[[count + more for count in row] for row in part] for part, more in zip(table, first, strict=True)]
