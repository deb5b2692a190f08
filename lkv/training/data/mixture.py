"""Our own mixture, recipe "wide": more kinds of text than the paper's Loom (`loom.py`), packed to a target length.

Short items are packed with others until the drawn length is reached. Sample i is a function of (seed, i) alone: a
resumed run sees the same.
"""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lkv.errors import DataError
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
from lkv.training.data.sets import SETS, Names, digest_of, survey
from lkv.training.data.sources import Asked, Meeting, Passage, Puzzle, identity, read_set, standard_library

T = TypeVar("T")
_VALIDATION_SHARE = 20  # one item in 20 is held out


# Of what sets each part is made.
_PARTS: dict[str, tuple[str, ...]] = {
    "squad": ("squad",),
    "multihop": ("hotpotqa", "2wiki", "musique"),
    "stories": ("fairytaleqa", "squality", "own"),
    "papers": ("covidqa",),
    "meetings": ("qmsum",),
    "dialogues": ("mts_dialog",),
    "exam": ("mmlu",),
    "prose": ("wikitext2", "text"),
    "code": ("the_stack", "code"),
}
_MADE = {
    "python": "Python standard library (PSF)",
    "facts": "invented facts in the prose, stories and papers above",
}


class Mixture:
    """Samples of every source found in `folder`: public sets under their official names, own data, text and code."""

    def __init__(
        self,
        folder: Path,
        min_tokens: int,
        max_tokens: int,
        seed: int = 0,
        validation: bool = False,
        checked: Callable[[str, list[Any]], list[Any]] = lambda name, items: items,
        names: Names | None = None,
    ):
        """`validation` draws from the items that training never sees; `checked` gives the items of a set that may be
        used; `names` are the files of sets whose names are others. Raises DataError if nothing is found."""
        self.survey = survey(folder, [name for names_ in _PARTS.values() for name in names_], names)
        self._bounds = (min_tokens, max_tokens)
        self._seed = f"{seed}-{'validation' if validation else 'train'}"
        self.items: dict[str, int] = {}

        def part(*names: str) -> list[Any]:
            items: list[Any] = []
            for name in names:
                rows = read_set(name, self.survey.taken.get(name, []), folder)
                self.items |= {name: len(rows)} if rows else {}
                items += checked(name, rows)
            return split(items, validation)

        self._squad, self._puzzles, self._stories = (part(*_PARTS[name]) for name in ("squad", "multihop", "stories"))
        self._papers, self._meetings = part(*_PARTS["papers"]), part(*_PARTS["meetings"])
        self._dialogues, self._exam = part(*_PARTS["dialogues"]), part(*_PARTS["exam"])
        self._prose, self._code = part(*_PARTS["prose"]), part(*_PARTS["code"])
        self._python = split(standard_library(), validation)
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
            ("facts", 20, self._facts_sample, self._texts),
        ]
        if not any(items for name, _, _, items in recipes if name != "python"):
            if any(self.items.values()):
                raise DataError(
                    f"{folder} holds too little to keep some apart for evaluation; give more texts, or longer ones."
                )
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
    def lines(self) -> list[str]:
        """What is trained on and what is left, for people."""
        return self.survey.lines()

    @property
    def digest(self) -> str:
        """Digest of the files in use."""
        return digest_of(path for paths in self.survey.taken.values() for path in paths)

    @property
    def origins(self) -> dict[str, str]:
        """Sources in use, each with its data sets and their licences."""
        sets = self.survey.taken
        said = {
            name: ", ".join(f"{SETS[part].title} ({SETS[part].licence})" for part in _PARTS[name] if part in sets)
            for name in self.names
            if name not in _MADE
        }
        return {name: said.get(name) or _MADE[name] for name in self.names}

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

    def _exam_sample(self, rng: random.Random, items: Sequence[Asked], tokens: float):
        shots = pack(rng, items, tokens * CHARS_PER_TOKEN, lambda qa: len(qa.question) + len(qa.answer) + 20)
        asked = rng.choice(items)
        context = "\n\n".join(f"Question: {q}\nAnswer: {a}" for q, a, _ in shots)
        return context, [Continuation(None, f"\n\nQuestion: {asked.question}\nAnswer: {asked.answer}")]

    def _code_sample(self, rng: random.Random, items: Sequence[Passage], tokens: float):
        texts = [f"{p.title}\n{p.text}" for p in rng.sample(items, min(3 + int(tokens) // 2000, len(items)))]
        return split_to_continue(rng, texts, int(tokens * CODE_CHARS_PER_TOKEN))

    def _facts_sample(self, rng: random.Random, items: Sequence[Passage], tokens: float):
        size = tokens * CHARS_PER_TOKEN
        text = window(rng, "\n".join(gather(rng, items, size, 2)), size)
        facts = [fact(rng) for _ in range(rng.choice([1, 2, 4, 8]))]
        asked = [Continuation(question, answer) for _, question, answer in facts[:4]]
        return hide(rng, text, [sentence for sentence, _, _ in facts]), asked


def split(items: Sequence[T], validation: bool) -> list[T]:
    """The items that training never sees, or the others: decided by what each says, so by no order and no file."""
    chosen = [item for item in items if _held_out(item) == validation]
    # A handful of texts may all have fallen on one side: then the first one alone is held out.
    if len(items) > 1 and len(chosen) in (0, len(items)):
        chosen = list(items[:1] if validation else items[1:])
    return chosen


def _held_out(item: Any) -> bool:
    digest = hashlib.blake2b(identity(item).encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "big") % _VALIDATION_SHARE == 0
