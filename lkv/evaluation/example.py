"""Examples of a benchmark, and their prompts as token ids.

Two protocols make the same prompts, generation lengths and scores, with these differences:

- "kvpress", as the paper evaluates (its baselines run in NVIDIA/kvpress): every task is put into the chat template, and
  the beginning of the answer ("Answer:") follows the template's end, as words of the assistant. Without a template, a
  line break takes its place.
- "longbench", as THUDM/LongBench's pred.py prompts: the beginning of the answer belongs to the user's turn, and tasks
  whose `Example.chat` is False (few-shot and code) are read without a template.

In both, the context is compressed before the question is known, so the two are tokenised separately, and a prompt that
is too long loses the middle of its context. The sources differ: kvpress cuts off the end of the context, and pred.py
the middle of the whole prompt, question included, which it tokenises as one text. Thinking is off, as in kvpress.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lkv.errors import EvaluationError, PromptError
from lkv.utils.prompts import bos_ids, chat_template_parts, encode, encode_continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROTOCOLS = ("kvpress", "longbench")

# Metrics whose true answers usually occur in the context, unlike summaries, class names, counts and code.
_EXTRACTIVE_METRICS = ("qa_f1", "retrieval", "string_match_all", "string_match_part")
# Answers that may occur in the context by chance.
_VERDICTS = ("yes", "no", "unanswerable")


@dataclass(frozen=True)
class Example:
    """One item of a benchmark: a context, which is compressed before its question is known, and the true answers."""

    suite: str  # "ruler", "longbench", or a name for examples of your own
    task: str
    number: int  # within the task and always the same: resumed runs and paired comparisons use it
    context: str
    question: str
    answer_prefix: str  # the beginning of the answer, which the model is given and which is not scored
    answers: tuple[str, ...]
    max_new_tokens: int
    metric: str  # a name in metrics.METRICS
    length: int | None = None  # requested tokens, in benchmarks of any length
    max_tokens: int | None = None  # of prompt and answer (default: what the model reads)
    classes: tuple[str, ...] = ()  # all labels, for classification
    first_line: bool = False  # only the first line of the answer is scored
    stop_at_newline: bool = False
    chat: bool = True  # whether the benchmark's official script puts this task into the chat template


@dataclass(frozen=True)
class Prompt:
    """Token ids of an example."""

    context: list[int]  # compressed
    question: list[int]  # from the end of the context to where generation starts
    truncated: bool
    answer_lost: bool  # by truncation, see `_is_answer_lost`


def make_prompt(example: Example, tokenizer: "PreTrainedTokenizerBase", protocol: str, max_positions: int) -> Prompt:
    """Tokenise an example so that it and its answer fit into `max_positions`.

    A context that is too long keeps its beginning and its end, half of the free positions each.

    Args:
        example: The example.
        tokenizer: The model's.
        protocol: One of `PROTOCOLS`.
        max_positions: The tokens that the model can read.

    Raises:
        EvaluationError: For an unknown protocol.
        PromptError: If the question leaves too few positions for a context, or nothing follows the context.
    """
    if protocol not in PROTOCOLS:
        raise EvaluationError(f"there is no protocol {protocol!r}; use one of {', '.join(PROTOCOLS)}.")
    before, after, first = _surrounding_texts(example, tokenizer, protocol)
    context = first + encode(tokenizer, before + example.context)
    question = encode_continuation(tokenizer, after, example.context)
    name = f"{example.task} {example.number}"
    if not question:
        raise PromptError(f"{name} has nothing to read after its context; give it a question or an answer prefix.")
    free = max_positions - len(question) - example.max_new_tokens
    # Both halves must exist, and the first must hold the whole beginning of the template.
    required = max(2, 2 * len(first + encode(tokenizer, before)))
    if free < min(required, len(context)):
        raise PromptError(
            f"{name}: its question ({len(question)} tokens) and answer ({example.max_new_tokens}) leave {free} of "
            f"{max_positions} positions for a context, which needs at least {required}; allow more positions."
        )
    if len(context) <= free:
        return Prompt(context, question, truncated=False, answer_lost=False)
    head, tail = context[: (free + 1) // 2], context[len(context) - free // 2 :]
    whole, *left = [str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for ids in (context, head, tail)]
    return Prompt(head + tail, question, truncated=True, answer_lost=_is_answer_lost(example, whole, left))


def _is_answer_lost(example: Example, context: str, left: list[str]) -> bool:
    """Return whether truncation of the context to the texts `left` removed the answer.

    True if a true answer occurs in the context, and none that does occurs in what is left of it or in the question.
    Answers are matched as whole words, ignoring case and kinds of white space. Always False where answers are not words
    of the context: summaries, classes, counts and code, and yes, no and unanswerable.
    """
    if example.metric not in _EXTRACTIVE_METRICS:
        return False
    answers = [answer for answer in example.answers if answer.strip(" .").lower() not in ("", *_VERDICTS)]
    present = [answer for answer in answers if _occurs(answer, [context])]
    return bool(present) and not any(_occurs(answer, [*left, example.question]) for answer in present)


def _surrounding_texts(example: Example, tokenizer: "PreTrainedTokenizerBase", protocol: str) -> tuple[str, str, list]:
    """Return (text before the context, text after it, ids that the tokenizer puts before a text)."""
    if getattr(tokenizer, "chat_template", None) and (protocol == "kvpress" or example.chat):
        before, _, after = chat_template_parts(tokenizer)
        first = []
    else:
        before, after = "", "\n" if protocol == "kvpress" else ""
        first = bos_ids(tokenizer)
    if protocol == "kvpress":
        return before, example.question + after + example.answer_prefix, first
    return before, example.question + example.answer_prefix + after, first


def _occurs(answer: str, texts: list[str]) -> bool:
    pattern = r"(?<!\w)" + r"\s+".join(map(re.escape, answer.split())) + r"(?!\w)"
    return any(re.search(pattern, text, re.IGNORECASE) for text in texts)
