"""Items of training data (passages, questions, meetings) and the readers that make them from files or rows of the hub.

Rows are read by their columns, since official files and the hub's Parquet files differ. `ROW_READERS` has a reader of
(position, row) pairs for each set; sets with files of another form have a reader in `FILE_READERS`. The readers of sets
that only the paper's training data has are in `experiments/data/loom.py`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lkv.context.document_reader import read_document
from lkv.errors import DataError, DocumentError, MissingPackageError
from lkv.training.data.public_datasets import DOCUMENT_SUFFIXES
from lkv.utils.data_files import Row, read_records, read_text, replace_lone_surrogates, require_field, require_texts
from lkv.utils.extras import install_command
from lkv.utils.files import package_json
from lkv.utils.qa_readers import SquadQuestion, hotpot_questions, read_squad, squad_questions

_PIECE_CHARS = 12_000
_HELD_OUT_SHARE = 20  # one item in this many is held out
_LEAST_HELD_OUT_CHARS = 2000  # the least characters of a text held out alone, if one is that long
LocatedRows = Iterable[tuple[str, Row]]


class Passage(NamedTuple):
    """A piece of text with the questions it answers, as (question, answer)."""

    title: str
    text: str
    questions: tuple[tuple[str, str], ...] = ()


class MultiHopQuestion(NamedTuple):
    """A question over several passages; the passages numbered in `needed` contain the answer."""

    question: str
    answer: str
    passages: tuple[Passage, ...]
    needed: frozenset[int]


class Meeting(NamedTuple):
    """A transcript, turn by turn, with queries: (query, answer, first turn, last turn)."""

    turns: tuple[str, ...]
    queries: tuple[tuple[str, str, int, int], ...]


class ShortQuestion(NamedTuple):
    """A short question with its answer, of a kind: MMLU's subject, or TREC."""

    question: str
    answer: str
    kind: str = ""


Item = Passage | MultiHopQuestion | Meeting | ShortQuestion
ItemT = TypeVar("ItemT", bound=Item)


def item_texts(item: Item) -> list[str]:
    """Return the texts of an item, which decontamination compares."""
    if isinstance(item, MultiHopQuestion):
        return [item.question, *(passage.text for passage in item.passages)]
    if isinstance(item, Meeting):
        return ["\n".join(item.turns), *(query for query, *_ in item.queries)]
    if isinstance(item, ShortQuestion):
        return [item.question]
    return [item.text, *(question for question, _ in item.questions)]


def split_held_out(items: Sequence[ItemT], validation: bool) -> list[ItemT]:
    """Return the held-out items if `validation`, else the training items; the split depends only on an item's text.

    Questions over the same passages are in the same split.
    """
    texts = [_text_read(item) for item in items]
    hashes = {text: int.from_bytes(blake2b(text.encode(), digest_size=4).digest()) for text in texts}
    held_out = {text for text, number in hashes.items() if number % _HELD_OUT_SHARE == 0}
    # A few texts may all be in one split: then the shortest is held out, but never the longest, nor a text of a few
    # words if there are others.
    if len(held_out) in (0, len({*texts})):
        shorter = sorted({*texts}, key=lambda text: (len(text), text))[:-1]
        long_enough = [text for text in shorter if len(text) >= _LEAST_HELD_OUT_CHARS]
        held_out = {*(long_enough or shorter)[:1]}
    return [item for item, text in zip(items, texts, strict=True) if (text in held_out) == validation]


def _text_read(item: Item) -> str:
    """Return the text of an item that contexts use."""
    if isinstance(item, MultiHopQuestion) and item.passages:
        return "\n\n".join(sorted(passage.text for passage in item.passages))
    return item_texts(item)[0]


def read_dataset(
    name: str, paths: Iterable[Path], folder: Path, unreadable: dict[Path, str] | None = None
) -> list[Item]:
    """Read all items of a set from its files, in order.

    Args:
        name: The set.
        paths: Its files.
        folder: The data folder; titles of texts are paths relative to it.
        unreadable: If given, collects files without readable text, with the reason, instead of raising.

    Raises:
        DataError: A file has an unsupported format.
    """
    items: list[Item] = []
    for path in paths:
        earlier = len(items)
        try:
            if name in FILE_READERS:
                items += FILE_READERS[name](path, folder)
            else:
                items += ROW_READERS[name](read_records(path))
        except DocumentError as error:
            if unreadable is None:
                raise DataError(f"{str(error).rstrip('.')}, or remove it from the folder.") from error
            unreadable[path] = "no text that can be read"
        except MissingPackageError as error:
            if unreadable is None:
                raise MissingPackageError(f"{path} cannot be read: {error}") from error
            unreadable[path] = f"needs `{install_command('documents')}`"
        except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path} is not as the data set {name!r} has it ({type(error).__name__}: {error}); download it again, "
                "or remove it from the folder."
            ) from error
        if unreadable is not None and not any(text.strip() for item in items[earlier:] for text in item_texts(item)):
            unreadable.setdefault(path, "empty")
            del items[earlier:]
    return items


