"""The HTTP API: OpenAI's chat completions and models, contexts, metrics, and a page."""

import asyncio
import json
import logging
import math
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, disable_created_metrics, generate_latest
from starlette.types import Receive, Scope, Send
from typing_extensions import override

import lkv
from lkv.errors import LkvError, PromptError
from lkv.serving import LOOPBACK
from lkv.serving.answer import Answer
from lkv.serving.middleware import Facts, RequestGuard, RequestLog, add_facts
from lkv.serving.routes import (
    add_context_routes,
    add_error_handlers,
    describe_contexts,
    describe_model,
    read_body,
    split_model_name,
)
from lkv.serving.schemas import ChatRequest, ClientGoneError, error_object, parse_chat
from lkv.serving.service import Service

_ROUTES = "the server has /v1/chat/completions, /v1/models, /v1/contexts, /metrics, /healthz and a page at /"
_DISCONNECT_CHECK = 0.5  # seconds between checks whether a client is still there
_THREADS = 32
_LOG = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn's server of one service, which stops with it: answers in flight have its `grace` seconds."""

    def __init__(self, service: Service, key: str | None = None):
        """Create the server; `key` is as in `make_app`."""
        self._service, settings = service, service.settings
        config = uvicorn.Config(
            make_app(service, key),
            host=settings.host,
            port=settings.port,
            log_level="warning",
            log_config=None,
            access_log=False,  # `RequestLog` has more
            timeout_graceful_shutdown=math.ceil(settings.grace) + 1,  # until cut off answers have been sent
        )
        super().__init__(config)

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        address = f"http://{self.config.host}:{self.config.port}"
        _LOG.info("started: %s", Facts(version=lkv.__version__, model=self._service.name, address=address))

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.create_task(asyncio.to_thread(self._service.stop, self._service.settings.grace))
        await super().shutdown(sockets)
        if self.force_exit:  # a second Ctrl-C
            self._service.answers.drop_all()
            await self.lifespan.shutdown()  # which uvicorn leaves out
        await stopping
        _LOG.info("stopped")


def make_app(service: Service, key: str | None = None) -> FastAPI:
    """Return the API over a service.

    Clients send `key` as a bearer token. A server that listens on this machine alone accepts only browsers and clients
    on it, by the host name that they send, and those that the service's `allowed_hosts` name.
    """
    disable_created_metrics()  # a line beside each metric
    settings = service.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # As many as may wait for a slow store.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "lkv-serve"))
        yield

    app = FastAPI(title="lkv", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    registry = CollectorRegistry()  # of this service alone: several may run in one process
    registry.register(service)
    app.add_middleware(RequestGuard, key=key, is_local=settings.host in LOOPBACK, allowed_hosts=settings.allowed_hosts)
    app.add_middleware(RequestLog, registry=registry)  # outermost: refused requests are logged too
    add_error_handlers(app, _ROUTES)

    @app.exception_handler(Exception)
    async def failure(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(
            error_object("the server failed to answer this request; send it again.", "server_error"), 500
        )

    add_context_routes(app, service)
    _add_chat(app, service)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [describe_model(service.name), *await describe_contexts(service)]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _add_chat(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await asyncio.to_thread(parse_chat, await read_body(request.receive, service.chat_limit))
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify() -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(changed.set)

        context = _find_context(service, body)
        add_facts(request.scope, context=context)
        is_gone, submitted = threading.Event(), list[Answer]()

        def submit() -> None:
            messages = [message.plain() for message in body.messages]
            submitted.append(service.ask(messages, context or "", body.sampling(), notify))
            if is_gone.is_set():
                service.answers.cancel(submitted[0])

        try:
            await asyncio.to_thread(submit)
        except asyncio.CancelledError:  # the thread goes on
            is_gone.set()
            for answer in submitted:
                service.answers.cancel(answer)
            raise
        (answer,) = submitted
        response = _AnswerResponse(service, body, request, answer, changed)
        return _Stream(response) if body.stream else await response.whole()


class _Stream(StreamingResponse):
    """An answer as server-sent events, which is cancelled however the response ends."""

    def __init__(self, response: "_AnswerResponse"):
        headers = {"Cache-Control": "no-store"}
        super().__init__(response.events(), media_type="text/event-stream", headers=headers)
        self._cancel = response.cancel

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


def _find_context(service: Service, body: ChatRequest) -> str | None:
    """Return the context that a chat names by its model or by the field. Raises PromptError for two different ones."""
    name = split_model_name(body.model or service.name, service.models)
    if body.context and name and body.context != name:
        raise PromptError("the fields model and context name different contexts; name one context.")
    return body.context or name


class _AnswerResponse:
    """One answer on its way to one client."""

    def __init__(self, service: Service, body: ChatRequest, request: Request, answer: Answer, changed: asyncio.Event):
        self._service, self._request, self._answer, self._changed = service, request, answer, changed
        self._context_tokens = 0 if answer.context is None else answer.context.tokens
        model = body.model or service.name
        self._base = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._has_usage = body.stream_options is not None and body.stream_options.include_usage
        add_facts(request.scope, id=self._base["id"])

    async def whole(self) -> Any:
        """Return the whole answer, once it is complete."""
        try:
            text = "".join([piece async for piece in self._pieces()])
        except ClientGoneError:
            raise
        except LkvError as error:
            status = 504 if self._answer.reason == "length" else 500
            return JSONResponse(error_object(str(error), "server_error"), status)
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._answer.reason}
        return {**self._base, "object": "chat.completion", "choices": [choice], "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """Return the answer as server-sent events."""
        yield self._chunk({"role": "assistant", "content": ""})
        try:
            async for piece in self._pieces():
                yield self._chunk({"content": piece})
        except LkvError as error:
            add_facts(self._request.scope, error=str(error))
            yield _event(error_object(str(error), "server_error"))
            return
        yield self._chunk({}, self._answer.reason)
        if self._has_usage:
            yield _event({**self._base, "object": "chat.completion.chunk", "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _event({**self._base, "object": "chat.completion.chunk", "choices": [choice]})

    async def _pieces(self) -> AsyncIterator[str]:
        """Yield the answer's text as it is generated; cancel it when its client has gone or it takes too long.

        The beginning of an answer that is cut off gets a warning. Raises LkvError where there is none.
        """
        seconds, clock, sent = self._service.settings.timeout, asyncio.get_running_loop().time, 0
        deadline = clock() + seconds
        try:
            is_ended = False
            while not is_ended:
                while not self._changed.is_set():
                    if (seconds_left := deadline - clock()) <= 0:
                        late = f"the answer took more than {seconds:g} seconds; ask for fewer tokens."
                        self._answer.finish("length", late)
                        break
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), min(_DISCONNECT_CHECK, seconds_left))
                    if await self._request.is_disconnected():
                        raise ClientGoneError("the client has gone.")
                self._changed.clear()
                is_ended = self._answer.done.is_set()
                if piece := self._answer.text[sent:]:
                    sent += len(piece)
                    yield piece
                if is_ended and self._answer.error is not None:
                    if not sent or self._answer.reason != "length":
                        raise LkvError(self._answer.error)
                    self._base["warning"] = self._answer.error
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Generate no more of the answer."""
        self._service.answers.cancel(self._answer)
        usage = self._usage()
        counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        add_facts(self._request.scope, **counts, finish=self._answer.reason)

    def _usage(self) -> dict[str, Any]:
        prompt, answer = len(self._answer.question) + self._context_tokens, len(self._answer.ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": self._context_tokens},  # read before
        }


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
