"""Serving logic, independent of HTTP: texts are compressed in the background, questions answered side by side."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from lkv.context.compression import compress_ids
from lkv.context.context import Context
from lkv.context.generation import longest_answer
from lkv.context.input_checks import check_characters, check_text
from lkv.context.protection import protected_tokens
from lkv.errors import (
    BusyError,
    ContextFileError,
    ContextPendingError,
    LkvError,
    PromptError,
    StoreError,
    UnknownContextError,
    check_retention,
)  # fmt: skip
from lkv.hf.attention import patch_attention
from lkv.hf.loading import DEFAULT, load_model
from lkv.hf.spec import max_positions
from lkv.methods.registry import parse_method
from lkv.methods.request import CompressionRequest
from lkv.policy.lookup import load_policy, resolve_policy
from lkv.policy.policy import Policy
from lkv.serving.answers import Answer, AnswerWorker, SamplingParams
from lkv.serving.store import CompressionSettings, ContextStore, StoredContext, context_id
from lkv.utils.devices import find_device, torch_dtype
from lkv.utils.files import cache_folder, short_name
from lkv.utils.prompts import bos_ids, encode, encode_context, render_messages, tokenizer_digest

_RATE_WINDOW = 10.0  # seconds over which tokens per second are averaged
_FAILED_JOBS = 256  # failed jobs that are still reported
# Longer texts are refused before they are tokenised, which takes hundreds of bytes a character.
_CHARACTERS_PER_TOKEN = 16
_BYTES_PER_CHARACTER = 6  # in JSON, where all are escaped
_EXPIRY_SECONDS = 600.0  # between two looks for expired contexts


@dataclass(frozen=True)
class Limits:
    """Limits of one server."""

    upload_bytes: int = 16 * 2**20  # of a request
    requests: int = 64  # open chat requests
    rows: int = 16  # requests that are answered together
    texts: int = 16  # that wait to be compressed
    answer_tokens: int = 1024
    seconds: float = 300.0  # of an answer
    store_bytes: int = 64 * 2**30  # of all stored contexts
    store_seconds: float | None = None  # after which a context that nobody asked is deleted


@dataclass(eq=False)
class Job:
    """A text that waits or is being compressed, or could not be."""

    id: str
    title: str
    text: str
    settings: CompressionSettings
    created: float
    progress: float = 0.0
    error: str | None = None
    is_cancelled: bool = False  # by a deletion or at the end of the server
    is_deleted: bool = False

    def as_object(self) -> dict[str, Any]:
        """What clients get: a context that is being compressed, or could not be."""
        return {
            "object": "context", "id": self.id, "name": self.title, "status": "failed" if self.error else "compressing",
            "progress": round(self.progress, 3), "created": int(self.created), "error": self.error,
            "method": self.settings.method, "memory": self.settings.memory,
            "retention": None if self.settings.memory else self.settings.retention,
            "tokens": None, "bytes": None, "full_bytes": None, "realised_retention": None,
        }  # fmt: skip

    def is_superseded_by(self, stored: StoredContext | None) -> bool:
        """Whether the job failed, and another server has stored its context since it began."""
        return self.error is not None and stored is not None and stored.created > self.created

    def pending_error(self) -> ContextPendingError:
        """The error of a question about this context."""
        if self.error is not None:
            return ContextPendingError(f"the context {self.id!r} could not be made: {self.error}")
        return ContextPendingError(
            f"the context {self.id!r} is still being compressed; ask again when its status is 'ready'."
        )


def merge_jobs(jobs: Iterable[Job], stored: Sequence[StoredContext]) -> list[StoredContext | Job]:
    """The jobs, but for superseded ones, then the stored contexts without a job."""
    contexts = {context.id: context for context in stored}
    current = {job.id: job for job in jobs if not job.is_superseded_by(contexts.get(job.id))}
    return [*current.values(), *(context for context in stored if context.id not in current)]


class _CancelledError(Exception):
    """The job was cancelled while its text was compressed."""


class Service:
    """One model with its policy, its stored contexts, and a thread each that answers and that compresses."""

    def __init__(
        self, model: Any, tokenizer: Any, name: str, store: str, policy: Policy | None = None, method: str = "lkv",
        retention: float = 0.15, memory_bytes: int = 2**30, limits: Limits | None = None,
    ):  # fmt: skip
        """`name` is the model's name for clients; `store` a folder or fsspec URL."""
        self.limits = limits or Limits()
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._policy = policy
        spec = patch_attention(model).spec
        digest = None if policy is None else policy.digest()
        self._settings = CompressionSettings(
            method, check_retention(retention), digest, spec.digest(), tokenizer_digest(tokenizer)
        )
        self.store = ContextStore(store, model, tokenizer, digest, memory_bytes)
        self.answers = AnswerWorker(model, tokenizer, self.limits.requests, self.limits.rows, memory_bytes)
        self._jobs: dict[str, Job] = {}
        self._waiting: queue.Queue[Job | None] = queue.Queue()
        self._lock = threading.Lock()  # of the jobs; never held during input or output
        self._tokenizing = threading.Lock()
        self._rate: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._is_stopping = False
        self._worker = threading.Thread(target=self._compress_all, daemon=True)
        self._worker.start()

    @property
    def body_limit(self) -> int:
        """Bytes of a request: no more than the longest text of this model takes."""
        return min(
            self.limits.upload_bytes, _CHARACTERS_PER_TOKEN * max_positions(self.model) * _BYTES_PER_CHARACTER + 2**16
        )

    @property
    def is_healthy(self) -> bool:
        """Whether questions are answered and texts compressed."""
        return self.answers.is_alive and self._worker.is_alive()

    def add(
        self, text: str, title: str = "", system: str | None = None, retention: float | None = None,
        memory: str | float | None = None, protect: Sequence[str] = (),
    ) -> StoredContext | Job:  # fmt: skip
        """The stored context of `text`, or its job; PromptError, BusyError (too many texts wait), StoreError (full)."""
        check_text(text, "the text", "give some text to compress")
        if system is not None:
            check_text(system, "the system prompt", "give some text, or leave it out")
        settings = self._settings.for_text(retention, memory, system, protect)
        check_characters(len(text) + len(system or ""), "the text", max_positions(self.model), _CHARACTERS_PER_TOKEN)
        with self._tokenizing:
            tokens = len(encode_context(self.tokenizer, text, system))
            if tokens >= (limit := max_positions(self.model)):
                raise PromptError(
                    f"the text has {tokens} tokens, but the model reads at most {limit}, question and answer included; "
                    "shorten it."
                )
            protected_tokens(self.tokenizer, text, protect, system)  # refuses spans that are not there
        name = context_id(text, settings)
        with self._lock:
            job = self._jobs.get(name)
            if job is not None and job.error is None:
                job.title = title or job.title
                return job
        stored = self.store.describe(name)
        if stored is not None:
            try:
                self.store.get(name)
                with self._lock:
                    if job is not None and self._jobs.get(name) is job:  # failed, before another server stored it
                        del self._jobs[name]
                return self.store.rename(stored, title)
            except (ContextFileError, UnknownContextError):  # a damaged file is made anew
                title = title or stored.name
        self._check_quota()
        with self._lock:
            job = self._jobs.get(name)
            if job is not None and job.error is None:
                job.title = title or job.title
                return job
            if self._is_stopping or self._waiting.qsize() >= self.limits.texts:
                raise BusyError("as many texts as this server takes wait to be compressed; send this one again later.")
            title = title or (job.title if job is not None else "")  # of one that failed
            job = self._jobs[name] = Job(name, title, text, settings, time.time())
            self._waiting.put(job)
        return job

    def _check_quota(self) -> None:
        if self.store.nbytes() >= self.limits.store_bytes:
            raise StoreError(f"the store is full ({self.limits.store_bytes:,} bytes); delete contexts first.")

    def find(self, name: str) -> StoredContext | Job | None:
        """A stored context, or the job of one that waits, is being compressed or could not be; None for neither."""
        job = self._jobs.get(name)
        return self.store.describe(name) if job is None or self._is_outdated(job) else job

    def list_contexts(self) -> list[StoredContext | Job]:
        """All contexts that are stored, wait, are being compressed or could not be."""
        jobs = self.jobs()  # first: what becomes ready meanwhile is in the store
        return merge_jobs(jobs, self.store.list_contexts())

    def jobs(self) -> list[Job]:
        """All jobs."""
        with self._lock:
            return list(self._jobs.values())

    def _is_outdated(self, job: Job) -> bool:
        """Whether a job failed and another server has stored its context since; it is dropped then."""
        if job.error is None or not job.is_superseded_by(self.store.describe(job.id)):
            return False
        with self._lock:
            if self._jobs.get(job.id) is job:
                del self._jobs[job.id]
        return True

    def delete(self, name: str) -> bool:
        """Delete a context, or the job that makes it; running answers continue. False if there is none."""
        with self._lock:
            job = self._jobs.pop(name, None)
            if job is not None:
                job.is_deleted = job.is_cancelled = True
                with self._waiting.mutex, suppress(ValueError):  # it is being compressed, or failed
                    self._waiting.queue.remove(job)
        return self.store.delete(name) or job is not None

    def context(self, name: str) -> Context:
        """A stored context. Raises UnknownContextError, or ContextPendingError for one that is being compressed."""
        job = self._jobs.get(name)
        if job is not None and not self._is_outdated(job):
            raise job.pending_error()
        return self.store.get(name)

    def _compress_all(self) -> None:
        job: Job | None
        while True:
            try:
                job = self._waiting.get(timeout=_EXPIRY_SECONDS)
            except queue.Empty:
                self._expire()
                continue
            if job is None:
                return
            try:
                if not job.is_cancelled:
                    self._compress(job)
            except BaseException:  # the next text is compressed all the same
                logging.getLogger(__name__).exception("a text could not be compressed")
            job.text = ""
            self._expire()

    def _expire(self) -> None:
        """Delete contexts that have expired."""
        try:
            self.store.expire(self.limits.store_seconds)
        except Exception as error:  # whatever the file system answers
            logging.getLogger(__name__).warning("expired contexts stay: %s", error)

    def _compress(self, job: Job) -> None:
        def progress(share: float) -> None:
            job.progress = share
            if job.is_cancelled:
                raise _CancelledError

        stored: StoredContext | None = None
        settings = job.settings
        try:
            with self._tokenizing:
                ids = encode_context(self.tokenizer, job.text, settings.system)
                protected = protected_tokens(self.tokenizer, job.text, settings.protect or (), settings.system)
            # Not `compress`: whether a text names a file of this machine is nothing that a client may learn.
            with self.answers.passes:
                request = CompressionRequest(
                    method=settings.method,
                    retention=settings.retention if settings.memory is None else None,
                    memory=settings.memory,
                    policy=self._policy,
                    protected=tuple(protected),
                )
                context = compress_ids(self.model, self.tokenizer, ids, request, job.text, progress)
            self._check_quota()
            if not job.is_cancelled:
                described = StoredContext.describe(job.id, job.title, context, settings)
                self.store.put(described, context)
                stored = described
        except _CancelledError:
            return
        except LkvError as error:
            job.error = str(error)
        except Exception as error:  # reported to the client
            job.error = f"the text could not be compressed ({type(error).__name__}: {error}); send it again."
        if stored is not None:
            self._end(job, stored)
        if job.is_deleted:
            if stored is not None:  # the deletion came too early for it
                self.store.delete(job.id)
            return
        with self._lock:
            failed = [earlier.id for earlier in self._jobs.values() if earlier.error is not None]
            for name in failed[: max(0, len(failed) - _FAILED_JOBS)]:
                del self._jobs[name]

    def _end(self, job: Job, stored: StoredContext) -> None:
        """Drop the job of a stored context, which takes a name that came while it was being stored."""
        title = stored.name
        while True:
            with self._lock:
                if self._jobs.get(job.id) is not job:  # it was deleted, and perhaps sent again
                    return
                if job.title == title:
                    del self._jobs[job.id]
                    return
                title = job.title
            try:
                stored = self.store.rename(stored, title)
            except LkvError as error:  # the context can be used all the same
                logging.getLogger(__name__).warning("the context %s could not be renamed: %s", job.id, error)

    def ask(
        self, messages: list[dict[str, str]], name: str, max_tokens: int | None, sampling: SamplingParams,
        stops: list[str] | None = None, notify: Callable[[], None] | None = None,
    ) -> Answer:  # fmt: skip
        """The answer to the last of `messages`, about the context `name` ("" for none).

        Raises PromptError for bad messages, BusyError for too many requests, and as `context` does.
        """
        characters = sum(len(message["content"]) for message in messages)
        check_characters(characters, "the conversation", max_positions(self.model), _CHARACTERS_PER_TOKEN)
        check_text(messages[-1]["content"], "the question", "ask something")
        for message in messages[:-1]:
            # Empty messages are harmless, but not what no tokenizer can read.
            check_text(message["content"] + ".", "a message", "give text")
        with self._tokenizing:
            ids = encode(self.tokenizer, render_messages(self.tokenizer, messages, after_context=bool(name)))
            if not name and not getattr(self.tokenizer, "chat_template", None):
                ids = bos_ids(self.tokenizer) + ids
        # Last, so that no request has a context in memory while it waits, or is refused.
        self.answers.check_capacity()
        context = self.context(name) if name else None
        length = min(max_tokens or self.limits.answer_tokens, self.limits.answer_tokens)
        if max_tokens is None:
            length = max(1, min(length, longest_answer(self.model, len(ids) + (context.tokens if context else 0))))
        return self.answers.submit(ids, context, length, sampling, stops, notify)

    def stop(self, seconds: float = 30.0) -> None:
        """Take nothing new, finish running answers for up to `seconds`, and drop texts that still wait."""
        with self._lock:
            self._is_stopping = True
            for job in self._jobs.values():
                job.is_cancelled = True
        self._waiting.put(None)
        self.answers.stop(seconds)
        self._worker.join(seconds)

    def tokens_per_second(self) -> float:
        """Generated tokens per second, over the last ten seconds or since the last call."""
        with self._lock:
            now, count = time.monotonic(), self.answers.tokens
            while len(self._rate) > 1 and now - self._rate[0][0] > _RATE_WINDOW:
                self._rate.popleft()
            before, earlier = self._rate[0]
            self._rate.append((now, count))
        return (count - earlier) / max(now - before, 1e-9)

    def collect(self) -> Iterator[Any]:
        """All metrics, as Prometheus's client reads them."""
        jobs = [job for job in self.jobs() if job.error is None]
        resident = self.store.resident()
        yield GaugeMetricFamily("lkv_requests_open", "Requests answered now or waiting", self.answers.open)
        yield GaugeMetricFamily("lkv_healthy", "Whether questions are answered and texts compressed", self.is_healthy)
        yield CounterMetricFamily("lkv_failures", "Batches of requests that failed", self.answers.failures)
        yield GaugeMetricFamily("lkv_texts_waiting", "Texts that wait or are being compressed", len(jobs))
        yield CounterMetricFamily("lkv_generated_tokens", "Tokens generated", self.answers.tokens)
        yield GaugeMetricFamily("lkv_tokens_per_second", "Tokens generated per second", self.tokens_per_second())
        yield GaugeMetricFamily("lkv_contexts_resident", "Contexts in memory", len(resident))
        yield GaugeMetricFamily("lkv_context_bytes", "Bytes of k and v of contexts in memory", sum(resident.values()))
        saved = "Bytes that their full caches would take beyond that"
        yield GaugeMetricFamily("lkv_context_bytes_saved", saved, self.store.saved_nbytes())
        with suppress(StoreError):  # the other metrics say all the same how the server is
            yield GaugeMetricFamily("lkv_contexts_stored", "Contexts in the store", self.store.usage()[0])


def make_service(options: dict[str, Any]) -> Service:
    """The service described by the options of `lkv serve`. Raises as loading a model and a policy does."""
    name = options["model"] or DEFAULT
    device = find_device(options["device"])
    model, tokenizer = load_model(name, torch_dtype(options["dtype"]), options["revision"], device)
    policy = None
    if parse_method(options["method"]).needs_policy:
        named = options["policy"] or None
        if named is not None:
            named = load_policy(named, options["strict"], options["policy_revision"])
        policy = resolve_policy(model, named, name=name)
    limits = Limits(
        upload_bytes=options["max_upload"] * 2**20, requests=options["max_requests"], rows=options["max_batch"],
        texts=options["max_texts"], answer_tokens=options["max_tokens"], seconds=options["timeout"],
        store_bytes=options["max_store"] * 2**20,
        store_seconds=None if options["keep_days"] is None else options["keep_days"] * 86400,
    )  # fmt: skip
    return Service(
        model, tokenizer, options["name"] or short_name(name),
        options["store"] or str(cache_folder() / "contexts"), policy, options["method"], options["retention"],
        int(options["memory"] * 2**20), limits,
    )  # fmt: skip
