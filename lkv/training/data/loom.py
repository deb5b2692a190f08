"""Loom, the paper's training data (App. C.2): seven public sets in its ratios.

The table cannot be met as it stands: 5-shot TREC has about 130 tokens, 8-shot SQuAD 1,700 and HotpotQA's ten paragraphs
1,400, where only samples from 2,000 tokens on are kept. So there are two recipes. "loom" packs: more shots, paragraphs
of other questions and more files, until a drawn length is reached. "loom-literal" writes the table's samples and leaves
it to the filter what remains of them.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lkv.training.data.packing import split_to_continue, window_start
from lkv.training.data.sample import Continuation, Sample
from lkv.training.data.sources import Asked, Passage, Puzzle

RATIOS = {"hotpotqa": 30, "multi_news": 20, "the_stack": 20, "squad": 10, "trec": 10, "mmlu": 5, "narrativeqa": 5}
_AGAIN = 50  # candidates a wanted sample at most, where items serve again
_MARGIN = 0.04  # of the bounds: lengths are estimated before they are counted
_NEXT_CHARS = 340  # of code to complete

Told = tuple[str, Continuation]


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
        return {name: ratio / sum(RATIOS.values()) for name, ratio in RATIOS.items()}

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


def _hotpot(draw: _Draw) -> Told:
    puzzle: Puzzle = draw.item
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


def _news(draw: _Draw) -> Told:
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


def _stack(draw: _Draw) -> Told:
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


def _squad(draw: _Draw) -> Told:
    asked = [p for p in (draw.item, *draw.more(8, _shot_length, (draw.size or 0) - len(draw.item.text))) if p.questions]
    shots = [_squad_shot(passage, *draw.rng.choice(passage.questions)) for passage in asked[1:]]
    question, answer = draw.rng.choice(draw.item.questions)
    context = "\n\n".join([*shots, f"Passage: {draw.item.text}"])
    return context, Continuation(f"Question: {question}\nAnswer:", answer)


def _squad_shot(passage: Passage, question: str, answer: str) -> str:
    return f"Passage: {passage.text}\nQuestion: {question}\nAnswer: {answer}"


def _shot_length(passage: Passage) -> int:
    return len(passage.text) + (len(passage.questions[0][0]) if passage.questions else 0) + 50


def _classes(word: str) -> Callable[[_Draw], Told]:
    """Few shots of short questions; `word` stands before an answer."""

    def tell(draw: _Draw) -> Told:
        item: Asked = draw.item
        length = len(f"Question: \n{word}: \n\n")
        shots = draw.more(
            5, lambda shot: len(shot.question) + len(shot.answer) + length, (draw.size or 0) - len(item.question)
        )
        context = "\n\n".join(f"Question: {shot.question}\n{word}: {shot.answer}" for shot in shots if shot is not item)
        return context, Continuation(f"Question: {item.question}\n{word}:", item.answer)

    return tell


def _story(draw: _Draw) -> Told:
    story: Passage = draw.item
    question, answer = draw.rng.choice(story.questions)
    if draw.size is None:
        return story.text, Continuation(question, answer)
    size = int(draw.size)
    start = window_start(draw.rng, story.text, size, _mention(story.text, f"{question} {answer}"))
    parts = [story.text[start : start + size]]
    parts += [tale.text for tale in draw.more(0, lambda tale: len(tale.text), size - len(parts[0]) - 2)]
    return "\n\n".join(parts), Continuation(question, answer)


def _mention(text: str, words: str) -> int:
    """Where the longest word of a question and its answer first stands: answers are seldom words of the story."""
    for word in sorted({word.strip(".,?!\"'") for word in words.split()}, key=lambda word: (-len(word), word)):
        if (start := text.find(word)) >= 0:
            return start
    return -1


_TELLERS: dict[str, Callable[[_Draw], Told]] = {
    "hotpotqa": _hotpot,
    "multi_news": _news,
    "the_stack": _stack,
    "squad": _squad,
    "trec": _classes("Type"),
    "mmlu": _classes("Answer"),
    "narrativeqa": _story,
}


def usable(name: str, item: Any) -> bool:
    """Whether an item of the set `name` can be asked about."""
    if isinstance(item, Puzzle):
        return bool(item.needed and item.answer)
    if isinstance(item, Passage):
        return bool(item.text.strip()) and (name == "the_stack" or bool(item.questions))
    return bool(item.question and item.answer)
