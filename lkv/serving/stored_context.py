"""The description of a stored context."""

import time
from typing import Any

from pydantic import BaseModel, ConfigDict

from lkv.context.context import Context
from lkv.serving.inputs import CompressionSettings
from lkv.utils.prompts import ContextKind, Tools


class StoredContext(BaseModel):
    """The description of a stored context, read without loading it."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    id: str
    name: str
    created: float  # seconds since 1970
    tokens: int
    nbytes: int
    full_nbytes: int
    method: str
    retention: float | None
    realised_retention: float
    memory: str | None = None
    model: str = ""  # digest of its fingerprint
    skipped: list[str] | None = None  # parts of an uploaded file that its text leaves out
    kind: ContextKind = "text"
    tools: Tools | None = None  # what the model may call, before the text

    @classmethod
    def describe(
        cls,
        name: str,
        title: str,
        context: Context,
        settings: CompressionSettings,
        created: float | None = None,
        skipped: list[str] | None = None,
    ) -> "StoredContext":
        """Return the description of a new context.

        Args:
            name: Its id.
            title: Its name for people.
            context: The context.
            settings: What it was compressed with.
            created: When its text came, in seconds since 1970; by default now.
            skipped: What of a file is not in its text; None for a text.
        """
        return cls(
            id=name,
            name=title,
            created=time.time() if created is None else created,
            tokens=context.tokens,
            nbytes=context.nbytes(),
            full_nbytes=context.full_nbytes(),
            method=settings.method,
            retention=settings.retention,
            memory=settings.memory,
            realised_retention=round(context.realised_retention(), 6),
            skipped=skipped,
            kind=settings.kind,
            tools=settings.tools,
        )

    def as_object(self) -> dict[str, Any]:
        """Return the JSON object of a ready context."""
        return {
            "object": "context",
            "id": self.id,
            "name": self.name,
            "status": "ready",
            "progress": 1.0,
            "created": int(self.created),
            "tokens": self.tokens,
            "bytes": self.nbytes,
            "full_bytes": self.full_nbytes,
            "method": self.method,
            "retention": self.retention,
            "memory": self.memory,
            "realised_retention": self.realised_retention,
            "error": None,
            "skipped": self.skipped,
            "tools": self.tools,
        }
