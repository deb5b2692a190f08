"""RULER's examples at a length, for any tokenizer."""

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

from lkv.errors import EvaluationError
from lkv.evaluation.example import Example
from lkv.evaluation.ruler import tasks as ruler_tasks
from lkv.evaluation.ruler.sources import Sources
from lkv.evaluation.ruler.tasks import NEEDLE_TASKS, QUESTION_TASKS, TASKS, ExampleTemplate
from lkv.utils.prompts import chat_template_parts, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A first token, and one for each of the four places where texts that are tokenised separately meet.
_RESERVED_TOKENS = 5


def make_examples(
    task: str, length: int, count: int, tokenizer: "PreTrainedTokenizerBase", sources: Sources, seed: int = 0
) -> list[Example]:
    """Make the first `count` examples of a task at `length` tokens.

    Context, chat template, question, answer prefix and the tokens to generate take at most `length` tokens together.
    They fall short of it by at most length / 256, or one unit of the task (a line, a word, a document) if that is more;
    five tokens are reserved where the texts meet. An example depends on the task, the length, the tokenizer, the seed
    and its own number, never on `count`. Questions whose needed documents exceed the length are skipped.

    Args:
        task: One of `TASKS`.
        length: The most tokens of an example.
        count: How many examples.
        tokenizer: The model's.
        sources: Where essays and questions are read.
        seed: Another seed makes other examples.

    Raises:
        EvaluationError: For an unknown task, and a length that is too short or too long for it.
        DataError: For a source that is missing or malformed.
    """
    check_task(task)
    if count < 1:
        raise EvaluationError(f"count is {count}, but at least 1 example of {task} is needed.")
    examples = list(islice(_generate(task, length, tokenizer, sources, seed), count))
    if len(examples) < count:
        raise EvaluationError(
            f"{task} has only {len(examples)} questions that fit {length} tokens, not {count}; ask for fewer."
        )
    return examples


def check_task(task: str) -> None:
    """Raise EvaluationError for a task that is not one of `TASKS`."""
    if task not in TASKS:
        near = get_close_matches(task, TASKS, 3) or TASKS
        raise EvaluationError(f"RULER has no task {task!r}; did you mean {', '.join(near)}?")


def check_sources(tasks: Sequence[str], sources: Sources) -> None:
    """Read what the tasks need, to find missing files before a long run. Raises DataError."""
    for task in tasks:
        if name := QUESTION_TASKS.get(task):
            sources.questions(name)
        elif task in NEEDLE_TASKS and NEEDLE_TASKS[task].haystack == "essay":
            _ = sources.words


def _generate(
    task: str, length: int, tokenizer: "PreTrainedTokenizerBase", sources: Sources, seed: int
) -> Iterator[Example]:
    fixed_tokens = _RESERVED_TOKENS + sum(_count(tokenizer, part) for part in chat_template_parts(tokenizer))
    number, too_long = 0, []
    for template in _templates(task, length, tokenizer, sources, f"{task}-{length}-{seed}"):
        prompt, ask, prefix = template.prompt, template.question, template.answer_prefix
        other_tokens = fixed_tokens + prompt.max_new_tokens + _count(tokenizer, ask + prefix)
        count_tokens = partial(_count_context, tokenizer, template)
        fit = largest_fit(count_tokens, length - other_tokens, template.min_units, template.max_units)
        total = other_tokens + fit.tokens
        if total > length:
            too_long.append(total)
            if task in QUESTION_TASKS:
                continue
            break
        if fit.units == template.max_units and total < length - length // 256:
            raise EvaluationError(
                f"all {fit.units} documents for {task} have {total} tokens, fewer than the length of {length}; "
                "give a larger set or a shorter length."
            )
        context = template.render_context(fit.units)
        parts = ("ruler", task, number, context, ask, prefix, template.answers, prompt.max_new_tokens, prompt.metric)
        yield Example(*parts, length=length)
        number += 1
    if number == 0 and too_long:
        raise EvaluationError(
            f"{task} needs at least {min(too_long)} tokens with this tokenizer, but the length is {length}; "
            "give a longer one."
        )


def _templates(
    task: str, length: int, tokenizer: "PreTrainedTokenizerBase", sources: Sources, seed: str
) -> Iterator[ExampleTemplate]:
    make: Callable[[str], ExampleTemplate]
    if name := QUESTION_TASKS.get(task):
        yield from ruler_tasks.question_templates(seed, sources.questions(name))
        return
    if task == "cwe":
        make = partial(ruler_tasks.common_words_template, length=length)
    elif task == "fwe":
        make = partial(ruler_tasks.frequent_words_template, length=length)
    elif task == "vt":
        # The solved example has as many noise lines as fit.
        count_demo = lambda lines: _count(tokenizer, ruler_tasks.chain_demo(lines))  # noqa: E731
        demo = largest_fit(count_demo, ruler_tasks.DEMO_TOKENS, ruler_tasks.MIN_CHAIN_LINES)
        make = partial(ruler_tasks.chain_template, demo_lines=demo.units)
    else:
        needles = NEEDLE_TASKS[task]
        essay = sources.words if needles.haystack == "essay" else ()
        make = partial(ruler_tasks.needle_template, task=needles, essay=essay)
    yield from (make(f"{seed}-{number}") for number in count())


class LengthFit(NamedTuple):
    """A number of units and how many tokens they take."""

    units: int
    tokens: int


def largest_fit(
    count_tokens: Callable[[int], int], limit: int, min_units: int, max_units: int | None = None
) -> LengthFit:
    """Find the most units whose tokens, which grow with the units, stay within `limit`.

    The search ends early once less than 1/256 of `limit` is left. Interpolation finds a long text in about five
    tokenisations, a third of what bisection takes; every third guess doubles or bisects, which bounds the search where
    tokens do not grow evenly. Its guesses determine the examples, so that another search would make other ones.

    Args:
        count_tokens: Returns the tokens of a number of units.
        limit: The most tokens; if `min_units` exceed it, they are returned.
        min_units: The fewest units.
        max_units: The most units; None for any number.
    """
    target, enough = limit - limit // 512, limit - limit // 256
    low = first = LengthFit(min_units, count_tokens(min_units))
    high: LengthFit | None = None
    step = 0
    while low.tokens < enough and low.units != max_units and (high is None or high.units - low.units > 1):
        is_third = step % 3 == 2
        if high is not None and is_third:
            guess = (low.units + high.units) // 2
        elif high is not None:
            share = (target - low.tokens) / max(1, high.tokens - low.tokens)
            guess = low.units + int(share * (high.units - low.units))
            guess = min(high.units - 1, max(low.units + 1, guess))
        elif low is first:
            guess = 2 * min_units + 16
        elif is_third:
            guess = 2 * low.units
        else:
            slope = max(1, low.tokens - first.tokens) / (low.units - first.units)
            guess = low.units + int((target - low.tokens) / slope)
            guess = min(max(guess, low.units + 1), 64 * low.units)
        guess = guess if max_units is None else min(guess, max_units)
        fit = LengthFit(guess, count_tokens(guess))
        if fit.tokens <= limit:
            low = fit
        else:
            high = fit
        step += 1
    return low


def _count(tokenizer: "PreTrainedTokenizerBase", text: str) -> int:
    return len(encode(tokenizer, text))


def _count_context(tokenizer: "PreTrainedTokenizerBase", template: ExampleTemplate, units: int) -> int:
    return _count(tokenizer, template.render_context(units))
