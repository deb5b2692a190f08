"""Mixture, the recipe `wide`: samples of many kinds of text, code and public sets.

Short items are packed until a drawn length is reached. Some samples have instructions that their answers obey.
A sample depends only on the seed and its number, so that a resumed run sees the same samples.
"""

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from lkv.errors import DataError
from lkv.training.data.decontamination import NgramOverlap
from lkv.training.data.documents import (
    Item,
    ItemT,
    Meeting,
    MultiHopQuestion,
    Passage,
    ShortQuestion,
    item_texts,
    read_dataset,
    read_own_articles,
    read_own_meetings,
    read_own_stories,
    read_python_manual,
    read_standard_library,
    split_held_out,
    split_text,
)
from lkv.training.data.instructions import INSTRUCTED_SHARE, draw_instructions, insert_instructions, obey
from lkv.training.data.packing import (
    CHARS_PER_TOKEN,
    CODE_CHARS_PER_TOKEN,
    Lengths,
    ask_to_repeat,
    draw_questions,
    fill_continuations,
    find_answer,
    gather,
    insert_sentences,
    make_fact,
    pack,
    random_window,
    split_to_continue,
    surround_with_texts,
    window_start_around,
)
from lkv.training.data.public_datasets import PUBLIC_DATASETS, DatasetIndex, digest_of, index_folder
from lkv.training.data.samples import Continuation, Sample

ContextAndAnswers = tuple[str, list[Continuation]]

BUILTIN_TEXTS: dict[
    str, tuple[str, str, Callable[[], Iterable[Item]]]
] = {  # available in every installation, from Python and LKV: title, licence and reader
    "python": ("Python standard library", "PSF", read_standard_library),
    "manual": ("Python's language reference in pydoc_data", "PSF", read_python_manual),
    "tales": ("stories, letters and essays of LKV's own", "Apache-2.0", read_own_stories),
    "talks": ("meetings of LKV's own", "Apache-2.0", read_own_meetings),
    "articles": ("articles of LKV's own", "Apache-2.0", read_own_articles),
}
BUILTIN_SOURCES = tuple(BUILTIN_TEXTS)
_ADDED_SOURCES = {*BUILTIN_SOURCES, "facts"}  # sources other than the caller's texts
OWN_SOURCES = {
    **{name: f"{title} ({licence})" for name, (title, licence, _) in BUILTIN_TEXTS.items()},
    "prose": "texts of the caller",
    "facts": "invented facts in texts of the other sources",
}
_CHARS_FOR_HALF = 100_000  # length of own texts from which they make up at least half of the samples


