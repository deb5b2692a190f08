"""The rows of a comparison: the full cache, then every method at every retention, all from one prefill."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lkv.errors import LkvError
from lkv.integrations.transformers.attention import attach
from lkv.integrations.transformers.prefill import PromptLayer, check_queries
from lkv.methods.budgets import Amount, Uniform
from lkv.methods.build import Method, MethodInputs, build_rule, build_selector
from lkv.methods.registry import FULL, POLICY, REFIT, SELECTORS, find, policy_name
from lkv.methods.selectors import Selector, StreamingLLM
from lkv.policy.policy import Policy


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
        policies: Mapping[str, Policy] | None = None,
    ):
        """`names` as `lkv methods` lists them or "RULE+SELECTOR", with "@NAME" behind for the policy `policies[NAME]`
        instead of `policy`; the full cache is a row of its own and always there.

        Raises LkvError for an unknown name, or where a method misses its policy or pattern, PolicyMismatchError for the
        policy of another model, and RetentionError.
        """
        attached = attach(model)
        named: dict[str, Policy | None] = {"": None}
        for tag, learned in [*(policies or {}).items(), *([("", policy)] if policy is not None else [])]:
            learned.check_model(attached.spec)
            named[tag] = learned.on(model.device)
        self._entries = {name: find(name) for name in dict.fromkeys(names) if name != FULL}
        if unknown := sorted({tag for name in self._entries if (tag := policy_name(name)) not in named}):
            raise LkvError(f"there is no policy named {', '.join(unknown)}; give it as --policy NAME=PATH.")
        self._inputs = {
            (retention, tag): MethodInputs(
                Amount(retention),
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
            part: build_selector(part[0], self._inputs[first, part[1]])
            for part in dict.fromkeys(self._selector_of(name) for name in self._entries)
        }
        for name, entry in self._entries.items():
            # What is missing is missed before the first prompt is read.
            build_rule(entry.rule, self._inputs[first, policy_name(name)])
        if any(entry.refit for entry in self._entries.values()):
            check_queries(model, REFIT)
        self._wanted = {(name, retention) for name in self._entries for retention in self._retentions}

    def _selector_of(self, name: str) -> tuple[str, str]:
        """Which selector a method has: by its name, and by its policy's where it reads one."""
        selector = self._entries[name].selector
        return selector, policy_name(name) if POLICY in SELECTORS[selector].needs else ""

    def only(self, wanted: frozenset[tuple[str, float]]) -> "Roster":
        """The same with these methods at these retentions alone, and the full cache."""
        twin = copy.copy(self)
        twin._wanted = self._wanted & wanted
        used = {self._selector_of(name) for name, _ in twin._wanted}
        twin._selectors = {part: selector for part, selector in self._selectors.items() if part in used}
        return twin

    @property
    def names(self) -> list[str]:
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
    def queries_read(self) -> bool | int:
        """Whether a prompt must be read with its queries, or with how many of the last ones."""
        if any(self._entries[name].refit for name, _ in self._wanted):
            return True
        last = [s.last_queries for s in self._selectors.values() if s.reads_queries]
        known = [count for count in last if count is not None]
        return max(known, default=False) if len(known) == len(last) else True

    def for_prompt(self, ids: list[int], prompt: list[PromptLayer]) -> tuple[list[ReadyMethod], list[Skipped]]:
        """The rows for the one prompt `ids`, already read into `prompt`; the full cache comes first."""
        ready = {name: _prepared(selector, ids, prompt) for name, selector in self._selectors.items()}
        rows = [ReadyMethod(FULL, 1.0, Method(FULL, Uniform(1.0), StreamingLLM(sinks=0)))]
        skipped = []
        for retention in self._retentions:
            for name, entry in self._entries.items():
                if (name, retention) not in self._wanted:
                    continue
                selector, scores = ready[self._selector_of(name)]
                try:
                    if isinstance(scores, LkvError):
                        raise scores
                    rule = build_rule(entry.rule, self._inputs[retention, policy_name(name)])
                    method = Method(name, rule, selector, refit=entry.refit).for_prompt(ids, prompt)
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
