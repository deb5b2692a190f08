"""RULER's source texts: local files, or the data sets' own files on the hub."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import hf_hub_download

from lkv.errors import DataError
from lkv.utils import data_files, qa_readers
from lkv.utils.data_files import read_json, read_records, require_field


class Question(NamedTuple):
    """A question, every accepted answer, and its documents by number: those needed, and the others of its own."""

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    related: tuple[int, ...]


class QuestionSet(NamedTuple):
    """Questions over one collection of distinct documents."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


class _DatasetFile(NamedTuple):
    title: str
    patterns: tuple[str, ...]  # of local files
    repository: str
    name: str  # in the repository
    revision: str


_DATASET_FILES = {
    "squad": _DatasetFile(
        "SQuAD's validation file (dev-v2.0.json)",
        ("dev-v2.0.json", "*quad*.json", "*quad*.json.gz", "*quad*.parquet"),
        "rajpurkar/squad_v2",
        "squad_v2/validation-00000-of-00001.parquet",
        "3ffb306f725f7d2ce8394bc1873b24868140c412",
    ),
    "hotpot": _DatasetFile(
        "HotpotQA's validation file (hotpot_dev_distractor_v1.json)",
        ("*hotpot_*.json", "*hotpot_*.json.gz", "*hotpot_*.jsonl.gz", "*hotpot_*.parquet"),  # not LongBench's hotpotqa
        "hotpotqa/hotpot_qa",
        "distractor/validation-00000-of-00001.parquet",
        "1908d6afbbead072334abe2965f91bd2709910ab",
    ),
}


@dataclass(frozen=True)
class Sources:
    """The haystack's text and the question sets, each read when a task first needs it.

    Args:
        essays: A text file, a JSON file with the field "text", or a folder of .txt files.
        squad: A file in SQuAD's format; None downloads it from the hub.
        hotpot: A file in HotpotQA's format; None downloads it from the hub.

    Raises:
        DataError: Where a text is read, with the file, the position and the field.
    """

    essays: Path | None = None
    squad: Path | None = None
    hotpot: Path | None = None

    @classmethod
    def from_folder(cls, folder: Path, essays: Path | None = None) -> "Sources":
        """Find the files of a folder.

        These are PaulGrahamEssays*.json(.gz) or a folder essays (unless `essays` is given), *quad* and *hotpot_*; files
        with "train" in their name are ignored. Question sets that the folder lacks come from the hub. Raises DataError
        if the folder does not exist.
        """
        if not folder.is_dir():
            raise DataError(f"there is no folder {folder}; give one with RULER's source files.")
        essays = essays or _first_match(folder, ("PaulGrahamEssays*.json", "PaulGrahamEssays*.json.gz", "essays"))
        squad, hotpot = (_first_match(folder, _DATASET_FILES[name].patterns) for name in ("squad", "hotpot"))
        return cls(essays, squad, hotpot)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words of the haystack."""
        if self.essays is None:
            raise DataError(
                "this task hides its needles in essays, which have no official place on the hub: put "
                "PaulGrahamEssays.json or a folder essays with .txt files into the folder with RULER's sources, or "
                "name a text file or such a folder with --haystack."
            )
        files = sorted(self.essays.glob("*.txt")) if self.essays.is_dir() else [self.essays]
        words = tuple(word for path in files for word in _read_essay(path).split())
        if not words:
            raise DataError(f"{self.essays} has no text to hide needles in.")
        return words

    def questions(self, name: str) -> QuestionSet:
        """Return the question set "squad" or "hotpot"."""
        if name not in self._question_sets:
            read, path = (_read_squad, self.squad) if name == "squad" else (_read_hotpot, self.hotpot)
            self._question_sets[name] = read(path or _download(_DATASET_FILES[name]))
        return self._question_sets[name]

    @cached_property
    def _question_sets(self) -> dict[str, QuestionSet]:
        return {}


def _download(file: _DatasetFile) -> Path:
    try:
        return Path(hf_hub_download(file.repository, file.name, repo_type="dataset", revision=file.revision))
    # Whatever stopped the download (no network, no such file, no access), the remedy is the same.
    except Exception as error:
        raise DataError(
            f"{file.name} of the hub's data set {file.repository} cannot be downloaded "
            f"({type(error).__name__}: {error}); put {file.title} into the folder "
            f"with RULER's sources, as one of {', '.join(file.patterns)}."
        ) from error


def _first_match(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if "train" not in path.name]
    return paths[0] if paths else None


def _read_squad(path: Path) -> QuestionSet:
    """SQuAD's questions that have an answer; the paragraphs of a question's article are its own documents."""
    questions = list(qa_readers.read_squad(path))
    articles: dict[str | int, dict[str, None]] = {}
    for question in questions:
        articles.setdefault(question.article, {})[question.context] = None
    return _number_documents(path, [(q.question, q.answers, [q.context], articles[q.article]) for q in questions])


def _read_hotpot(path: Path) -> QuestionSet:
    """HotpotQA's questions; a document is a title and its paragraph.

    A question that lacks a paragraph of its supporting facts (as in the fullwiki setting) is left out.
    """
    raw: list[_RawQuestion] = []
    for question in qa_readers.hotpot_questions(read_records(path)):
        texts = {title: f"{title}\n{text}" for title, text in question.paragraphs}
        titles = question.supporting_titles
        answers = (question.answer,) if titles and titles <= texts.keys() else ()
        raw.append((question.question, answers, [texts[t] for t in texts if t in titles], texts.values()))
    return _number_documents(path, raw)


# (text, answers, needed documents, all its own documents)
_RawQuestion = tuple[str, tuple[str, ...], Iterable[str], Iterable[str]]


def _number_documents(path: Path, raw: list[_RawQuestion]) -> QuestionSet:
    """Return number the distinct documents; questions without an answer are left out, but not their documents."""
    documents = tuple(sorted({document for *_, pool in raw for document in pool}))
    numbers = {document: i for i, document in enumerate(documents)}
    questions = []
    for text, answers, needed, pool in raw:
        if answers:
            required = dict.fromkeys(numbers[document] for document in needed)
            related = [i for i in dict.fromkeys(numbers[document] for document in pool) if i not in required]
            questions.append(Question(text, answers, tuple(required), tuple(related)))
    if not questions:
        raise DataError(f"{path} has no question with an answer; give the official file of the data set.")
    return QuestionSet(tuple(questions), documents)


def _read_essay(path: Path) -> str:
    """Return a text file, or the field "text" of a JSON file, gzipped or not."""
    if ".json" in path.name:
        return require_field(read_json(path), "text", str, str(path))
    text = data_files.read_text(path)
    if "\0" in text:
        raise DataError(f"{path} is no UTF-8 text (it holds null bytes); give a text file.")
    return text
