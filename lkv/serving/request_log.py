"""One line of log and two metrics for each request."""

import json
import logging
import re
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_FACTS = "lkv.facts"  # the key of a request's scope
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # seconds
_MAX_PATH = 200  # characters
_PLAIN = re.compile(r"[\w./:@%+-]+", re.ASCII)
_NO_ANSWER = 499  # the client has gone, as web servers write it
_LOG = logging.getLogger(__name__)


class RequestLog:
    """ASGI middleware that logs each request when its response ends, and counts it in a registry of metrics."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry):
        self._app = app
        self._requests = Counter(
            "lkv_requests", "Requests by route and HTTP status", ("route", "status"), registry=registry
        )
        self._seconds = Histogram(
            "lkv_request_seconds",
            "Seconds from a request to the end of its response",
            ("route",),
            buckets=_BUCKETS,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts = scope[_FACTS] = dict[str, Any]()
        status, start = _NO_ANSWER, time.perf_counter()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            seconds = time.perf_counter() - start
            # Not the path, which clients choose: each would be a metric of its own.
            route = getattr(scope.get("route"), "path", "other")
            self._requests.labels(route, str(status)).inc()
            self._seconds.labels(route).observe(seconds)
            line = {"method": scope["method"], "path": scope["path"][:_MAX_PATH], "status": status}
            _LOG.info("%s", format_facts(line | facts | {"seconds": round(seconds, 3)}))


def add_facts(scope: Scope, **facts: Any) -> None:
    """Add facts to the line of a request's log; None for those that it does not have."""
    scope.get(_FACTS, {}).update((name, value) for name, value in facts.items() if value is not None)


def format_facts(facts: dict[str, Any]) -> str:
    """Return facts as `name=value` pairs; texts with other than plain characters in the form of JSON."""

    def as_text(value: Any) -> str:
        return str(value) if _PLAIN.fullmatch(str(value)) else json.dumps(str(value))

    return " ".join(f"{name}={as_text(value)}" for name, value in facts.items())
