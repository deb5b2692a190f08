"""Replicas of the server behind one address, by Ray Serve.

A router sends every request to a replica that has loaded its context, if there is one (Ray's model multiplexing, with
the context's id), else to any: all of them find all contexts in the shared store. A request whose replica dies before
it has begun to answer is sent to another one.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from lkv.errors import LkvError
from lkv.serving.app import make_app
from lkv.serving.middleware import LOOPBACK, refuse
from lkv.serving.schemas import error_object
from lkv.serving.service import make_service

_CONTEXTS_PER_REPLICA = 256  # that the router knows of
_ATTEMPTS = 4
_PATH = "/v1/contexts/"


class Replica:
    """One server: model, engine, and the contexts that it has loaded."""

    def __init__(self, options: dict[str, Any], key: str | None):
        self._service = make_service(options)
        self._app = make_app(self._service, key, options["host"] in LOOPBACK, wait=True)

    @serve.multiplexed(max_num_models_per_replica=_CONTEXTS_PER_REPLICA)
    async def load(self, name: str) -> str:
        """Load a context; Ray notes that this replica has it."""
        await asyncio.to_thread(self._service.context, name)
        return name

    async def ask(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """The ASGI messages that answer a request."""
        if name := serve.get_multiplexed_model_id():
            # The answer says what is wrong with the context.
            with suppress(LkvError):
                await self.load(name)
        async for message in asgi_messages(self._app, scope, body):
            yield message

    async def process(self) -> int:
        """Its process id."""
        return os.getpid()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self._service.stop(0)


class Router:
    """Receives requests, checks key and size, and sends them to a replica."""

    def __init__(self, replicas: Any, key: str | None, is_local: bool, limit: int):
        self._replicas, self._key, self._is_local, self._limit = replicas, key, is_local, limit

    async def __call__(self, request: Request) -> Response:
        """The answer of a replica."""
        # Before the body is read, or a context loaded.
        refusal = refuse(request.url.path, request.headers, self._key, self._is_local, self._limit)
        if refusal is not None:
            return refusal
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._limit:
                message = f"the request is larger than {self._limit:,} bytes; send a shorter text."
                return JSONResponse(error_object(message, "invalid_request_error", "too_large"), 413)
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method,
            "scheme": "http", "path": request.url.path, "raw_path": request.url.path.encode(), "root_path": "",
            "query_string": request.url.query.encode(), "headers": list(request.headers.raw), "client": None,
        }  # fmt: skip
        return await self._forward(scope, bytes(body), context_of_request(request.url.path, bytes(body)))

    async def _forward(self, scope: dict[str, Any], body: bytes, context: str) -> Response:
        handle = self._replicas.options(stream=True, multiplexed_model_id=context)
        for _ in range(_ATTEMPTS):
            messages = handle.ask.remote(scope, body)
            try:
                first = await anext(messages)
                # Nothing is sent before the first part of the answer is there, so that another replica may give it.
                second = await anext(messages)
            except (RayError, StopAsyncIteration):
                await asyncio.sleep(0.2)
                continue

            async def content(part: dict[str, Any] = second, messages: Any = messages) -> AsyncIterator[bytes]:
                yield part.get("body", b"")
                async for message in messages:
                    yield message.get("body", b"")

            headers = {name.decode(): value.decode() for name, value in first["headers"]}
            return StreamingResponse(content(), first["status"], headers)
        message = "the replicas that received this request have died; ask again later."
        return JSONResponse(error_object(message, "server_error"), 503)


async def asgi_messages(app: ASGIApp, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
    """The messages by which `app` answers one request; it is cancelled when nobody reads them any more."""
    messages: asyncio.Queue[Any] = asyncio.Queue()
    is_received = False

    async def receive() -> dict[str, Any]:
        nonlocal is_received
        if not is_received:
            is_received = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        try:
            await app(scope, receive, messages.put)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task
    finally:
        task.cancel()


def context_of_request(path: str, body: bytes) -> str:
    """The id of the context that a request is about, "" if there is none or it cannot be read."""
    if path.startswith(_PATH):
        return path.removeprefix(_PATH)
    if path != "/v1/chat/completions":
        return ""
    try:
        request = json.loads(body)
        model = request.get("model", "")
        name = request.get("context") or (model.rpartition(":")[2] if ":" in model else "")
    except (ValueError, AttributeError, TypeError, RecursionError):
        return ""
    return name if isinstance(name, str) else ""


def application(options: dict[str, Any], key: str | None) -> Any:
    """The application for `serve.run`, from the options of `lkv serve` by name."""
    # A replica on a GPU has one to itself: Ray hides the others from it.
    gpus = {"num_gpus": 1} if (options["device"] or "").startswith("cuda") else {}
    replicas = serve.deployment(
        Replica, num_replicas=options["replicas"], max_ongoing_requests=options["max_requests"], ray_actor_options=gpus
    )
    router = serve.deployment(Router, max_ongoing_requests=1000)
    is_local = options["host"] in LOOPBACK
    return router.bind(replicas.bind(options, key), key, is_local, options["max_upload"] * 2**20)


def serve_replicas(options: dict[str, Any], key: str | None) -> None:
    """Serve until interrupted; joins the cluster that RAY_ADDRESS names, else starts one here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    local: dict[str, Any] = {}
    if options["host"] in LOOPBACK and not os.environ.get("RAY_ADDRESS"):
        local = {"_node_ip_address": "127.0.0.1"}  # Ray's own ports, too, are for this machine alone
    ray.init(include_dashboard=False, log_to_driver=False, **local)
    serve.start(http_options={"host": options["host"], "port": options["port"]})
    serve.run(application(options, key), name="lkv", route_prefix="/")
    print(f"lkv serves {options['replicas']} replicas on http://{options['host']}:{options['port']}", flush=True)
    try:
        asyncio.run(asyncio.Event().wait())
    except KeyboardInterrupt:
        serve.shutdown()
        ray.shutdown()
