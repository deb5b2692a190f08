"""Contexts over HTTP, beside vLLM's own routes: `/v1/contexts`, and chats and completions that name a context.

vLLM loads this as an endpoint plugin where `VLLM_PLUGINS` names `lkv`. A request names its context by the model's name,
`MODEL:CONTEXT`, by `vllm_xargs={"lkv_context": CONTEXT}`, or by the field `context`. It is rewritten before vLLM parses
it: a chat's messages become the tokens that follow the context.
"""

import asyncio
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI
from prometheus_client import REGISTRY, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import ValidationError

from lkv.errors import IntegrationError, LkvError, PromptError, UnknownContextError
from lkv.integrations.vllm.batch import COMPRESS, CONTEXT
from lkv.integrations.vllm.context_middleware import COMPLETIONS, PREFIX, ContextMiddleware
from lkv.integrations.vllm.contexts import NewContext, VllmContexts, loaded_contexts, plugin_settings
from lkv.integrations.vllm.requests import front_contexts, salt_of, split_salt
from lkv.serving import LOOPBACK
from lkv.serving.inputs import encode_conversation
from lkv.serving.jobs import Job, JobQueue
from lkv.serving.routes import add_context_routes, add_error_handlers, describe_model
from lkv.serving.schemas import ContextRequest, Message, first_problem
from lkv.serving.settings import ContextSettings
from lkv.serving.store import ContextStore
from lkv.serving.stored_context import StoredContext

# vLLM ignores these fields for context chats.
_UNUSED_FIELDS = (
    "tools", "functions", "prompt_embeds", "echo", "chat_template", "chat_template_kwargs", "documents",
    "continue_final_message", "reasoning_effort", "truncate_prompt_tokens", "kv_transfer_params",
)  # fmt: skip
_CONTEXT_FIELDS = ("context", CONTEXT)
_RESEMBLANCE = 0.8  # of a misspelt field, as difflib measures it
_MAX_FIELDS = 256  # of a request; each is compared with those that name a context
_LONGEST_FIELD = 32  # characters; longer ones resemble none
_BUCKETS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # seconds
_MAX_TEXTS = 256  # that are being compressed
_LOG = logging.getLogger("vllm.lkv")


