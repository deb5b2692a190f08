"""Held-out contexts with reference continuations: prose QA, multi-hop QA, stories, meetings, code, needles."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lkv.errors import DataError
from lkv.training.data import documents, packing
from lkv.training.data.samples import Continuation, Sample, tokenize_sample
from lkv.utils import data_files
from lkv.utils.prompts import encode, encode_context, encode_question
from lkv.utils.qa_readers import read_squad

CONTINUATIONS = 4
LONGEST = 160
_DRAWS = 100  # of texts, until one has something to ask
_LONG = 8000  # tokens, beyond which single texts are too short and others go before them
_LONGBENCH = ("narrativeqa", "qasper", "multifieldqa_en", "gov_report", "musique", "2wikimqa")
TASKS = ("prose QA", "multi-hop QA", "stories", "meetings", "code", "needles")

_ADJECTIVES = """absent brave calm distant eager fearless gentle humble icy jolly keen loyal mellow noble odd
    proud""".split()
_ANIMALS = "badger cactus dolphin eagle falcon gecko heron iguana jackal koala lemur magpie newt otter puffin".split()

REFERENCE = 80  # tokens of a target at most, where `cut_targets` is called
Continuations = list[tuple[list[int], int]]  # ids, and how many of them precede the target
Case = tuple[str, list[Continuation]]


def cases_by_length(tasks: Sequence[str], contexts: Mapping[int, int]) -> dict[str, tuple[str, int, int]]:
    """(task, number, tokens) of so many `contexts` of each length and task, the first of all of them first, by name."""
    return {
        f"{task}-{tokens}-{number}": (task, number, tokens)
        for number in range(max(contexts.values()))
        for tokens in sorted(contexts)
        for task in tasks
        if number < contexts[tokens]
    }


def cut_targets(continuations: Continuations) -> Continuations:
    """The same with targets of at most `REFERENCE` tokens."""
    return [(ids[: skip + REFERENCE], skip) for ids, skip in continuations]


def builders(folder: Path) -> dict[str, Callable[[random.Random, int], Case]]:
    """One function a task: (random source, tokens) to a context and its continuations."""
    paragraphs = list(documents.squad_passages(read_squad(folder / "xquad.en.json.gz")))
    puzzles = list(documents.hotpot(data_files.read_records(folder / "hotpot_dev_400.jsonl.gz")))
    tales = list(documents.fairytale(data_files.read_records(folder / "fairytaleqa_val.jsonl.gz")))
    meetings = list(documents.qmsum(data_files.read_records(folder / "qmsum_val.jsonl.gz")))
    sample = folder / "longbench_sample"

    def rows_of(*names: str) -> list[dict[str, Any]]:
        return [row for name in names for row in data_files.read_json_lines(sample / f"{name}.jsonl.gz")]

    code = [row["context"] + row["input"] for row in rows_of("lcc", "repobench-p")]

    def prose_qa(rng: random.Random, tokens: int) -> Case:
        packed = packing.pack(rng, paragraphs, tokens * packing.CHARS_PER_TOKEN, lambda p: len(p.text))
        return "\n\n".join(p.text for p in packed), packing.draw_questions(rng, packed, CONTINUATIONS)

    def multihop_qa(rng: random.Random, tokens: int) -> Case:
        first, second = rng.sample(puzzles, 2)
        needed = [p.passages[i] for p in (first, second) for i in sorted(p.needed)]
        rest = [p.passages[i] for p in (first, second) for i in range(len(p.passages)) if i not in p.needed]
        for more in rng.sample(puzzles, tokens // 1500):
            rest += more.passages
        free_chars = tokens * packing.CHARS_PER_TOKEN - sum(len(p.text) for p in needed)
        chosen = [*needed, *packing.pack(rng, rest, free_chars, lambda p: len(p.text))]
        rng.shuffle(chosen)
        text = "\n\n".join(f"{p.title}\n{p.text}" for p in chosen)
        return text, [Continuation(p.question, p.answer) for p in (first, second)]

    def stories(rng: random.Random, tokens: int) -> Case:
        tale = rng.choice(tales)
        explicit = [qa for qa in tale.questions if qa[1] in tale.text] or list(tale.questions)
        size = int(tokens * packing.CHARS_PER_TOKEN)
        first = rng.choice(explicit)
        start = packing.window_start_around(rng, tale.text, size, tale.text.find(first[1]))
        text = tale.text[start : start + size]
        near = [qa for qa in explicit if qa[1] in text and qa != first]
        questions = [first, *rng.sample(near, min(len(near), CONTINUATIONS - 1))]
        return packing.surround_with_texts(rng, text, tales, size), [Continuation(*question) for question in questions]

    def meeting(rng: random.Random, tokens: int) -> Case:
        chosen = rng.choice([m for m in meetings if m.queries])
        size = int(tokens * packing.CHARS_PER_TOKEN)
        query, answer, first, _ = rng.choice(chosen.queries)
        context = "\n".join(chosen.turns[max(0, first - 3) :])
        text, following = context[:size], context[size : size + 300]
        return text, [Continuation(query, answer), *([Continuation(None, following)] if following else [])]

    def code_lines(rng: random.Random, tokens: int) -> Case:
        size = int(tokens * packing.CODE_CHARS_PER_TOKEN)
        text, (following, _) = packing.split_to_continue(rng, [rng.choice(code)], size)
        return text, [following]

    single = {"prose QA": prose_qa, "multi-hop QA": multihop_qa, "stories": stories, "meetings": meeting}
    return {**single, "code": code_lines, "LongBench text": partial(_longbench_text, rows_of(*_LONGBENCH))}


def _longbench_text(prose: list[dict[str, Any]], rng: random.Random, tokens: int) -> Case:
    size = int(tokens * packing.CHARS_PER_TOKEN)
    for _ in range(_DRAWS):
        row = rng.choice(prose)
        start = rng.randint(0, max(0, len(row["context"]) - size - 400))
        text = row["context"][start : start + size]
        following = row["context"][start + size : start + size + 400]
        continuations = [Continuation(row["input"], row["answers"][0])] if row["input"] else []
        continuations += [Continuation(None, following)] if following else []
        if continuations:  # a whole text without a question has none
            return text, continuations
    raise DataError(f"of {_DRAWS} LongBench texts none has a question or is longer than {tokens:,} tokens.")


class Needles(NamedTuple):
    """A context in which facts are hidden, all of them as (question, answer), and the one to ask for."""

    ids: list[int]
    facts: list[tuple[str, str]]
    question: str
    answer: str


def make_needles(tokenizer: Any, prose: Sequence[str], tokens: int, needles: int, seed: int) -> Needles:
    """`needles` facts at random sentence boundaries of `prose`, about `tokens` tokens in all."""
    rng = random.Random(f"{seed}-{tokens}-{needles}")
    keys = rng.sample([f"{a}-{b}" for a in _ADJECTIVES for b in _ANIMALS], needles)
    numbers = [str(rng.randint(1_000_000, 9_999_999)) for _ in keys]
    sentences = [f"One of the special magic numbers for {k} is: {n}." for k, n in zip(keys, numbers, strict=True)]
    text = rng.choice(prose)
    start = text.find(" ", rng.randint(0, max(0, len(text) - 6 * tokens))) + 1
    # Shorten the prose, never the needles, to the requested length.
    words = text[start : start + 6 * tokens].split(" ")
    free = tokens - len(encode_context(tokenizer, " ".join(sentences)))
    words = words[: int(len(words) * min(1.0, free / len(encode(tokenizer, " ".join(words)))))]
    facts = [
        (f"What is the special magic number for {key} mentioned in the provided text?", number)
        for key, number in zip(keys, numbers, strict=True)
    ]
    question, answer = rng.choice(facts)
    ids = encode_context(tokenizer, packing.insert_sentences(rng, " ".join(words), sentences))
    return Needles(ids, facts, question, answer)


class HeldOut:
    """Cases by task and number, the same for the same seed."""

    def __init__(self, folder: Path, tokenizer: Any, seed: int):
        """`folder` is the evaluation folder; nothing in it is trained on."""
        self._build = builders(folder)
        tales = documents.fairytale(data_files.read_records(folder / "fairytaleqa_val.jsonl.gz"))
        self._prose = [tale.text for tale in tales]
        self._tokenizer, self._seed = tokenizer, seed

    def _prepend_other_texts(self, context: str, task: str, rng: random.Random, tokens: int) -> str:
        """Put other texts of the task before `context`, as many as make `tokens` tokens by the tokenizer."""
        before: list[str] = []
        free = tokens - len(encode(self._tokenizer, context))
        while free > tokens // 20 and len(before) < 100:
            text, _ = self._build[task](rng, tokens)
            ids = encode(self._tokenizer, text)
            before.append(text if len(ids) <= free else text[: len(text) * free // len(ids)])
            free -= len(ids)
        return "\n\n".join([*before, context])

    def case(self, task: str, number: int, tokens: int | None = None) -> tuple[list[int], Continuations]:
        """A context of about `tokens` tokens (default: 1,000 to 2,000) with its continuations."""
        rng = random.Random(f"{self._seed}-{task}-{number}" + (f"-{tokens}" if tokens else ""))
        longest = tokens or 2000
        tokens = tokens or rng.randint(1000, 2000)
        if task == "needles":
            item = make_needles(self._tokenizer, self._prose, tokens, 4, self._seed * 100_000 + number)
            continuations = []
            for question, answer in item.facts:
                prefix = encode_question(self._tokenizer, question)
                target = encode(self._tokenizer, f"The special magic number is {answer}.")
                continuations.append((prefix + target, len(prefix)))
            return item.ids, continuations
        context, targets = self._build[task](rng, tokens)
        if tokens > _LONG:
            context = self._prepend_other_texts(context, task, rng, tokens)
        tokenized = tokenize_sample(Sample(task, context, tuple(targets)), self._tokenizer, longest, LONGEST)
        return tokenized.context, tokenized.continuations
