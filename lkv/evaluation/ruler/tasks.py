"""RULER's 13 tasks as the benchmark defines them (Hsieh et al. 2024).

The prompts (NVIDIA/RULER, Apache-2.0) are in ruler.json. Each function makes an `ExampleTemplate`, whose context can
have any number of units: noise lines, words, documents.
"""

import math
import random
import re
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from lkv.utils.extras import optional_import
from lkv.utils.files import package_json

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
# From this length on, the common words task uses its full frequencies.
FULL_WORD_LIST = 4096


class Question(NamedTuple):
    """A question, every accepted answer, and its documents by number: those needed, and the others of its own."""

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    related: tuple[int, ...]


class QuestionSet(NamedTuple):
    """Questions over one collection of distinct documents."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


class PromptTemplate(NamedTuple):
    """The prompt that tasks of one kind share, cut as kvpress cuts it."""

    context: str  # with the field {context} for the text
    question: str  # with the space that follows it
    prefix: str  # the beginning of the answer
    max_new_tokens: int
    metric: str


_PROMPTS = {name: PromptTemplate(**fields) for name, fields in package_json("lkv.evaluation", "ruler.json").items()}
NIAH, VARIABLE_TRACKING = _PROMPTS["niah"], _PROMPTS["variable_tracking"]
COMMON_WORDS, FREQUENT_WORDS = _PROMPTS["common_words"], _PROMPTS["frequent_words"]
QUESTIONS = _PROMPTS["questions"]


class NeedleTask(NamedTuple):
    """The haystack and the needles of a task."""

    haystack: str  # "noise", "essay", "needle"
    key_kind: str  # "words", "uuids"
    value_kind: str  # "numbers", "uuids"
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1  # keys to ask for


NEEDLE_TASKS = {
    "niah_single_1": NeedleTask("noise", "words", "numbers"),
    "niah_single_2": NeedleTask("essay", "words", "numbers"),
    "niah_single_3": NeedleTask("essay", "words", "uuids"),
    "niah_multikey_1": NeedleTask("essay", "words", "numbers", keys=4),
    "niah_multikey_2": NeedleTask("needle", "words", "numbers"),
    "niah_multikey_3": NeedleTask("needle", "uuids", "uuids"),
    "niah_multivalue": NeedleTask("essay", "words", "numbers", values=4),
    "niah_multiquery": NeedleTask("essay", "words", "numbers", keys=4, queries=4),
}
QUESTION_TASKS = {"qa_1": "squad", "qa_2": "hotpot"}
TASKS = (*NEEDLE_TASKS, "vt", "cwe", "fwe", *QUESTION_TASKS)

# Needles lie at some of 40 depths between the first and the last sentence of an essay.
_DEPTHS = tuple(round(100 * i / 39) for i in range(40))
# A full stop, an optional closing mark, white space, and what can begin a sentence.
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]?\s+(?=[\"'(\[]?[A-Z0-9])")

_HOPS = 4  # assignments of a variable chain after the first
_LETTERS, _DEMO_LETTERS = 5, 3  # of a variable's name
DEMO_TOKENS = 500  # the solved example of variable tracking, up to its answer
MIN_CHAIN_LINES = _HOPS + 1  # each assignment stands before a noise line of its own

_COMMON = 10  # common words to find
_CODE_LETTERS, _DOTS = 6, "..."
_ALPHA, _ZETA = 2.0, math.pi**2 / 6  # the exponent of the zeta law, and zeta(2)
_MIN_CODED_WORDS = 100  # from here on, the four highest counts differ


class ExampleTemplate(NamedTuple):
    """An example whose context is rendered with a number of units.

    The same number always gives the same text, and more units a longer one.
    """

    prompt: PromptTemplate
    render_context: Callable[[int], str]
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    min_units: int
    max_units: int | None = None


def needle_template(seed: str, task: NeedleTask, essay: Sequence[str]) -> ExampleTemplate:
    """Needles in a haystack; `essay` is its words, repeated if the context is longer.

    One unit is a noise line, a needle of another key, or a word of the essay. No key and no value occurs twice.
    """
    rng = random.Random(seed)
    used: set[str] = set()
    keys = [_draw_unused(rng, task.key_kind, used) for _ in range(task.keys)]
    values = {key: [_draw_unused(rng, task.value_kind, used) for _ in range(task.values)] for key in keys}
    needles = [NEEDLE.format(kind=task.value_kind, key=key, value=value) for key in keys for value in values[key]]
    rng.shuffle(needles)
    queried = rng.sample(keys, task.queries)
    depths = sorted(rng.sample(_DEPTHS, len(needles)))
    depth = rng.random()

    def distractors(count: int) -> list[str]:
        rng, distinct = random.Random(f"{seed}-haystack"), set(used)
        return [
            NEEDLE.format(
                kind=task.value_kind,
                key=_draw_unused(rng, task.key_kind, distinct),
                value=_draw_unused(rng, task.value_kind, distinct),
            )
            for _ in range(count)
        ]

    def haystack(units: int) -> str:
        if task.haystack == "essay":
            return _insert_at_depths(essay, units, needles, depths)
        lines = [NOISE] * units if task.haystack == "noise" else distractors(units)
        position = int(depth * units)
        return "\n".join([*lines[:position], *needles, *lines[position:]])

    is_singular = task.queries * task.values == 1
    fields = {
        "kind": task.value_kind.removesuffix("s") if is_singular else task.value_kind,
        "query": queried[0] if len(queried) == 1 else f"{', '.join(queried[:-1])}, and {queried[-1]}",
    }
    context, question, prefix = (
        text.replace("Some", "A").replace("are all", "is").replace("are", "is") if is_singular else text
        for text in (NIAH.context, NIAH.question, NIAH.prefix)
    )
    return ExampleTemplate(
        NIAH,
        render_context=lambda units: context.format(context=haystack(units), **fields),
        question=question.format(**fields),
        answer_prefix=prefix.format(**fields),
        answers=tuple(value for key in queried for value in values[key]),
        min_units=10 if task.haystack == "essay" else 1,
    )


def _insert_at_depths(essay: Sequence[str], words: int, needles: list[str], depths: list[int]) -> str:
    repeats = -(-words // len(essay))
    sentences = SENTENCE_END.split(" ".join((list(essay) * repeats)[:words]))
    cuts = [0, *(len(sentences) * depth // 100 for depth in depths), len(sentences)]
    pieces = []
    for i, needle in enumerate(needles):
        pieces += [*sentences[cuts[i] : cuts[i + 1]], needle]
    return " ".join([*pieces, *sentences[cuts[-2] :]])


def chain_template(seed: str, demo_lines: int) -> ExampleTemplate:
    """Return a chain of four variable assignments after the first, after a solved example of `demo_lines` noise lines.

    One unit is a noise line.
    """
    rng = random.Random(seed)
    used = {"VAR"}  # no variable may be named like the keyword, and the two values must differ
    demo_names, demo_value = _chain(rng, _DEMO_LETTERS, used)
    demo_question = "".join(_chain_question(demo_value))
    demo = f"{_chain_text(rng, demo_lines, demo_names, demo_value)}{demo_question} {' '.join(demo_names)}\n\n"
    names, value = _chain(rng, _LETTERS, used)
    question, prefix = _chain_question(value)
    return ExampleTemplate(
        VARIABLE_TRACKING,
        render_context=lambda units: demo + _chain_text(random.Random(f"{seed}-places"), units, names, value),
        question=question,
        answer_prefix=prefix,
        answers=tuple(names),
        min_units=MIN_CHAIN_LINES,
    )


def chain_demo(lines: int) -> str:
    """Return a solved example with `lines` noise lines up to its answer; all have about the same number of tokens."""
    rng = random.Random("example")
    names, value = _chain(rng, _DEMO_LETTERS, {"VAR"})
    return _chain_text(rng, lines, names, value) + "".join(_chain_question(value))


def _chain(rng: random.Random, letters: int, used: set[str]) -> tuple[list[str], str]:
    """Return the names of a chain's variables, and their value."""
    names = _draw_strings(rng, string.ascii_uppercase, letters, _HOPS + 1, used)
    while (value := str(rng.randrange(10_000, 99_999))) in used:
        pass
    used.add(value)
    return names, value


