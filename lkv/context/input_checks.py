"""Argument checks shared by all entry points of contexts."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lkv.errors import PromptError


def check_model_and_tokenizer(model: object, tokenizer: object) -> None:
    """Raise PromptError for objects that are not a model and its tokenizer."""
    if not isinstance(model, torch.nn.Module):
        raise PromptError(f"the model is a {type(model).__name__}; give one as AutoModelForCausalLM loads it.")
    if isinstance(tokenizer, torch.nn.Module) or not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise PromptError(
            f"the tokenizer is a {type(tokenizer).__name__}; give the model's own, as AutoTokenizer loads it."
        )


def check_text(text: object, name: str, advice: str) -> None:
    """Raise PromptError unless `text`, called `name` in the message, is a non-blank str that can be encoded."""
    if not isinstance(text, str):
        raise PromptError(f"{name} is a {type(text).__name__}, but it must be one text (str); {advice}.")
    if not text.strip():
        raise PromptError(f"{name} is empty; {advice}.")
    if "\0" in text:
        raise PromptError(
            f"{name} holds NUL characters, the first at {text.index(chr(0))}, so it was decoded wrongly or is not text;"
            " remove them."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{name} is not valid Unicode text ({error.reason} at {error.start}); give UTF-8.") from error


def check_context(text: object, advice: str) -> None:
    """Raise PromptError unless `text` is a text, as `check_text` does, or a conversation."""
    if isinstance(text, str | bytes) or not isinstance(text, Sequence):
        check_text(text, "the text", advice)
    else:
        check_conversation(text)


def check_conversation(messages: object) -> None:
    """Raise PromptError unless `messages` are the turns of a conversation that the assistant ended."""
    if not isinstance(messages, Sequence) or not messages or not all(isinstance(each, Mapping) for each in messages):
        raise PromptError('a conversation is a list of messages such as {"role": "user", "content": "..."}.')
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise PromptError("a message of the conversation has no role; give one, such as user.")
        content = message.get("content")
        if isinstance(content, list) and content:
            for part in content:
                _check_part(part)
            continue
        check_text(f"{content or ''}.", "a message", "give text")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise PromptError(
                "a message of the conversation has no text as its content; give one, perhaps an empty one."
            )
    content = messages[-1]["content"]
    is_open = messages[-1]["role"] == "user" and isinstance(content, list)
    if not is_open and (messages[-1]["role"] != "assistant" or (isinstance(content, str) and not content.strip())):
        raise PromptError(
            "the conversation must end with an answer of the assistant; ask the next question afterwards."
        )


def _check_part(part: Any) -> None:
    """Raise PromptError unless a part of a message's content is a text or an image."""
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
    if kind == "text" and isinstance(text, str):
        check_text(f"{text}.", "a message", "give text")
    elif kind != "image" or image_of(part) is None:
        raise PromptError(
            f"a message of the conversation has a part of type {kind!r} that is not read; give "
            '{"type": "text", "text": ...} and {"type": "image", "image": ...}, a video as some of its pictures.'
        )


def image_of(part: Mapping[str, Any]) -> Any:
    """Return the image of a message's part, under the names that transformers knows; None without one."""
    return next((part[name] for name in ("image", "url", "path", "base64") if part.get(name) is not None), None)


def check_characters(characters: int, name: str, tokens: int, per_token: int) -> None:
    """Raise PromptError for a text that is too long to tokenise, which takes hundreds of bytes a character.

    Args:
        characters: The number of characters.
        name: The name of the text in the error.
        tokens: The model's context length.
        per_token: The characters allowed per token.
    """
    if characters > per_token * tokens:
        raise PromptError(
            f"{name} has {characters:,} characters, too many for a model that reads at most {tokens} tokens; shorten "
            "it."
        )
