"""Recipes."""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lkv.errors import DataError
from lkv.training.data.documents import (
    Meeting,
    MultiHopQuestion,
    Passage,
    ShortQuestion,
    item_key,
    read_dataset,
    read_standard_library,
)
from lkv.training.data.facts import insert_sentences, make_fact
from lkv.training.data.packing import (
    CHARS_PER_TOKEN,
    CODE_CHARS_PER_TOKEN,
    ask_to_repeat,
    draw_questions,
    gather,
    pack,
    random_window,
    split_to_continue,
    surround_with_texts,
    window_start_around,
)
from lkv.training.data.public_datasets import PUBLIC_DATASETS, NameMap, digest_of, index_folder
from lkv.training.data.samples import Continuation, Sample

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
        names: NameMap | None = None,
    ):
        """`validation` draws from the items that training never sees; `checked` gives the items of a set that may be
        used; `names` are the files of sets whose names are others. Raises DataError if nothing is found."""
        self.survey = index_folder(folder, [name for names_ in _PARTS.values() for name in names_], names)
        self._bounds = (min_tokens, max_tokens)
        self._seed = f"{seed}-{'validation' if validation else 'train'}"
        self.items: dict[str, int] = {}

        def part(*names: str) -> list[Any]:
            items: list[Any] = []
            for name in names:
                rows = read_dataset(name, self.survey.taken.get(name, []), folder)
                self.items |= {name: len(rows)} if rows else {}
                items += checked(name, rows)
            return split_held_out(items, validation)

        self._squad, self._puzzles, self._stories = (part(*_PARTS[name]) for name in ("squad", "multihop", "stories"))
        self._papers, self._meetings = part(*_PARTS["papers"]), part(*_PARTS["meetings"])
        self._dialogues, self._exam = part(*_PARTS["dialogues"]), part(*_PARTS["exam"])
        self._prose, self._code = part(*_PARTS["prose"]), part(*_PARTS["code"])
        self._python = split_held_out(read_standard_library(), validation)
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
            asked.append(ask_to_repeat(rng, context))
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
            name: ", ".join(
                f"{PUBLIC_DATASETS[part].title} ({PUBLIC_DATASETS[part].licence})"
                for part in _PARTS[name]
                if part in sets
            )
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
        asked = draw_questions(rng, packed, 2)
        return "\n\n".join(p.text for p in packed), [*asked, ask_to_repeat(rng, packed[-1].text)]

    def _multihop_sample(self, rng: random.Random, items: Sequence[MultiHopQuestion], tokens: float):
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
            start = window_start_around(rng, passage.text, size, passage.text.find(anchor[1]))
            text = passage.text[start : start + size]
            near = [qa for qa in questions if qa[1] in text and qa != anchor]
            asked = [anchor, *rng.sample(near, min(3, len(near)))]
            return surround_with_texts(rng, text, items, size), [
                Continuation(question, answer) for question, answer in asked
            ]
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

    def _exam_sample(self, rng: random.Random, items: Sequence[ShortQuestion], tokens: float):
        shots = pack(rng, items, tokens * CHARS_PER_TOKEN, lambda qa: len(qa.question) + len(qa.answer) + 20)
        asked = rng.choice(items)
        context = "\n\n".join(f"Question: {q}\nAnswer: {a}" for q, a, _ in shots)
        return context, [Continuation(None, f"\n\nQuestion: {asked.question}\nAnswer: {asked.answer}")]

    def _code_sample(self, rng: random.Random, items: Sequence[Passage], tokens: float):
        texts = [f"{p.title}\n{p.text}" for p in rng.sample(items, min(3 + int(tokens) // 2000, len(items)))]
        return split_to_continue(rng, texts, int(tokens * CODE_CHARS_PER_TOKEN))

    def _facts_sample(self, rng: random.Random, items: Sequence[Passage], tokens: float):
        size = tokens * CHARS_PER_TOKEN
        text = random_window(rng, "\n".join(gather(rng, items, size, 2)), size)
        facts = [make_fact(rng) for _ in range(rng.choice([1, 2, 4, 8]))]
        asked = [Continuation(question, answer) for _, question, answer in facts[:4]]
        return insert_sentences(rng, text, [sentence for sentence, _, _ in facts]), asked


def split_held_out(items: Sequence[T], validation: bool) -> list[T]:
    """The items that training never sees, or the others: decided by what each says, so by no order and no file."""
    chosen = [item for item in items if _held_out(item) == validation]
    # A handful of texts may all have fallen on one side: then the first one alone is held out.
    if len(items) > 1 and len(chosen) in (0, len(items)):
        chosen = list(items[:1] if validation else items[1:])
    return chosen


def _held_out(item: Any) -> bool:
    digest = hashlib.blake2b(item_key(item).encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "big") % _VALIDATION_SHARE == 0


LOOM_RATIOS = {"hotpotqa": 30, "multi_news": 20, "the_stack": 20, "squad": 10, "trec": 10, "mmlu": 5, "narrativeqa": 5}
_AGAIN = 50  # candidates a wanted sample at most, where items serve again
_MARGIN = 0.04  # of the bounds: lengths are estimated before they are counted
_NEXT_CHARS = 340  # of code to complete

ContextAndAnswer = tuple[str, Continuation]


class _Draw(NamedTuple):
    """What a sample is made from: the item, all of its set, and the characters to reach (None: as it is)."""

    rng: random.Random
    item: Any
    items: Sequence[Any]
    size: float | None

    def more(self, least: int, length: Callable[[Any], int], room: float) -> list[Any]:
        """Other items: `least` where the recipe is literal, else as many as fit into `room`."""
        if self.size is None:
            return self.rng.sample(self.items, min(least, len(self.items)))
        drawn: list[Any] = []
        for _ in range(len(self.items)):
            item = self.rng.choice(self.items)
            room -= length(item)
            if room < 0:
                break
            drawn.append(item)
        return drawn


class Loom:
    """Candidates of each source by number, functions of (seed, source, number) alone."""

    def __init__(
        self,
        items: dict[str, list[Any]],
        chars: dict[str, float],
        bounds: tuple[int, int],
        seed: int,
        literal: bool = False,
    ):
        """`items` of each source; `chars` a token of each; `bounds` are the lengths to reach, in tokens."""
        self._items, self._chars, self._seed, self._literal = items, chars, seed, literal
        self._bounds = (math.log(bounds[0] * (1 + _MARGIN)), math.log(bounds[1] * (1 - _MARGIN)))
        self._orders = {
            name: random.Random(f"{seed}-{name}").sample(range(len(listed)), len(listed))
            for name, listed in items.items()
        }

    def shares(self) -> dict[str, float]:
        """Of all samples, the share of each source."""
        return {name: ratio / sum(LOOM_RATIOS.values()) for name, ratio in LOOM_RATIOS.items()}

    def candidates(self, source: str, wanted: int) -> int:
        """How many candidates `source` has for `wanted` samples: read as they are, items serve once."""
        items = len(self._items[source])
        return items if self._literal else min(1, items) * wanted * _AGAIN

    def candidate(self, source: str, number: int) -> Sample:
        """Candidate `number` of `source`; its length is to be counted."""
        rng = random.Random(f"{self._seed}-{source}-{number}")
        items, order = self._items[source], self._orders[source]
        size = None if self._literal else math.exp(rng.uniform(*self._bounds)) * self._chars[source]
        context, asked = _TELLERS[source](_Draw(rng, items[order[number % len(items)]], items, size))
        return Sample(source, context, (asked,))


def _hotpot(draw: _Draw) -> ContextAndAnswer:
    puzzle: MultiHopQuestion = draw.item
    passages = list(puzzle.passages)
    room = (draw.size or 0) - sum(map(_length, passages))
    if draw.size is not None:
        seen = {p.text for p in passages}
        # Paragraphs come twice where questions share them: more is drawn than there is room for.
        for more in draw.more(0, lambda more: sum(map(_length, more.passages)) // 2, room):
            for passage in more.passages:
                if passage.text not in seen and room >= _length(passage):
                    room -= _length(passage)
                    passages.append(passage)
                    seen.add(passage.text)
    draw.rng.shuffle(passages)
    return "\n\n".join(f"{p.title}\n{p.text}" for p in passages), Continuation(puzzle.question, puzzle.answer)


def _length(passage: Passage) -> int:
    return len(passage.text) + len(passage.title) + 3


def _news(draw: _Draw) -> ContextAndAnswer:
    event: Passage = draw.item
    question, summary = event.questions[0]
    room = (draw.size or 0) - len(event.text)
    articles = draw.more(0, lambda article: len(article.text), room)
    articles = [article for article in articles if article is not event]
    if not articles:
        return event.text, Continuation(question, summary)
    before = draw.rng.randint(0, len(articles))
    texts = [article.text for article in (*articles[:before], event, *articles[before:])]
    opening = " ".join(event.text.split()[:12])
    asked = f'Write a one-page summary of the news about the event whose first article starts with: "{opening}"'
    return "\n\n".join(texts), Continuation(asked, summary)


def _stack(draw: _Draw) -> ContextAndAnswer:
    file: Passage = draw.item
    language = file.title.rsplit(".", 1)[-1]
    alike = [source for source in draw.items if source.title.rsplit(".", 1)[-1] == language and source is not file]
    alike = alike or list(draw.items)
    if draw.size is None:
        before = draw.rng.sample(alike, min(2, len(alike)))
        whole = "\n\n".join(f"{source.title}\n{source.text}" for source in (*before, file))
        cut = max(1, len(whole) - _NEXT_CHARS)
        return whole[:cut], Continuation(None, whole[cut:])
    chosen = [file]
    while len(chosen) < 3 or (sum(len(source.text) for source in chosen) < draw.size and len(chosen) < 64):
        chosen.append(draw.rng.choice(alike))
    texts = [f"{source.title}\n{source.text}" for source in reversed(chosen)]
    context, asked = split_to_continue(draw.rng, texts, int(draw.size))
    return context, asked[0]


def _squad(draw: _Draw) -> ContextAndAnswer:
    asked = [p for p in (draw.item, *draw.more(8, _shot_length, (draw.size or 0) - len(draw.item.text))) if p.questions]
    shots = [_squad_shot(passage, *draw.rng.choice(passage.questions)) for passage in asked[1:]]
    question, answer = draw.rng.choice(draw.item.questions)
    context = "\n\n".join([*shots, f"Passage: {draw.item.text}"])
    return context, Continuation(f"Question: {question}\nAnswer:", answer)


def _squad_shot(passage: Passage, question: str, answer: str) -> str:
    return f"Passage: {passage.text}\nQuestion: {question}\nAnswer: {answer}"


def _shot_length(passage: Passage) -> int:
    return len(passage.text) + (len(passage.questions[0][0]) if passage.questions else 0) + 50


def _classes(word: str) -> Callable[[_Draw], ContextAndAnswer]:
    """Few shots of short questions; `word` stands before an answer."""

    def tell(draw: _Draw) -> ContextAndAnswer:
        item: ShortQuestion = draw.item
        length = len(f"Question: \n{word}: \n\n")
        shots = draw.more(
            5, lambda shot: len(shot.question) + len(shot.answer) + length, (draw.size or 0) - len(item.question)
        )
        context = "\n\n".join(f"Question: {shot.question}\n{word}: {shot.answer}" for shot in shots if shot is not item)
        return context, Continuation(f"Question: {item.question}\n{word}:", item.answer)

    return tell


def _story(draw: _Draw) -> ContextAndAnswer:
    story: Passage = draw.item
    question, answer = draw.rng.choice(story.questions)
    if draw.size is None:
        return story.text, Continuation(question, answer)
    size = int(draw.size)
    start = window_start_around(draw.rng, story.text, size, _mention(story.text, f"{question} {answer}"))
    parts = [story.text[start : start + size]]
    parts += [tale.text for tale in draw.more(0, lambda tale: len(tale.text), size - len(parts[0]) - 2)]
    return "\n\n".join(parts), Continuation(question, answer)


def _mention(text: str, words: str) -> int:
    """Where the longest word of a question and its answer first stands: answers are seldom words of the story."""
    for word in sorted({word.strip(".,?!\"'") for word in words.split()}, key=lambda word: (-len(word), word)):
        if (start := text.find(word)) >= 0:
            return start
    return -1


_TELLERS: dict[str, Callable[[_Draw], ContextAndAnswer]] = {
    "hotpotqa": _hotpot,
    "multi_news": _news,
    "the_stack": _stack,
    "squad": _squad,
    "trec": _classes("Type"),
    "mmlu": _classes("Answer"),
    "narrativeqa": _story,
}


def is_usable(name: str, item: Any) -> bool:
    """Whether an item of the set `name` can be asked about."""
    if isinstance(item, MultiHopQuestion):
        return bool(item.needed and item.answer)
    if isinstance(item, Passage):
        return bool(item.text.strip()) and (name == "the_stack" or bool(item.questions))
    return bool(item.question and item.answer)
