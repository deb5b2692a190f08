"""A look at a text as one HTML file that needs nothing else: no network, no server, no fonts."""

import base64
import json
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from lkv.context.inspection import Look

_DATA = "/* DATA */"


@dataclass(frozen=True)
class Answer:
    """What one method answered: its `label` in print, entries kept of all, bytes held, and the text."""

    label: str
    realised: float
    nbytes: int
    full_nbytes: int
    text: str


def page(look: Look, title: str, model: str, retention: float, answers: dict[str, list[Answer]]) -> str:
    """The HTML of the page; `answers` by question, all at `retention`, where the slider starts."""
    start = min(range(len(look.retentions)), key=lambda i: abs(look.retentions[i] - retention))
    data: dict[str, Any] = {
        "title": title,
        "model": model,
        "method": look.method,
        "layers": look.layers,
        "heads": look.heads,
        "entryBytes": look.entry_bytes,
        "retentions": look.retentions,
        "start": start,
        "pieces": look.pieces,
        "counts": look.counts.tolist(),
        "rankBytes": look.ranks.dtype.itemsize,
        "ranks": base64.b64encode(look.ranks.astype(look.ranks.dtype.newbyteorder("<")).tobytes()).decode(),
        "answersAt": retention,
        "answers": {question: [asdict(answer) for answer in given] for question, given in answers.items()},
    }
    # "<" could end the script that holds the data.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    template = resources.files(__package__).joinpath("inspection_page.html").read_text(encoding="utf-8")
    return template.replace(_DATA, text)