def squad_passages(questions: Iterable[SquadQuestion]) -> Iterator[Passage]:
    """SQuAD's paragraphs, each with all its questions."""
    passages: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for question in questions:
        pairs = passages.setdefault((question.title, question.context), [])
        if question.answers:
            pairs.append((question.question, question.answers[0]))
    for (title, paragraph), pairs in passages.items():
        yield Passage(title.replace("_", " "), paragraph, tuple(pairs))


def hotpot(rows: LocatedRows) -> Iterator[MultiHopQuestion]:
    """HotpotQA's questions over titled paragraphs, and 2WikiMultihopQA's."""
    for question in hotpot_questions(rows):
        passages = tuple(Passage(title, text) for title, text in question.paragraphs)
        needed = frozenset(i for i, passage in enumerate(passages) if passage.title in question.supporting_titles)
        yield MultiHopQuestion(question.question, question.answer, passages, needed)


def musique(rows: LocatedRows) -> Iterator[MultiHopQuestion]:
    """MuSiQue's questions over twenty paragraphs."""
    for position, row in rows:
        paragraphs = require_field(row, "paragraphs", list, position)
        passages = tuple(Passage(p["title"], p["paragraph_text"]) for p in paragraphs)
        needed = frozenset(i for i, p in enumerate(paragraphs) if p["is_supporting"])
        question, answer = require_texts(row, position, "question", "answer")
        yield MultiHopQuestion(question, answer, passages, needed)


def fairytale(rows: LocatedRows) -> Iterator[Passage]:
    """FairytaleQA's whole tales with questions."""
    for position, row in rows:
        pairs = [(q["question"], q["answers"][0]) for q in require_field(row, "qas", list, position) if q["answers"]]
        name, story = require_texts(row, position, "name", "story")
        yield Passage(name, story, tuple(pairs))


def squality(rows: LocatedRows) -> Iterator[Passage]:
    """SQuALITY's long stories with questions."""
    for position, row in rows:
        story = re.sub(r"\n\s*\n?", "\n", require_field(row, "document", str, position)).strip()
        answered = [q for q in require_field(row, "questions", list, position) if q["responses"]]
        yield Passage("", story, tuple((q["question_text"], q["responses"][0]["response_text"]) for q in answered))


def qmsum(rows: LocatedRows) -> Iterator[Meeting]:
    """QMSum's meeting transcripts with their specific queries."""
    for position, row in rows:
        transcript = require_field(row, "meeting_transcripts", list, position)
        queries = []
        for query in require_field(row, "specific_query_list", list, position):
            spans = [(int(first), int(last)) for first, last in query["relevant_text_span"]]
            if spans:
                first, last = min(first for first, _ in spans), max(last for _, last in spans)
                queries.append((query["query"], query["answer"], first, last))
        yield Meeting(tuple(f"{turn['speaker']}: {turn['content']}" for turn in transcript), tuple(queries))


def mts_dialog(rows: LocatedRows) -> Iterator[Passage]:
    """MTS-Dialog: doctor-patient dialogues, each with the note that summarises it."""
    for position, row in rows:
        header, note, dialogue = require_texts(row, position, "section_header", "section_text", "dialogue")
        yield Passage("", dialogue, ((header, note),))


def mmlu(rows: LocatedRows) -> Iterator[ShortQuestion]:
    """MMLU's questions with their choices; rows that name a split other than the training ones are left out."""
    for position, row in rows:
        if row.get("split", "dev") not in ("auxiliary_train", "dev"):
            continue
        choices = require_field(row, "choices", list, position)
        answer = require_field(row, "answer", (int, str), position)
        number = "ABCD".index(answer) if isinstance(answer, str) else answer
        choice_lines = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True))
        question = f"{require_field(row, 'question', str, position)}\n{choice_lines}"
        yield ShortQuestion(question, f"{'ABCD'[number]}. {choices[number]}", row.get("subject") or "")


