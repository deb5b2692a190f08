"""Words to be counted: the ten most common of a numbered list, and the three most frequent of a coded text."""

import math
import random
import string
from collections.abc import Sequence

from lkv.evaluation.ruler.definitions import COMMON_WORDS, FREQUENT_WORDS, FULL_WORD_LIST
from lkv.evaluation.ruler.draft import Draft
from lkv.evaluation.ruler.words import distinct, draw_new, vocabulary

_COMMON = 10
_ALPHA, _CODE_LETTERS, _DOTS = 2.0, 6, "..."
_ZETA = math.pi**2 / 6  # of _ALPHA = 2
# From so many words on, the four highest counts of the coded text differ.
_LEAST_CODED = 100


def common_words(seed: str, length: int) -> Draft:
    """Ten words 30 times each among others three times each, behind a worked example. One unit is a word.

    Below 4,096 tokens the frequencies are 6 and 1, as officially. Where a long list needs more words than the package
    has, hyphenated pairs of them follow (the official script has another list there).
    """
    rng = random.Random(seed)
    # (different words, frequency of the ten, frequency of the others)
    shown, often, seldom = ((40, 10, 3), 30, 3) if length >= FULL_WORD_LIST else ((20, 3, 1), 6, 1)
    example = rng.sample(vocabulary(), shown[0])
    before, ask = COMMON_WORDS.before_question, COMMON_WORDS.question + COMMON_WORDS.prefix
    worked = before.format(context=_list(rng, example, *shown[1:])) + f"{ask} {_numbered(example[:_COMMON])}\n"
    words = rng.sample(vocabulary(), len(vocabulary()))

    def context(units: int) -> str:
        chosen = words[:units] + _pairs(seed, units - len(words))
        return worked + before.format(context=_list(random.Random(f"{seed}-order"), chosen, often, seldom))

    return Draft(context, COMMON_WORDS.question, COMMON_WORDS.prefix, tuple(words[:_COMMON]), least=_COMMON + 1)


def frequent_words(seed: str, length: int) -> Draft:
    """Coded words whose frequencies follow a zeta law; dots take the first rank. One unit is a word drawn."""
    rng = random.Random(seed)
    size = max(_COMMON, (length - FREQUENT_WORDS.tokens_to_generate) // 50)
    ranks = [_DOTS, *distinct(rng, string.ascii_lowercase, _CODE_LETTERS, size - 1, set())]

    def context(units: int) -> str:
        words = [word for k, word in enumerate(ranks, 1) for _ in range(int(units * k**-_ALPHA / _ZETA))]
        random.Random(f"{seed}-order").shuffle(words)
        return FREQUENT_WORDS.before_question.format(context=" ".join(words))

    return Draft(context, FREQUENT_WORDS.question, FREQUENT_WORDS.prefix, tuple(ranks[1:4]), least=_LEAST_CODED)


def _list(rng: random.Random, words: Sequence[str], often: int, seldom: int) -> str:
    entries = [*words[:_COMMON]] * often + [*words[_COMMON:]] * seldom
    rng.shuffle(entries)
    return _numbered(entries)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _pairs(seed: str, count: int) -> list[str]:
    rng, taken = random.Random(f"{seed}-pairs"), set(vocabulary())
    return [draw_new(rng, "words", taken) for _ in range(count)]
