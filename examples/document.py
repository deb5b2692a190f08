"""The text that the examples read: real prose with three notes hidden in it."""

from importlib.metadata import files
from typing import Any

TOKENS = 2600
# Real text of a pinned package: about 2,600 tokens of the licence that numpy's wheels carry for their Fortran library.
PACKAGE, OPENING = "numpy", "GNU GENERAL PUBLIC LICENSE"
# Depth, note, question, answer.
NOTES = (
    (0.15, "The meeting of the book club is on Thursday in room 214.", "In which room is the meeting of the book club?",
     "214"),
    (0.50, "The password for the old archive is walnut.", "What is the password for the old archive?", "walnut"),
    (0.82, "The telephone extension of Marta Lindgren is 5308.", "What is the telephone extension of Marta Lindgren?",
     "5308"),
)  # fmt: skip


def document(tokenizer: Any, tokens: int = TOKENS) -> str:
    """About the first `tokens` tokens of the licence, with the notes at their depths."""
    texts = [file.read_text(encoding="utf-8") for file in files(PACKAGE) or [] if file.name == "LICENSE.txt"]
    text = next(text for text in texts if OPENING in text)
    paragraphs = [" ".join(part.split()) for part in text[text.index(OPENING) :].split("\n\n") if part.strip()]
    parts, count = [], 0
    for paragraph in paragraphs:
        parts.append(paragraph)
        count += len(tokenizer(paragraph, add_special_tokens=False)["input_ids"])
        if count >= tokens:
            break
    for depth, sentence, _, _ in reversed(NOTES):
        parts.insert(int(depth * len(parts)), sentence)
    return "\n\n".join(parts)
