"""The HTTP API: OpenAI's chat completions and models, contexts, metrics, and a page."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from email.message import Message as Headers
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from tokenizers.decoders import DecodeStream

from lkv.context.context import Context
from lkv.errors import (
    BusyError,
    ContextFileError,
    LkvError,
    PromptError,
    RetentionError,
    StoreError,
    UnknownContextError,
)
from lkv.integrations.continuous import Answer
from lkv.serving.middleware import RequestGuard
from lkv.serving.schemas import ChatRequest, ContextRequest, error_object, parse
from lkv.serving.service import Job, Service
from lkv.serving.store import StoredContext, unknown_context

_STATUS: list[tuple[type[LkvError], int, str]] = [
    (UnknownContextError, 404, "not_found_error"),
    (BusyError, 429, "rate_limit_error"),
    (ContextFileError, 409, "conflict_error"),
    (StoreError, 507, "server_error"),
    (PromptError, 400, "invalid_request_error"),
    (RetentionError, 400, "invalid_request_error"),
]
_DISCONNECT_CHECK = 0.5  # seconds between checks whether a client is still there
_POLL = 0.05  # seconds
_INCOMPLETE = "\ufffd"  # what half a character is decoded to


def make_app(
    service: Service, key: str | None = None, local: bool = True, grace: float = 30.0, wait: bool = False
) -> FastAPI:
    """The API over a service, which gets `grace` seconds for running answers when the server ends.

    Clients send `key` as a bearer token. `local`: only browsers and clients on this machine, by the host name that they
    send. `wait`: the creation of a context is answered when it is ready, as the next request may go to another server.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.stop, grace)

    app = FastAPI(title="lkv", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequestGuard, key=key, local=local, limit=service.limits.upload_bytes)
    _add_errors(app)
    _add_contexts(app, service, wait)
    _add_chat(app, service)
    _add_others(app, service)
    return app


def _add_errors(app: FastAPI) -> None:
    """All errors in the form that OpenAI's clients read, one sentence each."""

    @app.exception_handler(LkvError)
    async def lkv_error(_: Request, error: Exception) -> JSONResponse:
        matches = ((status, kind) for cls, status, kind in _STATUS if isinstance(error, cls))
        status, kind = next(matches, (500, "server_error"))
        headers = {"Retry-After": "1"} if status == 429 else None
        return JSONResponse(error_object(str(error), kind), status, headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}; the API is described at /."
        return JSONResponse(error_object(message, "invalid_request_error"), error.status_code)


def _add_contexts(app: FastAPI, service: Service, wait: bool) -> None:
    @app.post("/v1/contexts", status_code=202)
    async def create(request: Request, response: Response) -> dict[str, Any]:
        body = await _context_request(request)
        made = await asyncio.to_thread(service.add, body.text, body.name, body.system, body.retention)
        while wait and isinstance(made, Job) and made.error is None and not made.is_cancelled:
            await asyncio.sleep(_POLL)
            made = await asyncio.to_thread(service.store.describe, made.id) or made
        response.status_code = 200 if isinstance(made, StoredContext) else 202
        return made.as_object()

    @app.get("/v1/contexts")
    async def list_contexts() -> dict[str, Any]:
        stored = await asyncio.to_thread(service.store.list_contexts)
        contexts: list[StoredContext | Job] = [*service.jobs(), *stored]
        return {"object": "list", "data": [context.as_object() for context in contexts]}

    @app.get("/v1/contexts/{name}")
    async def describe(name: str) -> dict[str, Any]:
        context: StoredContext | Job | None = service.job(name)
        if context is None:
            context = await asyncio.to_thread(service.store.describe, name)
        if context is None:
            raise unknown_context(name)
        return context.as_object()

    @app.delete("/v1/contexts/{name}")
    async def delete(name: str) -> dict[str, Any]:
        if not await asyncio.to_thread(service.delete, name):
            raise unknown_context(name)
        return {"object": "context", "id": name, "deleted": True}


async def _context_request(request: Request) -> ContextRequest:
    """A new context: JSON with its text, or a form with a file. Raises PromptError for anything else."""
    header = Headers()
    header["content-type"] = request.headers.get("content-type", "")
    body = await request.body()
    if header.get_content_type() != "multipart/form-data":
        return parse(ContextRequest, body)
    # Other charsets decode slowly, or not what was sent.
    if header.get_content_charset("utf-8") not in ("utf-8", "us-ascii"):
        raise PromptError("the form has another charset than UTF-8; send it as UTF-8.")
    async with request.form(max_files=1, max_fields=8) as form:
        file = form.get("file")
        fields: dict[str, Any] = {name: value for name, value in form.items() if isinstance(value, str)}
        # Starlette reads fields that are no UTF-8 as Latin-1.
        if wrong := [name for name, value in fields.items() if value.encode("utf-8", "replace") not in body]:
            raise PromptError(f"the form's field {wrong[0][:80]!r} is no UTF-8 text; send it as UTF-8.")
        if isinstance(file, UploadFile):
            try:
                fields["text"] = (await file.read()).decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise PromptError(
                    f"the file is no UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8."
                ) from None
            fields.setdefault("name", (file.filename or "")[:200])
        return parse(ContextRequest, fields)


