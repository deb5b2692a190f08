"""RULER's examples at a length, for any tokenizer."""

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import count, islice
from typing import Any

from lkv.errors import EvaluationError
from lkv.evaluation.example import Example
from lkv.evaluation.ruler import counting, niah, qa, tracking
from lkv.evaluation.ruler.definitions import (
    COMMON_WORDS,
    FREQUENT_WORDS,
    NEEDLE_TASKS,
    NIAH,
    QUESTION_TASKS,
    QUESTIONS,
    TASKS,
    VARIABLE_TRACKING,
    Family,
)
from lkv.evaluation.ruler.draft import Draft, largest
from lkv.evaluation.ruler.sources import Sources
from lkv.utils.prompts import chat_template_parts, encode

_FAMILIES = {"vt": VARIABLE_TRACKING, "cwe": COMMON_WORDS, "fwe": FREQUENT_WORDS}
# A first token, and one for each of the four places where texts meet that are counted apart.
_SEAMS = 5


def make_examples(task: str, length: int, count: int, tokenizer: Any, sources: Sources, seed: int = 0) -> list[Example]:
    """The first `count` examples of a task at `length` tokens.

    Context, chat template, question, answer prefix and the tokens to generate take at most `length` tokens together.
    They fall short of it by no more than length / 256, or one unit of the task (a line, a word, a document) where that
    is more; five tokens are held back for the places where the texts meet. An example depends on the task, the length,
    the tokenizer, the seed and its own number, never on `count`. Questions whose needed documents exceed the length are
    passed over.

    Raises EvaluationError for an unknown task, and for a length too short or too long for it; DataError for a
    missing or malformed source.
    """
    if task not in TASKS:
        near = get_close_matches(task, TASKS, 3) or TASKS
        raise EvaluationError(f"RULER has no task {task!r}; did you mean {', '.join(near)}?")
    if count < 1:
        raise EvaluationError(f"{count} examples of {task} are asked for; ask for at least one.")
    examples = list(islice(_examples(task, length, tokenizer, sources, seed), count))
    if len(examples) < count:
        raise EvaluationError(
            f"{task} has {len(examples)} questions that fit {length} tokens, but {count} are asked for."
        )
    return examples


def check_sources(tasks: Sequence[str], sources: Sources) -> None:
    """Read what the tasks need, so that what is missing is told before a long run. Raises DataError."""
    for task in tasks:
        if name := QUESTION_TASKS.get(task):
            sources.questions(name)
        elif task in NEEDLE_TASKS and NEEDLE_TASKS[task].haystack == "essay":
            _ = sources.words


def _examples(task: str, length: int, tokenizer: Any, sources: Sources, seed: int) -> Iterator[Example]:
    family = _FAMILIES.get(task) or (NIAH if task in NEEDLE_TASKS else QUESTIONS)
    around = (
        sum(_tokens(tokenizer, part) for part in chat_template_parts(tokenizer)) + _SEAMS + family.tokens_to_generate
    )
    number, shortest = 0, []
    for draft in _drafts(task, length, tokenizer, sources, f"{task}-{length}-{seed}"):
        asked = around + _tokens(tokenizer, draft.question + draft.answer_prefix)
        size = partial(_context_tokens, tokenizer, draft)
        fit = largest(size, length - asked, draft.least, draft.most)
        total = asked + fit.tokens
        if total > length:
            shortest.append(total)
            if family is QUESTIONS:
                continue
            break
        if fit.units == draft.most and total < length - length // 256:
            raise EvaluationError(
                f"all {fit.units} documents for {task} make {total} tokens, but {length} are asked for; "
                "give a larger set or ask for a shorter length."
            )
        yield _example(task, family, number, length, draft, fit.units)
        number += 1
    if number == 0 and shortest:
        raise EvaluationError(
            f"{task} needs at least {min(shortest)} tokens with this tokenizer, but {length} are asked for; "
            "ask for a longer length."
        )


def _drafts(task: str, length: int, tokenizer: Any, sources: Sources, seed: str) -> Iterator[Draft]:
    if name := QUESTION_TASKS.get(task):
        questions = sources.questions(name)
        return (
            qa.draft(f"{seed}-{number}", question, questions.documents)
            for number, question in enumerate(qa.order(seed, questions))
        )
    make = _maker(task, length, tokenizer, sources)
    return (make(f"{seed}-{number}") for number in count())


def _maker(task: str, length: int, tokenizer: Any, sources: Sources) -> Callable[[str], Draft]:
    """What makes the draft of one seed."""
    if task == "cwe":
        return partial(counting.common_words, length=length)
    if task == "fwe":
        return partial(counting.frequent_words, length=length)
    if task == "vt":
        worked = largest(
            lambda lines: _tokens(tokenizer, tracking.example(lines)), tracking.EXAMPLE_TOKENS, tracking.LEAST_LINES
        )
        return partial(tracking.draft, example_lines=worked.units)
    needles = NEEDLE_TASKS[task]
    return partial(niah.draft, task=needles, essay=sources.words if needles.haystack == "essay" else ())


def _example(task: str, family: Family, number: int, length: int, draft: Draft, units: int) -> Example:
    return Example(
        suite="ruler",
        task=task,
        number=number,
        context=draft.context(units),
        question=draft.question,
        answer_prefix=draft.answer_prefix,
        answers=draft.answers,
        max_new_tokens=family.tokens_to_generate,
        metric=family.metric,
        length=length,
    )


def _context_tokens(tokenizer: Any, draft: Draft, units: int) -> int:
    return _tokens(tokenizer, draft.context(units))


def _tokens(tokenizer: Any, text: str) -> int:
    return len(encode(tokenizer, text))
