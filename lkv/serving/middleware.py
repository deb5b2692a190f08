"""What comes before every request: the key, who may ask, how much may be sent."""

import hmac
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lkv.serving.schemas import error_object

_OPEN = ("/", "/healthz")  # without a key: the page holds none, and asks for it
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class RequestGuard:
    """ASGI middleware: refuses what has no key, comes from a foreign page, or is too large."""

    def __init__(self, app: ASGIApp, key: str | None, local: bool, limit: int):
        self._app, self._key, self._local, self._limit = app, key, local, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if refused := self._refused(scope["path"], headers):
            await refused(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise HTTPException(413, f"the request is larger than {self._limit:,} bytes")
            return message

        await self._app(scope, counted, send)

    def _refused(self, path: str, headers: Headers) -> Any:
        """The answer to a request that goes no further; None for others."""
        host = urlsplit(f"//{headers.get('host', '')}").hostname
        origin = headers.get("origin")
        if self._local and host not in LOOPBACK:
            return _error(421, f"this server serves this machine alone, not {host!r}; ask 127.0.0.1.", "wrong_host")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return _error(403, f"pages of {origin} may not use this server; ask from its own page.", "wrong_origin")
        if self._key is not None and path not in _OPEN and not self._has_key(headers):
            return _error(401, "the key is missing or wrong; send 'Authorization: Bearer KEY'.", "invalid_api_key")
        if int(headers.get("content-length", "0") or 0) > self._limit:
            return _error(413, f"the request is larger than {self._limit:,} bytes; send a shorter text.", "too_large")
        return None

    def _has_key(self, headers: Headers) -> bool:
        sent = headers.get("authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(sent.encode(), (self._key or "").encode())


def _error(status: int, message: str, code: str) -> JSONResponse:
    return JSONResponse(error_object(message, "invalid_request_error", code), status)
