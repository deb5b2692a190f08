"""Where a prompt is cut: the context, which is compressed before any question is known, and the continuation."""

import hashlib
from typing import Any

from lkv.errors import PromptError

_CONTEXT, _QUESTION, _ANSWER = "\x02context\x02", "\x02question\x02", "\x02answer\x02"


def chat_template_parts(tokenizer: Any, system: str | None = None) -> tuple[str, str, str]:
    """The chat template around one user turn as (before the context, between context and question, after it).

    Training, evaluation and use share it, so that an answer begins in one place: templates that can think aloud are
    told not to, as in kvpress (Qwen3's then ends in an empty `<think></think>` block). `system`: a system prompt before
    it all. A tokenizer without a template gets a plain question-and-answer form. Raises PromptError for a template that
    takes no system prompt, or does not carry the turn as it is.
    """
    if not getattr(tokenizer, "chat_template", None):
        return f"{system}\n\n" if system else "", "\n\nQuestion: ", "\nAnswer:"
    turns = [{"role": "user", "content": f"{_CONTEXT}\n\n{_QUESTION}"}]
    text = _templated(tokenizer, _with_system(system, turns))
    if text.count(_CONTEXT) != 1 or text.count(_QUESTION) != 1:
        raise PromptError(
            "the tokenizer's chat template does not carry the user's text exactly once, so no context can be told from "
            "its question; give a tokenizer with another template, or with none."
        )
    before, rest = text.split(_CONTEXT)
    if system and system.strip() not in before:
        raise PromptError("this model's chat template leaves a system prompt out; put it into the text instead.")
    between, after = rest.split(_QUESTION)
    return before, between, after


def next_turn_parts(tokenizer: Any) -> tuple[str, str]:
    """What stands between an answer and the next question, and what after that question."""
    if not getattr(tokenizer, "chat_template", None):
        return "\n\nQuestion: ", "\nAnswer:"
    turns = [
        {"role": "user", "content": _CONTEXT},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _QUESTION},
    ]
    between, after = _templated(tokenizer, turns).split(_ANSWER)[1].split(_QUESTION)
    return between, after


def _with_system(system: str | None, turns: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, *turns] if system else turns


def _templated(tokenizer: Any, turns: list[dict[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    # A template refuses by an error of Jinja's, with any words in it.
    except Exception as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise PromptError(f"this model's chat template refuses turns of {roles} ({error}); leave out one.") from error


def tokenizer_digest(tokenizer: Any) -> str:
    """What tells one tokenizer from another: its template and how it cuts a text."""
    probe = encode(tokenizer, "The 27 naïve coders' cafés\n\tdef f(x): return x**2  # ok")
    return hashlib.sha256(repr((tokenizer.chat_template, len(tokenizer), probe)).encode()).hexdigest()


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` without added special tokens (the template already holds them).

    Raises PromptError where the tokenizer has no tokens for it.
    """
    try:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    # Tokenizers raise nothing more precise.
    except Exception as error:
        raise PromptError(
            f"the tokenizer cannot read the text ({error}); its files may be damaged: fetch the model again."
        ) from error


def bos_ids(tokenizer: Any) -> list[int]:
    """The id that the tokenizer itself puts before a text, if any: base models expect it."""
    first = getattr(tokenizer, "bos_token_id", None)
    return [] if first is None or tokenizer("a")["input_ids"][:1] != [first] else [first]


def encode_context(tokenizer: Any, context: str, system: str | None = None) -> list[int]:
    """Ids of everything up to the end of the context."""
    ids = encode(tokenizer, chat_template_parts(tokenizer, system)[0] + context)
    # A chat template writes the first token itself.
    return ids if getattr(tokenizer, "chat_template", None) else bos_ids(tokenizer) + ids


def encode_question(tokenizer: Any, question: str) -> list[int]:
    """Ids from the end of the context to the place where the answer begins."""
    _, between, after = chat_template_parts(tokenizer)
    return encode(tokenizer, between + question + after)


def encode_next_question(tokenizer: Any, question: str) -> list[int]:
    """Ids from the end of an answer to the place where the answer to the next question begins."""
    between, after = next_turn_parts(tokenizer)
    return encode(tokenizer, between + question + after)


def render_messages(tokenizer: Any, messages: list[dict[str, str]], after_context: bool) -> str:
    """The chat template around `messages`, each with a `role` and a `content`, up to where the answer begins.

    `after_context`: what follows a context in its first user turn; a system message, which can no longer stand before
    the context, then begins that turn. Raises PromptError for turns that the template refuses or changes.
    """
    turns = [dict(message) for message in messages]
    if not turns or turns[-1]["role"] != "user":
        raise PromptError("the last message must be one of the user; put the question there.")
    if not getattr(tokenizer, "chat_template", None):
        return _plain_text(turns, after_context)
    if not after_context:
        return _templated(tokenizer, turns)
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    turns = [turn for turn in turns if turn["role"] != "system"]
    first = "\n\n".join([*system, turns[0]["content"]])
    text = _templated(tokenizer, [{"role": turns[0]["role"], "content": f"{_CONTEXT}\n\n{first}"}, *turns[1:]])
    if turns[0]["role"] != "user" or text.count(_CONTEXT) != 1:
        raise PromptError("the first message after the system's must be one of the user: it follows the context.")
    return text.split(_CONTEXT)[1]


def _plain_text(turns: list[dict[str, str]], after_context: bool) -> str:
    """Turns for a tokenizer without a template."""
    forms = {"system": "{}", "user": "\n\nQuestion: {}", "assistant": "\nAnswer: {}"}
    if unknown := {turn["role"] for turn in turns} - forms.keys():
        raise PromptError(f"there are messages of {', '.join(sorted(unknown))}; give those of {', '.join(forms)}.")
    text = "".join(forms[turn["role"]].format(turn["content"]) for turn in turns) + "\nAnswer:"
    return text if after_context else text.lstrip("\n")
