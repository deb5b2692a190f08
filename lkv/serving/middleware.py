"""Checks of a request's headers, before its body is read: host and origin, API key."""

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lkv.serving import LOOPBACK
from lkv.serving.schemas import error_object

_PUBLIC = ("/", "/health", "/healthz")  # without a key: the page prompts for it


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
        sent = headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1", "replace")
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