class Mixture:
    """Samples of every source: a folder's public sets under their official names, own data, text and code.

    At least half of the samples come from the folder and the texts, fewer if these are short.

    Args:
        folder: Where the data is, if anywhere.
        lengths: The approximate range of context lengths in tokens.
        seed: Seed of the samples.
        texts: Documents in addition to the folder.
        builtin: The sources of `BUILTIN_SOURCES` to add.
        overlap: Drops items that overlap with its evaluated texts.
        skip_unknown: Skip data in the folder that is not recognised or cannot be read.

    Raises:
        DataError: There is no training data, or, unless `skip_unknown`, unusable data.
    """

    def __init__(
        self,
        folder: Path | None,
        lengths: tuple[int, int],
        seed: int = 0,
        *,
        texts: Sequence[str] = (),
        builtin: Sequence[str] = ("python",),
        overlap: NgramOverlap | None = None,
        skip_unknown: bool = False,
    ):
        self.index = DatasetIndex(Path(), {}, {})
        if folder is not None:
            sets_in_use = [name for _, _, sets in _SOURCES.values() for name in sets]
            self.index = index_folder(folder, sets_in_use, skip_unknown)
        self._lengths, self._texts, self._overlap = Lengths(*lengths), tuple(texts), overlap
        self.item_counts: dict[str, int] = {}
        self.builtin_counts: dict[str, int] = {}
        items: dict[str, list[Item]] = {}
        unreadable: dict[Path, str] = {}
        for source, (_, _, sets) in _SOURCES.items():
            items[source] = []
            for name in sets:
                paths = self.index.used.get(name, [])
                rows = read_dataset(name, paths, self.index.folder, unreadable if skip_unknown else None)
                self.item_counts |= {name: len(rows)} if rows else {}
                items[source] += self._clean(name, rows)
        self.index = self.index.skip(unreadable)
        items["prose"] += self._clean("texts", [piece for text in texts for piece in split_text("", text)])
        for name in builtin:
            own = list(BUILTIN_TEXTS[name][2]())
            self.builtin_counts[name] = len(own)
            items[name] = self._clean(name, own)
        own_items = (item for source, group in items.items() if source not in BUILTIN_SOURCES for item in group)
        self.own_chars = sum(len(text) for item in own_items for text in item_texts(item))
        self._all_items = items
        self._select(f"{seed}-train", is_held_out=False)

    def _clean(self, name: str, items: list[ItemT]) -> list[ItemT]:
        """Return the items that do not overlap with evaluated texts."""
        return self._overlap.clean(name, items) if self._overlap else items

    def held_out(self, seed: int = 0) -> Self:
        """Return the mixture of the items that training never sees. Raises DataError if there are none."""
        mixture = copy.copy(self)
        mixture._select(f"{seed}-validation", is_held_out=True)
        return mixture

    def with_lengths(self, lengths: Lengths) -> "Mixture":
        """Return the same mixture with contexts of other lengths."""
        mixture = copy.copy(self)
        mixture._lengths = lengths
        return mixture

    def _select(self, seed: str, is_held_out: bool) -> None:
        """Set the seed, the split of the items, and the sources' weights."""
        self._seed = seed
        items = {source: split_held_out(group, is_held_out) for source, group in self._all_items.items()}
        prose = [*items["prose"], *items["stories"], *items["papers"]] or items["squad"]
        # Facts have a large weight: hidden only in short prose, these texts would be in most samples.
        is_enough = prose and self.own_chars >= _CHARS_FOR_HALF
        items["facts"] = prose if is_enough else [*prose, *items.get("manual", []), *items.get("tales", [])]
        if not any(texts for source, texts in items.items() if source != "python"):
            if self.item_counts:
                raise DataError(
                    f"{self.index.folder} holds too little to keep some apart for evaluation; give more texts, or "
                    "longer ones."
                )
            raise DataError(
                f"{self.index.folder} has no data to train on; put .txt, .md or source files there, or the data "
                "sets that the documentation of `lkv train` names."
            )
        self._items = {source: items[source] for source in _SOURCES if items.get(source)}
        self.weights = _balance_weights(self.names, 0.5 * min(1.0, self.own_chars / _CHARS_FOR_HALF))

    def sample(self, index: int, continuations: int, tokens_a_continuation: int = 0) -> Sample:
        """Draw sample number `index`; other arguments as in `fill_continuations`."""
        rng = random.Random(f"{self._seed}-{index}")
        source = rng.choices(self.names, weights=list(self.weights.values()))[0]
        tokens = self._lengths.draw(rng)
        context, answers = _SOURCES[source][1](rng, self._items[source], tokens)
        own_rng = random.Random(f"{self._seed}-{index}-instructions")  # other samples do not depend on instructions
        instructions = draw_instructions(own_rng) if own_rng.random() < INSTRUCTED_SHARE else []
        if instructions:
            context, answers = insert_instructions(own_rng, context, answers, instructions)
        answers = fill_continuations(rng, context, answers, tokens, continuations, tokens_a_continuation)
        return Sample(source, context, tuple(obey(instructions, answer) for answer in answers))

    @property
    def lines(self) -> list[str]:
        """Lines that list each file as used or skipped."""
        return self.index.lines()

    @property
    def digest(self) -> str:
        """The digest of the files and texts in use, the sources' weights, and the evaluated files."""
        files = digest_of(path for paths in self.index.used.values() for path in paths)
        evaluated = self._overlap.files.values() if self._overlap else ()
        parts = [files, json.dumps(self.weights), *self._texts, *evaluated]
        return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:16]

    @property
    def names(self) -> list[str]:
        """Names of the sources in use."""
        return list(self._items)

    @property
    def has_own_texts(self) -> bool:
        """Whether any source is of the caller's own texts."""
        return not {*self.names} <= _ADDED_SOURCES

    @property
    def origins(self) -> dict[str, str]:
        """Sources in use, each with its data sets and their licences."""
        origins = {}
        for source in self.names:
            sets = [PUBLIC_DATASETS[name] for name in _SOURCES[source][2] if name in self.index.used]
            titles = [f"{dataset.title} ({dataset.licence})" for dataset in sets]
            origins[source] = ", ".join(titles) or OWN_SOURCES[source]
        return origins

    @property
    def decontamination(self) -> dict[str, Any] | None:
        """The record of decontamination, for a policy's card; None without decontamination."""
        return self._overlap.card() if self._overlap else None


def _balance_weights(sources: Sequence[str], own_share: float) -> dict[str, float]:
    """Return weights of the sources, scaling down Python's texts and facts until other texts make up `own_share`."""
    weights: dict[str, float] = {name: _SOURCES[name][0] for name in sources}
    others = _ADDED_SOURCES & weights.keys()
    total = sum(weights[name] for name in others)
    own_total = sum(weights.values()) - total
    if own_total and own_total < own_share * (own_total + total):
        scale = own_total * (1 - own_share) / own_share / total
        weights |= {name: weights[name] * scale for name in others}
    return weights


def _squad_sample(rng: random.Random, items: Sequence[Passage], tokens: float) -> ContextAndAnswers:
    packed = pack(rng, items, tokens * CHARS_PER_TOKEN, lambda p: len(p.text))
    answers = draw_questions(rng, packed, 2)
    return "\n\n".join(p.text for p in packed), [*answers, ask_to_repeat(rng, packed[-1].text)]


