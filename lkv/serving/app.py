"""The HTTP API: OpenAI's chat completions and models, contexts, metrics, and a page."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

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
from lkv.serving.metrics import registry_of
from lkv.serving.middleware import RequestGuard
from lkv.serving.schemas import (
    ChatRequest,
    Completion,
    ContextRequest,
    context_object,
    error_object,
    job_object,
    model_object,
    usage_of,
)
from lkv.serving.service import Job, Service
from lkv.serving.store import Entry
from lkv.serving.text import IncrementalDetokenizer

_STATUS: list[tuple[type[LkvError], int, str]] = [
    (UnknownContextError, 404, "not_found_error"),
    (BusyError, 429, "rate_limit_error"),
    (ContextFileError, 409, "conflict_error"),
    (StoreError, 507, "server_error"),
    (PromptError, 400, "invalid_request_error"),
    (RetentionError, 400, "invalid_request_error"),
]
_LOOK = 0.5  # seconds after which a request looks whether its client is still there

_POLL = 0.05  # seconds


def make_app(
    service: Service, key: str | None = None, local: bool = True, grace: float = 30.0, wait: bool = False
) -> FastAPI:
    """The API over `service`, which is stopped, with `grace` seconds for answers at hand, when the server ends.

    `key`: what clients must send as a bearer token. `local`: only browsers and clients on this machine are served, by
    the name that they call it. `wait`: a new context is answered when it is there, for clients that may not come to
    this server again.
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
    _add_rest(app, service)
    return app


