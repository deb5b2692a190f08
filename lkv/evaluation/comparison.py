"""Compare methods on one prompt from one prefill: `MethodGrid` binds them, `MethodComparison` runs them at once."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import StoppingCriteria, StoppingCriteriaList

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import LkvError
from lkv.integrations.transformers.attention import input_device, patch_attention
from lkv.integrations.transformers.cache_layers import crop_to
from lkv.integrations.transformers.prefill import LayerKV, PromptKV, as_prompt_kv, query_rotations
from lkv.methods.budgets import RetentionTarget, Uniform
from lkv.methods.method import Method, MethodInputs, combine_rowwise
from lkv.methods.registry import FULL, POLICY, REFIT, parse_method, selectors
from lkv.methods.selectors import Selector, StreamingLLM
from lkv.policy.policy import Policy
from lkv.utils.fidelity import is_top1_equal, kl_divergence


@dataclass(frozen=True)
class BoundMethod:
    """One method at one retention, ready for one prompt."""

    name: str
    retention: float
    method: Method


@dataclass(frozen=True)
class SkippedMethod:
    """A method that cannot serve a prompt at this retention, with the reason."""

    name: str
    retention: float
    reason: str


class MethodGrid:
    """Methods by name, times retentions. What several of them share is computed once: the scores of a selector, and
    KVzip's second pass."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        names: Sequence[str],
        retentions: Sequence[float],
        policy: Policy | None = None,
        pattern: list[list[float]] | None = None,
        policies: Mapping[str, Policy] | None = None,
    ):
        """`names` as `lkv methods` lists them or "RULE+SELECTOR", with "@NAME" behind for the policy `policies[NAME]`
        instead of `policy`; the full cache is a row of its own and always there.

        Raises LkvError for an unknown name, or where a method misses its policy or pattern, PolicyMismatchError for the
        policy of another model, and RetentionError.
        """
        attached = patch_attention(model)
        named: dict[str, Policy | None] = {"": None}
        for tag, learned in [*(policies or {}).items(), *([("", policy)] if policy is not None else [])]:
            learned.check_model(attached.spec)
            named[tag] = learned.on(model.device)
        self._entries = {name: parse_method(name) for name in dict.fromkeys(names) if name != FULL}
        if unknown := sorted({spec.policy_name for spec in self._entries.values()} - set(named)):
            raise LkvError(f"there is no policy named {', '.join(unknown)}; give it as --policy NAME=PATH.")
        self._inputs = {
            (retention, tag): MethodInputs(
                RetentionTarget(retention),
                learned,
                attached.heads,
                model,
                attached.spec.layers,
                pattern,
                tokenizer,
                strict=False,
            )
            for retention in dict.fromkeys(retentions)
            for tag, learned in named.items()
        }
        self._retentions = list(dict.fromkeys(retentions))
        first = self._retentions[0]
        self._selectors = {
            self._selector_of(name): spec.build_selector(self._inputs[first, spec.policy_name])
            for name, spec in self._entries.items()
        }
        for entry in self._entries.values():
            # What is missing is missed before the first prompt is read.
            entry.build_budget(self._inputs[first, entry.policy_name])
        if any(entry.compensation for entry in self._entries.values()):
            query_rotations(model, REFIT)
        self._wanted = {(name, retention) for name in self._entries for retention in self._retentions}

    def _selector_of(self, name: str) -> tuple[str, str]:
        """Which selector a method has: by its name, and by its policy's where it reads one."""
        spec = self._entries[name]
        return spec.selector, spec.policy_name if POLICY in selectors()[spec.selector].needs else ""

    def select(self, wanted: frozenset[tuple[str, float]]) -> "MethodGrid":
        """The same with these methods at these retentions alone, and the full cache."""
        twin = copy.copy(self)
        twin._wanted = self._wanted & wanted
        used = {self._selector_of(name) for name, _ in twin._wanted}
        twin._selectors = {part: selector for part, selector in self._selectors.items() if part in used}
        return twin

    @property
    def methods(self) -> list[str]:
        """The methods, without the full cache."""
        return list(self._entries)

    @property
    def retentions(self) -> list[float]:
        """As they were given, each once."""
        return list(self._retentions)

    @property
    def pairs(self) -> frozenset[tuple[str, float]]:
        """(method, retention) of every row but the full cache's."""
        return frozenset(self._wanted)

    @property
    def size(self) -> int:
        """Rows of a prompt that every method can serve."""
        return 1 + len(self._wanted)

    @property
    def required_queries(self) -> bool | int:
        """Whether a prompt must be read with its queries, or with how many of the last ones."""
        if any(self._entries[name].compensation for name, _ in self._wanted):
            return True
        last = [s.last_queries for s in self._selectors.values() if s.reads_queries]
        known = [count for count in last if count is not None]
        return max(known, default=False) if len(known) == len(last) else True

    def bind(self, ids: list[int], prompt: list[LayerKV]) -> tuple[list[BoundMethod], list[SkippedMethod]]:
        """The rows for the one prompt `ids`, already read into `prompt`; the full cache comes first."""
        ready = {name: _prepared(selector, ids, prompt) for name, selector in self._selectors.items()}
        rows = [BoundMethod(FULL, 1.0, Method(FULL, Uniform(1.0), StreamingLLM(sinks=0)))]
        skipped = []
        for retention in self._retentions:
            for name, entry in self._entries.items():
                if (name, retention) not in self._wanted:
                    continue
                selector, scores = ready[self._selector_of(name)]
                try:
                    if isinstance(scores, LkvError):
                        raise scores
                    budget = entry.build_budget(self._inputs[retention, entry.policy_name])
                    method = Method(name, budget, selector, compensation=entry.compensation).for_prompt(ids, prompt)
                    method.budget.counts(0, scores)
                except LkvError as error:
                    skipped.append(SkippedMethod(name, retention, str(error)))
                else:
                    rows.append(BoundMethod(name, retention, method))
        return rows, skipped


