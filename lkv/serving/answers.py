"""Answers to many requests by one thread: those about one context are generated in one batch, contexts take turns."""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.context import Context
from lkv.context.generation import answer_length, end_tokens, generate, longest_answer
from lkv.errors import BusyError
from lkv.hf.attention import is_rope_by_length
from lkv.hf.positions import check_frequencies
from lkv.utils.fair_lock import FairLock

# Below, logits divided by the temperature could overflow, and the most probable token is drawn almost surely.
LEAST_TEMPERATURE = 1e-3
# Tokens that a batch generates before it makes way for requests that wait, and those that it reads again afterwards for
# each of them at most.
TURN_TOKENS, _READ_AGAIN = 32, 8
# Rows of a batch times the square of its longest question: attention over questions takes memory in proportion.
_MAX_SCORES = 2**22
# Settings of a model's generation_config that depend on the whole of one answer, or on the ids before it.
_UNBATCHED = (
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "min_length", "min_new_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size", "guidance_scale", "watermarking_config", "stop_strings", "no_repeat_ngram_size",
    "max_time",
)  # fmt: skip
_INCOMPLETE = "\ufffd"  # what half a character is decoded to
_LOG = logging.getLogger(__name__)


class SamplingParams(NamedTuple):
    """How the tokens of an answer are chosen; greedily by default."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None


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
        no_ids: Any = None  # the warpers read no ids
        scores = self._warpers(no_ids, logits[None].float().cpu())
        return int(torch.multinomial(scores[0].softmax(-1), 1, generator=self._generator))


class Answer:
    """One answer while it is generated: by the worker's thread, which alone changes it, except for its end.

    Attributes:
        ids: The tokens so far.
        text: The text so far that can no longer change.
        reason: Why it has ended: "stop" (an end token or a stop string), "length", "error", "cancelled"; None before.
        error: What went wrong, as one sentence.
    """

    def __init__(
        self, tokenizer: Any, question: list[int], context: Context | None, length: int, sampling: SamplingParams,
        stops: list[str], notify: Callable[[], None] | None,
    ):  # fmt: skip
        """`notify` is called after every change, in the thread that made it."""
        self.question, self.context, self.length = question, context, length
        self.sampler = Sampler(sampling) if sampling.temperature >= LEAST_TEMPERATURE else None
        self.ids: list[int] = []
        self.text = ""
        self.reason: str | None = None
        self.error: str | None = None
        self.is_alone = False  # not answered in a batch: one that it was in has failed
        self.done = threading.Event()
        self._detokenizer = IncrementalDetokenizer(tokenizer, stops)
        self._notify = notify

    @property
    def row(self) -> list[int]:
        """The ids after the context: those of the question and of the answer so far."""
        return self.question + self.ids

    def push(self, token: int, is_end: bool) -> None:
        """Take the next token; `is_end` if it is one of the model's end tokens. What fails ends this answer alone."""
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


