"""Compare methods on one prompt from one prefill: `MethodGrid` binds them, `MethodComparison` runs them at once."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import StoppingCriteria, StoppingCriteriaList

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import LkvError
from lkv.hf.attention import input_device, patch_attention
from lkv.hf.cache_argument import cache_argument, passes
from lkv.hf.cache_layers import crop_to
from lkv.hf.prompt_kv import LayerKV, PromptKV, as_prompt_kv, query_rotations
from lkv.hf.spec import unwrap_model
from lkv.methods.base import MethodInputs, TierBudget
from lkv.methods.budgets import Uniform
from lkv.methods.method import Method, combine_rowwise
from lkv.methods.registry import COMPENSATION, FULL, POLICY, MethodSpec, parse_method, selectors
from lkv.methods.request import build_tiers, tier_table_of
from lkv.methods.selectors import Selector, StreamingLLM
from lkv.methods.targets import MemoryTarget, RetentionTarget, TierTable
from lkv.policy.policy import Policy
from lkv.utils.fidelity import is_top1_equal, kl_divergence

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class BoundMethod(NamedTuple):
    """A method at a retention, prepared for one prompt."""

    name: str
    retention: float
    method: Method


class SkippedMethod(NamedTuple):
    """A method that cannot serve a prompt at a retention, with the reason."""

    method: str
    retention: float
    reason: str


class MethodGrid:
    """Methods times retentions; methods share a selector's scores, and KVzip's second pass."""

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase | None",
        names: Sequence[str],
        retentions: Sequence[float],
        policy: Policy | None = None,
        pattern: list[list[float]] | None = None,
        policies: Mapping[str, Policy] | None = None,
        tier_tables: Mapping[str, TierTable | None] | None = None,
    ):
        """Build the methods.

        Args:
            model: The model to evict from.
            tokenizer: Its tokenizer.
            names: As `lkv methods` lists them, or "BUDGET+SELECTOR"; "METHOD@NAME" reads `policies[NAME]` instead of
                `policy`. The full cache is always a row too.
            retentions: The shares of KV entries to keep.
            policy: The policy of methods that read one.
            pattern: DuoAttention's score of each head, [layers][KV heads].
            policies: Further policies by name.
            tier_tables: If given, `retentions` are shares of the 16-bit cache's bytes, and each method is
                a row for each of these ways to spend them, named "METHOD (NAME)"; "METHOD" for the name "". None is
                that of the method's policy.

        Raises:
            LkvError: For an unknown name, or a method without its policy or pattern.
            PolicyMismatchError: If a policy was trained for another model.
            RetentionError: If a retention is out of range.
        """
        patched = patch_attention(model)
        named: dict[str, Policy | None] = {"": None}
        for policy_name, loaded in {**(policies or {}), **({} if policy is None else {"": policy})}.items():
            loaded.check_model(patched.spec)
            named[policy_name] = loaded.on(model.device)
        self._specs = {name: parse_method(name) for name in dict.fromkeys(names) if name != FULL}
        if unknown := sorted({spec.policy_name for spec in self._specs.values()} - set(named)):
            raise LkvError(f"there is no policy named {', '.join(unknown)}; give it as --policy NAME=PATH.")
        self.retentions = list(dict.fromkeys(retentions))
        shared = (patched.heads, model, patched.spec.layers, pattern, tokenizer)
        self._inputs = {
            (retention, name): MethodInputs(RetentionTarget(retention), loaded, *shared, strict=False)
            for retention in self.retentions
            for name, loaded in named.items()
        }
        self._tables: Mapping[str, TierTable | None] = {"": None} if tier_tables is None else tier_tables
        self.is_memory = tier_tables is not None
        self._selectors: dict[tuple[str, str], Selector] = {}
        for spec in self._specs.values():
            inputs = self._inputs[self.retentions[0], spec.policy_name]
            self._selectors[_selector_key(spec)] = spec.build_selector(inputs)
            spec.build_budget(inputs)  # raises before the first prompt is read
            for table in self._tables.values() if self.is_memory else ():
                self._build_tiers(spec, self.retentions[0], table)
        if any(spec.compensation for spec in self._specs.values()):
            query_rotations(model, COMPENSATION)
        self.methods = [_row_name(name, table) for name in self._specs for table in self._tables]
        self.pairs = frozenset(product(self.methods, self.retentions))

    def select(self, pairs: frozenset[tuple[str, float]]) -> "MethodGrid":
        """Return a grid with only these (method, retention) pairs, and the full cache."""
        grid = copy.copy(self)
        grid.pairs = self.pairs & pairs
        grid._specs = {
            name: spec
            for name, spec in self._specs.items()
            if any((_row_name(name, table), each) in grid.pairs for table in self._tables for each in self.retentions)
        }
        used = {_selector_key(spec) for spec in grid._specs.values()}
        grid._selectors = {key: selector for key, selector in self._selectors.items() if key in used}
        return grid

    def _build_tiers(self, spec: MethodSpec, memory: float, table: TierTable | None) -> tuple[TierBudget, ...]:
        """Return the tiers of a method within a share of the 16-bit cache's bytes."""
        inputs = self._inputs[memory, spec.policy_name]
        learned = inputs.policy if spec.needs_policy else None
        return build_tiers(spec, inputs, MemoryTarget(share=memory), table or tier_table_of(learned))

    @property
    def required_queries(self) -> bool | int:
        """Whether a prompt must be read with its queries, or with how many of the last ones."""
        if any(spec.compensation for spec in self._specs.values()):
            return True
        counts = [selector.last_queries for selector in self._selectors.values() if selector.reads_queries]
        return True if None in counts else max((count for count in counts if count is not None), default=False)

    def bind(self, ids: list[int], prompt: list[LayerKV]) -> tuple[list[BoundMethod], list[SkippedMethod]]:
        """Prepare the methods for the prompt `ids`, which was read into `prompt`; the full cache comes first."""
        prepared = {key: _prepare(selector, ids, prompt) for key, selector in self._selectors.items()}
        rows = [BoundMethod(FULL, 1.0, Method(FULL, Uniform(1.0), StreamingLLM(sinks=0)))]
        skipped = []
        for retention, (method_name, spec), table_name in product(self.retentions, self._specs.items(), self._tables):
            name = _row_name(method_name, table_name)
            if (name, retention) not in self.pairs:
                continue
            selector, scores = prepared[_selector_key(spec)]
            try:
                if isinstance(scores, LkvError):
                    raise scores
                tiers = self._build_tiers(spec, retention, self._tables[table_name]) if self.is_memory else ()
                budget = tiers[-1].budget if tiers else spec.build_budget(self._inputs[retention, spec.policy_name])
                method = Method(name, budget, selector, compensation=spec.compensation, tiers=tiers)
                method = method.for_prompt(ids, prompt)
                method.budget.counts(0, scores)
            except LkvError as error:
                skipped.append(SkippedMethod(name, retention, str(error)))
            else:
                rows.append(BoundMethod(name, retention, method))
        return rows, skipped


