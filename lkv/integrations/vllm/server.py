"""The contexts of vLLM's server: made by its engine, listed, deleted and counted."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from prometheus_client import Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from lkv.errors import IntegrationError, LkvError, PromptError
from lkv.integrations.vllm.contexts import COMPRESS, NewContext, VllmContexts
from lkv.integrations.vllm.requests import front_contexts
from lkv.serving.jobs import ContextRegistry, Job
from lkv.serving.schemas import ContextRequest
from lkv.serving.settings import ContextSettings
from lkv.serving.stored_context import StoredContext

_BUCKETS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # seconds
_MAX_TEXTS = 256  # that are being compressed


class EngineContextServer:
    """The contexts of an engine, for `lkv.serving.routes` and for requests that name one."""

    def __init__(self) -> None:
        self.settings = ContextSettings.model_validate({})
        self.models: list[str] = []
        self.max_length = 0  # tokens of a request, vLLM's --max-model-len
        self.registry: ContextRegistry | None = None  # before the first request
        self.metrics = Metrics()
        self.engine: Any = None
        self.has_template = False  # one of vLLM's own options
        self._tasks: set[asyncio.Task[None]] = set()  # of all jobs, the deleted ones too
        self._readings: dict[Job, asyncio.Task[None]] = {}  # the engine's work for a job

    @property
    def body_limit(self) -> int:
        """The largest text that is sent, in bytes."""
        return self.settings.upload_bytes

    async def check_health(self) -> bool:
        """Return whether the engine answers."""
        with suppress(Exception):
            await self.engine.check_health()
            return True
        return False

    async def contexts(self) -> VllmContexts:
        """Get the front end's contexts; the first call reads a few weights. Raises LkvError if there can be none."""
        if self.has_template:
            raise IntegrationError(
                "contexts cannot be used here: --chat-template and --default-chat-template-kwargs are not used with "
                "contexts; put the template into the tokenizer's files."
            )
        return await asyncio.to_thread(front_contexts, self.engine.input_processor)

    async def open_registry(self) -> ContextRegistry:
        """Return the contexts, stored and being made."""
        contexts = await self.contexts()
        if self.registry is None:
            self.registry = ContextRegistry(contexts.store, _MAX_TEXTS)
        return self.registry

    async def create(self, body: ContextRequest, skipped: list[str] | None) -> StoredContext | Job:
        """Return the stored context of a text, or the job that makes it."""
        contexts, registry = await self.contexts(), await self.open_registry()
        settings = body.settings(contexts.compression)
        new_context = await asyncio.to_thread(contexts.encode, body.content(), settings)
        if len(new_context.ids) >= self.max_length:
            raise PromptError(
                f"the text has {len(new_context.ids)} tokens, but vLLM was started with --max-model-len "
                f"{self.max_length}."
            )
        job = Job(new_context.id, body.name, settings, time.time(), skipped=skipped, is_started=True)
        made = await asyncio.to_thread(registry.submit, job, contexts.tokens)
        if made is job:
            new_context.name, new_context.created, new_context.skipped = job.title, job.created, skipped
            task = asyncio.create_task(self._compress(registry, new_context, job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return made

    async def delete(self, name: str) -> None:
        """Delete a context, or the job that makes it; answers that have begun continue."""
        job = await asyncio.to_thread((await self.open_registry()).delete, name)
        if job is not None and (reading := self._readings.get(job)) is not None:
            reading.cancel()
        await self._release(name)

    async def _release(self, name: str) -> None:
        """Drop a deleted context from the workers' memory."""
        with suppress(Exception):  # the engine has ended, and its memory with it
            await self.engine.collective_rpc("lkv_release", args=(name,))

    async def _compress(self, registry: ContextRegistry, new_context: NewContext, job: Job) -> None:
        """Have the engine read a text, and compress it."""
        stored: StoredContext | None = None
        try:
            reading = self._readings[job] = asyncio.create_task(self._read(new_context))
            if job.is_deleted:
                reading.cancel()
            await asyncio.wait([reading])
            del self._readings[job]
            if not reading.cancelled():  # by a deletion, perhaps after the text was compressed
                reading.result()
            while None in (outcomes := await self.engine.collective_rpc("lkv_outcome", args=(job.id,))):
                await asyncio.sleep(0.01)
            job.error = "".join(outcomes) or None
            if job.error is None:
                stored = await asyncio.to_thread(registry.store.describe, job.id)
                if stored is None:
                    job.error = "vLLM ended without compressing the text; see its log, and send it again."
        except Exception as error:  # reported to the client
            job.error = f"the text could not be compressed ({type(error).__name__}: {error}); send it again."
        if await asyncio.to_thread(registry.finish, job, stored):
            await self._release(job.id)
        if not job.is_deleted:
            self.metrics.compressions["failed" if job.error else "succeeded"] += 1
            if job.error is None:
                self.metrics.seconds.observe(time.time() - job.created)

    async def _read(self, new_context: NewContext) -> None:
        """Have the engine read a text."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, extra_args={COMPRESS: new_context.model_dump_json()})
        prompt = {"prompt_token_ids": new_context.ids}
        # Of several engines the first is the one that answers `collective_rpc`.
        has_replicas = self.engine.vllm_config.parallel_config.data_parallel_size > 1
        options = {"data_parallel_rank": 0} if has_replicas else {}
        async for _ in self.engine.generate(prompt, params, f"lkv-{uuid.uuid4().hex}", **options):
            pass

    async def refresh_metrics(self) -> None:
        """Query the statistics of the workers and the store."""
        if self.registry is not None:
            self.metrics.texts_waiting = sum(job.error is None for job in self.registry.jobs())
        with suppress(Exception):  # the engine has ended, which vLLM's own metrics say, or the store cannot be read
            self.metrics.workers = await self.engine.collective_rpc("lkv_statistics")
            if self.registry is not None:
                self.metrics.usage = await asyncio.to_thread(self.registry.store.usage)

    async def unreadable_reason(self, name: str) -> LkvError | None:
        """Return why a context cannot be read now; None if it can be."""
        try:
            contexts = await self.contexts()
            await asyncio.to_thread(contexts.open_store(0).get, name)
        except LkvError as error:
            return error
        return None


class Metrics:
    """LKV's metrics in /metrics, as a collector of Prometheus's client."""

    def __init__(self) -> None:
        self.texts_waiting = 0
        self.usage = 0, 0  # contexts and bytes in the store
        self.workers: list[dict[str, Any]] = []  # their statistics
        # From the start, as rates need.
        self.compressions, self.requests = Counter(succeeded=0, failed=0), Counter({"200": 0})
        self.seconds = Histogram(
            "lkv_compression_seconds", "From request to stored context", buckets=_BUCKETS, registry=None
        )

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        # Ranks of one model, which all need the same contexts.
        resident = [worker["resident"].values() for worker in self.workers]
        first = self.workers[0] if self.workers else {"queries": 0, "hits": 0}
        for name, about, value in (
            ("lkv_contexts_resident", "Contexts in the workers' memory", max(map(len, resident), default=0)),
            ("lkv_context_bytes", "Bytes of k and v of contexts in the workers' memory", sum(map(sum, resident))),
            ("lkv_contexts_stored", "Contexts in the store", self.usage[0]),
            ("lkv_store_bytes", "Bytes of all files in the store", self.usage[1]),
            ("lkv_texts_waiting", "Texts that wait or are being compressed", self.texts_waiting),
        ):
            yield GaugeMetricFamily(name, about, value)
        yield CounterMetricFamily("lkv_context_queries", "How often a worker needed a context", first["queries"])
        yield CounterMetricFamily("lkv_context_hits", "How often it was in the worker's memory", first["hits"])
        for name, about, label, counts in (
            ("lkv_compressions", "Texts compressed, or not", "outcome", self.compressions),
            ("lkv_context_requests", "Requests about contexts, by their answers' status", "code", self.requests),
        ):
            family = CounterMetricFamily(name, about, labels=[label])
            for key, count in counts.items():
                family.add_metric([key], count)
            yield family
        yield from self.seconds.collect()
