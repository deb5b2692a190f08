"""Split prompts into a context, which is compressed before any question is known, and its continuation."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from lkv.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Messages, each with a `role`, a `content` (a text, or texts and images as parts) and, in assistants', `tool_calls`.
Conversation = Sequence[Mapping[str, Any]]
Tools = list[dict[str, Any]]  # functions that a model may call, in OpenAI's form
ContextKind = Literal["text", "conversation"]

_CONTEXT, _QUESTION, _ANSWER = "\x02context\x02", "\x02question\x02", "\x02answer\x02"
_QUESTION_PART = {"type": "text", "text": _QUESTION}
# Default texts before a continuation whose preceding text is unknown.
_NEUTRAL_STARTS = ("a", "\n", ".", "1")
_SAMPLED_TOKENS = 1000
_TAIL_CHARACTERS, _TAIL_TOKENS = 256, 64  # of the text before a continuation that decide how it begins
_PLAIN_QUESTION, _PLAIN_ANSWER = "\n\nQuestion: ", "\nAnswer:"  # for tokenizers without a chat template


def chat_template_parts(
    tokenizer: "PreTrainedTokenizerBase", system: str | None = None, images: int = 0, tools: Tools | None = None
) -> tuple[str, str, str]:
    """Split the chat template around one user turn into its texts before the context, before the question and after it.

    Training, evaluation and use share it, so that an answer begins in one place. Thinking is turned off, as in kvpress
    (Qwen3's template then ends in an empty `<think></think>` block). Without a template, a plain question-and-answer
    form takes its place.

    Args:
        tokenizer: The model's tokenizer.
        system: A system prompt before the context.
        images: The number of images that begin the user turn.
        tools: What the model may call.

    Raises:
        PromptError: If the template takes no system prompt or tools, or changes the text of the turn.
    """
    if not _has_template(tokenizer, tools):
        return f"{system}\n\n" if system else "", _PLAIN_QUESTION, _PLAIN_ANSWER
    turns = [{"role": "system", "content": system}] if system else []
    text = _apply_template(
        tokenizer, [*turns, {"role": "user", "content": f"{_CONTEXT}\n\n{_QUESTION}"}], images, tools
    )
    if text.count(_CONTEXT) != 1 or text.count(_QUESTION) != 1:
        raise PromptError(
            "the tokenizer's chat template does not carry the user's text exactly once, so its context cannot be "
            "separated from its question; use a tokenizer with another template, or with none."
        )
    before, rest = text.split(_CONTEXT)
    if system and system.strip() not in before:
        raise PromptError("this model's chat template leaves a system prompt out; put it into the text instead.")
    between, after = rest.split(_QUESTION)
    return before, between, after


def next_turn_parts(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str]:
    """Return the chat template's texts between an answer and the next question, and after that question."""
    if not _has_template(tokenizer):
        return _PLAIN_QUESTION, _PLAIN_ANSWER
    turns = [
        {"role": "user", "content": _CONTEXT},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _QUESTION},
    ]
    text = _apply_template(tokenizer, turns)
    if text.count(_ANSWER) != 1 or text.count(_QUESTION) != 1 or text.index(_ANSWER) > text.index(_QUESTION):
        raise PromptError(
            "the tokenizer's chat template does not carry an earlier answer and the next question, so a conversation "
            "cannot continue after its compressed text; use a tokenizer with another template, or with none."
        )
    between, after = text.split(_ANSWER)[1].split(_QUESTION)
    return between, after


def content_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the content of a message as parts of text and images."""
    content = message.get("content") or ""
    return [{"type": "text", "text": content}] if isinstance(content, str) else [*content]


def content_texts(message: Mapping[str, Any]) -> list[str]:
    """Return the texts of a message, without white space around them."""
    return [part["text"].strip() for part in content_parts(message) if part["type"] == "text"]


def _has_template(tokenizer: "PreTrainedTokenizerBase", tools: Tools | None = None) -> bool:
    """Return whether there is a chat template. Raises PromptError if there is none for `tools`."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if tools and not has_template:
        raise PromptError("this model has no chat template, which tools need; leave tools out.")
    return has_template


