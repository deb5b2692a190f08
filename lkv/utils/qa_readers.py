"""Readers of question answering data in the formats of SQuAD and HotpotQA, for training data and RULER."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lkv.errors import DataError
from lkv.utils.data_files import Row, read_json, read_records, require_field, require_pair


class SquadQuestion(NamedTuple):
    """A question with its distinct answers, if any; `article` is equal for questions of one article."""

    question: str
    answers: tuple[str, ...]
    context: str
    title: str
    article: str | int


class HotpotQuestion(NamedTuple):
    """A question over several paragraphs (title, text) and the titles of those that support its answer."""

    question: str
    answer: str
    paragraphs: tuple[tuple[str, str], ...]
    supporting_titles: frozenset[str]


def _require_text(value: object, name: str, position: str) -> str:
    """Return a text of the field `name`, or of an entry with its text. Raises DataError for anything else."""
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise DataError(f"{position}: field {name!r} must hold texts, but has {value!r:.60}.")
    return text


def _join_paragraph(title: object, sentences: object, position: str) -> tuple[str, str]:
    """Return a title and the text of its sentences. Raises DataError if they are none."""
    parts = [sentences] if isinstance(sentences, str) else sentences or []
    if not isinstance(parts, list):
        raise DataError(f"{position}: field 'context' must hold lists of sentences, but has {parts!r:.60}.")
    text = "".join(_require_text(part, "context", position) for part in parts)
    return _require_text(title, "context", position), text


def read_squad(path: Path) -> Iterator[SquadQuestion]:
    """Read SQuAD's nested JSON, or a file of flat rows (JSON lines, Parquet, CSV). Raises DataError."""
    if not path.name.removesuffix(".gz").endswith(".json"):
        yield from squad_questions(read_records(path))
        return
    for a, article in enumerate(require_field(read_json(path), "data", list, str(path)), 1):
        for p, paragraph in enumerate(require_field(article, "paragraphs", list, f"{path}, article {a}"), 1):
            position = f"{path}, article {a}, paragraph {p}"
            context = require_field(paragraph, "context", str, position)
            for q, entry in enumerate(require_field(paragraph, "qas", list, position), 1):
                position = f"{path}, article {a}, paragraph {p}, question {q}"
                listed = require_field(entry, "answers", list, position)
                answers = dict.fromkeys(require_field(answer, "text", str, position) for answer in listed)
                if entry.get("is_impossible"):
                    answers = {}
                question = require_field(entry, "question", str, position)
                yield SquadQuestion(question, tuple(answers), context, article.get("title") or "", a)


def squad_questions(rows: Iterable[tuple[str, Row]]) -> Iterator[SquadQuestion]:
    """Return the questions of flat (position, row) pairs; answers are a list of texts, or the hub's columns."""
    for position, row in rows:
        answers = require_field(row, "answers", (list, dict), position)
        if isinstance(answers, dict):
            answers = require_field(answers, "text", list, position)
        answers = [_require_text(answer, "answers", position) for answer in answers]
        context, title = require_field(row, "context", str, position), row.get("title") or ""
        question = require_field(row, "question", str, position)
        yield SquadQuestion(question, tuple(dict.fromkeys(answers)), context, title, title)


def hotpot_questions(rows: Iterable[tuple[str, Row]]) -> Iterator[HotpotQuestion]:
    """Return the questions of rows in HotpotQA's fields: pairs as in its own files, or the hub's columns."""
    for position, row in rows:
        facts = require_field(row, "supporting_facts", (list, dict), position)
        context = require_field(row, "context", (list, dict), position)
        if isinstance(facts, dict) and isinstance(context, dict):
            titles = set(require_field(facts, "title", list, position))
            names, texts = (require_field(context, name, list, position) for name in ("title", "sentences"))
            if len(names) != len(texts):
                raise DataError(f"{position}: 'context' has {len(names)} titles and {len(texts)} lists of sentences.")
            paragraphs = list(zip(names, texts, strict=True))
        else:
            titles = {require_pair(fact, "supporting_facts", position)[0] for fact in facts}
            paragraphs = [require_pair(entry, "context", position) for entry in context]
        yield HotpotQuestion(
            require_field(row, "question", str, position),
            require_field(row, "answer", str, position),
            tuple(_join_paragraph(title, sentences, position) for title, sentences in paragraphs),
            frozenset(titles),
        )
