"""An answer in progress: its sampling and its text so far."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lkv.context.context import Context

# Below, logits divided by the temperature could overflow, and the most probable token is drawn almost surely.
LEAST_TEMPERATURE = 1e-3
_INCOMPLETE = "\ufffd"  # what half a character is decoded to


class SamplingParams(NamedTuple):
    """Sampling parameters of an answer, greedy by default, and its end conditions."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None  # by default as many as fit
    stop: Sequence[str] = ()


class Sampler:
    """Draws the tokens of one answer with a random generator of its own."""

    def __init__(self, params: SamplingParams):
        self._warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
        if params.top_k is not None:
            self._warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            self._warpers.append(TopPLogitsWarper(float(params.top_p)))
        self._generator = torch.Generator("cpu")
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def __call__(self, logits: Tensor) -> int:
        """Draw the next token from its logits [V]."""
        scores = self._warpers(torch.LongTensor(), logits[None].float().cpu())  # these warpers read no ids
        return int(torch.multinomial(scores[0].softmax(-1), 1, generator=self._generator))


class Answer:
    """An answer in progress, modified only by the worker's thread, except for its end.

    Attributes:
        ids: The tokens so far.
        text: The text so far that can no longer change.
        reason: Why it has ended: "stop" (an end token or a stop string), "length", "error", "cancelled"; None before.
        error: The error, or with "length" why the answer was cut off, in one sentence.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        question: list[int],
        context: Context | None,
        params: SamplingParams,
        notify: Callable[[], None] | None,
    ):
        """Create an answer without tokens; arguments as in `AnswerQueue.submit`, `params` with their `max_tokens`."""
        assert params.max_tokens is not None
        self.question, self.context, self.length = question, context, params.max_tokens
        self.sampler = Sampler(params) if params.temperature >= LEAST_TEMPERATURE else None
        self.ids: list[int] = []
        self.text = ""
        self.reason: str | None = None
        self.error: str | None = None
        self.is_retried = False  # alone: a batch that it was in has failed
        self.done = threading.Event()
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.stop)
        self._notify = notify

    @property
    def row(self) -> list[int]:
        """The ids after the context: those of the question and of the answer so far."""
        return self.question + self.ids

    def push(self, token: int, is_end: bool) -> None:
        """Add the next token; `is_end` if it is one of the model's end tokens. A failure ends only this answer."""
        self.ids.append(token)
        is_last = is_end or len(self.ids) >= self.length
        try:
            self.text += self._detokenizer.push(self.ids, is_last)
        except Exception as error:
            self.fail(error)
        if is_last or self._detokenizer.is_stopped:
            self.finish("stop" if is_end or self._detokenizer.is_stopped else "length")
        elif self._notify is not None:
            self._notify()

    def fail(self, error: BaseException) -> None:
        """End the answer because it cannot be computed."""
        self.finish("error", f"the answer could not be computed ({error}); ask again.")

    def finish(self, reason: str, error: str | None = None) -> None:
        """End the answer; one that has ended does not change."""
        if not self.done.is_set():
            self.reason, self.error = reason, error
            self.done.set()
            if self._notify is not None:
                self._notify()


class IncrementalDetokenizer:
    """Decodes ids incrementally and returns only text that can no longer change.

    The joined pieces equal the text of `Context.ask`, stripped of white space and cut before the first of `stops`. Each
    step decodes only the new tokens, with tokenizers' DecodeStream. Slow tokenizers, and those that clean up spaces,
    decode all ids again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, stops
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self._backend = None
        self._stream = DecodeStream(skip_special_tokens=True)
        self._longest = max(map(len, stops), default=0)
        self._text = ""
        self._read = self._sent = 0  # ids, characters
        self.is_stopped = False

    def push(self, ids: list[int], ended: bool) -> str:
        """Return the new text, given all ids so far."""
        text = self._decode(ids, ended).lstrip()
        start = max(0, self._sent - self._longest)
        places = [place for stop in self._stops if (place := text.find(stop, start)) >= 0]
        if places:
            self.is_stopped, text = True, text[: min(places)]
        text = text.rstrip() if ended or places else text[: self._certain(text)]
        piece = text[self._sent :]
        self._sent += len(piece)
        return piece

    def _decode(self, ids: list[int], ended: bool) -> str:
        if self._backend is None or ended:
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))
        try:
            for token in ids[self._read :]:
                self._text += self._stream.step(self._backend, token) or ""
        except Exception:  # bytes of an incomplete character
            self._backend = None
            return self._decode(ids, ended)
        self._read = len(ids)
        return self._text

    def _certain(self, text: str) -> int:
        """Return the length of the stable text: incomplete characters, white space and partial stops may change."""
        stop_starts = (
            len(text) - size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])
        )
        return len(text[: min([len(text), *stop_starts])].rstrip(_INCOMPLETE).rstrip())
