"""Contexts over HTTP, beside vLLM's own routes: `/v1/contexts`, and chats and completions that name a context.

vLLM loads this as an endpoint plugin where `VLLM_PLUGINS` names `lkv`. A request names its context by the model's name,
`MODEL:CONTEXT`, by `vllm_xargs={"lkv_context": CONTEXT}`, or by the field `context`. It is rewritten before vLLM parses
it: a chat's messages become the tokens that follow the context.
"""

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lkv.errors import LkvError, PromptError
from lkv.integrations.vllm.contexts import COMPRESS, CONTEXT, VllmContexts, plugin_settings
from lkv.integrations.vllm.requests import salt_of, split_salt
from lkv.integrations.vllm.server import EngineContextServer
from lkv.serving import LOOPBACK
from lkv.serving.inputs import encode_conversation
from lkv.serving.middleware import refusal, refuse_foreign
from lkv.serving.routes import add_context_routes, add_error_handlers, describe_contexts, read_body
from lkv.serving.schemas import Turns, error_response, parse
from lkv.serving.stored_context import StoredContext

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_PREFIX = "lkv_"  # of all that names contexts
# Refused in requests about contexts, for which vLLM would ignore them.
_UNSUPPORTED_FIELDS = (
    "tools functions prompt_embeds echo chat_template chat_template_kwargs documents continue_final_message "
    "reasoning_effort truncate_prompt_tokens kv_transfer_params"
).split()
_CHAT_FIELDS = ("tools", "chat_template_kwargs")  # which chats can have
_MAX_BODY = 64 * 2**20  # bytes of a request to vLLM's routes, images and sound included
_RESEMBLANCE = 0.8  # of a misspelt field, as difflib measures it
_MAX_FIELDS = 256  # of a request; each is compared with those that name a context
_LONGEST_FIELD = 32  # characters; longer ones resemble none
_SHUTDOWN_SECONDS = 5  # for clients to read their answers after the engine has ended


class ContextRoutes(EngineContextServer):
    """vLLM's endpoint plugin (entry point `vllm.endpoint_plugins`)."""

    name = "lkv"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and the middleware that rewrites requests about contexts."""
        arguments: Any = getattr(app.state, "args", None)
        # Without this check, a web page could reach the contexts by DNS rebinding.
        is_local = getattr(arguments, "host", None) in LOOPBACK and arguments.allowed_origins in ([], ["*"])
        has_key = bool(getattr(arguments, "api_key", None) or os.environ.get("VLLM_API_KEY"))
        app.add_middleware(ContextMiddleware, server=self, is_local=is_local, has_key=has_key)
        add_error_handlers(app)
        add_context_routes(app, self)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take the engine, and the settings."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self.engine = engine_client
        self.settings = plugin_settings(engine_client.vllm_config)
        self.models = list(args.served_model_name or [args.model])
        self.max_length = engine_client.vllm_config.model_config.max_model_len
        self.has_template = bool(args.chat_template or args.default_chat_template_kwargs)
        REGISTRY.register(self.metrics)
        shutdown, loop = engine_client.shutdown, asyncio.get_running_loop()

        def stop(*arguments: object, **options: Any) -> None:
            """vLLM calls this at SIGINT and SIGTERM, in a thread; running answers have the time that it takes."""
            shutdown(*arguments, **options)
            # Otherwise requests that wait for the dead engine would hang until uvicorn cancels them.
            with suppress(RuntimeError):  # the event loop has ended too
                loop.call_soon_threadsafe(engine_client.output_processor.propagate_error, EngineDeadError())

        engine_client.shutdown = stop


class ContextMiddleware:
    """Rewrites requests about contexts before vLLM parses them, and adds contexts to vLLM's answers."""

    def __init__(self, app: ASGIApp, server: EngineContextServer, is_local: bool, has_key: bool):
        """`is_local`: contexts are for clients and pages of this machine alone. `has_key`: clients must send a key."""
        self._app, self._server, self._is_local, self._has_key = app, server, is_local, has_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "lifespan" and (server := getattr(scope["app"].state, "server", None)):
            # Otherwise a request whose engine has died would block the shutdown.
            server.config.timeout_graceful_shutdown = _SHUTDOWN_SECONDS
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = _route_path(scope)
        rejection = self._refuse(scope, path)
        if path == "/metrics":
            await self._server.refresh_metrics()
        if rejection is not None and path.startswith(("/v1/contexts", "/v1/models/")):
            await rejection(scope, receive, send)
        elif scope["method"] == "POST" and not path.startswith("/v1/contexts"):
            await self._ask(path, scope, receive, send, rejection)
        elif path == "/v1/models" and rejection is None:
            models: list[dict[str, Any]] = []
            with suppress(LkvError):  # there can be none
                models = await describe_contexts(self._server)
            await self._app(scope, receive, AnswerEditor(send, lambda answer: answer["data"].extend(models)).send)
        else:
            await self._app(scope, receive, send)

    def _refuse(self, scope: Scope, path: str) -> JSONResponse | None:
        """Return the response that refuses a request about contexts; None if it is allowed.

        With a key set, every path outside /v1 is refused, because vLLM does not check the key on all of them. On a
        server for this machine only, requests to another host name or from another page are refused.
        """
        # vLLM checks the key under /v1 and on few other paths, but answers chats on /invocations as well.
        if self._has_key and not path.startswith("/v1/"):
            message = "contexts are available under /v1 only, where the API key is checked; use /v1/chat/completions."
            return refusal(401, message, "invalid_api_key")
        allowed_hosts = self._server.settings.allowed_hosts if self._has_key else ()
        return refuse_foreign(Headers(scope=scope), True, allowed_hosts) if self._is_local else None

    async def _ask(self, path: str, scope: Scope, receive: Receive, send: Send, rejection: JSONResponse | None) -> None:
        """Pass a question on, rewritten where it names a context; `rejection` is the response to those, if any."""
        try:
            data = await read_body(receive, _MAX_BODY)
            body = _parse(data)
            name = None if body is None else split_name(body, self._server.models)
            if rejection is not None and (name is not None or _PREFIX in json.dumps(body)):
                await rejection(scope, receive, send)
            elif body is None or name is None:
                await self._pass_on(data, scope, receive, send)
            elif path not in (CHAT, COMPLETIONS):
                raise PromptError(f"{path} cannot use contexts; use {CHAT} or {COMPLETIONS}.")
            else:
                await self._ask_context(path, body, name, scope, receive, send)
        except LkvError as error:
            await error_response(error)(scope, receive, send)

    async def _ask_context(
        self, path: str, body: dict[str, Any], name: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass a question about a context on, rewritten.

        A response header names the context, so that clients notice a misspelt field, which vLLM would ignore. If the
        context was lost while the request waited, vLLM's internal error is replaced by the cause.
        """
        is_replaced = False

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._server.metrics.requests[str(message["status"])] += 1
                if message["status"] < 400:
                    message = {**message, "headers": [*message["headers"], (b"lkv-context", name.encode())]}
            await send(message)

        async def send_answer(message: Message) -> None:
            nonlocal is_replaced
            error = None
            if message["type"] == "http.response.start" and message["status"] == 500:
                error = await self._server.unreadable_reason(name)
            if error is not None:
                is_replaced = True
                await error_response(error)(scope, receive, send_named)
            elif not is_replaced:
                await send_named(message)

        try:
            tokens = await rewrite(self._server, path, body, name)
        except LkvError as error:
            await error_response(error)(scope, receive, send_named)
            return
        editor = AnswerEditor(send_answer, lambda answer: _count_context(answer, tokens))
        await self._pass_on(json.dumps(body).encode(), scope, receive, editor.send)

    async def _pass_on(self, data: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with the body `data`."""
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(data)).encode())]}
        unread: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, replay, send)


