"""Questions with their documents from SQuAD's and HotpotQA's files: JSON, JSON lines (gzip) and Parquet."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lkv.errors import DataError
from lkv.utils import data_files, qa_readers
from lkv.utils.data_files import read_json, read_records, require_field


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


def read_squad(path: Path) -> QuestionSet:
    """Read SQuAD's questions that have an answer; the paragraphs of a question's article are its own documents."""
    questions = list(qa_readers.read_squad(path))
    articles: dict[str | int, dict[str, None]] = {}
    for question in questions:
        articles.setdefault(question.article, {})[question.context] = None
    return _number_documents(path, ((q.question, q.answers, (q.context,), articles[q.article]) for q in questions))


def read_hotpot(path: Path) -> QuestionSet:
    """Read HotpotQA's questions; a document is a title and its paragraph.

    A question that lacks a paragraph of its supporting facts (as in the fullwiki setting) is left out.
    """
    raw = []
    for question in qa_readers.hotpot_questions(read_records(path)):
        texts = {title: f"{title}\n{text}" for title, text in question.paragraphs}
        titles = question.supporting_titles
        answers = (question.answer,) if titles and titles <= texts.keys() else ()
        raw.append((question.question, answers, [texts[t] for t in texts if t in titles], texts.values()))
    return _number_documents(path, raw)


def read_text(path: Path) -> str:
    """Read a text file, or the field "text" of a JSON file, gzipped or not. Raises DataError."""
    if ".json" in path.name:
        return require_field(read_json(path), "text", str, str(path))
    text = data_files.read_text(path)
    if "\0" in text:
        raise DataError(f"{path} is no UTF-8 text (it holds null bytes); give a text file.")
    return text


def _number_documents(
    path: Path, raw: Iterable[tuple[str, tuple[str, ...], Iterable[str], Iterable[str]]]
) -> QuestionSet:
    """Number the documents of (question, answers, needed documents, all documents); questions without an answer are
    left out, but not their documents."""
    raw = list(raw)
    documents = tuple(sorted({document for *_, own in raw for document in own}))
    number = {document: i for i, document in enumerate(documents)}
    asked = []
    for text, answers, needed, own in raw:
        if answers:
            required = dict.fromkeys(number[document] for document in needed)
            near = [i for i in dict.fromkeys(number[document] for document in own) if i not in required]
            asked.append(Question(text, answers, tuple(required), tuple(near)))
    if not asked:
        raise DataError(f"{path} has no question with an answer; give the official file of the data set.")
    return QuestionSet(tuple(asked), documents)
