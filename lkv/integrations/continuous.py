"""Many questions at once about compressed contexts, by transformers' continuous batching (5.17 and newer).

    engine = start(model, tokenizer)
    answers = [engine.submit(ids, context) for ids, context in ...]      # of different contexts, or of none
    for token in answers[0]: ...                                         # as they come
    answers[1].result()

Each request brings its question alone; contexts are shared, read and never copied. Where the installed version does not
fit, requests are answered one after another by what `Context.ask` does, and `start` says so in the log.
"""

import itertools
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)  # fmt: skip

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.context import Context
from lkv.context.generation import Stop, answer_length, ends_of, generated
from lkv.errors import BusyError, IntegrationError, LkvError
from lkv.integrations.sampling import SamplingParams
from lkv.integrations.transformers.attention import patch_attention

_LEAST_VERSION = (5, 17)
# What a model's own configuration may say of its answers, and a batch of requests does not heed.
_ALONE = (
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "min_length", "min_new_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size", "guidance_scale", "watermarking_config", "stop_strings",
)  # fmt: skip
_STOPPED = "the engine was stopped before this answer was complete; start one and ask again."


class Answer:
    """The ids of one answer, as they come. Iterate over it in one thread, or wait for `result()`."""

    def __init__(self, cancel: Callable[["Answer"], None], notify: Callable[[], None] | None, prompt_tokens: int):
        """`notify` is called in the computing thread whenever there is something new."""
        self.ids: list[int] = []
        self.prompt_tokens = prompt_tokens  # of the question alone
        self.error: str | None = None
        self.cancelled = False
        self.done = threading.Event()
        self.ended_by_token = False
        self._cancel, self._notify = cancel, notify
        self._changed = threading.Condition()

    def cancel(self) -> None:
        """End the answer with what there is of it; nothing happens to one that has ended."""
        if not self.done.is_set():
            self.cancelled = True
            self._cancel(self)
            self.put(self.ids, ended=True)

    def put(self, ids: list[int], ended: bool, error: str | None = None) -> None:
        """What there is now; for the engine. Ignored once the answer has ended."""
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
        while new := self._beyond(seen):
            yield from new
            seen += len(new)
        self._check()

    def _beyond(self, seen: int) -> list[int]:
        """The ids after the first `seen`, once there are some; none where the answer has ended."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.ids) > seen or self.done.is_set())
            return self.ids[seen:]

    def result(self, timeout: float | None = None) -> list[int]:
        """All ids, the one that ends the answer included. Raises IntegrationError where the engine failed or gave none
        within `timeout` seconds."""
        if not self.done.wait(timeout):
            raise IntegrationError(f"there is no answer after {timeout} seconds; wait longer, or cancel() it.")
        self._check()
        return self.ids

    def _check(self) -> None:
        if self.error is not None:
            raise IntegrationError(self.error)


class Engine(ABC):
    """Answers requests about contexts of one model. It may be used from several threads."""

    batched = False  # whether answers are made side by side

    def __init__(self, model: Any, tokenizer: Any, waiting: int):
        self.model, self.tokenizer = model, tokenizer
        self._waiting = waiting
        self._lock = threading.Lock()
        self._open: dict[str, Answer] = {}
        self._names = map(str, itertools.count())
        self._stopping = False
        self.tokens = 0  # generated so far

    def submit(
        self,
        ids: list[int],
        context: Context | None = None,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        notify: Callable[[], None] | None = None,
    ) -> Answer:
        """The answer to what `ids` ask after the text of `context`, or by themselves.

        Raises PromptError where the answer would not fit, BusyError where too many requests wait already.
        """
        if not ids:
            raise LkvError("there is nothing to answer: give the ids of a question.")
        held = 0 if context is None else context.tokens
        length = answer_length(self.model, held + len(ids), max_new_tokens)
        self._check(context, len(ids) + length)
        with self._lock:
            if self._stopping:
                raise BusyError("the engine is stopping; ask again when another one runs.")
            if len(self._open) >= self._waiting:
                raise BusyError(f"{len(self._open)} requests are being answered or wait already; ask again later.")
            name = next(self._names)
            answer = Answer(lambda _: self._cancel(name), notify, len(ids))
            self._open[name] = answer
        self._begin(name, answer, list(ids), context, length, sampling or SamplingParams())
        return answer

    @property
    def open(self) -> int:
        """Requests that are answered or wait."""
        return len(self._open)

    def stop(self, timeout: float = 30.0) -> None:
        """Take no more requests, answer those at hand for up to `timeout` seconds, then end those that are left."""
        with self._lock:
            self._stopping = True
        deadline = time.monotonic() + timeout
        while self._open and time.monotonic() < deadline:
            time.sleep(0.01)
        for name in list(self._open):
            self._deliver(name, None, True, _STOPPED)
        self._end()

    def _deliver(self, name: str, ids: list[int] | None, ended: bool, error: str | None = None) -> None:
        """Hand on what there is of an answer; `None` leaves its ids as they are."""
        with self._lock:
            answer = self._open.pop(name, None) if ended else self._open.get(name)
        if answer is None:
            return
        ids = answer.ids if ids is None else ids
        self.tokens += len(ids) - len(answer.ids)
        if ended and ids:
            answer.ended_by_token = ids[-1] in ends_of(self.model, {})
        answer.put(ids, ended, error)

    @abstractmethod
    def _check(self, context: Context | None, tokens: int) -> None:
        """Raise for a request that can never be served; `tokens` of it beside the context's."""

    @abstractmethod
    def _begin(
        self, name: str, answer: Answer, ids: list[int], context: Context | None, length: int, sampling: SamplingParams
    ) -> None:
        """Compute the answer elsewhere, and `_deliver` it."""

    @abstractmethod
    def _cancel(self, name: str) -> None:
        """Compute no more of an answer."""

    @abstractmethod
    def _end(self) -> None:
        """End all computing, at once."""