def _row_name(method: str, table: str) -> str:
    return f"{method} ({table})" if table else method


def _selector_key(spec: MethodSpec) -> tuple[str, str]:
    """Return the key of a shared selector: its name, and the policy's name if it uses one."""
    return spec.selector, spec.policy_name if POLICY in selectors()[spec.selector].needs else ""


def _prepare(selector: Selector, ids: list[int], prompt: list[LayerKV]) -> tuple[Selector, Tensor | LkvError]:
    """Return the selector for this prompt with its scores of the first layer, or the error why it cannot score it."""
    try:
        prepared = selector.for_prompt(ids, prompt)
        return prepared, prepared.scores(0, prompt[0])
    except LkvError as error:
        return selector, error


# Override the model's generation config, so that answers depend only on the logits, as in the benchmarks.
_PLAIN_GENERATION: dict[str, Any] = {
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "use_cache": True,
    "cache_implementation": None,
    "prefill_chunk_size": None,
}


@dataclass(frozen=True)
class Fidelity:
    """How close a method's predictions are to the full cache's (means over the target tokens)."""

    kl: float  # KL(full || compressed) in nats
    agreement: float  # share of tokens with the same most probable token
    hidden_error: float  # ||h - h_full|| / ||h_full|| of the output head's input


@dataclass(frozen=True)
class RowPrediction:
    """One method's log-probabilities [n, V] of the target tokens, and the output head's input [n, D]."""

    log_probs: Tensor
    hidden: Tensor

    def fidelity_to(self, full: "RowPrediction") -> Fidelity:
        """Compare with the full cache's."""
        divergence, equal = kl_divergence(full.log_probs, self.log_probs), is_top1_equal(full.log_probs, self.log_probs)
        norm = torch.linalg.vector_norm
        error = norm(self.hidden - full.hidden, dim=-1) / norm(full.hidden, dim=-1).clamp(min=1e-12)
        return Fidelity(float(divergence.mean()), float(equal.float().mean()), float(error.mean()))


