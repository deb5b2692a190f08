"""Readers of the public data sets behind the training mixture. Each yields plain passages with their questions.

A passage is (title, text, [(question, answer), ...]); a questionless source has an empty list. Files that are absent
yield nothing, so any folder with some of them, or with plain text and code, can be trained on.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lkv.errors import DataError

CODE_ENDINGS = {".py", ".java", ".cpp", ".cc", ".c", ".h", ".cs", ".js", ".ts", ".go", ".rs"}
_PIECE_CHARS = 12_000
TEXT_ENDINGS = {".txt", ".md", ".rst"}


class Passage(NamedTuple):
    """A piece of text with the questions it answers."""

    title: str
    text: str
    questions: tuple[tuple[str, str], ...] = ()


class Puzzle(NamedTuple):
    """A question over several passages, of which `needed` must be read to answer it."""

    question: str
    answer: str
    passages: tuple[Passage, ...]
    needed: frozenset[int]


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a gzipped JSON-lines file; DataError names the file and line of one that cannot be read."""
    if not path.is_file():
        return
    number = 1
    with gzip.open(path, "rt", encoding="utf-8") as file:
        try:
            for line in file:
                yield json.loads(line)
                number += 1
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is not a readable gzip file ({error}); get it again.") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not a JSON object ({error}).") from error


def squad(folder: Path) -> list[Passage]:
    """SQuAD v1.1 train: paragraphs, each with all its questions."""
    grouped: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row in rows(folder / "squad_train_subset.jsonl.gz"):
        grouped.setdefault((row["title"] or "", row["context"]), []).append((row["question"], row["answers"][0]))
    return [Passage(title.replace("_", " "), text, tuple(qa)) for (title, text), qa in grouped.items()]


def hotpot_like(path: Path) -> Iterator[Puzzle]:
    """Questions over titled paragraphs in HotpotQA's fields."""
    for row in rows(path):
        titles = {title for title, _ in row["supporting_facts"]}
        passages = tuple(Passage(title, "".join(lines)) for title, lines in row["context"])
        needed = frozenset(i for i, passage in enumerate(passages) if passage.title in titles)
        yield Puzzle(row["question"], row["answer"], passages, needed)


def multihop(folder: Path) -> list[Puzzle]:
    """HotpotQA, 2WikiMultihopQA and MuSiQue train questions with their paragraphs."""
    puzzles = list(hotpot_like(folder / "hotpotqa_train_200.jsonl.gz"))
    puzzles += hotpot_like(folder / "2wiki_train_500.jsonl.gz")
    for row in rows(folder / "musique_train_100.jsonl.gz"):
        passages = tuple(Passage(p["title"], p["paragraph_text"]) for p in row["paragraphs"])
        needed = frozenset(i for i, p in enumerate(row["paragraphs"]) if p["is_supporting"])
        puzzles.append(Puzzle(row["question"], row["answer"], passages, needed))
    return puzzles


def stories(folder: Path) -> list[Passage]:
    """FairytaleQA (whole tales with questions) and SQuALITY (long stories with questions)."""
    passages = list(tales(folder / "fairytaleqa_train.jsonl.gz"))
    for row in rows(folder / "squality_train.jsonl.gz"):
        text = re.sub(r"\n\s*\n?", "\n", row["document"]).strip()
        asked = [q for q in row["questions"] if q["responses"]]
        qa = tuple((q["question_text"], q["responses"][0]["response_text"]) for q in asked)
        passages.append(Passage("", text, qa))
    return passages


def tales(path: Path) -> Iterator[Passage]:
    """FairytaleQA: whole tales with questions."""
    for row in rows(path):
        yield Passage(
            row["name"], row["story"], tuple((q["question"], q["answers"][0]) for q in row["qas"] if q["answers"])
        )


def squad_format(path: Path) -> Iterator[Passage]:
    """Paragraphs with extractive questions in SQuAD's nested JSON (gzip)."""
    if path.is_file():
        for article in json.loads(gzip.decompress(path.read_bytes()))["data"]:
            for p in article["paragraphs"]:
                yield Passage(
                    "", p["context"], tuple((q["question"], q["answers"][0]["text"]) for q in p["qas"] if q["answers"])
                )


