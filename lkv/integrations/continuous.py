"""Concurrent requests about compressed contexts, by transformers' continuous batching (5.17 and newer).

    engine = start(model, tokenizer)
    answers = [engine.submit(ids, context) for ids, context in ...]      # different contexts, or None
    for token in answers[0]: ...                                         # as they are generated
    answers[1].result()

Each request brings its question alone; contexts are shared, only read, and never copied. Where continuous batching
cannot be used, requests are answered one after another as `Context.ask` does, and `start` logs the reason.
"""

import itertools
import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from typing_extensions import override

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.context import Context
from lkv.context.generation import StopOnRequest, answer_length, end_tokens, generate
from lkv.errors import BusyError, IntegrationError, PromptError
from lkv.integrations.transformers.attention import patch_attention
from lkv.integrations.transformers.spec import max_positions

try:
    from lkv.integrations.transformers import paged
except ImportError as error:  # transformers before 5.17, or one that has changed
    paged, _IMPORT_ERROR = None, error  # type: ignore[assignment]

_MIN_VERSION = (5, 17)
# Settings of a model's generation_config that a batch of requests does not apply.
_UNBATCHED = (
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "min_length", "min_new_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size", "guidance_scale", "watermarking_config", "stop_strings",
)  # fmt: skip
# Below, logits divided by the temperature could overflow, and the most probable token is drawn almost surely.
LEAST_TEMPERATURE = 1e-3
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one answer are chosen.

    Args:
        temperature: From 0 to 2; below 0.001 the most probable token is taken (greedy decoding).
        top_p: Sample from the most probable tokens that together reach this share, in (0, 1].
        top_k: Sample from this many of the most probable tokens.
        seed: The same seed draws the same tokens from the same probabilities.

    Raises:
        PromptError: For values outside these ranges.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature <= 2:
            raise PromptError(f"temperature is {self.temperature!r}; give a number from 0 (greedy) to 2.")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise PromptError(f"top_p is {self.top_p!r}; give a share in (0, 1].")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise PromptError(f"top_k is {self.top_k!r}; give a number of tokens, 1 or more.")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise PromptError(f"seed is {self.seed!r}; give a whole number from 0 to 2^63 - 1.")

    def sampler(self) -> "Sampler | None":
        """The sampler of one answer; None for greedy decoding."""
        return Sampler(self) if self.temperature >= LEAST_TEMPERATURE else None


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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Answer:
    """The ids of one answer, as they are generated. Iterate over it in one thread, or wait for `result()`."""

    def __init__(self, cancel: Callable[[], None], notify: Callable[[], None] | None, prompt_tokens: int):
        """`notify` is called in the computing thread after every change."""
        self.ids: list[int] = []
        self.prompt_tokens = prompt_tokens  # of the question alone
        self.error: str | None = None
        self.cancelled = False
        self.done = threading.Event()
        self.ended_by_token = False
        self._cancel, self._notify = cancel, notify
        self._changed = threading.Condition()

    def cancel(self) -> None:
        """End the answer with the ids so far; an answer that has ended does not change."""
        if not self.done.is_set():
            self.cancelled = True
            self._cancel()
            self.update(self.ids, ended=True)

    def update(self, ids: list[int], ended: bool, error: str | None = None) -> None:
        """Set the ids so far; called by the engine, and ignored once the answer has ended."""
        with self._changed:
            if self.done.is_set():
                return
            self.ids, self.error = ids, error
            if ended:
                self.done.set()
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()

    def __iter__(self) -> Iterator[int]:
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self.ids) > seen or self.done.is_set())  # noqa: B023
                new = self.ids[seen:]
            if not new:
                break
            yield from new
            seen += len(new)
        self._raise_error()

    def result(self, timeout: float | None = None) -> list[int]:
        """Wait for all ids, the one that ends the answer included.

        Raises:
            IntegrationError: If the engine failed, or there is no answer after `timeout` seconds.
        """
        if not self.done.wait(timeout):
            raise IntegrationError(f"there is no answer after {timeout} seconds; wait longer, or cancel() it.")
        self._raise_error()
        return self.ids

    def _raise_error(self) -> None:
        if self.error is not None:
            raise IntegrationError(self.error)


