"""Random keys and values, and RULER's word lists (package wonderwords)."""

import random
import uuid
from functools import cache

from lkv.errors import DataError


@cache
def word_list(part: str) -> tuple[str, ...]:
    """The package's words of one part of speech ("noun", "adjective", "verb"), sorted. Raises DataError."""
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise DataError(
            "RULER's word lists come from the package wonderwords, which is not installed; "
            "run `pip install lkv-cache[evals]`."
        ) from error
    return tuple(sorted({word.strip() for word in RandomWord().filter(include_categories=[part])}))


@cache
def vocabulary() -> tuple[str, ...]:
    """Nouns, adjectives and verbs, each once."""
    return tuple(sorted({*word_list("noun"), *word_list("adjective"), *word_list("verb")}))


def draw(rng: random.Random, kind: str) -> str:
    """A key or value: "words" (adjective-noun), "numbers" (seven digits) or "uuids"."""
    if kind == "words":
        return f"{rng.choice(word_list('adjective'))}-{rng.choice(word_list('noun'))}"
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_new(rng: random.Random, kind: str, taken: set[str]) -> str:
    """One that is not in `taken` yet; it is added."""
    while (value := draw(rng, kind)) in taken:
        pass
    taken.add(value)
    return value


def distinct(rng: random.Random, letters: str, size: int, count: int, taken: set[str]) -> list[str]:
    """`count` different strings of `size` letters, none of them in `taken`."""
    words: list[str] = []
    while len(words) < count:
        word = "".join(rng.choices(letters, k=size))
        if word not in taken:
            taken.add(word)
            words.append(word)
    return words