def papers(folder: Path) -> list[Passage]:
    """COVID-QA: scientific papers with extractive questions."""
    return list(squad_format(folder / "covidqa_200423.json.gz"))


class Meeting(NamedTuple):
    """A transcript, turn by turn, with queries: (query, answer, first turn, last turn)."""

    turns: tuple[str, ...]
    queries: tuple[tuple[str, str, int, int], ...]


def meetings(folder: Path, name: str = "qmsum_train.jsonl.gz") -> list[Meeting]:
    """QMSum meeting transcripts with their specific queries."""
    transcripts = []
    for row in rows(folder / name):
        turns = tuple(f"{t['speaker']}: {t['content']}" for t in row["meeting_transcripts"])
        queries = []
        for q in row["specific_query_list"]:
            spans = [(int(a), int(b)) for a, b in q["relevant_text_span"]]
            if spans:
                queries.append((q["query"], q["answer"], min(a for a, _ in spans), max(b for _, b in spans)))
        transcripts.append(Meeting(turns, tuple(queries)))
    return transcripts


def dialogues(folder: Path) -> list[Passage]:
    """MTS-Dialog: doctor-patient dialogues, each with the note that summarises it."""
    path = folder / "mts_dialog_train.csv.gz"
    if not path.is_file():
        return []
    rows = csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode("utf-8")))
    return [Passage("", row["dialogue"], ((row["section_header"], row["section_text"]),)) for row in rows]


def exam(folder: Path) -> list[tuple[str, str]]:
    """MMLU questions as (question with its choices, answer)."""
    questions = []
    for row in rows(folder / "mmlu_dev_test.jsonl.gz"):
        choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
        answer = row["choices"]["ABCD".index(row["answer"])]
        questions.append((f"{row['question']}\n{choices}", f"{row['answer']}. {answer}"))
    return questions


def wikipedia(folder: Path) -> list[Passage]:
    """WikiText-2 articles."""
    path = folder / "wikitext2_valid.txt.gz"
    if not path.is_file():
        return []
    text = gzip.decompress(path.read_bytes()).decode("utf-8").replace(" @-@ ", "-").replace(" @,@ ", ",")
    text = text.replace(" @.@ ", ".").replace("<unk>", "it")
    parts = re.split(r"\n = ([^=\n]+) = \n", text)
    return [Passage(title.strip(), body.strip()) for title, body in zip(parts[1::2], parts[2::2], strict=True)]


def code(folder: Path) -> list[Passage]:
    """Source files: Java, C++ and C# of the training folder, and the folder's own source files."""
    passages = [Passage(row["path"], row["code"]) for row in rows(folder / "code_java_cpp_csharp.jsonl.gz")]
    return passages + list(_files(folder, CODE_ENDINGS))


def standard_library() -> list[Passage]:
    """The running interpreter's standard library (PSF licence), tests and generated tables left out."""
    root = Path(json.__file__).parent.parent
    paths = [*root.glob("*.py"), *root.glob("[a-z]*/*.py")]
    skip = {"test", "tests", "idlelib", "lib2to3", "site-packages", "encodings", "pydoc_data", "ensurepip"}
    return [
        Passage(str(path.relative_to(root)), path.read_text(encoding="utf-8", errors="replace"))
        for path in sorted(paths)
        if not skip & set(path.relative_to(root).parts) and path.stat().st_size > 3000
    ]


def plain_text(folder: Path) -> list[Passage]:
    """The folder's own text files."""
    return list(_files(folder, TEXT_ENDINGS))


def _files(folder: Path, endings: set[str]) -> Iterator[Passage]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in endings and path.is_file() and not path.name.startswith("README"):
            text = path.read_text(encoding="utf-8", errors="replace")
            # Pieces, so that one long book can serve both for training and for validation.
            for start in range(0, len(text), _PIECE_CHARS):
                yield Passage(str(path.relative_to(folder)), text[start : start + _PIECE_CHARS])