class Engine(ABC):
    """Answers requests about contexts of one model. It may be used from several threads."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_requests: int):
        self.model, self.tokenizer = model, tokenizer
        self._max_requests = max_requests
        self._lock = threading.Lock()
        self._open: dict[str, Answer] = {}
        self._names = map(str, itertools.count())
        self._is_stopping = False
        self.tokens = 0  # generated so far

    def submit(
        self,
        ids: list[int],
        context: Context | None = None,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        notify: Callable[[], None] | None = None,
    ) -> Answer:
        """Queue a request for the answer to the question `ids`, about `context` if given.

        Args:
            ids: Token ids of the question, as the model reads them after the context.
            context: A context of the engine's model.
            max_new_tokens: At most this many tokens; by default 128, or as many as fit.
            sampling: Greedy decoding by default.
            notify: Called in the computing thread after every change of the answer.

        Raises:
            PromptError: If question and answer do not fit.
            BusyError: If too many requests are open, or the engine is stopping.
        """
        if not ids:
            raise PromptError("there is nothing to answer: give the ids of a question.")
        length = answer_length(self.model, (0 if context is None else context.tokens) + len(ids), max_new_tokens)
        if max_new_tokens is None:
            length = max(1, min(length, self.free_tokens(len(ids), context)))
        self._check(context, len(ids) + length)
        with self._lock:
            if self._is_stopping:
                raise BusyError("the engine is stopping; ask again when another one runs.")
            if len(self._open) >= self._max_requests:
                raise BusyError(f"{len(self._open)} requests are open, as many as are allowed; ask again later.")
            name = next(self._names)
            answer = self._open[name] = Answer(lambda: self._cancel(name), notify, len(ids))
        try:
            self._begin(name, list(ids), context, length, sampling or SamplingParams())
        except BaseException:
            self._open.pop(name, None)
            raise
        return answer

    def free_tokens(self, question_tokens: int, context: Context | None) -> int:
        """The most new tokens that can follow a question of that length."""
        return max_positions(self.model) + 1 - question_tokens - (0 if context is None else context.tokens)

    @property
    def open(self) -> int:
        """Requests that are being answered or wait."""
        return len(self._open)

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether requests are still being answered."""

    def stop(self, timeout: float = 30.0) -> None:
        """Take no more requests, finish the open ones for up to `timeout` seconds, then end the rest."""
        with self._lock:
            self._is_stopping = True
        deadline = time.monotonic() + timeout
        while self._open and time.monotonic() < deadline and self.is_alive:
            time.sleep(0.01)
        for name in list(self._open):
            self._fail(name, "the engine was stopped before this answer was complete; start one and ask again.")
        self._end()

    def _deliver(self, name: str, ids: list[int] | None, ended: bool, error: str | None = None) -> None:
        """Update an answer; `None` leaves its ids as they are."""
        with self._lock:
            answer = self._open.pop(name, None) if ended else self._open.get(name)
        if answer is None:
            return
        ids = answer.ids if ids is None else ids
        self.tokens += len(ids) - len(answer.ids)
        if ended and ids:
            answer.ended_by_token = ids[-1] in end_tokens(self.model, {})
        answer.update(ids, ended, error)

    def _fail(self, name: str, problem: object) -> None:
        """End an answer with a sentence, or with the reason why it could not be computed."""
        if not isinstance(problem, str):
            problem = f"the answer could not be computed ({problem}); ask again."
        self._deliver(name, None, True, problem)

    @abstractmethod
    def _check(self, context: Context | None, tokens: int) -> None:
        """Raise for a request that can never be served; `tokens` are those beside the context's."""

    @abstractmethod
    def _begin(self, name: str, ids: list[int], context: Context | None, length: int, sampling: SamplingParams) -> None:
        """Compute the answer in another thread, and `_deliver` it."""

    @abstractmethod
    def _cancel(self, name: str) -> None:
        """Stop computing an answer."""

    @abstractmethod
    def _end(self) -> None:
        """Stop all computing."""