def _multihop_sample(rng: random.Random, items: Sequence[MultiHopQuestion], tokens: float) -> ContextAndAnswers:
    question = rng.choice(items)
    chosen = [p for i, p in enumerate(question.passages) if i in question.needed]
    others = {p.text: p for i, p in enumerate(question.passages) if i not in question.needed}
    for extra in rng.sample(items, min(len(items), 1 + int(tokens) // 1200)):
        others |= {p.text: p for p in extra.passages if p not in chosen}
    missing = tokens * CHARS_PER_TOKEN - sum(len(p.text) for p in chosen)
    chosen += pack(rng, [*others.values()], missing, lambda p: len(p.text)) if missing > 0 else []
    rng.shuffle(chosen)
    context = "\n\n".join(f"{p.title}\n{p.text}" for p in chosen)
    return context, [Continuation(question.question, question.answer)]


def _document_sample(rng: random.Random, items: Sequence[Passage], tokens: float) -> ContextAndAnswers:
    passage = rng.choice(items)
    size = int(tokens * CHARS_PER_TOKEN)
    pairs = [pair for pair in passage.questions if pair[1] in passage.text] or list(passage.questions)
    if pairs and rng.random() < 0.75:
        anchor = rng.choice(pairs)
        start = window_start_around(rng, passage.text, size, find_answer(passage.text, *anchor))
        text = passage.text[start : start + size]
        near = [pair for pair in pairs if pair[1] in text and pair != anchor]
        answers = [Continuation(*pair) for pair in (anchor, *rng.sample(near, min(3, len(near))))]
        return surround_with_texts(rng, text, items, size, passage.text), answers
    others = gather(rng, items, size - len(passage.text), 0, passage.text)
    return split_to_continue(rng, [*others, passage.text], size)


def _meeting_sample(rng: random.Random, items: Sequence[Meeting], tokens: float) -> ContextAndAnswers:
    meeting = rng.choice(items)
    size = int(tokens * CHARS_PER_TOKEN)
    if meeting.queries and rng.random() < 0.6:
        query, answer, first, _ = rng.choice(meeting.queries)
        text = "\n".join(meeting.turns[max(0, first - rng.randint(0, 8)) :])[:size]
        return text, [Continuation(query, answer)]
    return split_to_continue(rng, ["\n".join(meeting.turns)], size)


def _dialogue_sample(rng: random.Random, items: Sequence[Passage], tokens: float) -> ContextAndAnswers:
    packed = pack(rng, items, tokens * CHARS_PER_TOKEN, lambda p: len(p.text))
    item = rng.choice(packed)
    opening = " ".join(item.text.split()[:12])
    answer = Continuation(f'Summarize the dialogue that starts with: "{opening}"', item.questions[0][1])
    return "\n\n".join(p.text for p in packed), [answer]


def _exam_sample(rng: random.Random, items: Sequence[ShortQuestion], tokens: float) -> ContextAndAnswers:
    shots = pack(rng, items, tokens * CHARS_PER_TOKEN, lambda shot: len(shot.question) + len(shot.answer) + 20)
    item = rng.choice(items)
    context = "\n\n".join(f"Question: {shot.question}\nAnswer: {shot.answer}" for shot in shots)
    return context, [Continuation(None, f"\n\nQuestion: {item.question}\nAnswer: {item.answer}")]


def _code_sample(rng: random.Random, items: Sequence[Passage], tokens: float) -> ContextAndAnswers:
    texts = [f"{p.title}\n{p.text}" for p in rng.sample(items, min(3 + int(tokens) // 2000, len(items)))]
    return split_to_continue(rng, texts, int(tokens * CODE_CHARS_PER_TOKEN))


def _facts_sample(rng: random.Random, items: Sequence[Passage], tokens: float) -> ContextAndAnswers:
    size = tokens * CHARS_PER_TOKEN
    text = random_window(rng, "\n".join(gather(rng, items, size, 2)), size)
    facts = [make_fact(rng) for _ in range(rng.choice([1, 2, 4, 8]))]
    answers = [Continuation(question, answer) for _, question, answer in facts[:4]]
    return insert_sentences(rng, text, [sentence for sentence, _, _ in facts]), answers


# The sources of the mixture: weight, how a sample is drawn, and sets.
_SOURCES: dict[str, tuple[float, Callable[..., ContextAndAnswers], tuple[str, ...]]] = {
    "squad": (18, _squad_sample, ("squad",)),
    "multihop": (10, _multihop_sample, ("hotpotqa", "2wiki", "musique")),
    "stories": (14, _document_sample, ("fairytaleqa", "squality", "own")),
    "papers": (5, _document_sample, ("covidqa",)),
    "meetings": (9, _meeting_sample, ("qmsum",)),
    "dialogues": (3, _dialogue_sample, ("mts_dialog",)),
    "exam": (3, _exam_sample, ("mmlu",)),
    "prose": (5, _document_sample, ("wikitext2", "text")),
    "code": (8, _code_sample, ("the_stack", "code")),
    "python": (10, _code_sample, ()),
    "manual": (8, _document_sample, ()),
    "tales": (14, _document_sample, ()),
    "talks": (9, _meeting_sample, ()),
    "articles": (10, _multihop_sample, ()),
    "facts": (20, _facts_sample, ()),
}
