"""ASGI middleware: checks of a request's headers before its body is read, and a log line and two metrics for each."""

import hmac
import json
import logging
import re
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from lkv.serving import LOOPBACK
from lkv.serving.schemas import error_object

_PUBLIC = ("/", "/health", "/healthz")  # without a key: the page prompts for it
_FACTS = "lkv.facts"  # the key of a request's scope
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # seconds
_MAX_PATH = 200  # characters
_PLAIN = re.compile(r"[\w./:@%+-]+", re.ASCII)
_NO_ANSWER = 499  # the client has gone, as web servers write it
_LOG = logging.getLogger(__name__)


class RequestGuard:
    """ASGI middleware that refuses requests without the key, to a foreign host name or from a foreign page."""

    def __init__(self, app: ASGIApp, key: str | None, is_local: bool):
        self._app, self._key, self._is_local = app, key, is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if refusal := refuse_foreign(headers, self._is_local) or self._refuse_key(scope["path"], headers):
                return await refusal(scope, receive, send)
        await self._app(scope, receive, send)

    def _refuse_key(self, path: str, headers: Headers) -> JSONResponse | None:
        """Return the response to a request without the key, or None."""
        # Headers are decoded as Latin-1; a key is compared by its bytes.
        sent = re.sub("(?i)^bearer +", "", headers.get("authorization", "")).encode("latin-1", "replace")
        if self._key is None or path in _PUBLIC or hmac.compare_digest(sent, self._key.encode()):
            return None
        return refusal(401, "the key is missing or wrong; send 'Authorization: Bearer KEY'.", "invalid_api_key")


def refuse_foreign(headers: Headers, is_local: bool) -> JSONResponse | None:
    """Return the response to a request from a foreign page, or with `is_local` to a foreign host name; None else."""
    host, origin = headers.get("host", ""), headers.get("origin")
    name, _ = _parts(host)
    if is_local and name not in LOOPBACK:
        return refusal(
            421, f"the server accepts requests to localhost only, not to {name!r}; use 127.0.0.1.", "wrong_host"
        )
    if origin is not None and _parts(origin.partition("//")[2])[1] != host:
        return refusal(403, f"pages of {origin} may not use this server; ask from its own page.", "wrong_origin")
    return None


def refusal(status: int, message: str, code: str) -> JSONResponse:
    """Return the response to a request that is not answered."""
    return JSONResponse(error_object(message, "invalid_request_error", code), status)


def _parts(host: str) -> tuple[str | None, str]:
    """Return the name, and the name with port, of a Host header; no name for an invalid header."""
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname, parts.netloc
    except ValueError:
        return None, ""


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
            _LOG.info("request %s", Facts(line | facts | {"seconds": round(seconds, 3)}))


def add_facts(scope: Scope, **facts: object) -> None:
    """Add facts to the line of a request's log; None for those that it does not have."""
    scope.get(_FACTS, {}).update((name, value) for name, value in facts.items() if value is not None)


class Facts(dict[str, Any]):
    """The facts of a log line: `name=value` pairs, where texts with other than plain characters are JSON."""

    @override
    def __str__(self) -> str:
        def as_text(value: object) -> str:
            return str(value) if _PLAIN.fullmatch(str(value)) else json.dumps(str(value))

        return " ".join(f"{name}={as_text(value)}" for name, value in self.items())


class JsonFormatter(logging.Formatter):
    """Log lines as one JSON object each, with the line's facts as fields."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
        }
        if isinstance(record.args, Facts):  # logging unpacks a single mapping
            line |= {"message": str(record.msg).removesuffix("%s").rstrip(": "), **record.args}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
