"""The training mixture ("Loom", App. C.2), packed to a target length instead of filtered by it.

The paper's table cannot be taken literally (8-shot SQuAD has ~1.7k tokens, 5-shot TREC ~130), so short items are packed
with others until the drawn length is reached. Sample i is a function of (seed, i) alone: a resumed run sees the same.
"""

import hashlib
import math
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lkv.errors import DataError
from lkv.training.data import sources
from lkv.training.data.facts import fact, hide
from lkv.training.data.packing import (
    CHARS_PER_TOKEN,
    CODE_CHARS_PER_TOKEN,
    gather,
    pack,
    repeat,
    some_questions,
    split_to_continue,
    surround,
    window,
    window_start,
)
from lkv.training.data.sample import Continuation, Sample
from lkv.training.data.sources import Meeting, Passage, Puzzle

T = TypeVar("T")
_VALIDATION_SHARE = 20  # one item in 20 is held out


# Where each source's text comes from, for the card of a policy trained on it.
_ORIGINS = {
    "squad": "SQuAD v1.1 train (CC BY-SA 4.0)",
    "multihop": "HotpotQA (CC BY-SA 4.0), 2WikiMultihopQA (Apache-2.0), MuSiQue (CC BY 4.0), train splits",
    "stories": "FairytaleQA train (Apache-2.0), SQuALITY train (CC BY 4.0)",
    "papers": "COVID-QA (Apache-2.0)",
    "meetings": "QMSum train (MIT)",
    "dialogues": "MTS-Dialog train (CC BY 4.0)",
    "exam": "MMLU dev and test (MIT)",
    "prose": "WikiText-2 validation (CC BY-SA 3.0); text files of the data folder",
    "code": "React Native sources in Java, C++ and C# (MIT); source files of the data folder",
    "python": "Python standard library (PSF)",
    "facts": "invented facts in the prose, stories and papers above",
}