class ContinuousEngine(Engine):
    """Answers requests side by side: every step reads the model's weights once for all of them.

    A request that raises ends alone. When a whole step raises, its requests fail and the batching is started again.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_requests: int = 256, pages: int = 512,
        page_size: int = 32, batch_tokens: int = 256, requests: int = 64,
    ):  # fmt: skip
        """Start the engine; raises IntegrationError if continuous batching cannot be used.

        `pages` of `page_size` tokens hold questions and answers; a step reads at most `batch_tokens` new tokens of at
        most `requests` requests. More than `max_requests` open ones raise BusyError.
        """
        super().__init__(model, tokenizer, max_requests)
        if reason := unsupported_reason(model):
            raise IntegrationError(f"continuous batching cannot be used: {reason}")
        self._sizes = (pages, page_size, batch_tokens, requests)
        self._capacity = pages * page_size
        self._restarting = threading.RLock()
        with self._restarting:  # its thread may fail at once
            self._manager = self._start_manager()

    def _start_manager(self) -> Any:
        manager = paged.PrefixBatchingManager(self.model, *self._sizes, self._on_result, self._restart)
        manager.start()
        return manager

    def _restart(self, error: Exception) -> None:
        """Replace the manager, whose thread (the current one) has ended with `error`."""
        with self._restarting:
            failed = self._manager
            for name in list(self._open):
                self._fail(name, error)
            # Without a batch processor the failure was at its start, and would be the same again.
            if failed.batch_processor is None or self._is_stopping:
                _LOG.error("continuous batching has ended: %s", error)
                return
            _LOG.error("continuous batching failed and is started again: %s", error)
            error.__traceback__ = None  # its frames hold the pages
            failed.batch_processor = None
            try:
                self._manager = self._start_manager()
            except Exception:
                _LOG.exception("continuous batching could not be started again")

    @property
    @override
    def is_alive(self) -> bool:
        with self._restarting:
            return self._manager.is_running()

    @override
    def free_tokens(self, question_tokens: int, context: Context | None) -> int:
        return min(super().free_tokens(question_tokens, context), self._capacity - question_tokens)

    @override
    def _check(self, context: Context | None, tokens: int) -> None:
        if tokens > self._capacity:
            raise PromptError(
                f"question and answer may have {self._capacity} tokens here, not {tokens}; ask for less, or start the "
                "engine with more pages."
            )
        if context is not None and context.model is not self.model:
            raise IntegrationError("the context belongs to another model; compress the text with the engine's model.")
        if context is not None:
            context_pools(context)

    def _on_result(self, name: str, ids: list[int], ended: bool, error: str | None) -> None:
        if error is None:
            self._deliver(name, ids, ended)
        else:
            self._fail(name, Exception(error))

    @override
    def _begin(self, name: str, ids: list[int], context: Context | None, length: int, sampling: SamplingParams) -> None:
        prefix = None
        if context is not None:
            # One object for as long as the context lives, so that its requests are computed together.
            prefix = context.__dict__.get("_lkv_prefix") or paged.Prefix(context.tokens, context_pools(context))
            context.__dict__["_lkv_prefix"] = prefix
        choose_token = token_chooser(self.model, [] if context is None else context.ids, sampling)
        with self._restarting:
            if not self._manager.submit(name, ids, length, paged.RequestInfo(prefix, choose_token)):
                self._fail(name, "the engine has failed; start another one.")

    @override
    def _cancel(self, name: str) -> None:
        self._manager.cancel_request(name)
        self._deliver(name, None, True)

    @override
    def _end(self) -> None:
        self._manager.stop(block=True, timeout=30, hard_stop=True)


class PlainEngine(Engine):
    """Answers requests one after another, each as `Context.ask` does."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_requests: int = 256):
        super().__init__(model, tokenizer, max_requests)
        patch_attention(model)
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._stops: dict[str, _IdDelivery] = {}
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    @override
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @override
    def _check(self, context: Context | None, tokens: int) -> None:
        pass

    @override
    def _begin(self, name: str, ids: list[int], context: Context | None, length: int, sampling: SamplingParams) -> None:
        start = len(ids) + (0 if context is None else context.tokens)
        self._stops[name] = _IdDelivery(partial(self._deliver, name, ended=False), start)
        self._queue.put((name, ids, context, length, sampling))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            name, ids, context, length, sampling = job
            stop = self._stops[name]
            options: dict[str, Any] = {"max_new_tokens": length, "stopping_criteria": StoppingCriteriaList([stop])}
            try:
                if (sampler := sampling.sampler()) is not None:
                    options["logits_processor"] = LogitsProcessorList([_SampledToken(sampler)])
                if not stop.requested.is_set() and context is None:
                    out = generate(self.model, self.tokenizer, [ids], 0, DynamicCache(), **options)
                    self._deliver(name, out[0].tolist(), True)
                elif not stop.requested.is_set():
                    self._deliver(name, context.complete(ids, **options), True)
            except Exception as error:  # ends this request alone
                self._fail(name, error)
            del self._stops[name], job, context

    @override
    def _cancel(self, name: str) -> None:
        if (stop := self._stops.get(name)) is not None:
            stop.requested.set()
        self._deliver(name, None, True)

    @override
    def _end(self) -> None:
        for stop in list(self._stops.values()):
            stop.requested.set()
        self._queue.put(None)
        self._thread.join()


