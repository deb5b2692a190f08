"""More than one machine: replicas of the server behind one address, by Ray Serve.

A gate hands every request to a replica that holds its context, where there is one (Ray's model multiplexing, with the
context's id), else to any: all of them find all contexts in the shared store. A request whose replica dies before it
has begun to answer is handed to another one.
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
from lkv.serving.middleware import LOOPBACK
from lkv.serving.schemas import error_object
from lkv.serving.service import make_service

_HELD = 256  # contexts of a replica that the gate knows of
_TRIES = 4
_PATH = "/v1/contexts/"


class Replica:
    """One server: model, engine, and the contexts that it has loaded."""

    def __init__(self, options: dict[str, Any], key: str | None):
        self._service = make_service(options)
        self._app = make_app(self._service, key, options["host"] in LOOPBACK, wait=True)

    @serve.multiplexed(max_num_models_per_replica=_HELD)
    async def hold(self, name: str) -> str:
        """Load a context; Ray notes that this replica holds it."""
        await asyncio.to_thread(self._service.context, name)
        return name

    async def ask(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """The ASGI messages that answer a request."""
        if name := serve.get_multiplexed_model_id():
            # What is wrong with the context is told in the answer.
            with suppress(LkvError):
                await self.hold(name)
        async for message in answered(self._app, scope, body):
            yield message

    async def process(self) -> int:
        """Its process id."""
        return os.getpid()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self._service.stop(0)


class Router:
    """What listens: hands requests on."""

    def __init__(self, replicas: Any, limit: int):
        self._replicas, self._limit = replicas, limit

    async def __call__(self, request: Request) -> Response:
        """The answer of a replica."""
        if int(request.headers.get("content-length") or 0) > self._limit:
            said = f"the request is larger than {self._limit:,} bytes; send a shorter text."
            return JSONResponse(error_object(said, "invalid_request_error", "too_large"), 413)
        body = await request.body()
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method,
            "scheme": "http", "path": request.url.path, "raw_path": request.url.path.encode(), "root_path": "",
            "query_string": request.url.query.encode(), "headers": list(request.headers.raw), "client": None,
        }  # fmt: skip
        return await self._asked(scope, body, context_named(request.url.path, body))

    async def _asked(self, scope: dict[str, Any], body: bytes, context: str) -> Response:
        handle = self._replicas.options(stream=True, multiplexed_model_id=context)
        for _ in range(_TRIES):
            messages = handle.ask.remote(scope, body)
            try:
                first = await anext(messages)
                # A whole answer is taken before any of it is given out, so that another replica may give it instead.
                rest = [await anext(messages)]
            except (RayError, StopAsyncIteration):
                await asyncio.sleep(0.2)
                continue
            headers = [(name.decode(), value.decode()) for name, value in first["headers"]]
            return StreamingResponse(_content(rest, messages), first["status"], dict(headers))
        said = "the replicas that were asked have died; ask again later."
        return JSONResponse(error_object(said, "server_error"), 503)


async def _content(begun: list[dict[str, Any]], messages: Any) -> AsyncIterator[bytes]:
    for message in begun:
        yield message.get("body", b"")
    async for message in messages:
        yield message.get("body", b"")


async def answered(app: ASGIApp, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
    """The messages by which `app` answers one request; it is ended when nobody reads them any more."""
    messages: asyncio.Queue[Any] = asyncio.Queue()
    given = False

    async def receive() -> dict[str, Any]:
        nonlocal given
        if not given:
            given = True
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


def context_named(path: str, body: bytes) -> str:
    """The id of the context that a request is about, "" where it is about none or cannot be read."""
    if path.startswith(_PATH):
        return path.removeprefix(_PATH)
    if path != "/v1/chat/completions":
        return ""
    try:
        asked = json.loads(body)
        model = asked.get("model", "")
        name = asked.get("context") or (model.rpartition(":")[2] if ":" in model else "")
    except (ValueError, AttributeError, TypeError):
        return ""
    return name if isinstance(name, str) else ""


def application(options: dict[str, Any], key: str | None) -> Any:
    """What `serve.run` runs, from the options of `lkv serve` by name."""
    # A replica on a GPU has one to itself: Ray hides the others from it.
    gpus = {"num_gpus": 1} if (options["device"] or "").startswith("cuda") else {}
    replicas = serve.deployment(
        Replica, num_replicas=options["replicas"], max_ongoing_requests=options["max_requests"], ray_actor_options=gpus
    )
    gate = serve.deployment(Router, max_ongoing_requests=1000)
    return gate.bind(replicas.bind(options, key), options["max_upload"] * 2**20)


def serve_replicas(options: dict[str, Any], key: str | None) -> None:
    """Serve until interrupted; joins the cluster that RAY_ADDRESS names, else starts one here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # tells nobody of its use
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": options["host"], "port": options["port"]})
    serve.run(application(options, key), name="lkv", route_prefix="/")
    print(f"lkv serves {options['replicas']} replicas on http://{options['host']}:{options['port']}", flush=True)
    try:
        asyncio.run(asyncio.Event().wait())
    except KeyboardInterrupt:
        serve.shutdown()
        ray.shutdown()