def _apply_template(
    tokenizer: "PreTrainedTokenizerBase",
    turns: Sequence[Mapping[str, Any]],
    images: int = 0,
    tools: Tools | None = None,
    has_thinking: bool = False,
) -> str:
    """Render `turns`; `images` begin the last one."""
    options = {"tools": tools, "enable_thinking": has_thinking}
    if tools and _render_template(tokenizer, turns, options) == _render_template(
        tokenizer, turns, options | {"tools": None}
    ):
        raise PromptError("this model's chat template leaves tools out; leave them out.")
    has_parts = images > 0 or any(isinstance(turn.get("content"), list) for turn in turns)
    if not has_parts:
        text = _render_template(tokenizer, turns, options)
        contents = [own for turn in turns for own in content_texts(turn)]
        if all(content in text for content in contents):
            return text
    # Templates of models that read images may take contents as a list of parts only.
    parts = [[part if part["type"] == "text" else {"type": "image"} for part in content_parts(turn)] for turn in turns]
    parts[-1] = [{"type": "image"}] * images + parts[-1]
    lists = [{**turn, "content": own} for turn, own in zip(turns, parts, strict=True)]
    in_parts = _render_template(tokenizer, lists, options)
    return in_parts if has_parts or all(content in in_parts for content in contents) else text


