"""Where a prompt is cut: the context, which is compressed before any question is known, and the continuation."""

from typing import Any

_CONTEXT, _QUESTION = "\x02context\x02", "\x02question\x02"


def chat_parts(tokenizer: Any, **options: Any) -> tuple[str, str, str]:
    """The chat template around one user turn as (before the context, between context and question, after it).

    `options` go to the template. A tokenizer without one gets a plain question-and-answer form.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "", "\n\nQuestion: ", "\nAnswer:"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{_CONTEXT}\n\n{_QUESTION}"}],
        tokenize=False,
        add_generation_prompt=True,
        **options,
    )
    before, rest = text.split(_CONTEXT)
    between, after = rest.split(_QUESTION)
    return before, between, after


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` without added special tokens (the template already holds them)."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def first_ids(tokenizer: Any) -> list[int]:
    """The id that the tokenizer itself puts before a text, if any: base models expect it."""
    first = getattr(tokenizer, "bos_token_id", None)
    return [] if first is None or tokenizer("a")["input_ids"][:1] != [first] else [first]


def context_ids(tokenizer: Any, context: str) -> list[int]:
    """Ids of everything up to the end of the context."""
    ids = encode(tokenizer, chat_parts(tokenizer)[0] + context)
    # A chat template writes the first token itself.
    return ids if getattr(tokenizer, "chat_template", None) else first_ids(tokenizer) + ids


def question_ids(tokenizer: Any, question: str) -> list[int]:
    """Ids from the end of the context to the place where the answer begins."""
    _, between, after = chat_parts(tokenizer)
    return encode(tokenizer, between + question + after)
