"""Instructions kept: checkable instructions before a long text, the question after compression.

python -m experiments.instructions --model NAME    (writes instructions-NAME.json)

Every prompt is an invented text from a seed after two instructions that a few lines of code can check. Each method
compresses it with and without `protect`, which names the instructions. What counts is the share of instructions
followed, and, of those that the full cache follows, the share that is still followed. A control without instructions
says how often an answer meets them by itself. Budgets are shares of the bytes of a 16-bit cache. The demo model is
too small: it follows none of these with its full cache.
"""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.bootstrap import bootstrap, named_interval
from experiments.common import SUBJECT, Subject, parse_options, run_cases, subject_of
from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress_ids
from lkv.context.context import Context
from lkv.context.protection import protected_tokens
from lkv.errors import LkvError
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.registry import FULL
from lkv.methods.request import CompressionRequest, resolve_method
from lkv.utils.prompts import encode_context

METHODS = ["lkv", "kvzip", "snapkv"]
QUESTION = "What is the text about?"
LENGTH = 16  # new tokens of an answer, enough for every check
Sample = dict[str, Any]

_NAMES = ("Ada Brooks", "Tomas Lindgren", "Mira Okafor", "Jonas Petit", "Edda Voss", "Ivo Marek", "Lena Castell")
_TRADES = ("baker", "joiner", "weaver", "glazier", "tanner", "miller", "cooper", "potter")
_TOWNS = ("Hallow Bay", "Stonereach", "Eastmere", "Willowford", "Coldwater", "Larkhill")
_GOODS = ("a copper kettle", "three oak chairs", "a bolt of blue cloth", "two panes of glass", "a sack of rye")


_ARTICLES = {
    "Spanish": re.compile(r"\b(?:el|la|los|las|un|una|de|del|en)\b", re.IGNORECASE),
    "French": re.compile(r"\b(?:le|la|les|un|une|de|du|des|dans)\b", re.IGNORECASE),
}


class Instruction(NamedTuple):
    """An instruction, one of `words` in it, and whether an answer follows it."""

    text: str
    words: Sequence[str]
    is_followed: Callable[[str, str], bool]


INSTRUCTIONS = {
    "greeting": Instruction(
        "Begin your answer with the words {word}.", ("Dear reader", "Dear friends", "Good evening", "My lady"),
        lambda answer, word: answer.lower().startswith(word.lower()),
    ),
    "list": Instruction("Answer with a numbered list.", ("",), lambda answer, _: answer.startswith("1.")),
    "JSON": Instruction(
        "Answer with a JSON object.", ("",), lambda answer, _: answer.lstrip("`json\n ").startswith("{")
    ),
    "key": Instruction(
        "Use the key {word}.", ("summary", "topic", "gist", "theme"), lambda answer, word: f'"{word}"' in answer.lower()
    ),
    "language": Instruction(
        "Answer in {word}.", ("Spanish", "French"), lambda answer, word: len(_ARTICLES[word].findall(answer)) >= 2
    ),
}  # fmt: skip
SETS = (("JSON", "key"), ("greeting", "list"), ("list", "language"), ("greeting", "language"))


def main() -> None:
    options = parse_options(
        __doc__, "instructions", **SUBJECT, methods=METHODS, memory=[0.1, 0.05], prompts=3, sentences=20, seed=0,
        out=Path,
    )  # fmt: skip
    subject = subject_of(options, "instructions")
    cases = {f"{number}-{'-'.join(names)}": (number, names) for number in range(options.prompts) for names in SETS}

    def measure_case(number: int, names: Sequence[str]) -> Sample:
        return measure(subject, options, number, names)

    def rows_of_samples(samples: dict[str, Sample]) -> list[dict]:
        return [{"model": subject.name, "dtype": options.dtype, **row} for row in summarise(samples.values())]

    run_cases(
        "experiments.instructions", options, "instructions", cases, measure_case, rows_of_samples, subject.policy,
        ("prompts",),
    )  # fmt: skip


