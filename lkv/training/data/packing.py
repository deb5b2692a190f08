"""Cut and pack real texts to a length, draw their continuations, and hide invented facts in them."""

import math
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from lkv.training.data.documents import Passage
from lkv.training.data.samples import Continuation
from lkv.utils.files import package_json

T = TypeVar("T")
CHARS_PER_TOKEN = 3.9
CODE_CHARS_PER_TOKEN = 2.9
COMPLETION_CHARS = 340  # of a text to continue
_REPEATED_WORDS, _OPENING_WORDS = 54, 8
_MAX_REPEATED_CHARS, _MAX_OPENING_CHARS = 2000, 400  # for texts with long words
# From this mean word length on, as in Chinese or minified code, characters are counted instead of words.
_LONG_WORD_CHARS, _REPEATED_CHARS, _OPENING_CHARS = 30, 300, 24
_LINE_CHARS, _WORD_CHARS = 200, 40  # how far a cut moves back to the end of a line or a word
_MAX_ITEMS = 256  # in one context
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
# The words of invented facts, by kind, and their sentences with questions and answers.
_WORDS: dict[str, list[str]] = package_json("lkv.training.data", "words.json")
_FACTS: dict[str, list[list[str]]] = package_json("lkv.training.data", "facts.json")
_SERIALS = 0.35  # share of the facts: long random values are lost first, because all of their tokens must be kept


class Lengths(NamedTuple):
    """The distribution of context lengths in tokens: log-uniform from `least` to `most`.

    With a `power`, the density is divided by that power of the length.
    """

    least: int
    most: int
    power: float = 0.0

    def draw(self, rng: random.Random) -> float:
        """Draw one length."""
        if not self.power:
            return math.exp(rng.uniform(math.log(self.least), math.log(self.most)))
        ends = self.least**-self.power, self.most**-self.power
        return rng.uniform(*ends) ** (-1 / self.power)


def pack(rng: random.Random, items: Sequence[T], max_chars: float, size: Callable[[T], int]) -> list[T]:
    """Draw items until they are full; at least one.

    Args:
        rng: Draws the items.
        items: What to draw from.
        max_chars: Characters of all drawn items.
        size: Returns the characters of an item.
    """
    packed: list[T] = []
    for item in rng.sample(items, min(len(items), _MAX_ITEMS)):
        if packed and max_chars < size(item):
            break
        packed.append(item)
        max_chars -= size(item)
    return packed


def gather(
    rng: random.Random, items: Sequence[Passage], chars: float, min_items: int = 1, without: str | None = None
) -> list[str]:
    """Draw texts until they are long enough.

    Args:
        rng: Draws the texts.
        items: What to draw from.
        chars: Characters of all texts.
        min_items: The least number of texts.
        without: A text that is not drawn.
    """
    texts: list[str] = []
    for item in rng.sample(items, min(len(items), _MAX_ITEMS)):
        if len(texts) >= min_items and sum(map(len, texts)) >= chars:
            break
        if item.text != without:
            texts.append(item.text)
    return texts


def surround_with_texts(
    rng: random.Random, text: str, items: Sequence[Passage], chars: float, without: str | None = None
) -> str:
    """Put other texts before and after a text.

    Args:
        rng: Draws the texts.
        text: What to surround.
        items: What to draw from.
        chars: Approximate characters in all.
        without: A text that is not drawn.
    """
    missing = int(chars) - len(text)
    if missing < 400:
        return text
    others = "\n\n".join(gather(rng, items, missing, without=without))[:missing]
    before = rng.randint(0, len(others))
    return "\n\n".join(part for part in (others[:before], text, others[before:]) if part)


def draw_questions(rng: random.Random, passages: Sequence[Passage], count: int) -> list[Continuation]:
    """Draw up to `count` questions about the passages."""
    pairs = [pair for passage in passages for pair in passage.questions]
    return [Continuation(question, answer) for question, answer in rng.sample(pairs, min(count, len(pairs)))]


def find_answer(text: str, question: str, answer: str) -> int:
    """Return the position of the answer in `text`, else of the longest word of question and answer, else -1."""
    words = {word.strip(".,?!\"'") for word in f"{question} {answer}".split()} - {""}
    sought = (answer, *sorted(words, key=lambda word: (-len(word), word)))
    return next((place for place in map(text.find, sought) if place >= 0), -1)


def window_start_around(rng: random.Random, text: str, size: int, anchor: int) -> int:
    """Draw the start of a window of a text.

    Args:
        rng: Draws the start.
        text: The text.
        size: Characters of the window.
        anchor: A position that the window holds; -1 for the text's beginning.
    """
    if anchor < 0 or len(text) <= size:
        return 0
    last = min(anchor, len(text) - size)
    return rng.randint(min(last, max(0, anchor - size + 200)), last)


