"""ASGI middleware: checks of a request's headers before its body is read, and a log line and two metrics for each."""

import hmac
import io
import json
import logging
import re
import threading
import time
from collections.abc import Collection
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from lkv.serving import LOOPBACK
from lkv.serving.schemas import UNREADABLE, error_object

_PUBLIC = ("/", "/health", "/healthz")  # without a key: the page prompts for it
_FACTS = "lkv.facts"  # the key of a request's scope
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # seconds
_MAX_PATH = 200  # characters
_PLAIN = re.compile(r"[\w./:@%+-]+", re.ASCII)
_NO_ANSWER = 499  # the client has gone, as web servers write it
_LOG = logging.getLogger(__name__)


class RequestGuard:
    """ASGI middleware that refuses requests without the key, to a foreign host name or from a foreign page."""

    def __init__(self, app: ASGIApp, key: str | None, is_local: bool, allowed_hosts: Collection[str]):
        self._app, self._key, self._is_local, self._allowed_hosts = app, key, is_local, allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            refusal = refuse_foreign(headers, self._is_local, self._allowed_hosts)
            if refusal := refusal or self._refuse_key(scope["path"], headers):
                return await refusal(scope, receive, send)
        await self._app(scope, receive, send)

    def _refuse_key(self, path: str, headers: Headers) -> JSONResponse | None:
        """Return the response to a request without the key, or None."""
        # Headers are decoded as Latin-1; a key is compared by its bytes.
        sent = re.sub("(?i)^bearer +", "", headers.get("authorization", "")).encode("latin-1", "replace")
        if self._key is None or path in _PUBLIC or hmac.compare_digest(sent, self._key.encode()):
            return None
        return refusal(401, "the key is missing or wrong; send 'Authorization: Bearer KEY'.", "invalid_api_key")


def refuse_foreign(headers: Headers, is_local: bool, allowed_hosts: Collection[str] = ()) -> JSONResponse | None:
    """Return the response to a request from a foreign page or to a foreign host name; None to others.

    Args:
        headers: Those of the request.
        is_local: Whether host names other than localhost and `allowed_hosts` are foreign; these always make them so.
        allowed_hosts: Names of this server behind a proxy. Their pages may ask, by any port.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    name, _ = _parts(host)
    if (is_local or allowed_hosts) and name not in (*LOOPBACK, *allowed_hosts):
        names = ", ".join(["localhost", *allowed_hosts])
        advice = "use 127.0.0.1, or name the host in --allowed-hosts"
        return refusal(421, f"the server accepts requests to {names} only, not to {name!r}; {advice}.", "wrong_host")
    page_name, page_host = _parts((origin or "").partition("//")[2])
    if origin is not None and page_host != host and page_name not in allowed_hosts:
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
            elif status >= HTTPStatus.BAD_REQUEST and (error := _find_error(message)):
                facts.update(code=error["code"] or error["type"], error=error["message"])

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            status = HTTPStatus.INTERNAL_SERVER_ERROR.value  # which is sent after this
            raise
        finally:
            seconds = time.perf_counter() - start
            # Not the path, which clients choose: each would be a metric of its own.
            route = getattr(scope.get("route"), "path", "other")
            self._requests.labels(route, str(status)).inc()
            self._seconds.labels(route).observe(seconds)
            line = {"method": scope["method"], "path": scope["path"][:_MAX_PATH], "status": status}
            is_problem = status >= HTTPStatus.INTERNAL_SERVER_ERROR or facts.get("code") == UNREADABLE
            level = logging.WARNING if is_problem else logging.INFO
            _LOG.log(level, "request %s", Facts(line | facts | {"seconds": round(seconds, 3)}))


def _find_error(message: Message) -> dict[str, str | None] | None:
    """Return the error of OpenAI's form that a part of a response is; None for other parts."""
    try:
        error: dict[str, str | None] = json.loads(message["body"])["error"]
        return error
    except (KeyError, TypeError, ValueError):
        return None


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


class LineLogger(io.TextIOBase):
    """A text stream, in place of stderr, that makes each line one of the log; of a progress bar its last state."""

    def __init__(self, handler: logging.Handler):
        self._handler, self._line, self._lock = handler, "", threading.RLock()

    @override
    def write(self, text: str, /) -> int:
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
            for line in lines:
                if shown := line.rstrip("\r").rpartition("\r")[2].rstrip():
                    facts = {"name": "stderr", "levelname": "INFO", "msg": shown}
                    self._handler.handle(logging.makeLogRecord(facts))
        return len(text)
