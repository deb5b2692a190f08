"""Shared by both servers: the routes of contexts, the page, and the error format."""

import asyncio
import functools
from importlib.resources import files
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive

from lkv.errors import LkvError, PromptError, UnknownContextError
from lkv.serving.jobs import ContextRegistry, Job
from lkv.serving.middleware import add_facts
from lkv.serving.schemas import (
    ClientGoneError,
    ContextRequest,
    TooLargeError,
    error_object,
    error_response,
    parse_context,
)
from lkv.serving.stored_context import StoredContext

# Content Security Policy: same origin only, no framing.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; frame-ancestors 'none'"
)
_CONTEXT_METHODS = "contexts take GET and POST at /v1/contexts, GET and DELETE at /v1/contexts/ID"


class ContextServer(Protocol):
    """A server of contexts, as the routes use it."""

    @property
    def models(self) -> list[str]:
        """The names of its model."""

    @property
    def body_limit(self) -> int:
        """The largest request in bytes."""

    async def open_registry(self) -> ContextRegistry:
        """Return the contexts. Raises LkvError if there can be none."""

    async def create(self, body: ContextRequest, skipped: list[str] | None) -> StoredContext | Job:
        """Return the stored context of a text, or the job that makes it. Raises LkvError if there can be none."""

    async def delete(self, name: str) -> None:
        """Delete a context, or the job that makes it; running answers continue. Raises UnknownContextError."""

    async def check_health(self) -> bool:
        """Return whether requests are answered."""


def add_context_routes(app: FastAPI, server: ContextServer) -> None:
    """Add /v1/contexts, /v1/models/NAME, /healthz, and the page on which contexts are made and asked."""

    @app.post("/v1/contexts", status_code=202)
    async def create(request: Request) -> JSONResponse:
        data = await read_body(request.receive, server.body_limit)
        kind = request.headers.get("content-type", "")
        body, skipped = await asyncio.to_thread(parse_context, data, kind, request.url.query)
        context = await server.create(body, skipped)
        add_facts(request.scope, context=context.id)
        about = context.as_object() | ({} if skipped is None else {"skipped": skipped})
        return JSONResponse(about, 200 if isinstance(context, StoredContext) else 202)

    @app.get("/v1/contexts")
    async def list_contexts() -> dict[str, Any]:
        contexts = await asyncio.to_thread((await server.open_registry()).list_contexts)
        return {"object": "list", "data": [context.as_object() for context in contexts]}

    @app.get("/v1/contexts/{name}")
    async def describe(name: str) -> dict[str, Any]:
        return (await asyncio.to_thread((await server.open_registry()).find, name)).as_object()

    @app.delete("/v1/contexts/{name}")
    async def delete(name: str) -> dict[str, Any]:
        await server.delete(name)
        return {"object": "context", "id": name, "deleted": True}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        context = split_model_name(name, server.models)
        if context is None:
            return describe_model(name)
        found = await asyncio.to_thread((await server.open_registry()).find, context)
        return describe_model(name, found.created)

    @app.api_route("/health", methods=["GET", "HEAD"])  # the path of vLLM
    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def health() -> PlainTextResponse:
        if not await server.check_health():
            return PlainTextResponse("the server has failed; restart it\n", 503)
        return PlainTextResponse("ok\n")

    @app.get("/")
    async def root() -> HTMLResponse:
        return page_response()


def add_error_handlers(app: FastAPI, other_routes: str = "") -> None:
    """Give all errors the form that OpenAI's clients read, one sentence each; unknown paths name `other_routes`."""

    @app.exception_handler(LkvError)
    async def lkv_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, LkvError)
        return error_response(error)

    # Not FastAPI's HTTPException, which vLLM's own routes raise and vLLM answers.
    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path = request.url.path
        advice = _CONTEXT_METHODS if path.startswith("/v1/contexts") else other_routes
        message = f"{request.method} {path}: {error.detail}{advice and '; '}{advice}."
        return JSONResponse(error_object(message, "invalid_request_error"), error.status_code, error.headers)


def describe_model(name: str, created: float = 0) -> dict[str, Any]:
    """Return the JSON object of a model, or of `MODEL:CONTEXT`, made at `created`."""
    return {"id": name, "object": "model", "created": int(created), "owned_by": "lkv"}


async def describe_contexts(server: ContextServer) -> list[dict[str, Any]]:
    """Return the stored contexts as models. Raises LkvError if there is no store."""
    stored = await asyncio.to_thread((await server.open_registry()).store.list_contexts)
    return [describe_model(f"{name}:{context.id}", context.created) for name in server.models for context in stored]


def split_model_name(model: str, models: list[str]) -> str | None:
    """Return the context in `MODEL:CONTEXT`, None for the name of a model, which may contain colons.

    Raises UnknownContextError for another model, and PromptError for an empty context.
    """
    if model in models:
        return None
    before, _, name = model.rpartition(":")
    if before not in models:
        names = " and ".join(map(repr, models))
        raise UnknownContextError(f"there is no model {model[:80]!r} here, only {names}; GET /v1/models lists all.")
    if not name:
        raise PromptError(f"the model {model!r} names no context after the colon; give an id, or no colon.")
    return name


@functools.cache
def page_response() -> HTMLResponse:
    """Return the page with its Content Security Policy."""
    text = (files("lkv.serving") / "page.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})


async def read_body(receive: Receive, limit: int) -> bytes:
    """Return a request's body. Raises TooLargeError beyond `limit` bytes, ClientGoneError without its end."""
    parts, size, has_more = [], 0, True
    while has_more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGoneError("the client has gone.")
        parts.append(message.get("body", b""))
        size, has_more = size + len(parts[-1]), message.get("more_body", False)
        if size > limit:
            raise TooLargeError(f"the request is larger than {limit:,} bytes; send a shorter text.")
    return b"".join(parts)
