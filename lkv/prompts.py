"""Where a prompt is cut: the context, which is compressed before any question is known, and the continuation."""

from typing import Any

_CONTEXT, _QUESTION = "\x02context\x02", "\x02question\x02"


def chat_parts(tokenizer: Any) -> tuple[str, str, str]:
    """The chat template around one user turn as (before the context, between context and question, after it).

    A tokenizer without a chat template gets a plain question-and-answer form.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "", "\n\nQuestion: ", "\nAnswer:"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{_CONTEXT}\n\n{_QUESTION}"}], tokenize=False, add_generation_prompt=True
    )
    before, rest = text.split(_CONTEXT)
    between, after = rest.split(_QUESTION)
    return before, between, after


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` without added special tokens (the template already holds them)."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def context_ids(tokenizer: Any, context: str) -> list[int]:
    """Ids of everything up to the end of the context."""
    ids = encode(tokenizer, chat_parts(tokenizer)[0] + context)
    # A chat template writes the first token itself; without one, base models expect what their tokenizer adds.
    first = getattr(tokenizer, "bos_token_id", None)
    if first is None or getattr(tokenizer, "chat_template", None) or tokenizer("a")["input_ids"][:1] != [first]:
        return ids
    return [first, *ids]


def question_ids(tokenizer: Any, question: str) -> list[int]:
    """Ids from the end of the context to the place where the answer begins."""
    _, between, after = chat_parts(tokenizer)
    return encode(tokenizer, between + question + after)