class ContinuousEngine(Engine):
    """Requests side by side: every step reads the model's weights once for all of them."""

    batched = True

    def __init__(
        self, model: Any, tokenizer: Any, waiting: int = 256, pages: int = 512, page_size: int = 32,
        batch_tokens: int = 256, requests: int = 64,
    ):  # fmt: skip
        """`pages` of `page_size` tokens hold what follows the contexts; a step reads up to `batch_tokens` new tokens of
        up to `requests` requests. Raises IntegrationError where this cannot work."""
        super().__init__(model, tokenizer, waiting)
        if reason := refusal(model):
            raise IntegrationError(f"continuous batching cannot be used: {reason}")
        from lkv.integrations.transformers import paged

        self._paged, self._room = paged, pages * page_size
        self._manager = paged.FollowingManager(model, pages, page_size, batch_tokens, requests, self._arrived)
        self._manager.start()

    def pages(self) -> tuple[int, int]:
        """Free pages and all pages, when no request is being answered."""
        return self._manager.free_pages()

    def held(self) -> int:
        """Requests whose context is still referred to."""
        return len(self._manager.followers)

    def _check(self, context: Context | None, tokens: int) -> None:
        if tokens > self._room:
            raise LkvError(
                f"question and answer may have {self._room} tokens here, not {tokens}; ask for less, or start the "
                "engine with more pages."
            )
        if context is not None and context.model is not self.model:
            raise IntegrationError("the context belongs to another model; compress the text with the engine's model.")
        if context is not None:
            pools_of(context)

    def _arrived(self, name: str, ids: list[int], ended: bool, error: str | None) -> None:
        self._deliver(name, ids, ended, error and f"the answer could not be computed ({error}); ask again.")

    def _begin(
        self, name: str, answer: Answer, ids: list[int], context: Context | None, length: int, sampling: SamplingParams
    ) -> None:
        prefix = None if context is None else self._prefix(context)
        choice = chosen_by(self.model, [] if context is None else context.ids, sampling)
        self._manager.follow(name, self._paged.Follower(prefix, choice))
        if self._manager.add_request(ids, request_id=name, max_new_tokens=length, streaming=True) is None:
            self._manager.followers.pop(name, None)
            self._deliver(name, None, True, "the engine has failed; start another one.")

    def _prefix(self, context: Context) -> Any:
        """One object a context for as long as that lives, so that its requests are computed together."""
        known = context.__dict__.get("_lkv_prefix")
        if known is None:
            known = context.__dict__["_lkv_prefix"] = self._paged.Prefix(context.tokens, pools_of(context))
        return known

    def _cancel(self, name: str) -> None:
        self._manager.cancel_request(name)
        self._deliver(name, None, True)

    def _end(self) -> None:
        self._manager.stop(block=True, timeout=30, hard_stop=True)


class PlainEngine(Engine):
    """Requests one after another, each as `Context.ask` answers it."""

    def __init__(self, model: Any, tokenizer: Any, waiting: int = 256):
        super().__init__(model, tokenizer, waiting)
        patch_attention(model)
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._stops: dict[str, Stop] = {}
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _check(self, context: Context | None, tokens: int) -> None:
        pass

    def _begin(
        self, name: str, answer: Answer, ids: list[int], context: Context | None, length: int, sampling: SamplingParams
    ) -> None:
        self._stops[name] = Stop()
        self._queue.put((name, ids, context, length, sampling))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            name, ids, context, length, sampling = job
            stop = self._stops[name]
            try:
                if not stop.asked.is_set():
                    self._compute(name, ids, context, length, sampling.drawer(), stop)
            except Exception as error:  # told to whoever asked
                self._deliver(name, None, True, f"the answer could not be computed ({error}); ask again.")
            del self._stops[name], job, context

    def _compute(self, name: str, ids: list[int], context: Context | None, length: int, draw: Any, stop: Stop) -> None:
        options: dict[str, Any] = {
            "streamer": _Ids(lambda ids: self._deliver(name, ids, False)),
            "stopping_criteria": StoppingCriteriaList([stop]),
        }
        if draw is not None:
            options["logits_processor"] = LogitsProcessorList([_Drawn(draw)])
        if context is None:
            out = generated(self.model, self.tokenizer, [ids], 0, DynamicCache(), max_new_tokens=length, **options)[
                0
            ].tolist()
        else:
            out = context.complete(ids, length, **options)
        self._deliver(name, out, True)

    def _cancel(self, name: str) -> None:
        if (stop := self._stops.get(name)) is not None:
            stop.asked.set()
        self._deliver(name, None, True)

    def _end(self) -> None:
        for stop in list(self._stops.values()):
            stop.asked.set()
        self._queue.put(None)
        self._thread.join()