def code_files(rows: LocatedRows) -> Iterator[Passage]:
    """Source files: The Stack's columns, or {path, code}."""
    for position, row in rows:
        path = row.get("max_stars_repo_path") or row.get("path") or ""
        yield Passage(path, require_field(row, "content" if "content" in row else "code", str, position))


def user_rows(rows: LocatedRows) -> Iterator[Passage]:
    """Return the user's JSON lines: {context, question, answer}, or {text}."""
    for position, row in rows:
        if "text" in row:
            yield Passage("", require_field(row, "text", str, position))
        else:
            question, answer, context = require_texts(row, position, "question", "answer", "context")
            yield Passage("", context, ((question, answer),))


def wikitext(path: Path, folder: Path) -> Iterator[Passage]:
    """WikiText-2's articles."""
    text = read_text(path).replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".").replace("<unk>", "it")
    parts = re.split(r"\n = ([^=\n]+) = \n", text)
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        yield Passage(title.strip(), body.strip())


def text_pieces(path: Path, folder: Path) -> Iterator[Passage]:
    """Return a file of text or code, or a document of `DOCUMENT_SUFFIXES`, in pieces."""
    text = read_document(path) if path.suffix.lower() in DOCUMENT_SUFFIXES else read_text(path)
    yield from split_text(str(path.relative_to(folder)), text)


def split_text(title: str, text: str) -> Iterator[Passage]:
    """Split a text into pieces, so that one long book can be used for both training and validation."""
    title, text = (replace_lone_surrogates(part) for part in (title, text))  # a file's name can hold them too
    for start in range(0, len(text), _PIECE_CHARS):
        yield Passage(title, text[start : start + _PIECE_CHARS])


def read_python_manual() -> list[Passage]:
    """Return the chapters of Python's language reference that come with the interpreter (PSF licence)."""
    from pydoc_data.topics import topics

    return [piece for name, text in sorted(topics.items()) if len(text) > 3000 for piece in split_text(name, text)]


def read_standard_library() -> list[Passage]:
    """Return the source files of the running interpreter's standard library (PSF licence), without tests and tables."""
    root = Path(json.__file__).parent.parent
    paths = [*root.glob("*.py"), *root.glob("[a-z]*/*.py")]
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "encodings", "pydoc_data", "ensurepip"}
    return [
        Passage(str(path.relative_to(root)), path.read_text(encoding="utf-8", errors="replace"))
        for path in sorted(paths)
        if not skipped & set(path.relative_to(root).parts) and path.stat().st_size > 3000
    ]


def read_own_stories() -> Iterator[Passage]:
    """Return the stories, letters and essays that were written for LKV, with questions."""
    for row in _own_texts()["stories"]:
        yield Passage(row["title"], row["text"], tuple((question, answer) for question, answer in row["questions"]))


def read_own_meetings() -> Iterator[Meeting]:
    """Return the meetings that were written for LKV, with queries."""
    for row in _own_texts()["meetings"]:
        yield Meeting(tuple(row["turns"]), tuple((*query,) for query in row["queries"]))


def read_own_articles() -> Iterator[MultiHopQuestion]:
    """Questions over two of the articles about invented things that were written for LKV."""
    for row in _own_texts()["articles"]:
        passages = tuple(Passage(title, text) for title, text in row["passages"])
        for question, answer, needed in row["questions"]:
            yield MultiHopQuestion(question, answer, passages, frozenset(needed))


@cache
def _own_texts() -> dict[str, list[dict[str, Any]]]:
    return package_json("lkv.training.data", "texts.json")


ROW_READERS: dict[str, Callable[[LocatedRows], Iterable[Item]]] = {
    "hotpotqa": hotpot,
    "2wiki": hotpot,
    "musique": musique,
    "fairytaleqa": fairytale,
    "squality": squality,
    "squad": lambda rows: squad_passages(squad_questions(rows)),
    "qmsum": qmsum,
    "mts_dialog": mts_dialog,
    "mmlu": mmlu,
    "the_stack": code_files,
    "own": user_rows,
}
FILE_READERS: dict[str, Callable[[Path, Path], Iterable[Item]]] = {
    "squad": lambda path, folder: squad_passages(read_squad(path)),
    "covidqa": lambda path, folder: squad_passages(read_squad(path)),
    "wikitext2": wikitext,
    "text": text_pieces,
    "code": text_pieces,
}
