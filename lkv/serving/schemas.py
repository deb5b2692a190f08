"""What clients send, checked, and what they get, in the forms of OpenAI's API."""

import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator

from lkv.errors import PromptError
from lkv.integrations.sampling import SamplingParams
from lkv.serving.service import Job
from lkv.serving.store import Entry

# Fields of OpenAI's API that would change an answer in ways not offered here, with what leaves it unchanged.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "logprobs": (False,),
    "top_logprobs": (0,), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none",), "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
}  # fmt: skip
_STOPS = 4


class Message(BaseModel):
    """One turn of a chat; content as a text or as a list of texts."""

    role: StrictStr
    content: StrictStr | list[dict[str, Any]]

    def plain(self) -> dict[str, str]:
        """Role and text alone. Raises PromptError for content other than text."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        texts = [part.get("text") for part in self.content if part.get("type") == "text"]
        if len(texts) < len(self.content) or not all(isinstance(text, str) for text in texts):
            raise PromptError("a message holds something other than text, which this model cannot read; send text.")
        return {"role": role, "content": "".join(map(str, texts))}


class StreamOptions(BaseModel):
    """What a stream ends with."""

    include_usage: StrictBool = False


class ChatRequest(BaseModel):
    """The body of a chat completion; `context` is the one field that OpenAI's API does not have."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr = ""
    messages: list[Message] = Field(min_length=1)
    context: StrictStr | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_tokens: StrictInt | None = Field(default=None, ge=1)
    max_completion_tokens: StrictInt | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: StrictInt | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: Any) -> Any:
        texts = [stop] if isinstance(stop, str) else stop or []
        if len(texts) > _STOPS or not all(texts):
            raise ValueError(f"stop takes up to {_STOPS} texts, none of them empty")
        return stop

    def length(self) -> int | None:
        """The most tokens an answer may have, if it is said."""
        return self.max_completion_tokens or self.max_tokens

    def sampling(self) -> SamplingParams:
        """Greedy unless a temperature is given. Raises PromptError."""
        return SamplingParams(
            0.0 if self.temperature is None else self.temperature, 1.0 if self.top_p is None else self.top_p,
            self.top_k, self.seed,
        )  # fmt: skip

    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def check(self) -> None:
        """Raise PromptError for what is not offered here and would change the answer."""
        extra = self.model_extra or {}
        for name, neutral in _NEUTRAL.items():
            if extra.get(name) not in (None, *neutral):
                raise PromptError(f"{name} is not offered by this server; leave it out.")


class ContextRequest(BaseModel):
    """The body of a new context."""

    text: StrictStr
    name: StrictStr = Field(default="", max_length=200)
    system: StrictStr | None = None
    retention: float | None = None


def context_object(entry: Entry) -> dict[str, Any]:
    """A context that is there."""
    return {
        "object": "context", "id": entry.id, "name": entry.name, "status": "ready", "progress": 1.0,
        "created": int(entry.created), "tokens": entry.tokens, "bytes": entry.nbytes, "full_bytes": entry.full_nbytes,
        "method": entry.method, "retention": entry.retention, "realised_retention": entry.realised_retention,
        "error": None,
    }  # fmt: skip


def job_object(job: Job) -> dict[str, Any]:
    """A context on its way, or one that could not be made."""
    return {
        "object": "context", "id": job.id, "name": job.title, "status": "failed" if job.error else "compressing",
        "progress": round(job.progress, 3), "created": int(job.created), "error": job.error,
        "method": job.settings.method, "retention": job.settings.retention,
    }  # fmt: skip


def model_object(name: str) -> dict[str, Any]:
    """A model as `/v1/models` lists it."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "lkv"}


class Completion:
    """The forms of one answer: whole, and as chunks of a stream."""

    def __init__(self, model: str, number: str):
        self._base = {"id": f"chatcmpl-{number}", "created": int(time.time()), "model": model}

    def whole(self, text: str, reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return {**self._base, "object": "chat.completion", "choices": [choice], "usage": usage}

    def chunk(self, delta: dict[str, Any] | None, reason: str | None = None, **more: Any) -> dict[str, Any]:
        """A piece of the answer; without `delta` one that has no choices."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        choices = [] if delta is None else [choice]
        return {**self._base, "object": "chat.completion.chunk", "choices": choices, **more}


def usage_of(question: int, context: int, answer: int) -> dict[str, Any]:
    """Tokens read and made; those of the context were read before."""
    prompt = question + context
    return {
        "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": context},
    }  # fmt: skip


def error_object(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
