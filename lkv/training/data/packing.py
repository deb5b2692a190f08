"""Cutting and packing real text to a length: windows, splits, questions, reconstruction requests."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from lkv.training.data.documents import Passage
from lkv.training.data.samples import Continuation

T = TypeVar("T")
CHARS_PER_TOKEN = 3.9
CODE_CHARS_PER_TOKEN = 2.9
_NEXT_CHARS = 340
_REPEAT_WORDS = 54
_PACKED = 256  # items at most in one context


def pack(rng: random.Random, items: Sequence[T], room: float, size: Callable[[T], int]) -> list[T]:
    """Random items until `room` characters are full; at least one."""
    packed: list[T] = []
    for item in rng.sample(items, min(len(items), _PACKED)):
        if packed and room < size(item):
            break
        packed.append(item)
        room -= size(item)
    return packed


def gather(rng: random.Random, items: Sequence[Passage], size: float, least: int = 1) -> list[str]:
    """Texts of random items, at least `least` of them, until they hold `size` characters."""
    texts: list[str] = []
    for item in rng.sample(items, min(len(items), _PACKED)):
        if len(texts) >= least and sum(map(len, texts)) >= size:
            break
        texts.append(item.text)
    return texts


def surround_with_texts(rng: random.Random, text: str, items: Sequence[Passage], size: float) -> str:
    """`text` with texts of other items before and after it, about `size` characters in all."""
    room = int(size) - len(text)
    if room < 400:
        return text
    around = "\n\n".join(gather(rng, items, room))[:room]
    before = rng.randint(0, len(around))
    return "\n\n".join(part for part in (around[:before], text, around[before:]) if part)


def draw_questions(rng: random.Random, packed: Sequence[Passage], count: int) -> list[Continuation]:
    questions = [qa for passage in packed for qa in passage.questions]
    return [Continuation(q, a) for q, a in rng.sample(questions, min(count, len(questions)))]


def window_start_around(rng: random.Random, text: str, size: int, anchor: int) -> int:
    """A random start such that text[start:start + size] holds the place `anchor` (-1: the text's beginning)."""
    if anchor < 0 or len(text) <= size:
        return 0
    last = min(anchor, len(text) - size)
    return rng.randint(min(last, max(0, anchor - size + 200)), last)


def random_window(rng: random.Random, text: str, size: float) -> str:
    start = rng.randint(0, max(0, len(text) - int(size)))
    return text[start : start + int(size)]


def split_to_continue(rng: random.Random, texts: Sequence[str], size: int) -> tuple[str, list[Continuation]]:
    """Several texts one after another, cut at a line or word; the continuation is what comes next."""
    text = "\n\n".join(text[: size // len(texts)] for text in texts[:-1])
    last = texts[-1]
    room = max(400, size - len(text))
    start = rng.randint(0, max(0, len(last) - room - _NEXT_CHARS))
    part = last[start : start + room + _NEXT_CHARS]
    cut = max(1, len(part) - _NEXT_CHARS)
    break_at = max(part.rfind("\n", 0, cut), part.rfind(" ", max(0, cut - 40), cut))
    cut = break_at if break_at > 0 else cut
    context = f"{text}\n\n{part[:cut]}" if text else part[:cut]
    return context, [Continuation(None, part[cut:]), ask_to_repeat(rng, context)]


def ask_to_repeat(rng: random.Random, context: str) -> Continuation:
    """Reconstruction: a strong signal that asks for no particular fact."""
    words = context.split(" ")
    start = rng.randint(0, max(0, len(words) - _REPEAT_WORDS))
    opening, rest = words[start : start + 8], words[start + 8 : start + _REPEAT_WORDS]
    question = f'Repeat the part of the text that starts with: "{" ".join(opening)}"'
    return Continuation(question, " ".join(rest) or " ".join(opening))
