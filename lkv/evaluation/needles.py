"""Needles hidden in prose: does the compressed cache still hold a sentence nobody knew would be asked for?"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lkv.training.data.facts import insert_sentences
from lkv.utils.prompts import encode_context

_FIRST = "absent brave calm distant eager fearless gentle humble icy jolly keen loyal mellow noble odd proud".split()
_SECOND = "badger cactus dolphin eagle falcon gecko heron iguana jackal koala lemur magpie newt otter puffin".split()


@dataclass(frozen=True)
class Needles:
    """A context in which facts are hidden, all of them as (question, answer), and the one to ask for."""

    ids: list[int]
    facts: list[tuple[str, str]]
    question: str
    answer: str


def make_needles(tokenizer: Any, prose: Sequence[str], tokens: int, needles: int, seed: int) -> Needles:
    """`needles` facts at random sentence boundaries of `prose`, about `tokens` tokens in all; one is asked for."""
    rng = random.Random(f"{seed}-{tokens}-{needles}")
    keys = rng.sample([f"{a}-{b}" for a in _FIRST for b in _SECOND], needles)
    numbers = [str(rng.randint(1_000_000, 9_999_999)) for _ in keys]
    sentences = [f"One of the special magic numbers for {k} is: {n}." for k, n in zip(keys, numbers, strict=True)]
    text = rng.choice(prose)
    start = rng.randint(0, max(0, len(text) - 6 * tokens))
    start = text.find(" ", start) + 1
    # Shorten the prose, never the needles, until the whole has the length asked for.
    words = text[start : start + 6 * tokens].split(" ")
    room = tokens - len(encode_context(tokenizer, " ".join(sentences)))
    size = len(tokenizer(" ".join(words), add_special_tokens=False)["input_ids"])
    words = words[: int(len(words) * min(1.0, room / size))]
    facts = [
        (f"What is the special magic number for {key} mentioned in the provided text?", number)
        for key, number in zip(keys, numbers, strict=True)
    ]
    question, answer = rng.choice(facts)
    return Needles(
        ids=encode_context(tokenizer, insert_sentences(rng, " ".join(words), sentences)),
        facts=facts,
        question=question,
        answer=answer,
    )
