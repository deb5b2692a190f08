"""Protected spans: parts of a text whose tokens every head keeps."""

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from lkv.errors import PromptError, check_count
from lkv.utils.prompts import (
    Conversation,
    Tools,
    bos_ids,
    chat_template_parts,
    content_parts,
    context_parts,
    context_text,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\x02message\x02"
Span = str | tuple[int, int] | Mapping[str, str]


def protected_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    text: str | Conversation,
    spans: Sequence[Span],
    system: str | None = None,
    tokens: int | None = None,
    tools: Tools | None = None,
) -> list[int]:
    """Find the tokens of protected spans.

    Args:
        tokenizer: The model's tokenizer; it must map tokens to characters (a "fast" tokenizer).
        text: The text or conversation that is compressed.
        spans: Words of the text or of the system prompt, protected wherever they occur, or (start, end) of characters
            of the text. In a conversation also {"role": "system"}, all messages of a role.
        system: The system prompt before the text.
        tokens: The number of tokens that are compressed; those behind it, white space at the end, are left out.
        tools: The tools before it.

    Returns:
        The positions of the tokens in what `encode_context` returns, in order.

    Raises:
        PromptError: For spans that are empty, absent or outside of the text, or overlap.
    """
    if isinstance(spans, str) or not isinstance(spans, Sequence):
        raise PromptError(f"protect is {spans!r}; give a list of words of the text, or of (start, end) in characters.")
    if not spans:
        return []
    before, rendered = context_parts(tokenizer, text, system, tools)
    if not isinstance(text, str):
        spans = [place for span in spans for place in _places_of_role(tokenizer, span, text, tools)]
    text = rendered
    parts = [(len(before), text)]
    if system is not None:
        parts.append((_find_system(tokenizer, system.strip(), before, tools), system.strip()))
    intervals, whole = _find_all(spans, text, parts), before + text
    for (_, end), (start, _) in pairwise(intervals):
        if start < end:
            raise PromptError(f"protected spans overlap at {whole[start:end][:60]!r}; give each part of the text once.")
    if not getattr(tokenizer, "is_fast", False):
        raise PromptError(
            f"protect needs to know the characters of each token, which {type(tokenizer).__name__} does not tell; load "
            "the model's fast tokenizer (AutoTokenizer does by default), or leave protect out."
        )
    offsets = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    first = 0 if getattr(tokenizer, "chat_template", None) else len(bos_ids(tokenizer))
    # Both are sorted, and a token may overlap two adjacent intervals.
    starts, ends = [low for low, _ in offsets], [high for _, high in offsets]
    positions: set[int] = set()
    for start, end in intervals:
        inside = range(bisect_right(ends, start), bisect_left(starts, end))
        if not inside:
            raise PromptError(f"the protected span {whole[start:end][:60]!r} has no token; give words of the text.")
        positions.update(first + token for token in inside)
    return sorted(place for place in positions if tokens is None or place < tokens)


def _places_of_role(
    tokenizer: "PreTrainedTokenizerBase", span: Span, messages: Conversation, tools: Tools | None
) -> Iterator[Span]:
    """Yield (start, end) of the messages of a role in the rendered conversation; any other span unchanged."""
    if not isinstance(span, Mapping):
        yield span
        return
    if set(span) != {"role"} or span["role"] not in {message["role"] for message in messages}:
        raise PromptError(f"protect names {dict(span)!r}; give {{'role': ROLE}} with the role of a message.")
    for place, message in enumerate(messages):
        parts = content_parts(message) if message["role"] == span["role"] else []
        for part in parts:
            if part["type"] == "text" and (own := part["text"].strip()):
                # Not where the rendered text has these words first: its tools may have them, too.
                marks = [{**other, "text": _MARK} if other is part else other for other in parts]
                content = _MARK if isinstance(message["content"], str) else marks
                marked = [*messages[:place], {**message, "content": content}, *messages[place + 1 :]]
                start = context_text(tokenizer, marked, tools).index(_MARK)
                yield start, start + len(own)


def _find_all(spans: Sequence[Span], text: str, parts: list[tuple[int, str]]) -> list[tuple[int, int]]:
    """Return the positions of the spans, in order; stops as soon as two of them must overlap."""
    intervals: list[tuple[int, int]] = []
    free = sum(len(part) for _, part in parts)  # characters not covered by spans, if none overlap
    for start, end in (interval for span in spans for interval in _find(span, text, parts)):
        intervals.append((start, end))
        free -= end - start
        if free < 0:
            break
    return sorted(intervals)


def _find(span: object, text: str, parts: list[tuple[int, str]]) -> Iterator[tuple[int, int]]:
    """Yield the positions of a span, in characters; `parts` are texts to search, with their start offsets."""
    if isinstance(span, str):
        if not span.strip():
            raise PromptError("a protected span is empty; give words of the text, or leave it out.")
        starts = [start + match.start() for start, part in parts for match in re.finditer(re.escape(span), part)]
        if not starts:
            raise PromptError(f"the text does not contain {span[:60]!r}, which protect names; copy it from there.")
        yield from ((start, start + len(span)) for start in starts)
        return
    problem = f"the protected span {span!r} is neither words of the text nor (start, end) in characters."
    if not isinstance(span, tuple | list) or len(span) != 2:
        raise PromptError(problem)
    start, end = (check_count(place, PromptError(problem), -math.inf) for place in span)
    if not 0 <= start < end <= len(text):
        raise PromptError(
            f"the protected span {(start, end)} is empty or outside of the text, which has {len(text)} characters; "
            "give 0 <= start < end up to that."
        )
    yield parts[0][0] + start, parts[0][0] + end


def _find_system(tokenizer: "PreTrainedTokenizerBase", system: str, before: str, tools: Tools | None) -> int:
    """Return the start of the system prompt in `before`; the template's own text may contain the same words earlier."""
    other = chat_template_parts(tokenizer, "b" if system.startswith("a") else "a", tools=tools)[0]
    shared = next((index for index, pair in enumerate(zip(before, other, strict=False)) if pair[0] != pair[1]), 0)
    return before.find(system, shared)
