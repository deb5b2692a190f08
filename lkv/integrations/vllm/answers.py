"""Change vLLM's answers: a context's tokens in their `usage`, contexts in the list of models."""

import json
from collections.abc import Callable
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send


class AnswerEditor:
    """Sends an answer on, JSON or a stream of events with a usage, after `change` has changed it in place."""

    def __init__(self, send: Send, change: Callable[[dict[str, Any]], None]):
        self._send, self._change = send, change
        self._start: Message | None = None  # of a JSON answer, whose length is unknown until it is complete
        self._is_stream, self._body = False, b""

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start" and message["status"] == 200:
            kind = MutableHeaders(raw=list(message["headers"])).get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
            if kind.startswith("application/json"):
                self._start = message
                return
        elif self._start is not None and message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            message = {**message, "body": self._edit(self._body)}
            headers = MutableHeaders(raw=list(self._start["headers"]))
            headers["content-length"] = str(len(message["body"]))
            await self._send({**self._start, "headers": headers.raw})
            self._start = None
        elif self._is_stream and b'"usage"' in message.get("body", b""):
            events = message["body"].split(b"\n\n")
            message = {**message, "body": b"\n\n".join(map(self._edit_event, events))}
        await self._send(message)

    def _edit_event(self, event: bytes) -> bytes:
        prefix, data = event[:6], event[6:]
        return prefix + self._edit(data) if prefix == b"data: " and b'"usage"' in data else event

    def _edit(self, data: bytes) -> bytes:
        answer = json.loads(data)
        self._change(answer)
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def count_context(answer: dict[str, Any], tokens: int) -> None:
    """Add a context's tokens to the usage of an answer, if it has one, as tokens that were cached."""
    usage = answer.get("usage")
    if usage:
        details = usage.get("prompt_tokens_details") or {}
        usage["prompt_tokens"] += tokens
        usage["total_tokens"] += tokens
        usage["prompt_tokens_details"] = {**details, "cached_tokens": (details.get("cached_tokens") or 0) + tokens}
