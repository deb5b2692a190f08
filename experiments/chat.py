"""Endless chats in bounded memory: what is still known of the text and the first turns, and the time of a token.

python -m experiments.chat --model NAME    (writes chat-NAME.json)

Every chat is about an invented text in which facts are hidden, and begins with turns that tell a fact each. Small talk
follows, then all facts are asked for. Methods evict while the chat goes on (`decode_eviction`), within the bytes that
`--memory` leaves of the full 16-bit cache of the text alone. The full cache holds everything; its answers are the aim.
"""

import random
import time
from pathlib import Path
from typing import Any

import torch

from experiments.bootstrap import bootstrap
from experiments.common import SUBJECT, Subject, parse_options, run_samples, subject_of
from experiments.instructions import invent
from lkv.context.chat import Chat
from lkv.context.compression import compress
from lkv.hf.attention import patch_attention
from lkv.methods.registry import FULL
from lkv.methods.targets import KVShape
from lkv.training.data.packing import insert_sentences
from lkv.utils.prompts import encode_context

METHODS = ["lkv", "streaming-llm", FULL]
_THINGS = "mill boathouse chapel tower bakery cellar barn library".split()
_TOWNS = ("Northam", "Selby", "Rockport", "Ashford")
_TOPICS = "rain bread boats trees music stones clocks birds rivers shoes".split()
_EDGE = 20  # turns whose time is compared: the first ones after the facts, and the last ones
Sample = dict[str, Any]


def main() -> None:
    options = parse_options(
        __doc__, "chat", **SUBJECT, methods=METHODS, sentences=60, turns=200, memory=0.25, chats=2, seed=0, out=Path,
    )  # fmt: skip
    subject = subject_of(options, "chat")
    cases = {f"{number}-{name}": (number, name) for number in range(options.chats) for name in options.methods}
    run_samples("chat", options, cases, lambda *case: measure(subject, options, *case), summarise, subject, "chats")


@torch.no_grad()
def measure(subject: Subject, options: Any, number: int, name: str) -> Sample:
    """Which facts are found at the end, the most bytes held, and the time of a token in first and last turns."""
    source = random.Random(options.seed * 100_000 + number)
    places = source.sample([(thing, town) for thing in _THINGS for town in _TOWNS], 8)
    keys = [str(source.randint(100, 999)) for _ in places]
    statements = [f"In {b}, the number of the {a} key is {key}." for (a, b), key in zip(places, keys, strict=True)]
    text = insert_sentences(source, invent(source, options.sentences), statements[:4])
    spec, tokens = patch_attention(subject.model).spec, len(encode_context(subject.tokenizer, text))
    full_nbytes = KVShape(spec.layers * spec.kv_heads, spec.head_dim, 2).reference_nbytes(tokens)
    bound: dict[str, Any] = {"method": name, "memory": int(options.memory * full_nbytes), "decode_eviction": True}
    bound = {"retention": 1.0} if name == FULL else bound
    context = compress(subject.model, subject.tokenizer, text, policy=subject.policy, **bound)
    chat, seconds, most = Chat(context), [], 0
    for sentence in statements[4:]:
        chat.ask(f"Remember this: {sentence}", 8)
    for turn in range(options.turns):
        started, tokens = time.process_time(), chat.cache.get_seq_length()
        chat.ask(f"{turn}: say something short about {_TOPICS[turn % len(_TOPICS)]}.", 12)
        seconds.append((time.process_time() - started) / (chat.cache.get_seq_length() - tokens))
        most = max(most, chat.nbytes())
    sample = {"method": name, "held": most, "text": full_nbytes, "tokens": chat.cache.get_seq_length()}
    sample["seconds"] = [sum(part) / _EDGE for part in (seconds[:_EDGE], seconds[-_EDGE:])]
    answers = [chat.ask(f"What is the number of the {thing} key in {town}?", 24) for thing, town in places]
    return sample | {"hits": [key in answer for key, answer in zip(keys, answers, strict=True)]}


def summarise(samples: list[Sample]) -> list[dict]:
    """Rows by method and by where the facts were told."""
    rows = []
    for method in dict.fromkeys(sample["method"] for sample in samples):
        own = [sample for sample in samples if sample["method"] == method]
        times = {"last_by_first": sum(s["seconds"][1] for s in own) / sum(s["seconds"][0] for s in own)}
        sizes = {"held": max(s["held"] for s in own), "full_nbytes": own[0]["text"]}
        sizes["tokens"] = sum(s["tokens"] for s in own) / len(own)
        for place, part in (("text", slice(4)), ("first turns", slice(4, None))):
            share = bootstrap([[float(hit) for hit in sample["hits"][part]] for sample in own])
            row: dict[str, Any] = {"method": method, "facts in the": place, **share._asdict()}
            rows.append(row | {"unit": "share of facts found at the end"} | sizes | times)
            print(f"{method:14} {place:12} {share.value:.2f} {sizes} {times}")
    return rows


if __name__ == "__main__":
    main()