class _IdDelivery(StopOnRequest):
    """Delivers the ids after the first `start` ones after each new token."""

    def __init__(self, deliver: Callable[[list[int]], None], start: int):
        super().__init__()
        self._deliver, self._start = deliver, start

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Any:
        self._deliver(input_ids[0, self._start :].tolist())
        return super().__call__(input_ids, scores)


class _SampledToken(LogitsProcessor):
    """Masks all tokens but the sampled one."""

    def __init__(self, sampler: Callable[[Tensor], int]):
        self._sampler = sampler

    @override
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        chosen = torch.tensor([self._sampler(scores[0])], device=scores.device)
        return torch.full_like(scores, -torch.inf).index_fill_(1, chosen, 0.0)


def token_chooser(
    model: PreTrainedModel, context_ids: list[int], sampling: SamplingParams
) -> Callable[[list[int], Tensor], int] | None:
    """A function from a request's ids and logits [V] to its next token; None for plain greedy decoding.

    Repetition penalties of the model's own configuration come first, over the context's ids, too, then sampling.
    """
    config, sampler = model.generation_config, sampling.sampler()
    penalties = LogitsProcessorList()
    if (penalty := getattr(config, "repetition_penalty", None)) not in (None, 1.0):
        penalties.append(RepetitionPenaltyLogitsProcessor(penalty))
    if size := getattr(config, "no_repeat_ngram_size", None):
        penalties.append(NoRepeatNGramLogitsProcessor(size))
    if sampler is None and not penalties:
        return None

    def choose_token(ids: list[int], logits: Tensor) -> int:
        if penalties:
            seen: Any = torch.tensor([context_ids + ids], device=logits.device)
            logits = penalties(seen, logits[None].float())[0]
        return int(logits.argmax()) if sampler is None else sampler(logits)

    return choose_token


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why continuous batching cannot serve `model` here, in one sentence; None if it can."""
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < _MIN_VERSION:
        return f"it needs transformers 5.17 or newer, and {transformers.__version__} is installed."
    if any(window is not None for window in patch_attention(model).sliding_windows):
        return f"{type(model).__name__} has sliding layers, whose windows reach from the question into the text."
    if settings := [name for name in _UNBATCHED if getattr(model.generation_config, name, None)]:
        return f"the model's generation_config sets {', '.join(settings)}, which a batch does not apply."
    return None if paged else f"transformers {transformers.__version__} has changed ({_IMPORT_ERROR})."


def start_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_requests: int = 256, **sizes: int
) -> Engine:
    """Start a ContinuousEngine with these `sizes`, or a PlainEngine if that cannot be used; the reason is logged."""
    if reason := unsupported_reason(model):
        _LOG.warning("requests are answered one after another: %s", reason)
        return PlainEngine(model, tokenizer, max_requests)
    return ContinuousEngine(model, tokenizer, max_requests, **sizes)


def context_pools(context: Context) -> Callable[[int], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """A function from a layer's index to the context's k, v, starts and lengths, as `ragged_attention` takes them."""
    cache = context.cache
    if isinstance(cache, RaggedCache):
        if not cache.is_rewindable:
            raise IntegrationError("a context with decode_eviction cannot be shared; compress the text without it.")
        ragged: Any = cache.ragged_layers
        return lambda layer: ragged[layer].store.compressed_view()
    layers: Any = cache.layers

    def whole(layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        key, value = layers[layer].keys[0], layers[layer].values[0]
        heads, stored = key.shape[:2]
        starts = torch.arange(0, heads * stored, stored, dtype=torch.int32, device=key.device)[None]
        return key.flatten(0, 1), value.flatten(0, 1), starts, torch.full_like(starts, context.tokens)

    return whole