def _chain_text(rng: random.Random, lines: int, names: list[str], value: str) -> str:
    # The space after each assignment is the benchmark's own.
    assignments = [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old} " for old, new in pairwise(names))]
    text = [NOISE] * lines
    for i, line in enumerate(sorted(rng.sample(range(lines), len(names)))):
        text.insert(line + i, assignments[i])
    return VARIABLE_TRACKING.context.format(context="\n".join(text))


def _chain_question(value: str) -> tuple[str, str]:
    fields = {"query": value, "count": _HOPS + 1}
    return VARIABLE_TRACKING.question.format(**fields), VARIABLE_TRACKING.prefix.format(**fields)


def common_words_template(seed: str, length: int) -> ExampleTemplate:
    """Ten words 30 times each among others three times each, after a solved example. One unit is a word.

    Below 4,096 tokens the frequencies are 6 and 1, as officially. Where a long list needs more words than the package
    has, hyphenated pairs of them follow (the official script has another list there).
    """
    rng = random.Random(seed)
    # (different words, frequency of the ten, frequency of the others)
    demo, frequent, rare = ((40, 10, 3), 30, 3) if length >= FULL_WORD_LIST else ((20, 3, 1), 6, 1)
    context, ask = COMMON_WORDS.context, COMMON_WORDS.question + COMMON_WORDS.prefix
    demo_words = rng.sample(vocabulary(), demo[0])
    demo_list = _numbered_list(rng, demo_words, *demo[1:])
    solved = context.format(context=demo_list) + f"{ask} {_numbered(demo_words[:_COMMON])}\n"
    words = rng.sample(vocabulary(), len(vocabulary()))

    def render_context(units: int) -> str:
        pair_rng, used = random.Random(f"{seed}-pairs"), set(vocabulary())
        pairs = [_draw_unused(pair_rng, "words", used) for _ in range(units - len(words))]
        listed = _numbered_list(random.Random(f"{seed}-order"), words[:units] + pairs, frequent, rare)
        return solved + context.format(context=listed)

    answers = tuple(words[:_COMMON])
    return ExampleTemplate(
        COMMON_WORDS, render_context, COMMON_WORDS.question, COMMON_WORDS.prefix, answers, min_units=_COMMON + 1
    )