def _prepared(selector: Selector, ids: list[int], prompt: list[LayerKV]) -> tuple[Selector, Tensor | LkvError]:
    """The selector made ready for this prompt with its scores of the first layer, or why it cannot score it."""
    try:
        ready = selector.for_prompt(ids, prompt)
        return ready, ready.scores(0, prompt[0])
    except LkvError as error:
        return selector, error


# Whatever a model's own configuration says: an answer is what the logits say alone, as in the suites themselves.
_PLAIN: dict[str, Any] = {
    "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "use_cache": True, "cache_implementation": None,
    "prefill_chunk_size": None,
}  # fmt: skip


@dataclass(frozen=True)
class Fidelity:
    """How close a method's continuation is to the full cache's (means over the target tokens).

    `kl`: KL(full || compressed) in nats; `agreement`: the share of tokens with the same most probable token;
    `hidden_error`: ||h - h_full|| / ||h_full|| of the last layer's hidden states, as the output head reads them.
    """

    kl: float
    agreement: float
    hidden_error: float


@dataclass(frozen=True)
class RowPrediction:
    """What one row gives for the target tokens: log-probabilities [n, V] and the output head's input [n, D]."""

    log_probs: Tensor
    hidden: Tensor

    def fidelity_to(self, full: "RowPrediction") -> Fidelity:
        """How close this is to what the full cache gives."""
        divergence, equal = kl_divergence(full.log_probs, self.log_probs), is_top1_equal(full.log_probs, self.log_probs)
        norm = torch.linalg.vector_norm
        error = norm(self.hidden - full.hidden, dim=-1) / norm(full.hidden, dim=-1).clamp(min=1e-12)
        return Fidelity(float(divergence.mean()), float(equal.float().mean()), float(error.mean()))


@dataclass(frozen=True)
class BatchPrediction:
    """Logits [B, n, V] and the head's input [B, n, D]; in float32 a row at a time, for all at once may be large."""

    logits: Tensor
    hidden: Tensor

    def row(self, index: int) -> RowPrediction:
        """Those of one method."""
        return RowPrediction(log_softmax(self.logits[index].float(), -1), self.hidden[index].float())