def invent(random_source: random.Random, sentences: int) -> str:
    """A text of so many sentences about people who never were."""

    def sentence() -> str:
        name, trade, town, goods = (random_source.choice(words) for words in (_NAMES, _TRADES, _TOWNS, _GOODS))
        forms = (
            f"{name} worked as a {trade} in {town} for {random_source.randint(2, 40)} years.",
            f"In the spring of {random_source.randint(1801, 1899)} {name} sold {goods} to the {trade} of {town}.",
            f"The market of {town} opened at {random_source.randint(5, 11)} o'clock, and {name} brought {goods}.",
            f"A letter from {town} said that the {trade} had lost {goods} on the road.",
        )
        return random_source.choice(forms)

    return " ".join(sentence() for _ in range(sentences))


@torch.no_grad()
def measure(subject: Subject, options: Any, number: int, names: Sequence[str]) -> Sample:
    """Which instructions each method follows at each budget, with and without protection."""
    model, tokenizer = subject.model, subject.tokenizer
    source = random.Random(options.seed * 100_000 + number)
    words = [source.choice(INSTRUCTIONS[name].words) for name in names]
    body = invent(source, options.sentences)
    orders = [INSTRUCTIONS[name].text.format(word=word) for name, word in zip(names, words, strict=True)]
    text = f"Follow these instructions in every answer: {' '.join(orders)}\n\nText: {body}"
    ids, spans = encode_context(tokenizer, text), protected_tokens(tokenizer, text, orders)
    prompt = read_prompt(model, torch.tensor([ids]), queries=True)

    def follows(cache: RaggedCache) -> list[bool]:
        cache.fill(prompt)
        cache.history.ids = torch.tensor([ids])
        answer = Context(model, tokenizer, ids, cache).ask(QUESTION, LENGTH)
        return [INSTRUCTIONS[name].is_followed(answer, word) for name, word in zip(names, words, strict=True)]

    control = compress_ids(model, tokenizer, encode_context(tokenizer, body), CompressionRequest(method=FULL)).ask(
        QUESTION, LENGTH
    )
    rows = [("none", 1.0, False, [INSTRUCTIONS[n].is_followed(control, w) for n, w in zip(names, words, strict=True)])]
    rows.append((FULL, 1.0, False, follows(RaggedCache(model, method="knorm", retention=1.0))))
    for name in options.methods:
        selector = None
        for memory in options.memory:
            for protected in ([], spans):
                request = CompressionRequest(
                    method=name, memory=memory, policy=subject.policy, protected=tuple(protected)
                )
                method = resolve_method(request, model, tokenizer)
                # A second pass over the text serves all budgets.
                selector = selector or method.selector.for_prompt(ids, prompt)
                method = replace(method, selector=selector).for_prompt(ids, prompt)
                rows.append((name, memory, bool(protected), follows(RaggedCache(model, method=method))))
    return {"names": list(names), "tokens": len(ids), "protected": len(spans), "rows": rows}


def summarise(samples: Iterable[Sample]) -> list[dict]:
    """Rows by method, budget and protection: the share followed, and of those that the full cache follows."""
    samples = list(samples)
    if not any(any(sample["rows"][1][3]) for sample in samples):
        raise LkvError("the full cache follows none of the instructions; measure a larger model.")
    rows = []
    for index, (method, memory, is_protected, _) in enumerate(samples[0]["rows"]):
        followed = [[float(done) for done in sample["rows"][index][3]] for sample in samples]
        full = [sample["rows"][1][3] for sample in samples]
        kept = [
            [f for f, own in zip(group, base, strict=True) if own] for group, base in zip(followed, full, strict=True)
        ]
        row: dict[str, Any] = {"method": method, "memory": memory, "protect": is_protected}
        row |= {"tokens": round(sum(sample["tokens"] for sample in samples) / len(samples))}
        row |= {"protected": round(sum(sample["protected"] for sample in samples) / len(samples))}
        share, mean = bootstrap(followed), bootstrap([group for group in kept if group])
        row |= named_interval("followed", share) | {"instructions": share.n}
        rows.append({**row, **mean._asdict(), "unit": "share of the instructions that the full cache follows"})
        print(
            f"{method:8} memory {memory:4} protect {is_protected!s:5} kept {mean.value:.3f} followed {share.value:.3f}"
        )
    return rows


if __name__ == "__main__":
    main()