def _add_errors(app: FastAPI) -> None:
    """All errors in the form that OpenAI's clients read, one sentence each."""

    @app.exception_handler(LkvError)
    async def known_error(_: Request, error: Exception) -> JSONResponse:
        status, kind = next(
            ((n, kind) for known, n, kind in _STATUS if isinstance(error, known)), (500, "server_error")
        )
        headers = {"Retry-After": "1"} if status == 429 else None
        return JSONResponse(error_object(str(error), kind), status, headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        if first["type"] == "json_invalid":
            field = "the body"
        said = f"{field or 'the body'}: {first['msg']}; look at the request."
        return JSONResponse(error_object(said, "invalid_request_error"), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        said = f"{request.method} {request.url.path}: {error.detail}; the API is described at /."
        return JSONResponse(error_object(said, "invalid_request_error"), error.status_code)


def _add_contexts(app: FastAPI, service: Service, wait: bool) -> None:
    @app.post("/v1/contexts", status_code=202)
    async def create(request: Request, response: Response) -> dict[str, Any]:
        asked = await _context_request(request)
        made = await asyncio.to_thread(service.add, asked.text, asked.name, asked.system, asked.retention)
        while wait and isinstance(made, Job) and made.error is None and not made.cancelled:
            await asyncio.sleep(_POLL)
            made = await asyncio.to_thread(service.store.entry, made.id) or made
        response.status_code = 200 if isinstance(made, Entry) else 202
        return _object(made)

    @app.get("/v1/contexts")
    async def list_contexts() -> dict[str, Any]:
        entries = await asyncio.to_thread(service.store.entries)
        listed: list[Entry | Job] = [*service.jobs(), *entries]
        return {"object": "list", "data": [_object(context) for context in listed]}

    @app.get("/v1/contexts/{name}")
    async def context(name: str) -> dict[str, Any]:
        known: Entry | Job | None = service.job(name)
        if known is None:
            known = await asyncio.to_thread(service.store.entry, name)
        if known is None:
            raise UnknownContextError(f"there is no context {name!r}; compress its text first.")
        return _object(known)

    @app.delete("/v1/contexts/{name}")
    async def delete(name: str) -> dict[str, Any]:
        if not await asyncio.to_thread(service.delete, name):
            raise UnknownContextError(f"there is no context {name!r} to delete.")
        return {"object": "context", "id": name, "deleted": True}


def _object(known: Entry | Job) -> dict[str, Any]:
    return context_object(known) if isinstance(known, Entry) else job_object(known)


async def _context_request(request: Request) -> ContextRequest:
    """The text of a new context: in JSON, or as a file in a form. Raises PromptError for what is no such thing."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        try:
            return ContextRequest.model_validate_json(await request.body())
        except ValueError as error:
            raise PromptError(f"{_first_problem(error)}; send a form with a file, or JSON with a text.") from error
    async with request.form(max_files=1, max_fields=8) as form:
        file = form.get("file")
        fields: dict[str, Any] = {name: value for name, value in form.items() if isinstance(value, str)}
        if isinstance(file, UploadFile):
            fields["text"] = _decoded(await file.read())
            fields.setdefault("name", file.filename or "")
        try:
            return ContextRequest.model_validate(fields)
        except ValueError as error:
            raise PromptError(f"{_first_problem(error)}; send a form with a file, or JSON with a text.") from error


def _first_problem(error: ValueError) -> str:
    problem: Any = getattr(error, "errors", lambda: [])()
    if not problem:
        return str(error)
    field = ".".join(map(str, problem[0]["loc"])) or "the body"
    return f"{field}: {problem[0]['msg']}"


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"the file is no UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8."
        ) from None


def _add_chat(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Any:
        asked.check()
        context = await _context_of(service, asked)
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify() -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(changed.set)

        messages = [message.plain() for message in asked.messages]
        answer = await asyncio.to_thread(service.ask, messages, context, asked.length(), asked.sampling(), notify)
        run = _Run(service, asked, request, answer, context, changed)
        if not asked.stream:
            return await run.whole()
        return StreamingResponse(run.events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _context_of(service: Service, asked: ChatRequest) -> Context | None:
    """The context that a chat names, by its field or in the model's name. Raises UnknownContextError."""
    # The model's own name may hold colons.
    model, colon, name = (asked.model, "", "") if asked.model == service.name else asked.model.rpartition(":")
    if not colon:
        model, name = asked.model, ""
    if model not in ("", service.name):
        raise UnknownContextError(
            f"there is no model {asked.model!r} here, only {service.name!r}; GET /v1/models lists all."
        )
    if asked.context and name and asked.context != name:
        raise PromptError("the model's name and the field context name two contexts; give one.")
    name = asked.context or name
    return await asyncio.to_thread(service.context, name) if name else None


class _Run:
    """One answer on its way to one client."""

    def __init__(
        self, service: Service, asked: ChatRequest, request: Request, answer: Answer, context: Context | None,
        changed: asyncio.Event,
    ):  # fmt: skip
        self._request, self._answer, self._changed = request, answer, changed
        self._held = 0 if context is None else context.tokens
        self._growing = IncrementalDetokenizer(service.tokenizer, asked.stops())
        self._seconds = service.limits.seconds
        self._completion = Completion(asked.model or service.name, uuid.uuid4().hex)
        self._usage = asked.stream_options is not None and asked.stream_options.include_usage

    async def whole(self) -> Any:
        """The whole answer, when it is there."""
        try:
            text = "".join([piece async for piece in self._pieces()])
        except LkvError as error:
            return JSONResponse(error_object(str(error), "server_error"), 504 if self._late else 500)
        return self._completion.whole(text, self._reason(), self._counts())

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        yield _event(self._completion.chunk({"role": "assistant", "content": ""}))
        try:
            async for piece in self._pieces():
                yield _event(self._completion.chunk({"content": piece}))
        except LkvError as error:
            yield _event(error_object(str(error), "server_error"))
            return
        yield _event(self._completion.chunk({}, self._reason()))
        if self._usage:
            yield _event(self._completion.chunk(None, usage=self._counts()))
        yield "data: [DONE]\n\n"

    async def _pieces(self) -> AsyncIterator[str]:
        """The answer's text as it grows; ends the answer where nobody waits for it any more, or it takes too long."""
        deadline = asyncio.get_running_loop().time() + self._seconds
        self._late = False
        try:
            ended = False
            while not ended:
                await self._wait(deadline)
                ended = self._answer.done.is_set()
                if self._answer.error is not None:
                    raise LkvError(self._answer.error)
                if piece := self._growing.more(self._answer.ids, ended):
                    yield piece
                if self._growing.stopped:
                    return
        finally:
            self._answer.cancel()

    async def _wait(self, deadline: float) -> None:
        """Until there is something new. Raises LkvError where the client is gone or the time is over."""
        while not self._changed.is_set():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                self._late = True
                raise LkvError(f"the answer took more than {self._seconds:g} seconds; ask for fewer tokens.")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(_LOOK, left))
            if await self._request.is_disconnected():
                raise LkvError("the client has gone.")
        self._changed.clear()

    def _reason(self) -> str:
        return "stop" if self._growing.stopped or self._answer.ended_by_token else "length"

    def _counts(self) -> dict[str, Any]:
        return usage_of(self._answer.prompt_tokens, self._held, len(self._answer.ids))


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _add_rest(app: FastAPI, service: Service) -> None:
    registry = registry_of(service)
    page = (files("lkv.serving") / "page.html").read_text(encoding="utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entries = await asyncio.to_thread(service.store.entries)
        names = [service.name, *(f"{service.name}:{entry.id}" for entry in entries)]
        return {"object": "list", "data": [model_object(name) for name in names]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/")
    async def root() -> HTMLResponse:
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
        policy += "; connect-src 'self'; img-src data:"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})
