"""The rows of a comparison: the full cache, then every method at every retention, all from one prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lkv.errors import LkvError
from lkv.host.attention import attach
from lkv.methods.budget import Share, Uniform
from lkv.methods.build import FULL, KVZIP, RULES, SELECTORS, Method, Source, find
from lkv.methods.kvzip import replay_budget, replay_scores
from lkv.methods.selection import GivenScores, Selector, StreamingLLM
from lkv.policy import Policy
from lkv.prefill import PromptLayer


@dataclass(frozen=True)
class Row:
    """One method at one retention, ready for one prompt."""

    name: str
    retention: float
    method: Method


@dataclass(frozen=True)
class Skipped:
    """A method that cannot serve a prompt at this retention, with the reason."""

    name: str
    retention: float
    reason: str


class Roster:
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
    ):
        """`names` as `lkv methods` lists them or "RULE+SELECTOR"; the full cache is a row of its own and always there.

        Raises LkvError for an unknown name, or where a method misses its policy or pattern, PolicyMismatchError for the
        policy of another model, and RetentionError.
        """
        self._model, self._tokenizer, self._policy = model, tokenizer, policy
        attached = attach(model)
        if policy is not None:
            policy.check_model(attached.spec)
        layers, heads = attached.spec.layers, attached.heads
        self._entries = {name: find(name) for name in dict.fromkeys(names) if name != FULL}
        self._sources = {
            retention: Source(Share(retention), policy, heads, model, layers, pattern, strict=False)
            for retention in dict.fromkeys(retentions)
        }
        some = next(iter(self._sources.values()))
        self._selectors = {
            selector: SELECTORS[selector][1](some)
            for selector in {entry.selector for entry in self._entries.values()} - {KVZIP}
        }
        for entry in self._entries.values():
            if entry.rule in RULES:
                RULES[entry.rule][1](some)  # what is missing is missed before the first prompt is read

    @property
    def names(self) -> list[str]:
        """The methods, without the full cache."""
        return list(self._entries)

    @property
    def retentions(self) -> list[float]:
        """As they were given, each once."""
        return list(self._sources)

    @property
    def size(self) -> int:
        """Rows of a prompt that every method can serve."""
        return 1 + len(self._entries) * len(self._sources)

    @property
    def queries_read(self) -> bool | int:
        """Whether a prompt must be read with its queries, or with how many of the last ones."""
        last = [s.last_queries for s in self._selectors.values() if s.reads_queries]
        known = [count for count in last if count is not None]
        return max(known, default=False) if len(known) == len(last) else True

    def for_prompt(self, ids: list[int], prompt: list[PromptLayer]) -> tuple[list[Row], list[Skipped]]:
        """The rows for the one prompt `ids`, already read into `prompt`; the full cache comes first."""
        selectors = dict(self._selectors)
        first = {name: _first_scores(selector, prompt[0]) for name, selector in selectors.items()}
        table = None
        if any(entry.selector == KVZIP for entry in self._entries.values()):
            try:
                table = replay_scores(self._model, self._tokenizer, ids, prompt)
            except LkvError as error:
                first[KVZIP] = error
            else:
                selectors[KVZIP], first[KVZIP] = GivenScores(table), table[0]
        rows = [Row(FULL, 1.0, Method(FULL, Uniform(1.0), StreamingLLM(sinks=0)))]
        skipped = []
        for retention, source in self._sources.items():
            for name, entry in self._entries.items():
                try:
                    scores = first[entry.selector]
                    if isinstance(scores, LkvError):
                        raise scores
                    if entry.selector == KVZIP:
                        assert table is not None
                        budget = replay_budget(name, table, source.share, self._policy, source.pattern)
                    else:
                        budget = RULES[entry.rule][1](source)
                    budget.counts(0, scores)
                except LkvError as error:
                    skipped.append(Skipped(name, retention, str(error)))
                else:
                    rows.append(Row(name, retention, Method(name, budget, selectors[entry.selector])))
        return rows, skipped


def _first_scores(selector: Selector, layer: PromptLayer) -> Tensor | LkvError:
    """The scores of the first layer, or why the selector cannot score this prompt."""
    try:
        return selector.scores(0, layer)
    except LkvError as error:
        return error
