"""Questions with their documents from SQuAD's and HotpotQA's files: JSON, JSON lines (gzip) and Parquet."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lkv.errors import DataError
from lkv.utils.data_files import read_json as document
from lkv.utils.data_files import read_records as records
from lkv.utils.data_files import read_text as text
from lkv.utils.data_files import require_field as field
from lkv.utils.data_files import require_pair as pair


class Question(NamedTuple):
    """A question, every accepted answer, and its documents by number: those needed, and the others it came with."""

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...]


class QuestionSet(NamedTuple):
    """Questions over one collection of different documents."""

    asked: tuple[Question, ...]
    documents: tuple[str, ...]


class _Raw(NamedTuple):
    """A question before its documents have numbers; without answers it is not asked, but its documents count."""

    text: str
    answers: tuple[str, ...]
    needed: tuple[str, ...]
    documents: tuple[str, ...]


def read_squad(path: Path) -> QuestionSet:
    """SQuAD's nested JSON, or the rows of its Parquet file; questions without an answer are left out.

    The other paragraphs of the article are a question's own. Raises DataError naming the place and the field.
    """
    return _collect(path, _squad_rows(path) if path.suffix == ".parquet" else _squad_articles(path))


def read_hotpot(path: Path) -> QuestionSet:
    """HotpotQA in its own JSON, as JSON lines, or as Parquet rows; a document is a title and its paragraph.

    The paragraphs of the supporting facts are needed; a question that lacks one of them (as in the fullwiki setting) is
    left out. Raises DataError naming the place and the field.
    """
    return _collect(path, _hotpot(path))


def read_text(path: Path) -> str:
    """A text file, or the field "text" of a JSON file; gzip by the name's ending. Raises DataError."""
    if ".json" in path.name:
        return field(document(path), "text", str, str(path))
    plain = text(path)
    if "\0" in plain:
        raise DataError(f"{path} is no UTF-8 text (it holds null bytes); give a text file.")
    return plain


def _collect(path: Path, questions: Iterator[_Raw]) -> QuestionSet:
    raw = list(questions)
    documents = tuple(sorted({document for question in raw for document in question.documents}))
    number = {document: i for i, document in enumerate(documents)}
    asked = []
    for question in raw:
        if not question.answers:
            continue
        needed = dict.fromkeys(number[document] for document in question.needed)
        given = dict.fromkeys(number[document] for document in question.documents)
        near = tuple(i for i in given if i not in needed)
        asked.append(Question(question.text, question.answers, tuple(needed), near))
    if not asked:
        raise DataError(f"{path} has no question with an answer; give the official file of the data set.")
    return QuestionSet(tuple(asked), documents)


def _squad_articles(path: Path) -> Iterator[_Raw]:
    for a, article in enumerate(field(document(path), "data", list, str(path)), 1):
        at = f"{path}, article {a}"
        paragraphs = field(article, "paragraphs", list, at)
        given_with = tuple(field(p, "context", str, f"{at}, paragraph {i}") for i, p in enumerate(paragraphs, 1))
        for i, (context, paragraph) in enumerate(zip(given_with, paragraphs, strict=True), 1):
            for q, entry in enumerate(field(paragraph, "qas", list, f"{at}, paragraph {i}"), 1):
                where = f"{at}, paragraph {i}, question {q}"
                given = [field(answer, "text", str, where) for answer in field(entry, "answers", list, where)]
                answers = () if entry.get("is_impossible") else tuple(dict.fromkeys(given))
                yield _Raw(field(entry, "question", str, where), answers, (context,), given_with)


def _squad_rows(path: Path) -> Iterator[_Raw]:
    table = [
        (where, field(row, "title", str, where), field(row, "context", str, where), row) for where, row in records(path)
    ]
    articles: dict[str, dict[str, None]] = {}
    for _, title, context, _ in table:
        articles.setdefault(title, {})[context] = None
    for where, title, context, row in table:
        given = field(field(row, "answers", dict, where), "text", list, where)
        text = field(row, "question", str, where)
        yield _Raw(text, tuple(dict.fromkeys(given)), (context,), tuple(articles[title]))


def _hotpot(path: Path) -> Iterator[_Raw]:
    for where, row in records(path):
        facts, context = row.get("supporting_facts"), row.get("context")
        # Parquet rows hold columns where the official file holds pairs.
        if isinstance(facts, dict) and isinstance(context, dict):
            titles = set(field(facts, "title", list, where))
            paragraphs = list(
                zip(field(context, "title", list, where), field(context, "sentences", list, where), strict=True)
            )
        else:
            titles = {pair(fact, "supporting_facts", where)[0] for fact in field(row, "supporting_facts", list, where)}
            paragraphs = [pair(entry, "context", where) for entry in field(row, "context", list, where)]
        texts = {title: f"{title}\n{''.join(lines)}" for title, lines in paragraphs}
        answer = field(row, "answer", str, where)
        yield _Raw(
            text=field(row, "question", str, where),
            answers=(answer,) if titles and titles <= texts.keys() else (),
            needed=tuple(texts[title] for title in texts if title in titles),
            documents=tuple(texts.values()),
        )
