"""Texts and conversations from clients: validation, tokenisation, and the settings that determine a context's id."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from transformers import PreTrainedTokenizerBase

from lkv.context.input_checks import check_characters, check_context, check_text
from lkv.context.protection import Span, protected_tokens
from lkv.errors import PromptError, check_retention
from lkv.hf.model_spec import ModelSpec
from lkv.methods.request import CompressionRequest
from lkv.methods.targets import MemoryTarget
from lkv.policy.policy import Policy
from lkv.serving.settings import ContextSettings
from lkv.utils.prompts import (
    ContextKind,
    Conversation,
    Tools,
    context_text,
    encode,
    encode_context,
    encode_continuation,
    render_messages,
    strip_end,
    tokenizer_digest,
    without_calls,
)

# Longer texts are rejected before tokenisation, which takes hundreds of bytes a character.
CHARACTERS_PER_TOKEN = 16


class CompressionSettings(NamedTuple):
    """All settings of a compression: equal texts with equal settings share one stored context."""

    method: str
    retention: float | None  # instead of the memory
    policy: str | None  # digest
    model: str  # digest of its fingerprint
    tokenizer: str  # digest of its template and its behaviour
    system: str | None = None
    memory: str | None = None  # a share of the 16-bit cache's bytes, or bytes
    protect: tuple[Span, ...] | None = None  # what every head keeps
    kind: ContextKind = "text"
    tools: Tools | None = None  # what the model may call, before the text

    @classmethod
    def of_server(
        cls, settings: ContextSettings, spec: ModelSpec, tokenizer: PreTrainedTokenizerBase, policy: Policy | None
    ) -> Self:
        """Return the default settings of texts.

        Args:
            settings: The server's settings.
            spec: Its model.
            tokenizer: The model's tokenizer.
            policy: The policy, for methods that need one.
        """
        digest = None if policy is None else policy.digest()
        is_named = settings.retention is None or "memory" in settings.model_fields_set
        compression = cls(settings.method, None, digest, spec.digest(), tokenizer_digest(tokenizer))
        return compression.for_text(settings.retention, settings.memory if is_named else None, None)

    def for_text(
        self,
        retention: float | None,
        memory: str | float | None,
        system: str | None,
        protect: Sequence[Span] = (),
        kind: ContextKind = "text",
        tools: Tools | None = None,
    ) -> Self:
        """Return the settings of one text.

        Args:
            retention: The share of its KV entries to keep.
            memory: Instead of `retention`, a share of the 16-bit cache's bytes, or bytes, as in `lkv.compress`. Without
                either, the text keeps as much as these settings say.
            system: A system prompt before the text.
            protect: What every head keeps.
            kind: What the text is.
            tools: What the model may call.

        Raises:
            PromptError: If both a memory and a retention are given.
            RetentionError: For one that cannot be.
        """
        if memory is not None and retention is not None:
            raise PromptError("memory and retention both say how much to keep; give one of them.")
        budget = self.memory, self.retention
        if retention is not None:
            budget = None, check_retention(retention)
        elif memory is not None:  # one text for equal budgets, however they are written
            target = MemoryTarget.parse(memory)
            budget = f"{target.nbytes}B" if target.share is None else str(target.share), None
        own = tuple(protect) or None
        return self._replace(
            system=system, memory=budget[0], retention=budget[1], protect=own, kind=kind, tools=tools or None
        )

    def request(self, policy: Policy | None, protected: Sequence[int] = ()) -> CompressionRequest:
        """Return the request that compresses a text with these settings; `protected` are positions of its tokens."""
        return CompressionRequest(
            method=self.method, retention=self.retention, memory=self.memory, policy=policy, protected=tuple(protected)
        )


def context_id(text: str, settings: CompressionSettings) -> str:
    """Return the id of a context: half of the text's SHA-256, a quarter of the settings'."""
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}-{digest[:16]}"


class EncodedText(NamedTuple):
    """A text that can be compressed.

    Attributes:
        id: The id of its context.
        text: The text; of a conversation, as the chat template renders it.
        ids: Its tokens, those of its system prompt first.
        protected: Positions of tokens that every head keeps.
    """

    id: str
    text: str
    ids: list[int]
    protected: list[int]


def encode_text(
    tokenizer: PreTrainedTokenizerBase, max_positions: int, text: str | Conversation, settings: CompressionSettings
) -> EncodedText:
    """Check and tokenise a text to compress.

    Args:
        tokenizer: The model's tokenizer.
        max_positions: The longest text of the model, in tokens.
        text: The text, or the messages of a conversation.
        settings: What it is compressed with; its system prompt and tools come before the text.

    Raises:
        PromptError: For an empty or too long text, and for protected spans that are not in it.
    """
    check_context(text, "give some text to compress")
    characters = len(text) if isinstance(text, str) else len(json.dumps(text))
    if settings.system is not None:
        check_text(settings.system, "the system prompt", "give some text, or leave it out")
    characters += len(settings.system or "") + (len(json.dumps(settings.tools)) if settings.tools else 0)
    check_characters(characters, "the text", max_positions, CHARACTERS_PER_TOKEN)
    ids = encode_context(tokenizer, strip_end(tokenizer, text), settings.system, settings.tools)
    if len(ids) >= max_positions:
        raise PromptError(
            f"the text has {len(ids)} tokens, but the model reads at most {max_positions}, question and answer "
            "included; shorten it."
        )
    protected = protected_tokens(tokenizer, text, settings.protect or (), settings.system, len(ids), settings.tools)
    rendered = context_text(tokenizer, text, settings.tools)
    return EncodedText(context_id(rendered, settings), rendered, ids, protected)


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    max_positions: int,
    messages: list[dict[str, Any]],
    after: ContextKind | None,
    **options: Any,
) -> list[int]:
    """Check and tokenise a conversation whose last message is answered.

    Args:
        tokenizer: The model's tokenizer.
        max_positions: The longest text of the model, in tokens.
        messages: The turns, with `role`, `content` and, of assistants, `tool_calls`.
        after: The kind of context that they follow, if any.
        **options: Tools and thinking, as `render_messages` takes them.

    Raises:
        PromptError: For a conversation that cannot be answered.
    """
    characters = sum(len(message["content"]) + len(str(message.get("tool_calls", ""))) for message in messages)
    characters += len(json.dumps(options["tools"])) if options.get("tools") else 0
    check_characters(characters, "the conversation", max_positions, CHARACTERS_PER_TOKEN)
    for message in messages:
        # Empty messages are harmless, but not what no tokenizer can read.
        check_text(message["content"] + ".", "a message", "give text")
    if messages[-1]["role"] == "user":
        check_text(messages[-1]["content"], "the question", "ask something")
    text = render_messages(tokenizer, messages, after, **options)
    for name, other in (("tool_calls", without_calls(messages)), ("tools' results", _without_results(messages))):
        if other != messages and render_messages(tokenizer, other, after, **options) == text:
            raise PromptError(f"this model's chat template leaves {name} out; leave these messages out.")
    return encode_continuation(tokenizer, text) if after else encode(tokenizer, text)


def _without_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with other results of tools."""
    return [
        {**each, "content": "-" * bool(not each["content"])} if each["role"] == "tool" else each for each in messages
    ]
