"""Middleware that rewrites requests about contexts before vLLM parses them, and reports a server shutdown."""

import json
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Protocol

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lkv.errors import LkvError, PromptError
from lkv.integrations.vllm.answers import AnswerEditor, count_context
from lkv.serving.middleware import refusal, refuse_foreign
from lkv.serving.routes import read_body
from lkv.serving.schemas import error_object, error_response

PREFIX = "lkv_"  # of all that names contexts
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MAX_BODY = 64 * 2**20  # bytes of a request to vLLM's routes, images and sound included
_SHUTDOWN_SECONDS = 5  # for clients to read their answers after the engine has ended


class Contexts(Protocol):
    """The contexts of a server, as the middleware uses them."""

    is_stopping: bool

    async def refresh_metrics(self) -> None:
        """Update the metrics of workers and store."""

    def count_request(self, status: int) -> None:
        """Count a request about a context by the HTTP status of its answer."""

    def split_name(self, body: dict[str, Any]) -> str | None:
        """Return the context that a request names, and put the model's own name into `body`."""

    def using(self, name: str) -> AbstractAsyncContextManager[None]:
        """Count a request about a context, which is not deleted in the block."""

    async def rewrite(self, path: str, body: dict[str, Any], name: str) -> int:
        """Turn a request about a context into one that vLLM answers with the plugin; returns the context's tokens."""
        raise NotImplementedError

    async def describe_models(self) -> list[dict[str, Any]]:
        """Return the contexts, as the list of models has them."""
        raise NotImplementedError

    async def unreadable_reason(self, name: str) -> LkvError | None:
        """Return why a context cannot be read now; None if it can be."""


class ContextMiddleware:
    """Rewrites requests about contexts before vLLM parses them."""

    def __init__(self, app: ASGIApp, routes: Contexts, is_local: bool, has_key: bool):
        """`is_local`: contexts are for clients and pages of this machine alone. `has_key`: clients must send a key."""
        self._app, self._routes, self._is_local, self._has_key = app, routes, is_local, has_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "lifespan" and (server := getattr(scope["app"].state, "server", None)):
            # Else a request whose engine has ended keeps the server from ending.
            server.config.timeout_graceful_shutdown = _SHUTDOWN_SECONDS
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(self._routes, send)
        try:
            await self._dispatch(scope, receive, answer.send)
        except Exception:
            if not self._routes.is_stopping or answer.is_started:
                raise
            await answer.refuse()

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _route_path(scope)
        if path == "/healthz":  # the path of `lkv serve`
            path, scope = "/health", {**scope, "path": f"{scope['path'].removesuffix('/healthz')}/health"}
        foreign = self._refuse(scope, path)
        if path == "/metrics":
            await self._routes.refresh_metrics()
        if self._routes.is_stopping and (scope["method"] == "POST" or path == "/health"):
            await _stopping_response()(scope, receive, send)
        elif foreign is not None and path.startswith(("/v1/contexts", "/v1/models/")):
            await foreign(scope, receive, send)
        elif scope["method"] == "POST" and not path.startswith("/v1/contexts"):
            await self._ask(path, scope, receive, send, foreign)
        elif path == "/v1/models" and foreign is None:
            models = await self._routes.describe_models()
            await self._app(scope, receive, AnswerEditor(send, lambda answer: answer["data"].extend(models)).send)
        else:
            await self._app(scope, receive, send)

    async def _ask(self, path: str, scope: Scope, receive: Receive, send: Send, foreign: JSONResponse | None) -> None:
        """Pass a question on, rewritten where it names a context; `foreign` is the response to those, if any."""
        try:
            data = await read_body(receive, _MAX_BODY)
            body = _parse(data)
            name = None if body is None else self._routes.split_name(body)
            if foreign is not None and (name is not None or PREFIX in json.dumps(body)):
                await foreign(scope, receive, send)
            elif body is None or name is None:
                await self._pass_on(data, scope, receive, send)
            elif path not in (CHAT, COMPLETIONS):
                raise PromptError(f"{path} cannot use contexts; use {CHAT} or {COMPLETIONS}.")
            else:
                send = self._about(name, send)
                async with self._routes.using(name):
                    tokens = await self._routes.rewrite(path, body, name)
                    send = AnswerEditor(send, partial(count_context, tokens=tokens)).send
                    await self._pass_on(json.dumps(body).encode(), scope, receive, send)
        except LkvError as error:
            await error_response(error)(scope, receive, send)

    def _about(self, name: str, send: Send) -> Send:
        """`send`, which counts the answer, and names its context in a header: vLLM ignores a misspelt field.

        Where the context was lost while the question waited, vLLM reports an internal error, which is replaced.
        """
        is_replaced = False

        async def send_named(message: Message) -> None:
            nonlocal is_replaced
            if is_replaced:
                return
            if message["type"] == "http.response.start":
                if message["status"] == 500 and not self._routes.is_stopping:
                    error = await self._routes.unreadable_reason(name)
                    if error is not None:
                        is_replaced = True
                        response = error_response(error)
                        self._routes.count_request(response.status_code)
                        await _send_response(response, send)
                        return
                self._routes.count_request(message["status"])
                if message["status"] < 400:
                    message = {**message, "headers": [*message["headers"], (b"lkv-context", name.encode())]}
            await send(message)

        return send_named

    async def _pass_on(self, data: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with the body `data`."""
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(data)).encode())]}
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": data, "more_body": False}

        await self._app(scope, replay, send)

    def _refuse(self, scope: Scope, path: str) -> JSONResponse | None:
        """Return the response to clients and pages from elsewhere, and to those without the key; None for others."""
        # vLLM asks for the key below /v1 and on few other paths, but answers chats on /invocations as well.
        if self._has_key and not path.startswith("/v1/"):
            message = "contexts are asked below /v1 alone, with the key; ask /v1/chat/completions."
            return refusal(401, message, "invalid_api_key")
        return refuse_foreign(Headers(scope=scope), True) if self._is_local else None


_STOPPING = error_object(
    "the server is shutting down; send the request again when it is back, or to another server.",
    "service_unavailable_error",
    "shutting_down",
)


def _route_path(scope: Scope) -> str:
    """Return the path below vLLM's --root-path, which requests may have or not."""
    path, root = scope["path"], scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _stopping_response() -> JSONResponse:
    """Return the answer to requests that the end of the server cuts off, or that come too late."""
    return JSONResponse(_STOPPING, 503, {"Retry-After": "10"})


async def _send_response(response: JSONResponse, send: Send) -> None:
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


class _Answer:
    """A response in progress; reports a shutdown of the server where vLLM would report a failed engine."""

    def __init__(self, routes: Contexts, send: Send):
        self._routes, self._send = routes, send
        self.is_started = self._is_refused = False

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        if self._is_refused:
            return
        if self._routes.is_stopping:
            if message["type"] == "http.response.start" and message["status"] == 500:
                await self.refuse()
                return
            if message.get("body", b"").startswith(b'data: {"error"'):  # in a stream
                message = {**message, "body": b"data: %b\n\n" % json.dumps(_STOPPING).encode()}
        self.is_started = True
        await self._send(message)

    async def refuse(self) -> None:
        """Send 503 instead of the answer."""
        self.is_started = self._is_refused = True
        await _send_response(_stopping_response(), self._send)


def _parse(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a body; None for invalid bodies, whose errors vLLM reports."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
