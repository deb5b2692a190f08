"""Readers of the public data sets behind the training recipes: files or rows of the hub in, plain items out.

A row's columns decide how it is read: the set's own files and the hub's Parquet have different ones. `READERS` has one
reader a set, from (place, row) pairs to items; sets whose files are no rows have one in `FILES`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lkv.errors import DataError
from lkv.utils.data_files import Row, read_json, read_records, read_text, require_field, require_pair, split_lines

_PIECE_CHARS = 12_000
LocatedRows = Iterable[tuple[str, Row]]


class Passage(NamedTuple):
    """A piece of text with the questions it answers."""

    title: str
    text: str
    questions: tuple[tuple[str, str], ...] = ()


class MultiHopQuestion(NamedTuple):
    """A question over several passages, of which `needed` must be read to answer it."""

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


def item_texts(item: Item) -> list[str]:
    """What an item says, piece by piece: what is told apart for the held-out split, and compared to evaluated texts."""
    if isinstance(item, MultiHopQuestion):
        return [item.question, *(passage.text for passage in item.passages)]
    if isinstance(item, Meeting):
        return ["\n".join(item.turns), *(query for query, *_ in item.queries)]
    if isinstance(item, ShortQuestion):
        return [item.question]
    return [item.text, *(question for question, _ in item.questions)]


def item_key(item: Item) -> str:
    """What makes an item itself, whatever type holds it: its question, or its text."""
    return item_texts(item)[0]


def read_dataset(name: str, paths: Iterable[Path], folder: Path) -> list[Item]:
    """All items of the set `name` from its files, in their order. Raises DataError with the file, and the place and the
    field where they are known."""
    items: list[Item] = []
    for path in paths:
        try:
            items += _read(name, path, folder)
        except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path} is not as the data set {name!r} has it ({type(error).__name__}: {error}); get it again, or "
                "take it out."
            ) from error
    return items


def _read(name: str, path: Path, folder: Path) -> Iterable[Item]:
    bare = path.name.removesuffix(".gz")
    if name in FILES:
        return FILES[name](path, folder)
    if name in ("squad", "covidqa"):
        return squad(_squad_rows(path))
    if bare.endswith(".src.cleaned"):
        return multi_news(_paired(path))
    return trec(_labelled(path)) if bare.endswith(".label") else READERS[name](read_records(path))


def squad(placed: LocatedRows) -> Iterator[Passage]:
    """Paragraphs, each with all its questions; answers are a list, or the hub's columns."""
    grouped: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for position, row in placed:
        given = require_field(row, "answers", (list, dict), position)
        answers = require_field(given, "text", list, position) if isinstance(given, dict) else given
        key = (row.get("title") or "", require_field(row, "context", str, position))
        grouped.setdefault(key, [])
        if answers:
            grouped[key].append((require_field(row, "question", str, position), answers[0]))
    for (title, paragraph), asked in grouped.items():
        yield Passage(title.replace("_", " "), paragraph, tuple(asked))


def _squad_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of SQuAD's nested JSON, or of the flat forms."""
    if not path.name.removesuffix(".gz").endswith(".json"):
        yield from read_records(path)
        return
    for a, article in enumerate(require_field(read_json(path), "data", list, str(path)), 1):
        for p, paragraph in enumerate(require_field(article, "paragraphs", list, f"{path}, article {a}"), 1):
            position = f"{path}, article {a}, paragraph {p}"
            shared = {"title": article.get("title"), "context": require_field(paragraph, "context", str, position)}
            for q in require_field(paragraph, "qas", list, position):
                answers = [
                    require_field(answer, "text", str, position)
                    for answer in require_field(q, "answers", list, position)
                ]
                yield position, {**shared, "question": require_field(q, "question", str, position), "answers": answers}


def read_squad(path: Path) -> Iterator[Passage]:
    """Paragraphs with extractive questions in SQuAD's nested JSON."""
    yield from squad(_squad_rows(path))


def hotpot(placed: LocatedRows) -> Iterator[MultiHopQuestion]:
    """Questions over titled paragraphs: HotpotQA's pairs (2WikiMultihopQA's too), or the hub's columns."""
    for position, row in placed:
        facts = require_field(row, "supporting_facts", (list, dict), position)
        context = require_field(row, "context", (list, dict), position)
        if isinstance(facts, dict) and isinstance(context, dict):
            titles = set(require_field(facts, "title", list, position))
            columns = (
                require_field(context, "title", list, position),
                require_field(context, "sentences", list, position),
            )
            paragraphs = list(zip(*columns, strict=True))
        else:
            titles = {require_pair(fact, "supporting_facts", position)[0] for fact in facts}
            paragraphs = [require_pair(entry, "context", position) for entry in context]
        passages = tuple(Passage(title, "".join(lines)) for title, lines in paragraphs)
        needed = frozenset(i for i, passage in enumerate(passages) if passage.title in titles)
        yield MultiHopQuestion(
            require_field(row, "question", str, position), require_field(row, "answer", str, position), passages, needed
        )