@dataclass(frozen=True)
class BatchPrediction:
    """Logits [B, n, V] of several methods, and the output head's input [B, n, D]."""

    logits: Tensor
    hidden: Tensor

    def row(self, index: int) -> RowPrediction:
        """Return one method's predictions in float32; converting all methods at once could take much memory."""
        return RowPrediction(log_softmax(self.logits[index].float(), -1), self.hidden[index].float())


class MethodComparison:
    """Several methods on one prompt as a batch: their kept entries, answers and predictions."""

    def __init__(self, model: "PreTrainedModel", ids: list[int], prompt: list[LayerKV], methods: Sequence[Method]):
        """Compress a prompt by each method.

        Args:
            model: The model.
            ids: The prompt's tokens.
            prompt: Its keys and values, from `read_prompt(model, ids, queries=...)`.
            methods: Row i of every result is of `methods[i]`. One with a memory budget must be alone.
        """
        self._model, self._ids, self._rows = model, list(ids), len(methods)
        self._prompt_tokens = len(ids)
        self._cache = RaggedCache(model, method=methods[0] if len(methods) == 1 else combine_rowwise(methods))
        one = as_prompt_kv(prompt)
        self._cache.fill(PromptKV((_repeat(layer, self._rows) for layer in prompt), one.kinds, one.others))

    def kept_entries(self) -> list[int]:
        """Return the number of the prompt's KV entries that each method keeps, over all layers and heads."""
        return torch.stack([layer.lens for layer in self._cache.ragged_layers]).sum((0, 2)).tolist()

    def nbytes(self) -> int:
        """Return the bytes of k and v of all rows, without sliding windows, from which nothing is evicted."""
        return sum(layer.nbytes() for layer in self._cache.ragged_layers)

    def realised_retentions(self) -> list[float]:
        """Return the share of the prompt's KV entries that each method keeps."""
        entries = sum(layer.lens.shape[1] for layer in self._cache.ragged_layers) * self._prompt_tokens
        return [count / entries for count in self.kept_entries()]

    @torch.no_grad()
    def append(self, ids: list[int]) -> None:
        """Append `ids` to the prompt; they are not evicted."""
        if ids:
            base = unwrap_model(self._model).base_model
            for part, arguments in passes(self._cache, self._batch(ids)):
                base(input_ids=part, **arguments)
            self._ids += ids

    def generate(
        self, question: list[int], max_new_tokens: int, stops: Sequence[int] = (), last: bool = False
    ) -> list[list[int]]:
        """Generate each method's answer to a question, see `generate_greedily`.

        Args:
            question: Its token ids.
            max_new_tokens: The maximum number of tokens of an answer.
            stops: Tokens that end an answer from its second token on.
            last: No other call follows, so methods whose answers have ended can be dropped, which saves time.
        """
        ids = [self._ids + question] * self._rows
        with self._working_cache(last) as cache:
            return generate_greedily(self._model, ids, max_new_tokens, stops, cache, dropping=last)

    def measure_fidelity(self, continuation: list[int], skip: int) -> list[Fidelity]:
        """Compare each method with the first one on the tokens of `continuation` from `skip` on."""
        predictions = self.predict(continuation, skip)
        full = predictions.row(0)
        return [predictions.row(index).fidelity_to(full) for index in range(self._rows)]

    @torch.no_grad()
    def predict(self, continuation: list[int], skip: int) -> BatchPrediction:
        """Predict the tokens of `continuation` from `skip` on (from 1 on, as the first has no predecessor here)."""
        # The last token predicts nothing.
        ids = self._batch(continuation[:-1])
        targets = len(continuation) - max(1, skip)
        logits: list[Tensor] = []
        hidden: list[Tensor] = []
        head = self._model.get_output_embeddings()
        keep_inputs = head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
        with keep_inputs, self._working_cache() as cache:
            for part, arguments in passes(cache, ids):
                logits.append(self._model(input_ids=part, **arguments, logits_to_keep=targets).logits)
        read = (parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in (logits, hidden))
        return BatchPrediction(*(part[:, -targets:] for part in read))

    def _batch(self, ids: list[int]) -> Tensor:
        device = input_device(self._model)
        return torch.tensor([ids], device=device).expand(self._rows, -1)

    @contextmanager
    def _working_cache(self, last: bool = False) -> Iterator[RaggedCache]:
        """Return the cache, cropped afterwards unless this is its `last` use; a copy if it cannot be cropped."""
        if self._cache.others or not self._cache.is_rewindable:
            yield self._cache.fork()
            return
        try:
            yield self._cache
        finally:
            if not last:
                crop_to(self._cache, len(self._ids))