def _route_path(scope: Scope) -> str:
    """Return the path below vLLM's --root-path, which requests may have or not."""
    path, root = scope["path"], scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _parse(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a body; None for invalid bodies, whose errors vLLM reports."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def split_name(body: dict[str, Any], models: list[str]) -> str | None:
    """Return the context that a request names, and put its model's own name into `body`; None for no context.

    Raises PromptError for two contexts, for an invalid id, and for a field that looks like a misspelt `context`, which
    vLLM would ignore.
    """
    extra = body.get("vllm_xargs")
    _check_fields(body, "context", "the field for a context is 'context'")
    if isinstance(extra, dict):
        _check_fields(extra, CONTEXT, f"the key of vllm_xargs for a context is {CONTEXT!r}")
    for field, value in body.items():
        is_nested = isinstance(value, dict) and (CONTEXT in value or (field == "extra_body" and "context" in value))
        if is_nested and field != "vllm_xargs":
            raise PromptError(
                f"{field[:80]!r} is not a field that names a context; put 'context' beside 'model', or {CONTEXT!r} "
                "into 'vllm_xargs' (extra_body is an argument of OpenAI's Python client)."
            )
    names = [body.pop("context", None), extra.get(CONTEXT) if isinstance(extra, dict) else None]
    names.append(split_salt(body.get("cache_salt"))[0])
    model = body.get("model")
    if isinstance(model, str) and model not in models and model.rpartition(":")[0] in models:
        body["model"], _, suffix = model.rpartition(":")
        names.append(suffix)
    contexts = {str(name): name for name in names if name is not None}
    if len(contexts) > 1:
        raise PromptError("the request names different contexts; name one context.")
    for text, name in contexts.items():
        if not isinstance(name, str) or not name:
            raise PromptError(f"the context {text[:80]!r} is not an id; GET /v1/contexts lists all contexts.")
    return next(iter(contexts), None)


def _check_fields(fields: dict[str, Any], name: str, advice: str) -> None:
    """Raise PromptError for a field that is not `name` but resembles what names a context."""
    if len(fields) > _MAX_FIELDS:
        raise PromptError(f"the request has {len(fields):,} fields, but at most {_MAX_FIELDS} are read; send fewer.")
    for field in set(fields) - {name, COMPRESS}:
        is_short = len(field) <= _LONGEST_FIELD
        resembles = is_short and get_close_matches(field.lower(), ("context", CONTEXT), 1, _RESEMBLANCE)
        if resembles or field.startswith(_PREFIX):
            raise PromptError(f"{field[:80]!r} is not a field of a request; {advice}, with the id of a context.")


async def rewrite(server: EngineContextServer, path: str, body: dict[str, Any], name: str) -> int:
    """Turn a request about a context into one that vLLM answers with the plugin.

    Args:
        server: The contexts.
        path: The route of the request.
        body: The request, which is changed.
        name: The context's id.

    Returns:
        The context's tokens.

    Raises:
        LkvError: For a request that cannot be answered.
    """
    contexts = await server.contexts()
    stored = await asyncio.to_thread((await server.open_registry()).find_ready, name)
    tokens = await asyncio.to_thread(contexts.tokens, name)
    contexts.remember_tokens(name, tokens)
    own = _CHAT_FIELDS if path == CHAT else ()
    unused = [field for field in _UNSUPPORTED_FIELDS if body.get(field) and field not in own]
    if body.get("add_generation_prompt") is False:
        unused.append("add_generation_prompt")
    if unused:
        raise PromptError(f"{unused[0]} cannot be used with a context; leave it out.")
    # Not by vllm_xargs, which beam search drops.
    body["cache_salt"] = salt_of(name, split_salt(body.get("cache_salt"))[1])
    if path == COMPLETIONS:
        body.setdefault("add_special_tokens", False)
        return tokens
    # Plain text only: if a content part mentions an image, even a null one, vLLM renders the messages itself.
    body["messages"], ids = await asyncio.to_thread(_encode_chat, contexts, stored, body)
    free = min(contexts.max_positions + 1 - tokens, server.max_length) - len(ids)
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None and free > 0:
        body["max_completion_tokens"] = min(free, server.settings.max_tokens)
    # vLLM takes these instead of rendering the messages.
    body["kv_transfer_params"] = {"prompt_token_ids": ids}
    return tokens


def _encode_chat(
    contexts: VllmContexts, stored: StoredContext, body: dict[str, Any]
) -> tuple[list[dict[str, str]], list[int]]:
    """Return the messages of a chat, role and text alone, and the tokens that follow the context.

    Raises PromptError for messages that cannot be answered, and for tools that cannot follow the context.
    """
    options = body.get("chat_template_kwargs") or {}
    has_thinking = options.get("enable_thinking", False) if isinstance(options, dict) else None
    if not isinstance(has_thinking, bool) or set(options) - {"enable_thinking"}:
        raise PromptError("with a context, chat_template_kwargs takes enable_thinking alone, which is true or false.")
    # Without it vLLM's reasoning parsers expect thoughts.
    body["chat_template_kwargs"] = {"enable_thinking": has_thinking}
    chat = parse(Turns, {field: body[field] for field in ("messages", "tools") if field in body})
    messages = [message.plain() for message in chat.messages]
    ids = encode_conversation(
        contexts.tokenizer,
        contexts.max_positions,
        messages,
        stored.kind,
        tools=chat.tools,
        context_tools=stored.tools,
        has_thinking=has_thinking,
    )
    return [{"role": message["role"], "content": message["content"]} for message in messages], ids


class AnswerEditor:
    """Forwards a JSON answer, or those events of a stream that have a usage, after `change` has edited it in place.

    Other messages are forwarded unchanged.
    """

    def __init__(self, send: Send, change: Callable[[dict[str, Any]], None]):
        self._send, self._change = send, change
        self._start: Message | None = None  # of a JSON answer, whose length is unknown until it is complete
        self._is_stream, self._body = False, b""

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start" and message["status"] == 200:
            kind = MutableHeaders(raw=list(message["headers"])).get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
            if kind.startswith("application/json"):
                self._start = message
                return
        elif self._start is not None and message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            message = {**message, "body": self._edit(self._body)}
            headers = MutableHeaders(raw=list(self._start["headers"]))
            headers["content-length"] = str(len(message["body"]))
            await self._send({**self._start, "headers": headers.raw})
            self._start = None
        elif self._is_stream and b'"usage"' in message.get("body", b""):
            events = message["body"].split(b"\n\n")
            message = {**message, "body": b"\n\n".join(map(self._edit_event, events))}
        await self._send(message)

    def _edit_event(self, event: bytes) -> bytes:
        prefix, data = event[:6], event[6:]
        return prefix + self._edit(data) if prefix == b"data: " and b'"usage"' in data else event

    def _edit(self, data: bytes) -> bytes:
        answer = json.loads(data)
        self._change(answer)
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def _count_context(answer: dict[str, Any], tokens: int) -> None:
    """Add a context's tokens to the usage of an answer, if it has one, as tokens that were cached."""
    usage = answer.get("usage")
    if usage:
        details = usage.get("prompt_tokens_details") or {}
        usage["prompt_tokens"] += tokens
        usage["total_tokens"] += tokens
        usage["prompt_tokens_details"] = {**details, "cached_tokens": (details.get("cached_tokens") or 0) + tokens}