def _render_template(tokenizer: "PreTrainedTokenizerBase", turns: Any, options: dict[str, Any]) -> str:
    options = {"enable_thinking": False} | options
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options))
    # Templates refuse with errors of Jinja's that have any message.
    except Exception as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise PromptError(f"this model's chat template refuses turns of {roles} ({error}); leave out one.") from error


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int] = ()) -> str:
    """Return a hash of the tokenizer's template, of how it splits a text, and of the tokens of `ids` and of samples.

    It stays the same if tokens are added, such as one for padding.
    """
    try:
        probe = encode(tokenizer, "The 27 naïve coders' cafés\n\tdef f(x): return x**2  # ok")
    except PromptError:  # it has no tokens for some of these characters
        probe = []
    size = tokenizer.vocab_size
    samples = [*ids, *range(0, size, max(1, size // _SAMPLED_TOKENS))]
    tokens = tokenizer.convert_ids_to_tokens(samples)
    return hashlib.sha256(repr((tokenizer.chat_template, probe, tokens)).encode(errors="replace")).hexdigest()


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Tokenise `text` without special tokens, which the template already holds.

    Raises PromptError if the tokenizer has no tokens for it.
    """
    try:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    # Tokenizers raise nothing more precise.
    except Exception as error:
        raise PromptError(
            f"the tokenizer cannot read the text ({error}); its files may be damaged: download the model again."
        ) from error


def encode_continuation(tokenizer: "PreTrainedTokenizerBase", text: str, before: str = "") -> list[int]:
    """Tokenise `text` as a continuation of the text `before` (its end suffices), whose ids are fixed.

    Tokenizers that prepend a space to every text (Metaspace, SentencePiece) prepend none here. If the tokenizer would
    merge the end of `before` with the beginning of `text`, this is logged once, and `text` is tokenised after a neutral
    text that it does not merge with.

    Raises PromptError if the tokenizer has no tokens for it.
    """
    for start in (before[-_TAIL_CHARACTERS:], *_NEUTRAL_STARTS):
        first = encode(tokenizer, start) if start else []
        if first and (ids := encode(tokenizer, start + text))[: len(first)] == first:
            return ids[len(first) :]
        if start and start == before[-_TAIL_CHARACTERS:]:
            _log_joined_boundary(type(tokenizer).__name__)
    return encode(tokenizer, text)


@cache
def _log_joined_boundary(name: str) -> None:
    logging.getLogger(__name__).info(
        "%s would join the end of a text and the beginning of what follows it into other tokens; they are tokenised "
        "separately, because the text is compressed before what follows is known.",
        name,
    )


def decode_tail(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> str:
    """Return the end of a text by its ids, for `encode_continuation`."""
    return str(tokenizer.decode(list(ids[-_TAIL_TOKENS:]), clean_up_tokenization_spaces=False))


def bos_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the id that the tokenizer itself puts before a text, if any; base models expect it."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [] if bos is None or tokenizer("a")["input_ids"][:1] != [bos] else [bos]


def strip_end(tokenizer: "PreTrainedTokenizerBase", text: str | Conversation) -> str | Conversation:
    """Return a text without white space at its end if the tokenizer merges that with the text before a question."""
    if not isinstance(text, str) or (stripped := text.rstrip()) == text:
        return text
    end = text[-_TAIL_CHARACTERS:]
    ids = encode(tokenizer, end)
    return text if encode(tokenizer, end + chat_template_parts(tokenizer)[1])[: len(ids)] == ids else stripped


def context_parts(
    tokenizer: "PreTrainedTokenizerBase",
    context: str | Conversation,
    system: str | None = None,
    tools: Tools | None = None,
) -> tuple[str, str]:
    """Return the chat template's text before a context, and the context as text.

    A text begins the user turn that its question ends. A conversation is rendered up to where the next user turn's
    content begins; nothing comes before it. The template says where `tools` are.

    Raises:
        PromptError: For a conversation that the template refuses or changes, and for a system prompt beside one.
    """
    if isinstance(context, str):
        return chat_template_parts(tokenizer, system, tools=tools)[0], context
    if system is not None:
        raise PromptError("a conversation has its system prompt among its messages; leave system out.")
    return "", context_text(tokenizer, context, tools)


def context_text(tokenizer: "PreTrainedTokenizerBase", context: str | Conversation, tools: Tools | None = None) -> str:
    """Return a context as text: itself, or a conversation as `context_parts` renders it, with the same errors."""
    if isinstance(context, str):
        return context
    turns = [{**message, "content": message["content"] or ""} for message in context]
    if not _has_template(tokenizer, tools):
        if any(isinstance(message["content"], list) for message in turns):
            raise PromptError("messages in parts need a chat template, but the tokenizer has none; give texts.")
        return _render_plainly(turns, after_context=False).removesuffix(_PLAIN_ANSWER)
    text = _apply_template(tokenizer, _with_question(turns), tools=tools)
    silent = without_calls(turns)
    is_whole = text.count(_QUESTION) == 1 and all(own in text for message in turns for own in content_texts(message))
    if not is_whole or (silent != turns and _apply_template(tokenizer, _with_question(silent), tools=tools) == text):
        raise PromptError("this model's chat template leaves messages out of a conversation; send it as one text.")
    return text.split(_QUESTION)[0]


def _with_question(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns with a question after them, which continues a last turn of the user."""
    if turns[-1]["role"] != "user":
        return [*turns, {"role": "user", "content": _QUESTION}]
    *parts, last = content_parts(turns[-1])
    more = [{**last, "text": f"{last['text']}\n\n{_QUESTION}"}] if last["type"] == "text" else [last, _QUESTION_PART]
    return [*turns[:-1], {**turns[-1], "content": [*parts, *more]}]


def without_calls(messages: Conversation) -> list[dict[str, Any]]:
    """Return messages without their calls of tools."""
    return [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]


def encode_context(
    tokenizer: "PreTrainedTokenizerBase",
    context: str | Conversation,
    system: str | None = None,
    tools: Tools | None = None,
) -> list[int]:
    """Tokenise everything up to the end of the context, the system prompt and the tools before it included."""
    ids = encode(tokenizer, "".join(context_parts(tokenizer, context, system, tools)))
    # A chat template writes the first token itself.
    return ids if _has_template(tokenizer) else bos_ids(tokenizer) + ids


def encode_question(
    tokenizer: "PreTrainedTokenizerBase", question: str, before: str = "", kind: ContextKind = "text"
) -> list[int]:
    """Tokenise everything from the end of a context of this kind, the text `before`, to where the answer begins.

    White space around the question is left out, as some templates do: with others its tokens would depend on it.
    """
    _, between, after = chat_template_parts(tokenizer)
    if kind == "conversation" and _has_template(tokenizer):  # the user's turn has begun
        between = ""
    return encode_continuation(tokenizer, between + question.strip() + after, before)


def encode_next_question(tokenizer: "PreTrainedTokenizerBase", question: str, before: str = "") -> list[int]:
    """Tokenise everything from the end of an answer, the text `before`, to where the next answer begins.

    White space around the question is left out, as in `encode_question`.
    """
    between, after = next_turn_parts(tokenizer)
    return encode_continuation(tokenizer, between + question.strip() + after, before)


def render_messages(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict[str, Any]],
    after: ContextKind | None = None,
    tools: Tools | None = None,
    context_tools: Tools | None = None,
    has_thinking: bool = False,
) -> str:
    """Render `messages`, each with a `role` and a `content`, up to where the answer begins.

    Args:
        tokenizer: The model's tokenizer.
        messages: The turns; the last one is the user's or a tool's.
        after: Return only what follows a context of this kind. A text begins the first user turn, a conversation ends
            where that turn's content begins. System messages, which can no longer come before the context, begin that
            turn. White space around the messages of user and system is left out, as in `encode_question`.
        tools: What the model may call; after a context, by default what that was made with.
        context_tools: The tools of the context.
        has_thinking: Whether the template lets the model think before its answer.

    Raises:
        PromptError: For turns that the template refuses or changes, and for tools that it puts before the context.
    """
    turns = [dict(message) for message in messages]
    if not turns or turns[-1]["role"] not in ("user", "tool"):
        raise PromptError("the last message must be one of the user, or a tool's result; put the question there.")
    has_template = _has_template(tokenizer, tools)
    if _content_of(tools) == _content_of(context_tools):
        tools = context_tools
    options: dict[str, Any] = {"tools": tools or context_tools or None, "has_thinking": has_thinking}
    if after:
        for turn in turns:
            turn["content"] = turn["content"].strip() if turn["role"] in ("user", "system") else turn["content"]
        system = [turn["content"] for turn in turns if turn["role"] == "system"]
        turns = [turn for turn in turns if turn["role"] != "system"]
        if turns[0]["role"] != "user":
            raise PromptError("the first message after the system's must be one of the user: it follows the context.")
        turns[0]["content"] = "\n\n".join([*system, turns[0]["content"]])
    if not has_template:
        return _render_plainly(turns, bool(after))
    if not after:
        return _apply_template(tokenizer, turns, **options)
    turns[0]["content"] = (f"{_CONTEXT}\n\n" if after == "text" else _CONTEXT) + turns[0]["content"]
    before, *rest = _apply_template(tokenizer, turns, **options).split(_CONTEXT)
    if len(rest) != 1:
        raise PromptError("this model's chat template does not carry the messages after a context; send one question.")
    if before != _apply_template(tokenizer, turns, tools=context_tools).split(_CONTEXT)[0]:
        is_redefined = bool(tools) and tools != context_tools and _names(tools) == _names(context_tools)
        request = _names(tools) + " with other definitions" * is_redefined + " and enable_thinking" * has_thinking
        raise PromptError(
            f"this model's chat template writes before a context what the model may call, here "
            f"{_names(context_tools)}, but the request has {request}; leave that out, or create the context with these "
            "tools."
        )
    return rest[0]


def _names(tools: Tools | None) -> str:
    return ", ".join(str(tool["function"]["name"])[:60] for tool in tools or ()) or "no tools"


def _content_of(tools: object) -> object:
    """Return tools without what libraries of agents write in their own way: order, `strict`, titles, closed objects."""
    if isinstance(tools, list):
        return sorted(map(_content_of, tools), key=str)
    if not isinstance(tools, dict):
        return tools
    written = {"strict": bool | None, "title": str, "additionalProperties": bool}
    return {
        name: _content_of(value)
        for name, value in sorted(tools.items())
        if not (name in written and isinstance(value, written[name]))
    }


def _render_plainly(turns: list[dict[str, str]], after_context: bool) -> str:
    """Render turns for a tokenizer without a template."""
    forms = {"system": "{}", "user": _PLAIN_QUESTION + "{}", "assistant": _PLAIN_ANSWER + " {}"}
    if unknown := {turn["role"] for turn in turns} - forms.keys():
        raise PromptError(f"there are messages of {', '.join(sorted(unknown))}; give those of {', '.join(forms)}.")
    text = "".join(forms[turn["role"]].format(turn["content"]) for turn in turns) + _PLAIN_ANSWER
    return text if after_context else text.lstrip("\n")
