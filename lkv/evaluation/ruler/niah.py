"""Needles in a haystack: one, several keys, several values, several questions."""

import random
import re
from collections.abc import Sequence

from lkv.evaluation.ruler.definitions import NEEDLE, NIAH, NOISE, Needles
from lkv.evaluation.ruler.draft import Draft
from lkv.evaluation.ruler.words import draw_new

# Needles lie at some of 40 depths between the first and the last sentence of an essay.
_DEPTHS = tuple(round(100 * i / 39) for i in range(40))
# A full stop, perhaps a closing mark, a gap, and what may begin a sentence.
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]?\s+(?=[\"'(\[]?[A-Z0-9])")


def draft(seed: str, task: Needles, essay: Sequence[str]) -> Draft:
    """A needle example; `essay` is the haystack's words, repeated where the length asks for more.

    One unit is a noise line, a needle of another key, or a word of the essay. No key and no value occurs twice.
    """
    rng = random.Random(seed)
    taken: set[str] = set()
    keys = [draw_new(rng, task.key, taken) for _ in range(task.keys)]
    values = {key: [draw_new(rng, task.value, taken) for _ in range(task.values)] for key in keys}
    needles = [_needle(task, key, value) for key in keys for value in values[key]]
    rng.shuffle(needles)
    asked = rng.sample(keys, task.queries)
    depths = sorted(rng.sample(_DEPTHS, len(needles)))
    depth = rng.random()

    def other_needles(count: int) -> list[str]:
        drawn, known = random.Random(f"{seed}-haystack"), set(taken)
        return [
            _needle(task, draw_new(drawn, task.key, known), draw_new(drawn, task.value, known)) for _ in range(count)
        ]

    def haystack(units: int) -> str:
        if task.haystack == "essay":
            return _in_essay(essay, units, needles, depths)
        lines = [NOISE] * units if task.haystack == "noise" else other_needles(units)
        at = int(depth * units)
        return "\n".join([*lines[:at], *needles, *lines[at:]])

    singular = task.queries * task.values == 1
    fields = {
        "kind": task.value.removesuffix("s") if singular else task.value,
        "query": asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}",
    }
    before, question, prefix = (
        _singular(part) if singular else part for part in (NIAH.before_question, NIAH.question, NIAH.prefix)
    )
    return Draft(
        context=lambda units: before.format(context=haystack(units), **fields),
        question=question.format(**fields),
        answer_prefix=prefix.format(**fields),
        answers=tuple(value for key in asked for value in values[key]),
        least=10 if task.haystack == "essay" else 1,
    )


def sentences(text: str) -> list[str]:
    """The sentences of `text`, split at full stops that a capital letter or a digit follows."""
    return _SENTENCE_END.split(text)


def _needle(task: Needles, key: str, value: str) -> str:
    return NEEDLE.format(kind=task.value, key=key, value=value)


def _singular(text: str) -> str:
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is")


def _in_essay(essay: Sequence[str], words: int, needles: list[str], depths: list[int]) -> str:
    times = -(-words // len(essay))
    essay_sentences = sentences(" ".join((list(essay) * times)[:words]))
    cuts = [0, *(len(essay_sentences) * depth // 100 for depth in depths), len(essay_sentences)]
    pieces = []
    for i, needle in enumerate(needles):
        pieces += [*essay_sentences[cuts[i] : cuts[i + 1]], needle]
    return " ".join([*pieces, *essay_sentences[cuts[-2] :]])