def read_hotpot(path: Path) -> Iterator[MultiHopQuestion]:
    """Questions over titled paragraphs in HotpotQA's fields."""
    yield from hotpot(read_records(path))


def musique(placed: LocatedRows) -> Iterator[MultiHopQuestion]:
    """MuSiQue's questions over twenty paragraphs."""
    for position, row in placed:
        paragraphs = require_field(row, "paragraphs", list, position)
        passages = tuple(Passage(p["title"], p["paragraph_text"]) for p in paragraphs)
        needed = frozenset(i for i, p in enumerate(paragraphs) if p["is_supporting"])
        yield MultiHopQuestion(
            require_field(row, "question", str, position), require_field(row, "answer", str, position), passages, needed
        )


def fairytale(placed: LocatedRows) -> Iterator[Passage]:
    """FairytaleQA's whole tales with questions."""
    for position, row in placed:
        asked = [q for q in require_field(row, "qas", list, position) if q["answers"]]
        qa = tuple((q["question"], q["answers"][0]) for q in asked)
        yield Passage(require_field(row, "name", str, position), require_field(row, "story", str, position), qa)


def read_tales(path: Path) -> Iterator[Passage]:
    """FairytaleQA: whole tales with questions."""
    yield from fairytale(read_records(path))


def squality(placed: LocatedRows) -> Iterator[Passage]:
    """SQuALITY's long stories with questions."""
    for position, row in placed:
        story = re.sub(r"\n\s*\n?", "\n", require_field(row, "document", str, position)).strip()
        asked = [q for q in require_field(row, "questions", list, position) if q["responses"]]
        yield Passage("", story, tuple((q["question_text"], q["responses"][0]["response_text"]) for q in asked))


def narrativeqa(placed: LocatedRows) -> Iterator[Passage]:
    """NarrativeQA's whole stories with their questions, from the hub's rows of one question each; FairytaleQA's form
    stands in for it where there is no story of NarrativeQA's."""
    stories: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for position, row in placed:
        if "qas" in row:
            yield from fairytale([(position, row)])
            continue
        whole = require_field(row, "document", dict, position)
        if not (answers := require_field(row, "answers", list, position)):
            continue
        key = require_field(whole, "id", str, position)
        if key not in stories:
            stories[key] = (require_field(whole, "text", str, position), [])
        question = require_field(require_field(row, "question", dict, position), "text", str, position)
        stories[key][1].append((question, require_field(answers[0], "text", str, position)))
    for story, asked in stories.values():
        yield Passage("", story, tuple(asked))


def multi_news(placed: LocatedRows) -> Iterator[Passage]:
    """Multi-News: the articles of one event, and their summary."""
    for position, row in placed:
        articles = require_field(row, "document", str, position).replace("NEWLINE_CHAR", "\n")
        parts = [part.strip() for part in re.split(r"\|\|\|\|\|", articles) if part.strip()]
        summary = require_field(row, "summary", str, position).removeprefix("\u2013").strip()
        if parts and summary:
            yield Passage("", "\n\n".join(parts), (("Write a one-page summary of all the news.", summary),))


def _paired(path: Path) -> Iterator[tuple[str, Row]]:
    """Multi-News' own pair of files, line by line."""
    target = path.with_name(path.name.replace(".src.cleaned", ".tgt"))
    articles, summaries = split_lines(read_text(path)), split_lines(read_text(target))
    if len(articles) != len(summaries):
        raise DataError(f"{path} has {len(articles)} lines and {target.name} {len(summaries)}; fetch both again.")
    for i, (article, summary) in enumerate(zip(articles, summaries, strict=True), 1):
        yield f"{path}, line {i}", {"document": article, "summary": summary}


def meetings_of(placed: LocatedRows) -> Iterator[Meeting]:
    """QMSum's meeting transcripts with their specific queries."""
    for position, row in placed:
        turns = tuple(
            f"{t['speaker']}: {t['content']}" for t in require_field(row, "meeting_transcripts", list, position)
        )
        queries = []
        for q in require_field(row, "specific_query_list", list, position):
            spans = [(int(a), int(b)) for a, b in q["relevant_text_span"]]
            if spans:
                queries.append((q["query"], q["answer"], min(a for a, _ in spans), max(b for _, b in spans)))
        yield Meeting(turns, tuple(queries))


def read_meetings(folder: Path, name: str = "qmsum_train.jsonl.gz") -> list[Meeting]:
    """The meetings of one file."""
    return list(meetings_of(read_records(folder / name)))


def mts_dialog(placed: LocatedRows) -> Iterator[Passage]:
    """MTS-Dialog: doctor-patient dialogues, each with the note that summarises it."""
    for position, row in placed:
        note = (require_field(row, "section_header", str, position), require_field(row, "section_text", str, position))
        yield Passage("", require_field(row, "dialogue", str, position), (note,))


