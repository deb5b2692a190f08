"""The rows of a comparison: the full cache, then every method at every retention, all from one prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lkv.errors import LkvError
from lkv.host.attention import attach
from lkv.methods.budget import Amount, Uniform
from lkv.methods.build import Method, MethodInputs, build_rule, build_selector
from lkv.methods.catalogue import FULL, find
from lkv.methods.selection import Selector, StreamingLLM
from lkv.policy import Policy
from lkv.prefill import PromptLayer


@dataclass(frozen=True)
class ReadyMethod:
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
        attached = attach(model)
        if policy is not None:
            policy.check_model(attached.spec)
            policy = policy.on(model.device)
        self._entries = {name: find(name) for name in dict.fromkeys(names) if name != FULL}
        self._inputs = {
            retention: MethodInputs(
                Amount(retention), policy, attached.heads, model, attached.spec.layers, pattern, tokenizer, strict=False
            )
            for retention in dict.fromkeys(retentions)
        }
        some = next(iter(self._inputs.values()))
        selectors = dict.fromkeys(entry.selector for entry in self._entries.values())
        self._selectors = {name: build_selector(name, some) for name in selectors}
        for entry in self._entries.values():
            build_rule(entry.rule, some)  # what is missing is missed before the first prompt is read

    @property
    def names(self) -> list[str]:
        """The methods, without the full cache."""
        return list(self._entries)

    @property
    def retentions(self) -> list[float]:
        """As they were given, each once."""
        return list(self._inputs)

    @property
    def size(self) -> int:
        """Rows of a prompt that every method can serve."""
        return 1 + len(self._entries) * len(self._inputs)

    @property
    def queries_read(self) -> bool | int:
        """Whether a prompt must be read with its queries, or with how many of the last ones."""
        last = [s.last_queries for s in self._selectors.values() if s.reads_queries]
        known = [count for count in last if count is not None]
        return max(known, default=False) if len(known) == len(last) else True

    def for_prompt(self, ids: list[int], prompt: list[PromptLayer]) -> tuple[list[ReadyMethod], list[Skipped]]:
        """The rows for the one prompt `ids`, already read into `prompt`; the full cache comes first."""
        ready = {name: _prepared(selector, ids, prompt) for name, selector in self._selectors.items()}
        rows = [ReadyMethod(FULL, 1.0, Method(FULL, Uniform(1.0), StreamingLLM(sinks=0)))]
        skipped = []
        for retention, inputs in self._inputs.items():
            for name, entry in self._entries.items():
                selector, scores = ready[entry.selector]
                try:
                    if isinstance(scores, LkvError):
                        raise scores
                    method = Method(name, build_rule(entry.rule, inputs), selector).for_prompt(ids, prompt)
                    method.budget.counts(0, scores)
                except LkvError as error:
                    skipped.append(Skipped(name, retention, str(error)))
                else:
                    rows.append(ReadyMethod(name, retention, method))
        return rows, skipped


def _prepared(selector: Selector, ids: list[int], prompt: list[PromptLayer]) -> tuple[Selector, Tensor | LkvError]:
    """The selector made ready for this prompt with its scores of the first layer, or why it cannot score it."""
    try:
        ready = selector.for_prompt(ids, prompt)
        return ready, ready.scores(0, prompt[0])
    except LkvError as error:
        return selector, error
