"""The page at the root of a server, on which contexts are made and asked."""

import functools
from importlib.resources import files

from fastapi.responses import HTMLResponse

# Content Security Policy: same origin only, no framing.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; frame-ancestors 'none'"
)


@functools.cache
def page_response() -> HTMLResponse:
    """The page, with what browsers may do on it."""
    text = (files("lkv.serving") / "page.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})