class ContextRoutes:
    """vLLM's endpoint plugin (entry point `vllm.endpoint_plugins`)."""

    name = "lkv"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._settings = ContextSettings.model_validate({})
        self._models: list[str] = []
        self.queue = JobQueue(_MAX_TEXTS)
        self._tasks: set[asyncio.Task[None]] = set()  # of all jobs, the deleted ones too
        self._readings: dict[Job, asyncio.Task[None]] = {}  # the engine's work for a job
        self._users: Counter[str] = Counter()  # open requests by context
        self.is_stopping = False
        self._metrics = _Metrics()
        self._has_template = False  # one of vLLM's own options
        self._has_replicas = False  # engines of data parallelism

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and the middleware that rewrites requests about contexts."""
        arguments: Any = getattr(app.state, "args", None)
        # Else pages in a browser on this machine could reach contexts, by a name of their own for its address.
        is_local = getattr(arguments, "host", None) in LOOPBACK and arguments.allowed_origins in ([], ["*"])
        has_key = bool(getattr(arguments, "api_key", None) or os.environ.get("VLLM_API_KEY"))
        app.add_middleware(ContextMiddleware, routes=self, is_local=is_local, has_key=has_key)
        add_error_handlers(app)
        add_context_routes(app, self)

        @app.get("/v1/models/{name:path}")
        async def model(name: str) -> dict[str, Any]:  # which vLLM lacks
            if name in self._models:
                return describe_model(name)
            before, _, context = name.rpartition(":")
            if before not in self._models:
                raise UnknownContextError(f"there is no model {name[:80]!r} here; GET /v1/models lists all.")
            found = await asyncio.to_thread(self.queue.find, context, await self.open_store())
            return describe_model(name, found.created)

    @property
    def body_limit(self) -> int:
        """The largest text that is sent, in bytes."""
        return self._settings.upload_bytes

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take the engine, and the settings."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self._engine = engine_client
        self._settings = plugin_settings(engine_client.vllm_config)
        self._models = list(args.served_model_name or [args.model])
        self._length = engine_client.vllm_config.model_config.max_model_len
        self._has_template = bool(args.chat_template or args.default_chat_template_kwargs)
        self._has_replicas = engine_client.vllm_config.parallel_config.data_parallel_size > 1
        REGISTRY.register(self._metrics)
        shutdown, loop = engine_client.shutdown, asyncio.get_running_loop()

        def stop(*arguments: Any, **options: Any) -> None:
            """vLLM calls this at SIGINT and SIGTERM, in a thread; running answers have the time that it takes."""
            self.is_stopping = True
            shutdown(*arguments, **options)
            # Else some requests wait for an engine that has ended, until uvicorn cuts them off.
            with suppress(RuntimeError):  # the event loop has ended too
                loop.call_soon_threadsafe(engine_client.output_processor.propagate_error, EngineDeadError())

        engine_client.shutdown = stop

    async def contexts(self) -> VllmContexts:
        """Get the front end's contexts; the first call reads a few weights. Raises LkvError if there can be none."""
        if self._has_template:
            raise IntegrationError(
                "contexts cannot be used here: --chat-template and --default-chat-template-kwargs are not used with "
                "contexts; put the template into the tokenizer's files."
            )
        return await asyncio.to_thread(front_contexts, self._engine.input_processor)

    async def open_store(self) -> ContextStore:
        """Return the store."""
        return (await self.contexts()).store

    async def create(self, body: ContextRequest, skipped: list[str] | None) -> StoredContext | Job:
        """Return the stored context of a text, or the job that makes it."""
        contexts = await self.contexts()
        settings = body.settings(contexts.compression)
        new_context = await asyncio.to_thread(contexts.encode, body.text, settings)
        if len(new_context.ids) >= self._length:
            raise PromptError(
                f"the text has {len(new_context.ids)} tokens, but vLLM was started with --max-model-len {self._length}."
            )
        job = Job(new_context.id, body.name, settings, time.time(), skipped=skipped, is_started=True)
        made = await asyncio.to_thread(self.queue.find_made, job, contexts.store, contexts.tokens)
        made = made or self.queue.add(job)
        if made is job:
            new_context.name, new_context.created, new_context.skipped = job.title, job.created, skipped
            contexts.announce(new_context)
            task = asyncio.create_task(self._compress(contexts, new_context, job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return made

    async def delete(self, name: str) -> None:
        """Delete a context, or the job that makes it; its files go when no request uses it any more."""
        store = await self.open_store()
        job = self.queue.delete(name)
        if job is not None and job.error is None:  # its context goes where it is complete already
            if (reading := self._readings.get(job)) is not None:
                reading.cancel()
            return
        if job is None:  # else one that failed, where another server may have stored the context
            await asyncio.to_thread(self.queue.find, name, store)
        self.queue.hidden.add(name)
        await self._delete_unused(name)

    async def _compress(self, contexts: VllmContexts, new_context: NewContext, job: Job) -> None:
        """Have the engine read a text, and compress it."""
        stored: StoredContext | None = None
        try:
            reading = self._readings[job] = asyncio.create_task(self._read(new_context))
            await asyncio.wait([reading])
            del self._readings[job]
            if not reading.cancelled():  # by a deletion, perhaps after the text was compressed
                reading.result()
            while None in (outcomes := await self._engine.collective_rpc("lkv_outcome", args=(job.id,))):
                await asyncio.sleep(0.01)
            job.error = "".join(outcomes) or None
            if job.error is None:
                stored = await asyncio.to_thread(contexts.store.describe, job.id)
                if stored is None:
                    job.error = "vLLM ended without compressing the text; see its log, and send it again."
        except Exception as error:  # reported to the client
            job.error = f"the text could not be compressed ({type(error).__name__}: {error}); send it again."
        is_deleted = await asyncio.to_thread(self.queue.finish, job, contexts.store, stored)
        if not job.is_deleted:
            self._metrics.compressions["failed" if job.error else "succeeded"] += 1
            if job.error is None:
                self._metrics.seconds.observe(time.time() - job.created)
        if is_deleted:
            await self._delete(contexts, job.id)
        elif job.error is not None:
            await self._delete_unused(job.id)

    async def _read(self, new_context: NewContext) -> None:
        """Have the engine read a text."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, extra_args={COMPRESS: new_context.model_dump_json()})
        prompt = {"prompt_token_ids": new_context.ids}
        # Of several engines the first is the one that answers `collective_rpc`.
        options = {"data_parallel_rank": 0} if self._has_replicas else {}
        async for _ in self._engine.generate(prompt, params, f"lkv-{uuid.uuid4().hex}", **options):
            pass

    async def _delete_unused(self, name: str) -> None:
        """Delete the files of a deleted context unless requests use it, which would not find them, or it is made again.

        Raises StoreError if the store fails; the context is not deleted then.
        """
        hidden = self.queue.hidden
        if name in hidden and not self._users[name] and self.queue.find_running(name) is None:
            try:
                await self._delete(await self.contexts(), name)
            finally:
                hidden.discard(name)

    async def _delete(self, contexts: VllmContexts, name: str) -> None:
        """Delete a context's files, and drop it from the workers' memory."""
        await asyncio.to_thread(contexts.store.delete, name)
        with suppress(Exception):  # the engine has ended, and its memory with it
            await self._engine.collective_rpc("lkv_release", args=(name,))

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[None]:
        """Count a request about a context, which is not deleted in the block."""
        self._users[name] += 1
        try:
            yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                try:
                    await self._delete_unused(name)
                except LkvError as error:  # nothing of this request's answer
                    _LOG.warning("the context %s could not be deleted: %s", name, error)

    async def refresh_metrics(self) -> None:
        """Query the statistics of the workers and the store."""
        self._metrics.texts_waiting = sum(job.error is None for job in self.queue.jobs())
        with suppress(Exception):  # the engine has ended, which vLLM's own metrics say, or the store cannot be read
            self._metrics.workers = await self._engine.collective_rpc("lkv_statistics")
            contexts = loaded_contexts(self._engine.input_processor)
            if contexts is not None:
                self._metrics.usage = await asyncio.to_thread(contexts.store.usage)

    def count_request(self, status: int) -> None:
        """Count a request about a context by the HTTP status of its answer."""
        self._metrics.requests[str(status)] += 1

    def split_name(self, body: dict[str, Any]) -> str | None:
        """Return the context that a request names, and its model's own name put into `body`; None for no context.

        Raises PromptError for two contexts, for an invalid id, and for a field that looks like a misspelt `context`,
        which vLLM would ignore.
        """
        extra = body.get("vllm_xargs")
        _check_fields(body, "context", "the field for a context is 'context'")
        if isinstance(extra, dict):
            _check_fields(extra, CONTEXT, f"the key of vllm_xargs for a context is {CONTEXT!r}")
        for field, value in body.items():
            is_nested = isinstance(value, dict) and (CONTEXT in value or (field == "extra_body" and "context" in value))
            if is_nested and field != "vllm_xargs":
                raise PromptError(
                    f"{field[:80]!r} is no field that names a context; put 'context' beside 'model', or {CONTEXT!r} "
                    "into 'vllm_xargs' (extra_body is an argument of OpenAI's Python client)."
                )
        names = [body.pop("context", None), extra.get(CONTEXT) if isinstance(extra, dict) else None]
        names.append(split_salt(body.get("cache_salt"))[0])
        model = body.get("model")
        if isinstance(model, str) and model not in self._models and model.rpartition(":")[0] in self._models:
            body["model"], _, suffix = model.rpartition(":")
            names.append(suffix)
        contexts = {str(name): name for name in names if name is not None}
        if len(contexts) > 1:
            raise PromptError("the request names different contexts; name one context.")
        for text, name in contexts.items():
            if not isinstance(name, str) or not name:
                raise PromptError(f"the context {text[:80]!r} is not an id; GET /v1/contexts lists all contexts.")
        return next(iter(contexts), None)

    async def rewrite(self, path: str, body: dict[str, Any], name: str) -> int:
        """Turn a request about a context into one that vLLM answers with the plugin; returns the context's tokens.

        Raises LkvError for a request that cannot be answered.
        """
        contexts = await self.contexts()
        await asyncio.to_thread(self.queue.check_ready, name, contexts.store)
        tokens = await asyncio.to_thread(contexts.tokens, name)
        contexts.remember_tokens(name, tokens)
        unused = [field for field in _UNUSED_FIELDS if body.get(field)]
        if body.get("add_generation_prompt") is False:
            unused.append("add_generation_prompt")
        if unused:
            raise PromptError(f"{unused[0]} cannot be used with a context; leave it out.")
        # Not by vllm_xargs, which beam search drops.
        body["cache_salt"] = salt_of(name, split_salt(body.get("cache_salt"))[1])
        if path == COMPLETIONS:
            body.setdefault("add_special_tokens", False)
            return tokens
        # vLLM looks at the messages it is given: where a part names an image, even none, it renders them itself.
        body["messages"], ids = await asyncio.to_thread(_question, contexts, body.get("messages"))
        free = min(contexts.max_positions + 1 - tokens, self._length) - len(ids)
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None and free > 0:
            body["max_completion_tokens"] = min(free, self._settings.max_tokens)
        # vLLM takes these instead of rendering the messages.
        body["kv_transfer_params"] = {"prompt_token_ids": ids}
        return tokens

    async def describe_models(self) -> list[dict[str, Any]]:
        """Return the contexts, as the list of models has them; none where there can be none."""
        try:
            stored = await asyncio.to_thread((await self.open_store()).list_contexts)
        except LkvError:
            return []
        listed = [context for context in stored if context.id not in self.queue.hidden]
        return [describe_model(f"{name}:{context.id}", context.created) for name in self._models for context in listed]

    async def unreadable_reason(self, name: str) -> LkvError | None:
        """Return why a context cannot be read now; None if it can be."""
        try:
            contexts = await self.contexts()
            await asyncio.to_thread(contexts.open_store(0).get, name)
        except LkvError as error:
            return error
        return None


class _Metrics:
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


def _check_fields(fields: dict[str, Any], name: str, advice: str) -> None:
    """Raise PromptError for a field that is not `name` but resembles what names a context."""
    if len(fields) > _MAX_FIELDS:
        raise PromptError(f"the request has {len(fields):,} fields, but at most {_MAX_FIELDS} are read; send fewer.")
    for field in set(fields) - {name, COMPRESS}:
        resembles = len(field) <= _LONGEST_FIELD and get_close_matches(field.lower(), _CONTEXT_FIELDS, 1, _RESEMBLANCE)
        if resembles or field.startswith(PREFIX):
            raise PromptError(f"{field[:80]!r} is no field of a request; {advice}, with the id of a context.")


def _question(contexts: VllmContexts, messages: Any) -> tuple[list[dict[str, str]], list[int]]:
    """Return the messages of a chat, role and text alone, and the tokens that follow a context.

    Raises PromptError for messages that cannot be answered.
    """
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages: give a list with at least one message of the user.")
    plain = []
    for number, message in enumerate(messages):
        try:
            plain.append(Message.model_validate(message).plain())
        except ValidationError as error:
            place, problem = first_problem(error)
            example = 'such as {"role": "user", "content": "..."}'
            where = f"messages.{number}.{place}".rstrip(".")
            raise PromptError(f"{where}: {problem}; a message has a role and a text, {example}.") from None
    ids = encode_conversation(contexts.tokenizer, contexts.max_positions, plain, after_context=True)
    return [{"role": message["role"], "content": message["content"]} for message in plain], ids