@torch.no_grad()
def generate_greedily(
    model: Any,
    rows: Sequence[list[int]],
    max_new_tokens: int,
    stops: Sequence[int] = (),
    cache: RaggedCache | None = None,
    dropping: bool = False,
) -> list[list[int]]:
    """Generate greedily with `model.generate`.

    Args:
        model: The model.
        rows: Prompts of equal length.
        max_new_tokens: The maximum number of tokens of an answer.
        stops: Tokens that end an answer from its second token on, as LongBench ends one-line answers.
        cache: Holds the beginning of the prompts.
        dropping: Remove rows from the cache once half of them have ended, so that a few long answers do not cost as
            many steps of all rows. The cache is of no use afterwards.

    Returns:
        The answer of each row up to its first end token, which is included.
    """
    ids = torch.tensor(rows, device=input_device(model))
    own_ends = model.generation_config.eos_token_id
    ends = [*([] if own_ends is None else [own_ends] if isinstance(own_ends, int) else own_ends), *stops]
    padding = model.generation_config.pad_token_id
    start, end = ids.shape[1], ids.shape[1] + max_new_tokens
    active = list(range(len(rows)))
    answers: list[list[int]] = [[] for _ in rows]
    while True:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **cache_argument(cache),
            do_sample=False,
            max_new_tokens=end - ids.shape[1],
            min_new_tokens=1 if stops and ids.shape[1] == start else None,
            eos_token_id=ends or None,
            pad_token_id=padding if padding is not None else (ends or [0])[0],
            **(_PLAIN_GENERATION | {"prefill_chunk_size": 1 if cache is not None and cache.is_stepwise else None}),
            stopping_criteria=StoppingCriteriaList([_HalfEnded(start, ends)] if dropping else []),
        )
        for row, tokens in zip(active, out[:, start:].tolist(), strict=True):
            length = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
            answers[row] = tokens[:length]  # the rest is padding
        unfinished = [index for index, row in enumerate(active) if answers[row][-1] not in ends]
        if not unfinished or out.shape[1] == end:
            return answers
        assert cache is not None  # without `dropping`, all rows end in the first pass
        active, indices = [active[index] for index in unfinished], torch.tensor(unfinished, device=ids.device)
        cache.batch_select_indices(indices)
        ids = out[indices]


class _HalfEnded(StoppingCriteria):
    """Stop when at least half of the rows have one of `ends` after their first `start` tokens."""

    def __init__(self, start: int, ends: Sequence[int]):
        self._start, self._ends = start, ends

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Any:
        ends = torch.tensor(self._ends, device=input_ids.device, dtype=input_ids.dtype)
        ended = torch.isin(input_ids[:, self._start :], ends).any(-1)
        return (ended.sum() * 2 >= len(ended)).expand(len(ended))


def _repeat(layer: LayerKV, rows: int) -> LayerKV:
    queries = None if layer.queries is None else layer.queries.expand(rows, -1, -1, -1)
    key, value = layer.key.expand(rows, -1, -1, -1), layer.value.expand(rows, -1, -1, -1)
    return replace(layer, key=key, value=value, queries=queries)