class MethodComparison:
    """Answers and fidelity of several methods over one prompt."""

    def __init__(self, model: Any, ids: list[int], prompt: list[LayerKV], methods: Sequence[Method]):
        """`prompt` is what `read_prompt(model, ids, queries=True)` gave; row i of every result is `methods[i]`."""
        self._model, self._ids, self._rows = model, list(ids), len(methods)
        self._prompt_tokens = len(ids)
        self._cache = RaggedCache(model, method=combine_rowwise(methods))
        self._cache.fill(PromptKV((_repeat(layer, self._rows) for layer in prompt), as_prompt_kv(prompt).windows))

    def kept_entries(self) -> list[int]:
        """Entries that each method kept of the prompt, over all layers and heads."""
        return torch.stack([layer.kept_counts for layer in self._cache.ragged_layers]).sum((0, 2)).tolist()

    def realised_retentions(self) -> list[float]:
        """Kept entries / all entries of each method."""
        entries = sum(layer.kept_counts.shape[1] for layer in self._cache.ragged_layers) * self._prompt_tokens
        return [kept / entries for kept in self.kept_entries()]

    @torch.no_grad()
    def append(self, ids: list[int]) -> None:
        """Let every later question and continuation begin with `ids`, which are read once."""
        if ids:
            self._model.base_model(input_ids=self._batch(ids), past_key_values=self._cache, use_cache=True)
            self._ids += ids

    def generate(
        self, question: list[int], max_new_tokens: int, stops: Sequence[int] = (), last: bool = False
    ) -> list[list[int]]:
        """Answer ids of each method to the ids of a question, see `generate_greedily`.

        `last`: nothing is asked afterwards, so that methods whose answers have ended can be dropped, which saves time.
        """
        ids = [self._ids + question] * self._rows
        with self._working_cache(last) as cache:
            return generate_greedily(self._model, ids, max_new_tokens, stops, cache, dropping=last)

    def measure_fidelity(self, continuation: list[int], skip: int) -> list[Fidelity]:
        """Each method against the first one, over the tokens of `continuation` from `skip` on."""
        predictions = self.predict(continuation, skip)
        full = predictions.row(0)
        return [predictions.row(index).fidelity_to(full) for index in range(self._rows)]

    @torch.no_grad()
    def predict(self, continuation: list[int], skip: int) -> BatchPrediction:
        """What each method gives for the tokens of `continuation` from `skip` on."""
        # The last token predicts nothing; the first is predicted where another precedes it here.
        ids = self._batch(continuation[:-1])
        targets = len(continuation) - max(1, skip)
        hidden: list[Tensor] = []
        head = self._model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
        try:
            with self._working_cache() as cache:
                out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=targets)
        finally:
            handle.remove()
        return BatchPrediction(out.logits[:, -targets:], hidden[0][:, -targets:])

    def _batch(self, ids: list[int]) -> Tensor:
        device = input_device(self._model)
        return torch.tensor([ids], device=device).expand(self._rows, -1)

    @contextmanager
    def _working_cache(self, last: bool = False) -> Iterator[RaggedCache]:
        """The cache, cut back afterwards unless this is its `last` use; a copy where it cannot be cut back."""
        if not self._cache.is_rewindable:
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
    cache: Any = None,
    dropping: bool = False,
) -> list[list[int]]:
    """What `model.generate` adds to `rows` of equal length, each cut after its first end token.

    `cache` may hold the beginning of the rows. `stops` end an answer, as the model's own end tokens do, from its second
    token on (LongBench's way with one-line answers). `dropping` takes rows out of the cache once half of them have
    ended, so that a few long answers do not cost as many steps of all; the cache is of no use afterwards.
    """
    ids = torch.tensor(rows, device=input_device(model))
    own_ends = model.generation_config.eos_token_id
    ends = [*([] if own_ends is None else [own_ends] if isinstance(own_ends, int) else own_ends), *stops]
    padding = model.generation_config.pad_token_id
    start, end = ids.shape[1], ids.shape[1] + max_new_tokens
    going = list(range(len(rows)))
    answers: list[list[int]] = [[] for _ in rows]
    while True:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=end - ids.shape[1],
            min_new_tokens=1 if stops and ids.shape[1] == start else None,
            eos_token_id=ends or None,
            pad_token_id=padding if padding is not None else (ends or [0])[0],
            **_PLAIN,
            stopping_criteria=StoppingCriteriaList([_HalfEnded(start, ends)] if dropping else []),
        )
        for row, tokens in zip(going, out[:, start:].tolist(), strict=True):
            answers[row] = _until(tokens, ends)
        left = [index for index, row in enumerate(going) if answers[row][-1] not in ends]
        if not left or out.shape[1] == end:
            return answers
        going, chosen = [going[index] for index in left], torch.tensor(left, device=ids.device)
        cache.batch_select_indices(chosen)
        ids = out[chosen]


class _HalfEnded(StoppingCriteria):
    """Stops all rows when at least half of them have one of `ends` after their first `start` tokens."""

    def __init__(self, start: int, ends: Sequence[int]):
        self._start, self._ends = start, ends

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        ends = torch.tensor(self._ends, device=input_ids.device, dtype=input_ids.dtype)
        ended = torch.isin(input_ids[:, self._start :], ends).any(-1)
        return (ended.sum() * 2 >= len(ended)).expand(len(ended))


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    """`ids` up to the first of `ends`, that one included: what follows is padding."""
    last = next((index for index, token in enumerate(ids) if token in ends), len(ids))
    return ids[: last + 1]


def _repeat(layer: LayerKV, rows: int) -> LayerKV:
    queries = None if layer.queries is None else layer.queries.expand(rows, -1, -1, -1)
    key, value = layer.key.expand(rows, -1, -1, -1), layer.value.expand(rows, -1, -1, -1)
    return replace(layer, key=key, value=value, queries=queries)
