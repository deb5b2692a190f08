"""Find where the context of an evaluation's prompt ends and its question begins."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lkv.errors import IntegrationError

# Tasks of lm-evaluation-harness: (name, the document's field that is the context, how the question begins).
TASKS: list[tuple[str, str | None, str | None]] = [
    (r"longbench2?_\w+", "context", None),
    (r"niah_\w+", None, r"\nWhat (?:is|are)(?: all)? the special magic "),
    (r"ruler_vt", None, r"\n?Question: Find all variables that are assigned the value "),
    (r"ruler_cwe", None, r"\nQuestion: What are the 10 most common words "),
    (r"ruler_fwe", None, r"\nQuestion: Do not provide any explanation\. "),
    (r"ruler_qa_\w+", None, r"\n\nAnswer the question based on the given documents\. "),
]


@dataclass(frozen=True)
class ContextSplit:
    """How to split a prompt into its context and its question.

    Args:
        context_field: The context ends where the text of this field of the task's document ends; it includes all text
            before.
        question_marker: A regular expression; the question begins at its last match.
        window: Without the two, and for tasks that are not in `TASKS`: the tokens of the question.
    """

    context_field: str | None = None
    question_marker: str | None = None
    window: int = 64

    def __post_init__(self) -> None:
        if self.context_field is not None and self.question_marker is not None:
            raise IntegrationError("context_field and question_marker both define the end of the context: give one.")
        if type(self.window) is not int or self.window < 1:
            raise IntegrationError(f"window is {self.window!r}, but a question has at least one token: give 1 or more.")
        try:
            re.compile(self.question_marker or "")
        except (re.error, TypeError) as error:
            problem = f"question_marker {self.question_marker!r} is no regular expression ({error})."
            raise IntegrationError(problem) from error

    def context_end(self, task: str, prompt: str, document: Mapping[str, Any]) -> tuple[str, int | None]:
        """Return ("field" or "marker", how many characters of `prompt` are context), or ("window", None).

        Raises IntegrationError if the document lacks the field, or the prompt lacks its text or the marker.
        """
        field, marker = self.context_field, self.question_marker
        if field is None and marker is None:
            field, marker = next(((f, m) for name, f, m in TASKS if re.fullmatch(name, task)), (None, None))
        if field is not None:
            return "field", _end_of_field(field, task, prompt, document)
        if marker is None:
            return "window", None
        starts = [match.start() for match in re.finditer(marker, prompt)]
        if not starts:
            raise IntegrationError(
                f"{task}: {marker!r}, which the question should begin with, is not in the prompt; give context_field "
                "or another question_marker."
            )
        return "marker", starts[-1]


def _end_of_field(field: str, task: str, prompt: str, document: Mapping[str, Any]) -> int:
    text = document.get(field)
    if not isinstance(text, str) or not text.strip():
        raise IntegrationError(
            f"{task}: the document has no text in a field {field!r}; its fields are {', '.join(map(str, document))}."
        )
    text = text.strip()  # as templates may strip it
    start = prompt.rfind(text)
    if start < 0:
        raise IntegrationError(
            f"{task}: the prompt does not contain the text of the field {field!r} unchanged; give question_marker, a "
            "regular expression that the question begins with."
        )
    return start + len(text)


def common_prefix_length(ids: list[int], other: list[int]) -> int:
    """Return the length of the common prefix of two lists of ids."""
    return next((n for n, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
