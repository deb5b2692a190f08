"""Checks before every request: connections that make progress, host and origin, the key, the size."""

import asyncio
import hmac
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import DEFAULT_MAX_INCOMPLETE_EVENT_SIZE, H11Protocol

from lkv.serving import LOOPBACK
from lkv.serving.schemas import error_object

_PUBLIC = ("/", "/healthz")  # without a key: the page has none, and asks for it
_FREE_CHUNKS, _LEAST_CHUNK = 1000, 1024  # chunks of any size; bytes of further ones, on average


class BoundedConnection(h11.Connection):
    """Refuses bodies in many small chunks: each takes the event loop as long as a large one."""

    _chunks = _size = 0  # of the body that is being received

    @override
    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._size = 0
        elif isinstance(event, h11.Data):
            self._chunks, self._size = self._chunks + event.chunk_start, self._size + len(event.data)
            if self._chunks > _FREE_CHUNKS + self._size // _LEAST_CHUNK:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


class BoundedProtocol(H11Protocol):
    """Closes connections whose clients make no progress; uvicorn's own protocol waits for ever.

    That is after `header_seconds` of incomplete headers, or of a body that goes on after its answer, and after
    `unread_seconds` in which nothing of an answer is read. A body that is no HTTP is answered once, by uvicorn itself;
    the application, which would answer too, is cut off.
    """

    header_seconds, unread_seconds = 10.0, 60.0
    _timer: asyncio.TimerHandle | None = None
    _watch: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conn = BoundedConnection(h11.SERVER, DEFAULT_MAX_INCOMPLETE_EVENT_SIZE)
        self.ws_protocol_class = None  # an upgrade would hand the connection to a protocol without these limits

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.header_seconds, transport.close)
        self._watch = self.loop.call_later(self.unread_seconds, self._abort_unread, 0)

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_answered = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE)
        is_incomplete = self.conn.their_state is (h11.SEND_BODY if is_answered else h11.IDLE)
        if self._timer is not None and not is_incomplete:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and is_incomplete:
            self._timer = self.loop.call_later(self.header_seconds, self.transport.close)

    @override
    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer has begun
            self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()

    def _abort_unread(self, before: int) -> None:
        """Abort where as many bytes wait to be sent as `before`, also when the connection is being closed."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent == before:
            self.transport.abort()
        else:
            self._watch = self.loop.call_later(self.unread_seconds, self._abort_unread, unsent)


class RequestGuard:
    """ASGI middleware that refuses requests without the key, from a foreign page, too large, or sent too slowly.

    Bodies take `limit` bytes each and four times that together, from their first byte until the application has read
    them: it then asks for the end of the connection, or answers.
    """

    idle_seconds, body_seconds = 20.0, 120.0  # between two pieces of a body, of a whole body

    def __init__(self, app: ASGIApp, key: str | None, local: bool, limit: int):
        self._app, self._key, self._local, self._limit = app, key, local, limit
        self._received = 0  # bytes of all bodies that are being received or read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if refusal := refuse(scope["path"], Headers(scope=scope), self._key, self._local, self._limit):
            await refusal(scope, receive, send)
            return
        size, is_complete, deadline = 0, False, asyncio.get_running_loop().time() + self.body_seconds

        async def limited() -> Message:
            nonlocal size, is_complete
            if is_complete:
                self._received, size = self._received - size, 0
                return await receive()
            seconds_left = deadline - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, min(self.idle_seconds, seconds_left)))
            except TimeoutError:
                raise HTTPException(408, "the body was not sent in time") from None
            new = len(message.get("body", b""))
            size, self._received = size + new, self._received + new
            is_complete = not message.get("more_body", False)
            if size > self._limit:
                raise HTTPException(413, f"the request is larger than {self._limit:,} bytes")
            if self._received > 4 * self._limit:
                raise HTTPException(429, "the server is receiving as much as it takes; send it again later")
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._received -= size


def refuse(path: str, headers: Headers, key: str | None, local: bool, limit: int) -> JSONResponse | None:
    """The answer to a request that is refused by its headers; None for others. `local`: only hosts of this machine."""
    host, origin = headers.get("host", ""), headers.get("origin")
    name, _ = _parts(host)
    if local and name not in LOOPBACK:
        return _error(
            421, f"the server accepts requests to localhost only, not to {name!r}; use 127.0.0.1.", "wrong_host"
        )
    if origin is not None and _parts(origin.partition("//")[2])[1] != host:
        return _error(403, f"pages of {origin} may not use this server; ask from its own page.", "wrong_origin")
    # Headers are decoded as Latin-1; a key is compared by its bytes.
    sent = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1", "replace")
    if key is not None and path not in _PUBLIC and not hmac.compare_digest(sent, key.encode()):
        return _error(401, "the key is missing or wrong; send 'Authorization: Bearer KEY'.", "invalid_api_key")
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > limit:
        return _error(413, f"the request is larger than {limit:,} bytes; send a shorter text.", "too_large")
    return None


def _parts(host: str) -> tuple[str | None, str]:
    """Name, and name with port, of a Host header; no name for what is none."""
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname, parts.netloc
    except ValueError:
        return None, ""


def _error(status: int, message: str, code: str) -> JSONResponse:
    return JSONResponse(error_object(message, "invalid_request_error", code), status)