class Mixture:
    """Samples of every source found in `folder` (its README's file names, plain text, code)."""

    def __init__(self, folder: Path, min_tokens: int, max_tokens: int, seed: int = 0, validation: bool = False):
        """`validation` draws from the items that training never sees. Raises DataError if nothing is found."""
        if not folder.is_dir():
            raise DataError(f"there is no data folder {folder}; give --data a folder with text, code or data sets.")
        self._bounds = (min_tokens, max_tokens)
        self._seed = f"{seed}-{'validation' if validation else 'train'}"

        def part(*readers: Callable[[Path], Iterable[T]]) -> list[T]:
            everything = [item for read in readers for item in _read(read, folder)]
            chosen = [item for item in everything if _held_out(item) == validation]
            # A handful of texts may all have fallen on one side: then the first one alone is held out.
            if len(everything) > 1 and len(chosen) in (0, len(everything)):
                chosen = everything[:1] if validation else everything[1:]
            return chosen

        self._squad = part(sources.squad)
        self._puzzles = part(sources.multihop)
        self._stories = part(sources.stories)
        self._papers = part(sources.papers)
        self._meetings = part(sources.meetings)
        self._dialogues = part(sources.dialogues)
        self._exam = part(sources.exam)
        self._prose = part(sources.wikipedia, sources.plain_text)
        self._code = part(sources.code)
        self._python = part(lambda _: sources.standard_library())
        texts = [*self._prose, *self._stories, *self._papers]
        self._texts = texts or self._squad
        recipes: list[tuple[str, float, Callable, Sequence[Any]]] = [
            ("squad", 18, self._squad_sample, self._squad),
            ("multihop", 10, self._multihop_sample, self._puzzles),
            ("stories", 14, self._document_sample, self._stories),
            ("papers", 5, self._document_sample, self._papers),
            ("meetings", 9, self._meeting_sample, self._meetings),
            ("dialogues", 3, self._dialogue_sample, self._dialogues),
            ("exam", 3, self._exam_sample, self._exam),
            ("prose", 5, self._document_sample, self._prose),
            ("code", 8, self._code_sample, self._code),
            ("python", 10, self._code_sample, self._python),
            ("facts", 15, self._facts_sample, self._texts),
        ]
        if not any(items for name, _, _, items in recipes if name != "python"):
            raise DataError(
                f"{folder} holds no data to train on; put .txt, .md or source files there, or the data sets that the "
                "documentation of `lkv train` names."
            )
        self._recipes = [recipe for recipe in recipes if recipe[3]]

    def sample(self, index: int, continuations: int, tokens_a_continuation: int = 0) -> Sample:
        """Sample number `index` with `continuations` continuations; where `tokens_a_continuation` is given, with two
        and one more for each so many tokens beyond 2,000, up to that number."""
        rng = random.Random(f"{self._seed}-{index}")
        name, _, build, items = rng.choices(self._recipes, weights=[recipe[1] for recipe in self._recipes])[0]
        low, high = (math.log(bound) for bound in self._bounds)
        tokens = math.exp(rng.uniform(low, high))
        if tokens_a_continuation:
            continuations = min(continuations, 2 + max(0, int(tokens - 2000) // tokens_a_continuation))
        context, asked = build(rng, items, tokens)
        asked = asked[:continuations]
        while len(asked) < continuations:
            asked.append(repeat(rng, context))
        return Sample(name, context, tuple(asked))

    @property
    def origins(self) -> dict[str, str]:
        """Sources in use, each with its data sets and their licences."""
        return {name: _ORIGINS[name] for name in self.names}

    @property
    def names(self) -> list[str]:
        """Names of the sources in use."""
        return [recipe[0] for recipe in self._recipes]

    def _squad_sample(self, rng: random.Random, items: Sequence[Passage], tokens: float):
        packed = pack(rng, items, tokens * CHARS_PER_TOKEN, lambda p: len(p.text))
        asked = some_questions(rng, packed, 2)
        return "\n\n".join(p.text for p in packed), [*asked, repeat(rng, packed[-1].text)]

    def _multihop_sample(self, rng: random.Random, items: Sequence[Puzzle], tokens: float):
        puzzle = rng.choice(items)
        chosen = [p for i, p in enumerate(puzzle.passages) if i in puzzle.needed]
        rest = [p for i, p in enumerate(puzzle.passages) if i not in puzzle.needed]
        for extra in rng.sample(items, min(len(items), 1 + int(tokens) // 1200)):
            rest += extra.passages
        room = tokens * CHARS_PER_TOKEN - sum(len(p.text) for p in chosen)
        chosen += pack(rng, rest, room, lambda p: len(p.text)) if room > 0 else []
        rng.shuffle(chosen)
        return "\n\n".join(f"{p.title}\n{p.text}" for p in chosen), [Continuation(puzzle.question, puzzle.answer)]

    def _document_sample(self, rng: random.Random, items: Sequence[Passage], tokens: float):
        passage = rng.choice(items)
        size = int(tokens * CHARS_PER_TOKEN)
        questions = [qa for qa in passage.questions if qa[1] in passage.text] or list(passage.questions)
        if questions and rng.random() < 0.75:
            anchor = rng.choice(questions)
            start = window_start(rng, passage.text, size, passage.text.find(anchor[1]))
            text = passage.text[start : start + size]
            near = [qa for qa in questions if qa[1] in text and qa != anchor]
            asked = [anchor, *rng.sample(near, min(3, len(near)))]
            return surround(rng, text, items, size), [Continuation(question, answer) for question, answer in asked]
        return split_to_continue(rng, [*gather(rng, items, size - len(passage.text), 0), passage.text], size)

    def _meeting_sample(self, rng: random.Random, items: Sequence[Meeting], tokens: float):
        meeting = rng.choice(items)
        size = int(tokens * CHARS_PER_TOKEN)
        if meeting.queries and rng.random() < 0.6:
            query, answer, first, _ = rng.choice(meeting.queries)
            text = "\n".join(meeting.turns[max(0, first - rng.randint(0, 8)) :])[:size]
            return text, [Continuation(query, answer)]
        return split_to_continue(rng, ["\n".join(meeting.turns)], size)

    def _dialogue_sample(self, rng: random.Random, items: Sequence[Passage], tokens: float):
        packed = pack(rng, items, tokens * CHARS_PER_TOKEN, lambda p: len(p.text))
        item = rng.choice(packed)
        opening = " ".join(item.text.split()[:12])
        asked = [Continuation(f'Summarize the dialogue that starts with: "{opening}"', item.questions[0][1])]
        return "\n\n".join(p.text for p in packed), asked

    def _exam_sample(self, rng: random.Random, items: Sequence[tuple[str, str]], tokens: float):
        shots = pack(rng, items, tokens * CHARS_PER_TOKEN, lambda qa: len(qa[0]) + len(qa[1]) + 20)
        question, answer = rng.choice(items)
        context = "\n\n".join(f"Question: {q}\nAnswer: {a}" for q, a in shots)
        return context, [Continuation(None, f"\n\nQuestion: {question}\nAnswer: {answer}")]

    def _code_sample(self, rng: random.Random, items: Sequence[Passage], tokens: float):
        texts = [f"{p.title}\n{p.text}" for p in rng.sample(items, min(3 + int(tokens) // 2000, len(items)))]
        return split_to_continue(rng, texts, int(tokens * CODE_CHARS_PER_TOKEN))

    def _facts_sample(self, rng: random.Random, items: Sequence[Passage], tokens: float):
        size = tokens * CHARS_PER_TOKEN
        text = window(rng, "\n".join(gather(rng, items, size, 2)), size)
        facts = [fact(rng) for _ in range(rng.choice([1, 2, 4, 8]))]
        asked = [Continuation(question, answer) for _, question, answer in facts[:4]]
        return hide(rng, text, [sentence for sentence, _, _ in facts]), asked


def _read(read: Callable[[Path], Iterable[T]], folder: Path) -> list[T]:
    """What `read` finds in `folder`. Raises DataError for files that are not in their data set's form."""
    try:
        return list(read(folder))
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = getattr(read, "__name__", "a data set")
        raise DataError(
            f"the files of {what!r} in {folder} are not as that data set has them ({type(error).__name__}: {error}); "
            "get them again, or take them out."
        ) from error


def _held_out(item: object) -> bool:
    return int.from_bytes(hashlib.blake2b(repr(item).encode(), digest_size=4).digest(), "big") % _VALIDATION_SHARE == 0