def _numbered_list(rng: random.Random, words: Sequence[str], frequent: int, rare: int) -> str:
    entries = [*words[:_COMMON]] * frequent + [*words[_COMMON:]] * rare
    rng.shuffle(entries)
    return _numbered(entries)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def frequent_words_template(seed: str, length: int) -> ExampleTemplate:
    """Coded words whose frequencies follow a zeta law; dots take the first rank. One unit is a word drawn."""
    rng = random.Random(seed)
    count = max(_COMMON, (length - FREQUENT_WORDS.max_new_tokens) // 50)
    ranked = [_DOTS, *_draw_strings(rng, string.ascii_lowercase, _CODE_LETTERS, count - 1, set())]

    def render_context(units: int) -> str:
        words = [word for rank, word in enumerate(ranked, 1) for _ in range(int(units * rank**-_ALPHA / _ZETA))]
        random.Random(f"{seed}-order").shuffle(words)
        return FREQUENT_WORDS.context.format(context=" ".join(words))

    question, prefix = FREQUENT_WORDS.question, FREQUENT_WORDS.prefix
    return ExampleTemplate(
        FREQUENT_WORDS, render_context, question, prefix, tuple(ranked[1:4]), min_units=_MIN_CODED_WORDS
    )


def question_templates(seed: str, questions: QuestionSet) -> Iterator[ExampleTemplate]:
    """Return all questions in random order. One unit is a document.

    The documents that the answer needs come first, then the question's own others, then any. Officially a HotpotQA
    question always has all ten of its own, and no example exists below them; here short lengths leave out those that
    are not needed.
    """
    shuffled = random.Random(seed).sample(questions.questions, len(questions.questions))
    for number, question in enumerate(shuffled):
        yield _question_template(f"{seed}-{number}", question, questions.documents)


def _question_template(seed: str, question: Question, documents: Sequence[str]) -> ExampleTemplate:
    rng, question_documents = random.Random(seed), {*question.needed, *question.related}
    others = [i for i in range(len(documents)) if i not in question_documents]
    related = rng.sample(question.related, len(question.related))
    ranked = [*question.needed, *related, *rng.sample(others, len(others))]

    def render_context(units: int) -> str:
        chosen = ranked[:units]
        random.Random(f"{seed}-order").shuffle(chosen)
        texts = [f"Document {i}:\n{documents[document]}" for i, document in enumerate(chosen, 1)]
        return QUESTIONS.context.format(context="\n\n".join(texts))

    return ExampleTemplate(
        QUESTIONS,
        render_context,
        QUESTIONS.question.format(query=question.text),
        QUESTIONS.prefix,
        question.answers,
        min_units=len(question.needed),
        max_units=len(documents),
    )


@cache
def word_list(part: str) -> tuple[str, ...]:
    """Return the words of one part of speech ("noun", "adjective", "verb"), sorted. Raises MissingPackageError."""
    with optional_import("evals", "RULER"):
        from wonderwords import RandomWord
    return tuple(sorted({word.strip() for word in RandomWord().filter(include_categories=[part])}))


@cache
def vocabulary() -> tuple[str, ...]:
    """Return all nouns, adjectives and verbs, sorted."""
    return tuple(sorted({*word_list("noun"), *word_list("adjective"), *word_list("verb")}))


def _draw_unused(rng: random.Random, kind: str, used: set[str]) -> str:
    """Return a key or value that is not in `used` yet, and is added; its kind is "words", "numbers" or "uuids"."""
    while True:
        if kind == "words":  # adjective-noun
            value = f"{rng.choice(word_list('adjective'))}-{rng.choice(word_list('noun'))}"
        elif kind == "numbers":
            value = str(rng.randint(1_000_000, 9_999_999))
        else:
            value = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if value not in used:
            used.add(value)
            return value


def _draw_strings(rng: random.Random, letters: str, size: int, count: int, used: set[str]) -> list[str]:
    """Return `count` different strings of `size` letters that are not in `used` yet, and are added."""
    strings: list[str] = []
    while len(strings) < count:
        text = "".join(rng.choices(letters, k=size))
        if text not in used:
            used.add(text)
            strings.append(text)
    return strings