class AnswerWorker:
    """Answers requests about contexts of one model in a thread of its own. It may be used from several threads.

    Requests about one context are generated in one batch, which reads the model's weights and the context once a step.
    While others wait, a batch makes way after `TURN_TOKENS` tokens, or more where its questions are long, and goes on
    when its context has the next turn; its questions, and the answers so far, are then read again.
    """

    def __init__(self, model: Any, tokenizer: Any, requests: int = 64, rows: int = 16, memory_bytes: int = 2**40):
        """At most `requests` are open and `rows` answered together; their contexts take about `memory_bytes`."""
        self.model, self.tokenizer = model, tokenizer
        self._is_rope_by_length = is_rope_by_length(model)
        # Held while the model runs: a pass changes such a model's rotations, which that of another thread may be using.
        self.passes: AbstractContextManager[Any] = FairLock() if self._is_rope_by_length else nullcontext()
        self._requests, self._rows, self._memory = requests, rows, memory_bytes
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Context | None, deque[Answer]] = OrderedDict()
        self._open: set[Answer] = set()
        self._is_stopping = self._is_stopped = False
        self.tokens = self.failures = 0  # generated tokens, batches that raised
        if names := [name for name in _UNBATCHED if getattr(model.generation_config, name, None)]:
            _LOG.warning("requests are answered one by one: generation_config sets %s.", ", ".join(names))
            self._rows = 1
        self._can_pause = not names
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are still being answered."""
        return self._thread.is_alive()

    @property
    def open(self) -> int:
        """Requests that are being answered or wait."""
        with self._changed:
            self._open = {answer for answer in self._open if not answer.done.is_set()}
            return len(self._open)

    def submit(
        self, question: list[int], context: Context | None = None, length: int | None = None,
        sampling: SamplingParams | None = None, stops: list[str] | None = None,
        notify: Callable[[], None] | None = None,
    ) -> Answer:  # fmt: skip
        """Queue the ids of a question about `context`; `length` is the most new tokens.

        Raises:
            PromptError: If question and answer do not fit.
            BusyError: If too many requests are open, their contexts take too much memory, or the worker is stopping.
        """
        read = 0 if context is None else context.tokens
        check_frequencies(self.model.config.get_text_config(decoder=True), read, read + len(question))
        length = answer_length(self.model, read + len(question), length)
        sampling = sampling or SamplingParams()
        answer = Answer(self.tokenizer, question, context, length, sampling, stops or [], notify)
        with self._changed:
            self.check_capacity()
            contexts = {other.context for other in (*self._open, answer) if other.context is not None}
            if len(contexts) > 1 and sum(context.nbytes() for context in contexts) > self._memory:
                raise BusyError("the contexts of open requests fill the memory for contexts; ask again later.")
            self._open.add(answer)
            self._enqueue(answer)
        return answer

    def check_capacity(self) -> None:
        """Raise BusyError if as many requests are open as are allowed, or the worker is stopping."""
        with self._changed:
            if self._is_stopping:
                raise BusyError("the server is stopping; ask again when it runs.")
            if self.open >= self._requests:
                raise BusyError(f"{self.open} requests are open, as many as are allowed; ask again later.")

    def cancel(self, answer: Answer) -> None:
        """End an answer with what there is of it; its row leaves the batch with the current token."""
        answer.finish("cancelled")
        with self._changed:
            self._open.discard(answer)
            waiting = self._waiting.get(answer.context)
            if waiting is not None and answer in waiting:
                waiting.remove(answer)
                if not waiting:
                    del self._waiting[answer.context]

    def stop(self, seconds: float = 30.0) -> None:
        """Take no more requests, finish the open ones for up to `seconds`, then end the rest."""
        with self._changed:
            self._is_stopping = True
        deadline = time.monotonic() + seconds
        while self.open and time.monotonic() < deadline and self.is_alive:
            time.sleep(0.01)
        with self._changed:
            self._is_stopped = True
            rest = list(self._open)
            self._waiting.clear()
            self._changed.notify_all()
        for answer in rest:
            answer.finish("error", "the server was stopped before this answer was complete; ask again when it runs.")
        self._thread.join(30)

    def _enqueue(self, answer: Answer) -> None:
        self._waiting.setdefault(answer.context, deque()).append(answer)
        self._changed.notify_all()

    def _work(self) -> None:
        while batch := self._next_batch():
            self._answer(batch)
            del batch  # contexts that no request follows any more are released

    def _next_batch(self) -> list[Answer]:
        """Requests about the context whose turn it is; none when the worker is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_stopped)
            if self._is_stopped:
                return []
            context, waiting = self._waiting.popitem(last=False)
            batch, rows = [waiting.popleft()], self._rows
            cache = None if context is None else context.cache
            if cache is None:
                # Without a context a short conversation would get the rotations of a long one.
                rows = 1 if self._is_rope_by_length else rows
            elif not (isinstance(cache, RaggedCache) and cache.is_rewindable):
                rows = 1
            longest = len(batch[0].row)
            while waiting and len(batch) < rows and not (batch[0].is_alone or waiting[0].is_alone):
                longest = max(longest, len(waiting[0].row))
                if (len(batch) + 1) * longest**2 > _MAX_SCORES:
                    break
                batch.append(waiting.popleft())
            if waiting:
                self._waiting[context] = waiting
            return batch

    def _answer(self, batch: list[Answer]) -> None:
        """Answer a batch for one turn. What raises ends one request: those of a batch are tried again one by one."""
        try:
            with self.passes:
                self._generate(batch)
        except BaseException as error:
            self.failures += 1
            _LOG.warning("%d requests could not be answered: %s", len(batch), error)
            for answer in batch:
                if len(batch) == 1:
                    answer.fail(error)
                answer.is_alone = True
        with self._changed:
            for answer in batch:
                if answer.done.is_set():
                    self._open.discard(answer)
                elif not self._is_stopped:
                    self._enqueue(answer)

    def _generate(self, batch: list[Answer]) -> None:
        context = batch[0].context
        rows = [answer.row for answer in batch]
        before, longest = 0 if context is None else context.tokens, max(map(len, rows))
        length = min(
            longest_answer(self.model, before + longest), max(answer.length - len(answer.ids) for answer in batch)
        )
        turn = _Turn(self, batch, before + longest)
        options: dict[str, Any] = {
            "max_new_tokens": length, "stopping_criteria": StoppingCriteriaList([turn]),
            "prompt_lookup_num_tokens": None,
        }  # fmt: skip
        if any(answer.sampler for answer in batch):
            options["logits_processor"] = LogitsProcessorList([_Sampling(batch)])
        if context is None:
            cache = DynamicCache(config=self.model.config)
            generate(self.model, self.tokenizer, rows, 0, cache, **options)
        elif len(rows) == 1:
            # The answer is appended to the context's own cache, whose size counts while it stays in memory.
            with context.cache.temporary_slots() if isinstance(context.cache, RaggedCache) else nullcontext():
                context.complete(rows[0], **options)
        else:
            context.batch_complete(rows, **options)
        if not turn.is_paused and turn.tokens < length:
            for answer in batch:
                answer.finish("stop")  # by the model's own settings

    def should_pause(self, has_had_turn: bool) -> bool:
        """Whether a batch makes way for requests that wait."""
        return self._is_stopped or (self._can_pause and has_had_turn and bool(self._waiting))