def mmlu(placed: LocatedRows) -> Iterator[ShortQuestion]:
    """MMLU's questions with their choices; rows that name a split other than the training ones are left out."""
    for position, row in placed:
        if row.get("split", "dev") not in MMLU_SPLITS:
            continue
        choices = require_field(row, "choices", list, position)
        answer = require_field(row, "answer", (int, str), position)
        number = "ABCD".index(answer) if isinstance(answer, str) else answer
        listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True))
        question = f"{require_field(row, 'question', str, position)}\n{listed}"
        yield ShortQuestion(question, f"{'ABCD'[number]}. {choices[number]}", row.get("subject") or "")


MMLU_SPLITS = ("auxiliary_train", "dev")


def trec(placed: LocatedRows) -> Iterator[ShortQuestion]:
    """TREC's questions with their fine classes, by name or by the hub's numbers."""
    for position, row in placed:
        label = require_field(row, "fine_label", (int, str), position)
        answer = TREC_CLASSES[label] if isinstance(label, int) else label
        yield ShortQuestion(require_field(row, "text", str, position), answer, "TREC")


# In the order of the hub's numbers.
TREC_CLASSES = """
ABBR:abb ABBR:exp ENTY:animal ENTY:body ENTY:color ENTY:cremat ENTY:currency ENTY:dismed ENTY:event ENTY:food
ENTY:instru ENTY:lang ENTY:letter ENTY:other ENTY:plant ENTY:product ENTY:religion ENTY:sport ENTY:substance
ENTY:symbol ENTY:techmeth ENTY:termeq ENTY:veh ENTY:word DESC:def DESC:desc DESC:manner DESC:reason HUM:gr HUM:ind
HUM:title HUM:desc LOC:city LOC:country LOC:mount LOC:other LOC:state NUM:code NUM:count NUM:date NUM:dist NUM:money
NUM:ord NUM:other NUM:period NUM:perc NUM:speed NUM:temp NUM:volsize NUM:weight
""".split()


def _labelled(path: Path) -> Iterator[tuple[str, Row]]:
    """TREC's own file: a class and a question a line, in Latin-1; lines without a known class are left out."""
    for i, line in enumerate(split_lines(read_text(path, "latin-1")), 1):
        label, _, question = line.partition(" ")
        if label in TREC_CLASSES and question.strip():
            yield f"{path}, line {i}", {"text": question.strip(), "fine_label": label}


def code(placed: LocatedRows) -> Iterator[Passage]:
    """Source files: The Stack's columns, or {path, code}."""
    for position, row in placed:
        path = row.get("max_stars_repo_path") or row.get("path") or ""
        yield Passage(path, require_field(row, "content" if "content" in row else "code", str, position))


def of_user(placed: LocatedRows) -> Iterator[Passage]:
    """The user's JSON lines: {context, question, answer}, or {text}."""
    for position, row in placed:
        if "text" in row:
            yield Passage("", require_field(row, "text", str, position))
        else:
            asked = (require_field(row, "question", str, position), require_field(row, "answer", str, position))
            yield Passage("", require_field(row, "context", str, position), (asked,))


def wikitext(path: Path, folder: Path) -> Iterator[Passage]:
    """WikiText-2's articles."""
    whole = read_text(path).replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".").replace("<unk>", "it")
    parts = re.split(r"\n = ([^=\n]+) = \n", whole)
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        yield Passage(title.strip(), body.strip())


def read_standard_library() -> list[Passage]:
    """The running interpreter's standard library (PSF licence), tests and generated tables left out."""
    root = Path(json.__file__).parent.parent
    paths = [*root.glob("*.py"), *root.glob("[a-z]*/*.py")]
    skip = {"test", "tests", "idlelib", "lib2to3", "site-packages", "encodings", "pydoc_data", "ensurepip"}
    return [
        Passage(str(path.relative_to(root)), path.read_text(encoding="utf-8", errors="replace"))
        for path in sorted(paths)
        if not skip & set(path.relative_to(root).parts) and path.stat().st_size > 3000
    ]


def pieces(path: Path, folder: Path) -> Iterator[Passage]:
    """A plain file in pieces, so that one long book can serve both for training and for validation."""
    whole = read_text(path)
    for start in range(0, len(whole), _PIECE_CHARS):
        yield Passage(str(path.relative_to(folder)), whole[start : start + _PIECE_CHARS])


READERS: dict[str, Callable[[LocatedRows], Iterable[Any]]] = {
    "hotpotqa": hotpot, "2wiki": hotpot, "musique": musique, "squad": squad, "covidqa": squad,
    "fairytaleqa": fairytale, "squality": squality, "narrativeqa": narrativeqa, "multi_news": multi_news,
    "qmsum": meetings_of, "mts_dialog": mts_dialog, "mmlu": mmlu, "trec": trec, "the_stack": code, "own": of_user,
}  # fmt: skip
FILES: dict[str, Callable[[Path, Path], Iterable[Any]]] = {"wikitext2": wikitext, "text": pieces, "code": pieces}
