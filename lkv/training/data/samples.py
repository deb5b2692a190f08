"""The one type that training and fidelity measurements read."""

from dataclasses import dataclass
from typing import Any

from lkv.utils.prompts import encode, encode_context, encode_question


@dataclass(frozen=True)
class Continuation:
    """What comes after the context. `question` None means that `target` follows the context directly."""

    question: str | None
    target: str


@dataclass(frozen=True)
class Sample:
    """A context and what may follow it; `source` names the data set, `task` the kind of question."""

    source: str
    context: str
    continuations: tuple[Continuation, ...]


@dataclass(frozen=True)
class TokenizedSample:
    """Ids of the context, and for each continuation its ids and how many of them precede the target."""

    source: str
    context: list[int]
    continuations: list[tuple[list[int], int]]


def tokenize_sample(sample: Sample, tokenizer: Any, max_context: int, max_continuation: int) -> TokenizedSample:
    """Turn text into ids; the context is cut to `max_context` tokens, a continuation to `max_continuation`.

    The end-of-turn token is part of a target that answers a question: knowing when to stop is part of the answer.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    continuations = []
    for item in sample.continuations:
        if item.question is None:
            # The token that the target begins with is predicted from the context's last one, which is not scored.
            ids, skip = encode(tokenizer, item.target), 0
        else:
            prefix = encode_question(tokenizer, item.question)
            ids, skip = prefix + encode(tokenizer, item.target) + end, len(prefix)
        if len(ids[:max_continuation]) > skip + 1:
            continuations.append((ids[:max_continuation], skip))
    return TokenizedSample(sample.source, encode_context(tokenizer, sample.context)[:max_context], continuations)