def _add_chat(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await asyncio.to_thread(parse, ChatRequest, await request.body())
        body.check_offered()
        context = await _context_of(service, body)
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify() -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(changed.set)

        messages = [message.plain() for message in body.messages]
        answer = await asyncio.to_thread(service.ask, messages, context, body.length(), body.sampling(), notify)
        response = _AnswerResponse(service, body, request, answer, context, changed)
        if not body.stream:
            return await response.whole()
        return StreamingResponse(
            response.events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )


async def _context_of(service: Service, body: ChatRequest) -> Context | None:
    """The context that a chat names, by its field or in the model's name. Raises UnknownContextError."""
    # The model's own name may contain colons.
    model, colon, name = (body.model, "", "") if body.model == service.name else body.model.rpartition(":")
    if not colon:
        model, name = body.model, ""
    if model not in ("", service.name):
        raise UnknownContextError(
            f"there is no model {body.model!r} here, only {service.name!r}; GET /v1/models lists all."
        )
    if body.context and name and body.context != name:
        raise PromptError("the model's name and the field context name two contexts; give one.")
    name = body.context or name
    return await asyncio.to_thread(service.context, name) if name else None


class _AnswerResponse:
    """One answer on its way to one client."""

    def __init__(
        self, service: Service, body: ChatRequest, request: Request, answer: Answer, context: Context | None,
        changed: asyncio.Event,
    ):  # fmt: skip
        self._request, self._answer, self._changed = request, answer, changed
        self._context_tokens = 0 if context is None else context.tokens
        self._detokenizer = IncrementalDetokenizer(service.tokenizer, body.stops())
        self._seconds = service.limits.seconds
        self._base = {
            "id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model or service.name,
        }  # fmt: skip
        self._has_usage = body.stream_options is not None and body.stream_options.include_usage
        self._is_late = False

    async def whole(self) -> Any:
        """The whole answer, once it is complete."""
        try:
            text = "".join([piece async for piece in self._pieces()])
        except LkvError as error:
            return JSONResponse(error_object(str(error), "server_error"), 504 if self._is_late else 500)
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._finish_reason()}
        return {**self._base, "object": "chat.completion", "choices": [choice], "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        yield self._chunk({"role": "assistant", "content": ""})
        try:
            async for piece in self._pieces():
                yield self._chunk({"content": piece})
        except LkvError as error:
            yield _event(error_object(str(error), "server_error"))
            return
        yield self._chunk({}, self._finish_reason())
        if self._has_usage:
            yield _event({**self._base, "object": "chat.completion.chunk", "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _event({**self._base, "object": "chat.completion.chunk", "choices": [choice]})

    async def _pieces(self) -> AsyncIterator[str]:
        """The answer's text as it is generated; cancels an answer whose client has gone, or that takes too long."""
        deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            ended = False
            while not ended:
                while not self._changed.is_set():
                    left = deadline - asyncio.get_running_loop().time()
                    if left <= 0:
                        self._is_late = True
                        raise LkvError(f"the answer took more than {self._seconds:g} seconds; ask for fewer tokens.")
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), min(_DISCONNECT_CHECK, left))
                    if await self._request.is_disconnected():
                        raise LkvError("the client has gone.")
                self._changed.clear()
                ended = self._answer.done.is_set()
                if self._answer.error is not None:
                    raise LkvError(self._answer.error)
                if piece := self._detokenizer.push(self._answer.ids, ended):
                    yield piece
                if self._detokenizer.is_stopped:
                    return
        finally:
            self._answer.cancel()

    def _finish_reason(self) -> str:
        return "stop" if self._detokenizer.is_stopped or self._answer.ended_by_token else "length"

    def _usage(self) -> dict[str, Any]:
        prompt, answer = self._answer.prompt_tokens + self._context_tokens, len(self._answer.ids)
        return {
            "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": self._context_tokens},  # read before
        }  # fmt: skip


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


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
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        for token in ids[self._read :]:
            self._text += self._stream.step(self._backend, token) or ""
        self._read = len(ids)
        return self._text

    def _certain(self, text: str) -> int:
        """How many characters of `text` stay: all but half characters, trailing white space and a begun stop."""
        begun = (len(text) - size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return len(text[: min([len(text), *begun])].rstrip(_INCOMPLETE).rstrip())


def _add_others(app: FastAPI, service: Service) -> None:
    registry = service.metrics_registry()
    page = (files("lkv.serving") / "page.html").read_text(encoding="utf-8")
    policy = (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; frame-ancestors 'none'"
    )

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        stored = await asyncio.to_thread(service.store.list_contexts)
        names = [service.name, *(f"{service.name}:{context.id}" for context in stored)]
        about = {"object": "model", "created": 0, "owned_by": "lkv"}
        return {"object": "list", "data": [{"id": name, **about} for name in names]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        if not await asyncio.to_thread(lambda: service.is_healthy):
            return PlainTextResponse("the engine has failed; restart the server\n", 503)
        return PlainTextResponse("ok\n")

    @app.get("/")
    async def root() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})
