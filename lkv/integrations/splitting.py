"""Where, in the prompt of an evaluation, the context ends and the question begins."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lkv.errors import IntegrationError

# Tasks of lm-evaluation-harness: (name, the document's field that is the context, what the question begins with).
TASKS: list[tuple[str, str | None, str | None]] = [
    (r"longbench2?_\w+", "context", None),
    (r"niah_\w+", None, r"\nWhat (?:is|are)(?: all)? the special magic "),
    (r"ruler_vt", None, r"\n?Question: Find all variables that are assigned the value "),
    (r"ruler_cwe", None, r"\nQuestion: What are the 10 most common words "),
    (r"ruler_fwe", None, r"\nQuestion: Do not provide any explanation\. "),
    (r"ruler_qa_\w+", None, r"\n\nAnswer the question based on the given documents\. "),
]


@dataclass(frozen=True)
class Split:
    """How the context of a prompt is told from its question.

    `field`: the context ends where the text of this field of the task's document ends; what stands before it is read
    with it. `marker`: a regular expression; the question begins where it matches last. With neither, the task decides
    as in TASKS; of one that is not there the last `window` tokens are the question.
    """

    field: str | None = None
    marker: str | None = None
    window: int = 64

    def __post_init__(self) -> None:
        if self.field is not None and self.marker is not None:
            raise IntegrationError("context_field and question_marker both say where the context ends: give one.")
        if type(self.window) is not int or self.window < 1:
            raise IntegrationError(f"window is {self.window!r}, but a question has at least one token: give 1 or more.")
        try:
            re.compile(self.marker or "")
        except (re.error, TypeError) as error:
            raise IntegrationError(f"question_marker {self.marker!r} is no regular expression ({error}).") from error

    def end(self, task: str, prompt: str, document: Mapping[str, Any]) -> tuple[str, int | None]:
        """("field" or "marker", characters of `prompt` that are context), or ("window", None).

        Raises IntegrationError where what should tell them apart is not in the document or in the prompt.
        """
        field, marker = self.field, self.marker
        if field is None and marker is None:
            field, marker = next(((f, m) for name, f, m in TASKS if re.fullmatch(name, task)), (None, None))
        if field is not None:
            return "field", _end_of_field(field, task, prompt, document)
        if marker is not None:
            return "marker", _start_of_marker(marker, task, prompt)
        return "window", None


def _end_of_field(field: str, task: str, prompt: str, document: Mapping[str, Any]) -> int:
    text = document.get(field)
    if not isinstance(text, str) or not text.strip():
        raise IntegrationError(
            f"{task}: the document has no text in a field {field!r}; its fields are {', '.join(map(str, document))}."
        )
    # Templates may strip what a prompt begins or ends with.
    start = prompt.rfind(text.strip())
    if start < 0:
        raise IntegrationError(
            f"{task}: the text of the field {field!r} does not stand in the prompt as it is; give question_marker, a "
            "regular expression that the question begins with."
        )
    return start + len(text.strip())


def _start_of_marker(marker: str, task: str, prompt: str) -> int:
    starts = [match.start() for match in re.finditer(marker, prompt)]
    if not starts:
        raise IntegrationError(
            f"{task}: {marker!r}, which the question should begin with, is not in the prompt; give context_field or "
            "another question_marker."
        )
    return starts[-1]


def shared_prefix(ids: list[int], longer: list[int]) -> int:
    """How many ids two lists have in common at their beginning."""
    return next((n for n, (a, b) in enumerate(zip(ids, longer, strict=False)) if a != b), min(len(ids), len(longer)))
