"""Checks before every request: host and origin, API key, size. Timeouts of slow clients are the proxy's."""

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lkv.serving import LOOPBACK
from lkv.serving.schemas import error_object

_PUBLIC = ("/", "/healthz")  # without a key: the page has none, and asks for it


class RequestGuard:
    """ASGI middleware that refuses requests without the key, from a foreign page, or larger than `limit` bytes."""

    def __init__(self, app: ASGIApp, key: str | None, local: bool, limit: int):
        self._app, self._key, self._local, self._limit = app, key, local, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if refusal := refuse(scope["path"], Headers(scope=scope), self._key, self._local, self._limit):
            await refusal(scope, receive, send)
            return
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise HTTPException(413, f"the request is larger than {self._limit:,} bytes")
            return message

        await self._app(scope, limited, send)


def refuse(path: str, headers: Headers, key: str | None, local: bool, limit: int) -> JSONResponse | None:
    """Return the response to a request that its headers rule out, or None.

    Args:
        path: The path of the request.
        headers: Its headers.
        key: The key that clients must send; None for no key.
        local: Whether to accept host names of this machine only.
        limit: The largest body in bytes.
    """
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
    """Return the name, and the name with port, of a Host header; no name for an invalid header."""
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname, parts.netloc
    except ValueError:
        return None, ""


def _error(status: int, message: str, code: str) -> JSONResponse:
    return JSONResponse(error_object(message, "invalid_request_error", code), status)