class _Ids:
    """A streamer of generate's: gives all ids so far whenever one comes."""

    def __init__(self, deliver: Callable[[list[int]], None]):
        self._deliver = deliver
        self._ids: list[int] = []
        self._begun = False

    def put(self, ids: Tensor) -> None:
        if self._begun:  # the first are those of the prompt
            self._ids = self._ids + ids.flatten().tolist()
            self._deliver(self._ids)
        self._begun = True

    def end(self) -> None:
        pass


class _Drawn(LogitsProcessor):
    """Leaves one token: the one that was drawn."""

    def __init__(self, draw: Callable[[Tensor], int]):
        self._draw = draw

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        chosen = self._draw(scores[0])
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([chosen], device=scores.device), 0.0)


def chosen_by(model: Any, before: list[int], sampling: SamplingParams) -> Callable[[list[int], Tensor], int] | None:
    """What chooses the next token of a request from its ids and logits [V], after a text of the ids `before`: a draw or
    the most probable one, once the penalties of repetition in the model's own configuration have been heeded. None
    where it is simply the most probable."""
    config, draw = model.generation_config, sampling.drawer()
    penalties = LogitsProcessorList()
    if (penalty := getattr(config, "repetition_penalty", None)) not in (None, 1.0):
        penalties.append(RepetitionPenaltyLogitsProcessor(penalty))
    if size := getattr(config, "no_repeat_ngram_size", None):
        penalties.append(NoRepeatNGramLogitsProcessor(size))
    if draw is None and not penalties:
        return None

    def choose(ids: list[int], logits: Tensor) -> int:
        if penalties:
            seen = torch.tensor([before + ids], device=logits.device)
            logits = penalties(seen, logits[None].float())[0]  # type: ignore[arg-type]
        return int(logits.argmax()) if draw is None else draw(logits)

    return choose


def refusal(model: Any) -> str | None:
    """Why continuous batching cannot serve `model` here, in one sentence; None where it can."""
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < _LEAST_VERSION:
        return f"it needs transformers 5.17 or newer, and {transformers.__version__} is installed."
    if any(window is not None for window in patch_attention(model).sliding_windows):
        return f"{type(model).__name__} has sliding layers, whose windows reach from the question into the text."
    if set_ := [name for name in _ALONE if getattr(model.generation_config, name, None)]:
        return f"the model's generation_config sets {', '.join(set_)}, which only answers one by one heed."
    try:
        import lkv.integrations.transformers.paged  # noqa: F401
    except ImportError as error:
        return f"transformers {transformers.__version__} has changed there ({error})."
    return None


def start(model: Any, tokenizer: Any, waiting: int = 256, **sizes: int) -> Engine:
    """A ContinuousEngine, `sizes` of which see there; where it cannot be used a PlainEngine, the reason logged."""
    if reason := refusal(model):
        logging.getLogger(__name__).warning("requests are answered one after another: %s", reason)
        return PlainEngine(model, tokenizer, waiting)
    return ContinuousEngine(model, tokenizer, waiting, **sizes)


def pools_of(context: Context) -> Callable[[int], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What of a context's cache is settled, layer by layer, as `ragged_attention` takes it."""
    cache = context.cache
    if isinstance(cache, RaggedCache) and not cache.is_rewindable:
        raise IntegrationError("a context with decode_eviction cannot be shared; compress the text without it.")
    layers: Any = cache.ragged_layers if isinstance(cache, RaggedCache) else cache.layers
    if isinstance(cache, RaggedCache):
        return lambda layer: layers[layer].store.settled()

    def whole(layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        key, value = layers[layer].keys[0], layers[layer].values[0]
        heads, held = key.shape[:2]
        starts = torch.arange(0, heads * held, held, dtype=torch.int32, device=key.device)[None]
        return key.flatten(0, 1), value.flatten(0, 1), starts, torch.full_like(starts, context.tokens)

    return whole