def random_window(rng: random.Random, text: str, chars: float) -> str:
    """Return a random part of `text` of `chars` characters."""
    start = rng.randint(0, max(0, len(text) - int(chars)))
    return text[start : start + int(chars)]


def split_to_continue(rng: random.Random, texts: Sequence[str], size: int) -> tuple[str, list[Continuation]]:
    """Join texts and cut the last at a line or word; the continuation is what comes next."""
    text = "\n\n".join(text[: size // len(texts)] for text in texts[:-1])
    last = texts[-1]
    length = max(400, size - len(text))
    start = rng.randint(0, max(0, len(last) - length - COMPLETION_CHARS))
    part = last[start : start + length + COMPLETION_CHARS]
    cut = max(1, len(part) - COMPLETION_CHARS)
    break_at = max(part.rfind("\n", max(0, cut - _LINE_CHARS), cut), part.rfind(" ", max(0, cut - _WORD_CHARS), cut))
    cut = break_at if break_at > 0 else cut
    context = f"{text}\n\n{part[:cut]}" if text else part[:cut]
    return context, [Continuation(None, part[cut:]), ask_to_repeat(rng, context)]


def ask_to_repeat(rng: random.Random, context: str) -> Continuation:
    """Ask to repeat a part of the context: a strong training signal for any text."""
    words = context.split(" ")
    if len(context) < _LONG_WORD_CHARS * len(words):
        start = rng.randint(0, max(0, len(words) - _REPEATED_WORDS))
        part = " ".join(words[start : start + _REPEATED_WORDS])[:_MAX_REPEATED_CHARS]
        opening = " ".join(words[start : start + _OPENING_WORDS])[:_MAX_OPENING_CHARS]
    else:
        start = rng.randint(0, max(0, len(context) - _REPEATED_CHARS))
        part = context[start : start + _REPEATED_CHARS]
        opening = part[:_OPENING_CHARS]
    question = f'Repeat the part of the text that starts with: "{opening}"'
    return Continuation(question, part[len(opening) :].removeprefix(" ") or opening)


def fill_continuations(
    rng: random.Random,
    context: str,
    answers: list[Continuation],
    tokens: float,
    continuations: int,
    tokens_a_continuation: int,
) -> list[Continuation]:
    """Truncate a sample's continuations to a number, or fill up with requests to repeat parts of its context.

    Args:
        rng: Draws the parts to repeat.
        context: The context.
        answers: Its own continuations.
        tokens: Its approximate number of tokens.
        continuations: The number of continuations.
        tokens_a_continuation: If above 0, two continuations plus one for every `tokens_a_continuation` tokens above
            2,000, at most `continuations`.
    """
    if tokens_a_continuation:
        continuations = min(continuations, 2 + max(0, int(tokens - 2000) // tokens_a_continuation))
    missing = continuations - len(answers)
    return answers[:continuations] + [ask_to_repeat(rng, context) for _ in range(missing)]


def make_fact(rng: random.Random) -> tuple[str, str, str]:
    """Invent a fact, as (sentence, question, answer)."""
    person = f"{rng.choice(_WORDS['names'])} {rng.choice(_WORDS['surnames'])}"
    item = f"the {rng.choice(_WORDS['adjectives'])} {rng.choice(_WORDS['objects'])}"
    # Numbers of three to five digits, sometimes up to ten; serials are groups of hexadecimal digits.
    digits = 0 if rng.random() < 0.6 else rng.randint(6, 10)
    number = str(rng.randint(10 ** (digits - 1), 10**digits - 1) if digits else rng.randint(100, 99999))
    code = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(rng.choice([4, 5, 6, 7, 12, 16])))
    sizes = rng.choice([*[(8, 4, 4, 4, 12)] * 4, (4, 4, 4, 4), (6, 8), (16,), (5, 5, 5, 5), (32,)])
    serial = "-".join("".join(rng.choice("0123456789abcdef") for _ in range(size)) for size in sizes)
    city, job, food = rng.choice(_WORDS["cities"]), rng.choice(_WORDS["jobs"]), rng.choice(_WORDS["foods"])
    year = rng.randint(1650, 2020)
    words = {"item": item, "the_item": item.capitalize(), "person": person, "number": number, "code": code}
    words |= {"serial": serial, "city": city, "job": job, "food": food, "variable": f"{code[:7].lower()}_{job}"}
    templates = _FACTS["serials" if rng.random() < _SERIALS else "others"]
    sentence, question, answer = (part.format(year=year, **words) for part in rng.choice(templates))
    return sentence, question, answer


def insert_sentences(rng: random.Random, text: str, sentences: list[str]) -> str:
    """Insert each sentence at a random sentence boundary of `text`."""
    parts = [part for part in _SENTENCE_END.split(text) if part]
    for sentence in sentences:
        parts.insert(rng.randint(0, len(parts)), sentence)
    return " ".join(parts)
