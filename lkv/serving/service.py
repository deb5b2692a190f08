"""Serving logic, independent of HTTP: texts are compressed in the background, questions answered side by side."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lkv.context.compression import compress_ids
from lkv.context.context import Context
from lkv.context.generation import longest_answer
from lkv.errors import LkvError, StoreError
from lkv.hf.attention import patch_attention
from lkv.hf.spec import check_ids, max_positions
from lkv.policy.policy import Policy
from lkv.serving.answer import Answer, SamplingParams
from lkv.serving.batcher import AnswerWorker
from lkv.serving.inputs import CHARACTERS_PER_TOKEN, CompressionSettings, encode_conversation, encode_text
from lkv.serving.jobs import ContextRegistry, Job
from lkv.serving.middleware import Facts
from lkv.serving.schemas import ContextRequest
from lkv.serving.settings import ServiceSettings
from lkv.serving.store import ContextStore
from lkv.serving.stored_context import StoredContext
from lkv.utils.prompts import bos_ids

_BYTES_PER_CHARACTER = 6  # in JSON, where all are escaped
_EXPIRY_SECONDS = 600.0  # between two looks for expired contexts
_LOG = logging.getLogger(__name__)


class _CancelledError(Exception):
    """The job was cancelled while its text was compressed."""


class Service:
    """One model with its policy, its stored contexts, and a thread each that answers and that compresses."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        settings: ServiceSettings,
        policy: Policy | None = None,
    ):
        """Start the threads.

        Args:
            model: The model.
            tokenizer: Its tokenizer.
            name: The model's name for clients.
            settings: Limits, the store, and how texts are compressed.
            policy: The policy, for methods that need one.
        """
        self.settings = settings
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._policy = policy
        spec = patch_attention(model).spec
        self.compression = CompressionSettings.of_server(settings, spec, tokenizer, policy)
        memory_bytes = settings.contexts_bytes
        self.store = ContextStore(
            settings.store_url, model, tokenizer, self.compression.policy, memory_bytes, settings.store_bytes
        )
        self.answers = AnswerWorker(model, tokenizer, settings.max_requests, settings.max_batch, memory_bytes)
        self.registry = ContextRegistry(self.store, settings.max_texts + 1)  # one is being compressed
        self._tokenizing = threading.Lock()
        self._worker = threading.Thread(target=self._compress_all, daemon=True)
        self._worker.start()

    @property
    def body_limit(self) -> int:
        """The maximum bytes of a text or a file."""
        return self.settings.upload_bytes

    @property
    def chat_limit(self) -> int:
        """The maximum bytes of a conversation: the size of the model's longest text."""
        return min(
            self.settings.upload_bytes, CHARACTERS_PER_TOKEN * max_positions(self.model) * _BYTES_PER_CHARACTER + 2**16
        )

    @property
    def models(self) -> list[str]:
        """The model's name for clients."""
        return [self.name]

    @property
    def is_healthy(self) -> bool:
        """Whether questions are answered and texts compressed."""
        return self.answers.is_alive and self._worker.is_alive()

    async def check_health(self) -> bool:
        """Return `is_healthy`."""
        return self.is_healthy

    async def open_registry(self) -> ContextRegistry:
        """Return the contexts."""
        return self.registry

    async def create(self, body: ContextRequest, skipped: list[str] | None) -> StoredContext | Job:
        """Run `add` in a thread."""
        return await asyncio.to_thread(self.add, body, skipped)

    def add(self, body: ContextRequest, skipped: list[str] | None = None) -> StoredContext | Job:
        """Compress a text in the background, unless it is stored already.

        Args:
            body: The text and its settings.
            skipped: What of a file is not in its text; None for a text.

        Returns:
            The stored context, or the job that makes it.

        Raises:
            PromptError: For a text that cannot be compressed.
            BusyError: If too many texts wait.
            StoreError: If the store is full, or fails.
        """
        settings = body.settings(self.compression)
        with self._tokenizing:
            text = encode_text(self.tokenizer, max_positions(self.model), body.content(), settings)
        check_ids(self.model, self.tokenizer, text.ids)
        job = Job(text.id, body.name, settings, time.time(), text, skipped)
        return self.registry.submit(job, self.store.get)

    async def delete(self, name: str) -> None:
        """Delete a context, or the job that makes it; running answers continue. Raises UnknownContextError."""
        await asyncio.to_thread(self.registry.delete, name)

    def context(self, name: str) -> Context:
        """Return a stored context.

        Raises UnknownContextError, or ContextPendingError for one that is being compressed.
        """
        self.registry.find_ready(name)
        return self.store.get(name)

    def _compress_all(self) -> None:
        while not self.registry.is_closed:
            job = self.registry.take(_EXPIRY_SECONDS)
            try:
                if job is not None:
                    self._compress(job)
            except BaseException:  # the next text is compressed all the same
                _LOG.exception("a text could not be compressed")
            self._expire()

    def _expire(self) -> None:
        """Delete contexts that have expired."""
        try:
            self.store.expire(self.settings.keep_seconds)
        except Exception as error:  # whatever the file system answers
            _LOG.warning("expired contexts stay: %s", error)

    def _compress(self, job: Job) -> None:
        stored: StoredContext | None = None
        problem: str | None = None
        start = time.perf_counter()
        try:
            stored = self._make_context(job)
        except _CancelledError:
            pass
        except LkvError as error:
            problem = str(error)
        except Exception as error:  # reported to the client
            problem = f"the text could not be compressed ({type(error).__name__}: {error}); send it again."
        job.text = None
        facts = {"context": job.id, "seconds": round(time.perf_counter() - start, 3)}
        if stored is not None:
            facts |= {"tokens": stored.tokens, "bytes": stored.nbytes}
            _LOG.info("compressed %s", Facts(facts))
        elif problem is not None:
            _LOG.warning("not compressed %s", Facts(facts | {"error": problem}))
        job.error = problem  # after the log: clients see it at once
        self.registry.finish(job, stored)

    def _make_context(self, job: Job) -> StoredContext:
        """Compress the text of a job, and store its context. Raises _CancelledError for a cancelled job."""

        def progress(share: float) -> None:
            job.progress = share
            if job.is_deleted or self.registry.is_closed:
                raise _CancelledError

        assert job.text is not None
        request = job.settings.request(self._policy, job.text.protected)
        # Not `compress`: whether a text names a file of this machine is nothing that a client may learn.
        with self.answers.passes:
            context = compress_ids(
                self.model, self.tokenizer, job.text.ids, request, job.text.text, progress, kind=job.settings.kind
            )
        self.store.check_quota()  # again: other texts were stored since the request
        progress(1.0)
        stored = StoredContext.describe(job.id, job.title, context, job.settings, job.created, job.skipped)
        self.store.put(stored, context)
        return stored

    def ask(
        self,
        messages: list[dict[str, Any]],
        name: str,
        params: SamplingParams,
        notify: Callable[[], None] | None = None,
    ) -> Answer:
        """Return the answer to a conversation, which is generated meanwhile.

        Args:
            messages: The turns; the last one is answered.
            name: The id of the context that it is about, "" for none.
            params: How it is generated, within the server's limit of tokens.
            notify: Called after every change of the answer, in the worker's thread.

        Raises:
            PromptError: For messages that cannot be answered.
            BusyError: If too many requests are open.
            StoreError: As `context` raises.
        """
        stored = self.registry.find_ready(name) if name else None  # not under the lock: a store may be slow
        kind, tools = (stored.kind, stored.tools) if stored else (None, None)
        with self._tokenizing:
            ids = encode_conversation(self.tokenizer, max_positions(self.model), messages, kind, context_tools=tools)
            if not name and not getattr(self.tokenizer, "chat_template", None):
                ids = bos_ids(self.tokenizer) + ids
        check_ids(self.model, self.tokenizer, ids)
        # Last, so that no request has a context in memory while it waits, or is refused.
        self.answers.check_capacity()
        context = self.context(name) if name else None
        length = min(params.max_tokens or self.settings.max_tokens, self.settings.max_tokens)
        if params.max_tokens is None:
            length = max(1, min(length, longest_answer(self.model, len(ids) + (context.tokens if context else 0))))
        return self.answers.submit(ids, context, params._replace(max_tokens=length), notify)

    def stop(self, seconds: float = 30.0) -> None:
        """Take nothing new, finish running answers for up to `seconds`, and drop texts that still wait."""
        self.registry.close()
        self.answers.stop(seconds)
        self._worker.join(seconds)

    def collect(self) -> Iterator[Metric]:
        """Return all metrics, as Prometheus's client reads them."""
        jobs = [job for job in self.registry.jobs() if job.error is None]
        resident = self.store.resident()
        yield GaugeMetricFamily("lkv_requests_open", "Requests answered now or waiting", self.answers.open)
        yield GaugeMetricFamily("lkv_healthy", "Whether questions are answered and texts compressed", self.is_healthy)
        yield CounterMetricFamily("lkv_failures", "Batches of requests that failed", self.answers.failures)
        yield GaugeMetricFamily("lkv_texts_waiting", "Texts that wait or are being compressed", len(jobs))
        yield CounterMetricFamily("lkv_generated_tokens", "Tokens generated", self.answers.tokens)
        yield GaugeMetricFamily("lkv_contexts_resident", "Contexts in memory", len(resident))
        yield GaugeMetricFamily("lkv_context_bytes", "Bytes of k and v of contexts in memory", sum(resident.values()))
        saved = "Bytes that their full caches would take beyond that"
        yield GaugeMetricFamily("lkv_context_bytes_saved", saved, self.store.saved_nbytes())
        with suppress(StoreError):  # the other metrics say all the same how the server is
            yield GaugeMetricFamily("lkv_contexts_stored", "Contexts in the store", self.store.usage()[0])
