"""Samples of training and fidelity measurements, and how they become token ids."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lkv.utils.prompts import encode_context, encode_continuation, encode_question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Continuation:
    """The text after the context: the answer to a question or, if `question` is None, a direct continuation."""

    question: str | None
    target: str


@dataclass(frozen=True)
class Sample:
    """A context from the data set `source`, with its continuations."""

    source: str
    context: str
    continuations: tuple[Continuation, ...]


@dataclass(frozen=True)
class TokenizedSample:
    """Ids of the context, and for each continuation its ids and the number of ids before the target."""

    source: str
    context: list[int]
    continuations: list[tuple[list[int], int]]


def tokenize_sample(
    sample: Sample, tokenizer: "PreTrainedTokenizerBase", max_context: int, max_continuation: int
) -> TokenizedSample:
    """Turn a sample into ids in the tokenizer's chat template.

    Args:
        sample: The sample.
        tokenizer: The model's tokenizer.
        max_context: The maximum number of tokens of the context; the rest is cut off.
        max_continuation: The maximum number of tokens of a continuation; one left without a target is dropped.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    continuations = []
    for item in sample.continuations:
        if item.question is None:
            # The target's first token is predicted from the context's last one, which is not scored.
            ids, skip = encode_continuation(tokenizer, item.target), 0
        else:
            prefix = encode_question(tokenizer, item.question)
            ids, skip = prefix + encode_continuation(tokenizer, item.target) + end, len(prefix)
        if len(ids[:max_continuation]) > skip + 1:
            continuations.append((ids[:max_continuation], skip))
    return TokenizedSample(sample.source, encode_context(tokenizer, sample.context)[:max_context], continuations)
