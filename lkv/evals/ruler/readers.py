"""Questions with their documents from SQuAD's and HotpotQA's files: JSON, JSON lines (gzip) and Parquet."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lkv.errors import DataError
from lkv.training.data.sources import rows


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
        return _field(_whole(path), "text", str, str(path))
    data = _bytes(path)
    if b"\0" in data:
        raise DataError(f"{path} is no UTF-8 text (it holds null bytes); give a text file.")
    return data.decode("utf-8", errors="replace")


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
    for a, article in enumerate(_field(_whole(path), "data", list, str(path)), 1):
        at = f"{path}, article {a}"
        paragraphs = _field(article, "paragraphs", list, at)
        given_with = tuple(_field(p, "context", str, f"{at}, paragraph {i}") for i, p in enumerate(paragraphs, 1))
        for i, (context, paragraph) in enumerate(zip(given_with, paragraphs, strict=True), 1):
            for q, entry in enumerate(_field(paragraph, "qas", list, f"{at}, paragraph {i}"), 1):
                where = f"{at}, paragraph {i}, question {q}"
                given = [_field(answer, "text", str, where) for answer in _field(entry, "answers", list, where)]
                answers = () if entry.get("is_impossible") else tuple(dict.fromkeys(given))
                yield _Raw(_field(entry, "question", str, where), answers, (context,), given_with)


def _squad_rows(path: Path) -> Iterator[_Raw]:
    table = [
        (where, _field(row, "title", str, where), _field(row, "context", str, where), row)
        for where, row in _records(path)
    ]
    articles: dict[str, dict[str, None]] = {}
    for _, title, context, _ in table:
        articles.setdefault(title, {})[context] = None
    for where, title, context, row in table:
        given = _field(_field(row, "answers", dict, where), "text", list, where)
        text = _field(row, "question", str, where)
        yield _Raw(text, tuple(dict.fromkeys(given)), (context,), tuple(articles[title]))


def _hotpot(path: Path) -> Iterator[_Raw]:
    for where, row in _records(path):
        facts, context = row.get("supporting_facts"), row.get("context")
        # Parquet rows hold columns where the official file holds pairs.
        if isinstance(facts, dict) and isinstance(context, dict):
            titles = set(_field(facts, "title", list, where))
            paragraphs = list(
                zip(_field(context, "title", list, where), _field(context, "sentences", list, where), strict=True)
            )
        else:
            titles = {
                _pair(fact, "supporting_facts", where)[0] for fact in _field(row, "supporting_facts", list, where)
            }
            paragraphs = [_pair(entry, "context", where) for entry in _field(row, "context", list, where)]
        texts = {title: f"{title}\n{''.join(lines)}" for title, lines in paragraphs}
        answer = _field(row, "answer", str, where)
        yield _Raw(
            text=_field(row, "question", str, where),
            answers=(answer,) if titles and titles <= texts.keys() else (),
            needed=tuple(texts[title] for title in texts if title in titles),
            documents=tuple(texts.values()),
        )


def _pair(value: Any, name: str, where: str) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise DataError(f"{where}: field {name!r} must hold pairs, but has {value!r:.60}.")
    return value[0], value[1]


def _field(row: Any, name: str, kind: type, where: str) -> Any:
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, kind):
        state = "is missing" if value is None else f"is not a {kind.__name__}"
        raise DataError(f"{where}: field {name!r} {state}; give the official file of the data set.")
    return value


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with the place of each, whatever the format."""
    if path.suffix == ".parquet":
        for i, row in enumerate(_parquet(path), 1):
            yield f"{path}, row {i}", row
    elif path.name.endswith(".jsonl.gz"):
        _check(path)
        try:
            for i, row in enumerate(rows(path), 1):
                yield f"{path}, line {i}", _object(row, f"{path}, line {i}")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise DataError(f"{path} is not a readable gzip file ({error}).") from error
    else:
        whole = _whole(path)
        if not isinstance(whole, list):
            raise DataError(f"{path} must hold a JSON list of questions, but holds a {type(whole).__name__}.")
        for i, row in enumerate(whole, 1):
            yield f"{path}, entry {i}", _object(row, f"{path}, entry {i}")


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: not a JSON object but a {type(row).__name__}; give the official file of the data set."
        )
    return row


def _parquet(path: Path) -> list[dict[str, Any]]:
    _check(path)
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{path} needs the package pyarrow; run `pip install lkv-cache[evals]`.") from error
    try:
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file ({error}).") from error


def _whole(path: Path) -> Any:
    try:
        return json.loads(_bytes(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}).") from error


def _bytes(path: Path) -> bytes:
    _check(path)
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error


def _check(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of the official file.")
