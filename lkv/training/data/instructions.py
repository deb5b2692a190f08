"""Instructions about the form of replies: inserted into contexts, and obeyed by their continuations."""

import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from lkv.training.data.samples import Continuation
from lkv.utils.files import package_json

INSTRUCTED_SHARE = 0.15  # of the samples of each source
_KINDS = ("lead", "opening", "closing", "case")  # a reply gets at most one of each, in this order
_GIST_WORDS = 8
_PARAGRAPH_END, _SENTENCE_END = re.compile(r"\n\s*\n"), re.compile(r"(?<=[.!?;])\s+|\n+")
_WORDINGS: dict[str, list[Any]] = package_json("lkv.training.data", "instructions.json")


class Instruction(NamedTuple):
    """An instruction as a sentence, and the template of replies that obey it."""

    sentence: str
    reply: str


def draw_instructions(rng: random.Random) -> list[Instruction]:
    """Draw one to four instructions that a reply can obey together, in the order in which they change it."""
    kinds, instructions = set(rng.sample(_KINDS, rng.randint(1, len(_KINDS)))), []
    for wording in (rng.choice(_WORDINGS[kind]) for kind in _KINDS if kind in kinds):
        word = rng.choice(wording["words"])
        parts = (rng.choice(wording["sentences"]), wording["reply"])
        instructions.append(Instruction(*(part.replace("{word}", word) for part in parts)))
    return instructions


def insert_instructions(
    rng: random.Random, text: str, answers: Sequence[Continuation], instructions: Sequence[Instruction]
) -> tuple[str, list[Continuation]]:
    """Insert instructions at the beginning, at the end or between paragraphs of a text, together or one by one.

    Returns the context, and its questions: first one about the whole text, which the text's first words answer, then
    those of `answers`, without direct continuations and without parts of the text that an instruction now divides.
    """
    sentences = rng.sample([instruction.sentence for instruction in instructions], len(instructions))
    context = text
    for group in [" ".join(sentences)] if rng.random() < 0.5 else sentences:
        ends = [match.end() for match in (_PARAGRAPH_END if "\n\n" in context else _SENTENCE_END).finditer(context)]
        place = rng.choice([0, len(context), rng.choice(ends or [0])])
        block = rng.choice(_WORDINGS["introductions"]) + group
        context = "\n\n".join(part for part in (context[:place].rstrip(), block, context[place:]) if part)
    gist = Continuation(rng.choice(_WORDINGS["gists"]), " ".join(text.split()[:_GIST_WORDS]))
    others = [one for one in answers if one.question and (one.target in context or one.target not in text)]
    return context, [gist, *others]


def obey(instructions: Sequence[Instruction], continuation: Continuation) -> Continuation:
    """Return the continuation with an answer that obeys all instructions."""
    question, answer = continuation.question, continuation.target
    for instruction in instructions:
        forms = {"capitals": answer.upper(), "smalls": answer.lower(), "lines": answer.replace("\n", "\n- ")}
        answer = instruction.reply.format(question=question, answer=answer, **forms)
    return Continuation(question, answer)
