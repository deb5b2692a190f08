"""Examples of a benchmark, and their prompts as token ids.

Two protocols with the same prompts, generation lengths and scores:

- "kvpress", as the paper evaluates (its baselines run in NVIDIA/kvpress): every task is put into the chat template, and
  the beginning of the answer ("Answer:") comes after the template's end, as words of the assistant. Without a template
  a line break stands in its place.
- "longbench", as THUDM/LongBench's pred.py prompts: the beginning of the answer belongs to the user's turn, and tasks
  whose `Example.chat` is False (few-shot and code) are read without a template.

In both, the context is compressed before the question is known, so the two are tokenised apart, and a prompt that is
too long loses the middle of its context. The sources differ: kvpress cuts off the context's end, and pred.py the middle
of the whole prompt, question included, which it tokenises as one text. Templates that can think aloud are told not to,
as in kvpress.
"""

import re
from dataclasses import dataclass
from typing import Any

from lkv.errors import EvaluationError, PromptError
from lkv.utils.prompts import bos_ids, chat_template_parts, encode

PROTOCOLS = ("kvpress", "longbench")

# Metrics whose true answers are, as a rule, words of the context. Summaries, class names, counts and code are not.
_EXTRACTIVE = ("qa_f1", "retrieval", "string_match_all", "string_match_part")
# These answer a question about the context, wherever else they may stand in it.
_VERDICTS = ("yes", "no", "unanswerable")


@dataclass(frozen=True)
class Example:
    """A context that is compressed before its question is known."""

    suite: str  # "ruler", "longbench"
    task: str
    number: int  # within the task, stable: the key by which runs resume and methods are paired
    context: str
    question: str
    answer_prefix: str  # what the answer begins with; given to the model, not scored
    answers: tuple[str, ...]
    max_new_tokens: int
    metric: str  # a name in scores.METRICS
    length: int | None = None  # tokens asked for, where the benchmark is made to measure
    classes: tuple[str, ...] = ()  # every label, for classification
    first_line: bool = False  # only the first line of the answer is scored
    stop_at_newline: bool = False
    chat: bool = True  # whether the official script of the benchmark puts this task into the chat template


@dataclass(frozen=True)
class Prompt:
    """Token ids of an example."""

    context: list[int]  # what is compressed
    question: list[int]  # from there to where generation starts
    truncated: bool
    answer_lost: bool  # by truncation; see `answer_lost`


def make_prompt(example: Example, tokenizer: Any, protocol: str, max_positions: int) -> Prompt:
    """The prompt of `example`, cut so that it and its answer fit into `max_positions`.

    Of a context that is too long the first and the last half of the room are kept. Raises EvaluationError for an
    unknown protocol, PromptError for a question that leaves no room for a context, and for an example with nothing to
    read after it.
    """
    if protocol not in PROTOCOLS:
        raise EvaluationError(f"there is no protocol {protocol!r}; use one of {', '.join(PROTOCOLS)}.")
    before, rest, first = _texts(example, tokenizer, protocol)
    context = first + encode(tokenizer, before + example.context)
    question = encode(tokenizer, rest)
    name = f"{example.task} {example.number}"
    if not question:
        raise PromptError(f"{name} has nothing to read after its context; give it a question or an answer prefix.")
    room = max_positions - len(question) - example.max_new_tokens
    # Both halves must be there, the first with the whole beginning of the template.
    least = max(2, 2 * len(first + encode(tokenizer, before)))
    if room < min(least, len(context)):
        raise PromptError(
            f"{name}: its question ({len(question)} tokens) and answer ({example.max_new_tokens}) leave {room} of "
            f"{max_positions} positions for a context, which needs at least {least}; allow more positions."
        )
    if len(context) <= room:
        return Prompt(context, question, truncated=False, answer_lost=False)
    head, tail = context[: (room + 1) // 2], context[len(context) - room // 2 :]
    lost = answer_lost(example, [_decode(tokenizer, context)], [_decode(tokenizer, ids) for ids in (head, tail)])
    return Prompt(head + tail, question, truncated=True, answer_lost=lost)


def answer_lost(example: Example, before: list[str], after: list[str]) -> bool:
    """Whether truncation from the texts `before` to the texts `after` took the answer away.

    True if at least one of the true answers stood in the context, and none of those stands in what is left of it or in
    the question. Answers are found as whole words, in any case and with any white space. It is False where answers are
    no words of the context: for summaries, classes, counts and code, and for yes, no and unanswerable.
    """
    if example.metric not in _EXTRACTIVE:
        return False
    answers = [answer for answer in example.answers if answer.strip(" .").lower() not in ("", *_VERDICTS)]
    stood = [answer for answer in answers if _stands(answer, before)]
    return bool(stood) and not any(_stands(answer, [*after, example.question]) for answer in stood)


def _texts(example: Example, tokenizer: Any, protocol: str) -> tuple[str, str, list[int]]:
    """(text before the context, text after it, ids that the tokenizer puts in front)."""
    if getattr(tokenizer, "chat_template", None) and (protocol == "kvpress" or example.chat):
        before, _, after = chat_template_parts(tokenizer)
        first = []
    else:
        before, after = "", "\n" if protocol == "kvpress" else ""
        first = bos_ids(tokenizer)
    if protocol == "kvpress":
        return before, example.question + after + example.answer_prefix, first
    return before, example.question + example.answer_prefix + after, first


def _stands(answer: str, texts: list[str]) -> bool:
    pattern = r"(?<!\w)" + r"\s+".join(map(re.escape, answer.split())) + r"(?!\w)"
    return any(re.search(pattern, text, re.IGNORECASE) for text in texts)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