class _Turn(StoppingCriteria):
    """Passes the new tokens of a batch on, and ends rows that are done, or all rows when the turn is over."""

    def __init__(self, worker: AnswerWorker, batch: list[Answer], length: int):
        self._worker, self._batch, self._length = worker, batch, length
        self._least_tokens = max(TURN_TOKENS, max(len(answer.row) for answer in batch) // _READ_AGAIN)
        self._ends = end_tokens(worker.model, {})
        self.tokens, self.is_paused = 0, False

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Any:
        """Which rows end [B], given all ids [B, T]."""
        new = input_ids[:, self._length :].tolist()
        self._length = input_ids.shape[1]
        self.tokens += len(new[0])
        for answer, tokens in zip(self._batch, new, strict=True):
            for token in tokens:
                if not answer.done.is_set():
                    self._worker.tokens += 1  # before the answer may end: who has it finds its tokens counted
                    answer.push(token, token in self._ends)
        self.is_paused = self._worker.should_pause(self.tokens >= self._least_tokens)
        ended = [self.is_paused or answer.done.is_set() for answer in self._batch]
        return torch.tensor(ended, device=input_ids.device)


class _Sampling(LogitsProcessor):
    """Leaves of each row that samples only the token that it has drawn."""

    def __init__(self, batch: list[Answer]):
        self._batch = batch

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """The scores [B, V], with all tokens but the drawn ones at -inf."""
        scores = scores.clone()
        for row, answer in enumerate(self._batch):
            if answer.sampler is None or answer.done.is_set():
                continue
            try:
                token = answer.sampler(scores[row])
            except Exception as error:  # ends this request alone
                answer.fail(error)
                continue
            scores[row] = -torch.inf
            scores[row, token] = 0.0
        return scores


class IncrementalDetokenizer:
    """Decodes ids as they come and gives out only text that can no longer change.

    All pieces together are the text that `Context.ask` gives, without white space at its ends, cut before the first of
    `stops`. Each step reads the new tokens alone, with tokenizers' DecodeStream; a tokenizer that is not backed by it,
    or that cleans up spaces afterwards, decodes all ids again.
    """

    def __init__(self, tokenizer: Any, stops: list[str]):
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
        """The new text, given all ids so far."""
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
        except Exception:  # bytes that were a character are none before the next ones
            self._backend = None
            return self._decode(ids, ended)
        self._read = len(ids)
        return self._text

    def _certain(self, text: str) -> int:
        """How many characters of `text` stay: half characters, white space and a begun stop at its end may change."""
        stop_starts = (
            len(text) - size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])
        )
        return len(text[: min([len(text), *stop_starts])].rstrip(_INCOMPLETE).rstrip())
