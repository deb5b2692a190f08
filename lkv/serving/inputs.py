"""Checks of the texts and conversations that clients send, before and while they are tokenised."""

from typing import Any, NamedTuple

from lkv.context.input_checks import check_characters, check_text
from lkv.context.protection import protected_tokens
from lkv.errors import PromptError
from lkv.serving.store import CompressionSettings, context_id
from lkv.utils.prompts import encode, encode_context, render_messages

# Longer texts are refused before they are tokenised, which takes hundreds of bytes a character.
CHARACTERS_PER_TOKEN = 16


class EncodedText(NamedTuple):
    """A text that can be compressed.

    Attributes:
        id: The id of its context.
        settings: What it is compressed with.
        ids: Its tokens, those of its system prompt first.
        protected: Positions of tokens that every head keeps.
    """

    id: str
    settings: CompressionSettings
    ids: list[int]
    protected: list[int]


def encode_text(tokenizer: Any, max_positions: int, text: str, settings: CompressionSettings) -> EncodedText:
    """Check and tokenise a text to compress.

    Args:
        tokenizer: The model's tokenizer.
        max_positions: The longest text of the model, in tokens.
        text: The text.
        settings: What it is compressed with; its system prompt comes before the text.

    Raises:
        PromptError: For an empty or too long text, and for protected spans that are not in it.
    """
    check_text(text, "the text", "give some text to compress")
    if settings.system is not None:
        check_text(settings.system, "the system prompt", "give some text, or leave it out")
    check_characters(len(text) + len(settings.system or ""), "the text", max_positions, CHARACTERS_PER_TOKEN)
    ids = encode_context(tokenizer, text, settings.system)
    if len(ids) >= max_positions:
        raise PromptError(
            f"the text has {len(ids)} tokens, but the model reads at most {max_positions}, question and answer "
            "included; shorten it."
        )
    protected = protected_tokens(tokenizer, text, settings.protect or (), settings.system)
    return EncodedText(context_id(text, settings), settings, ids, protected)


def encode_conversation(
    tokenizer: Any, max_positions: int, messages: list[dict[str, str]], after_context: bool
) -> list[int]:
    """Check and tokenise a conversation whose last message is answered.

    Args:
        tokenizer: The model's tokenizer.
        max_positions: The longest text of the model, in tokens.
        messages: The turns, with `role` and `content`.
        after_context: Whether they follow a context.

    Raises:
        PromptError: For a conversation that cannot be answered.
    """
    characters = sum(len(message["content"]) for message in messages)
    check_characters(characters, "the conversation", max_positions, CHARACTERS_PER_TOKEN)
    check_text(messages[-1]["content"], "the question", "ask something")
    for message in messages[:-1]:
        # Empty messages are harmless, but not what no tokenizer can read.
        check_text(message["content"] + ".", "a message", "give text")
    return encode(tokenizer, render_messages(tokenizer, messages, after_context=after_context))
