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
from lkv.training.data.records import Row, document, field, lines, pair, records, text

_PIECE_CHARS = 12_000
Placed = Iterable[tuple[str, Row]]


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


class Meeting(NamedTuple):
    """A transcript, turn by turn, with queries: (query, answer, first turn, last turn)."""

    turns: tuple[str, ...]
    queries: tuple[tuple[str, str, int, int], ...]


class Asked(NamedTuple):
    """A short question with its answer, of a kind: MMLU's subject, or TREC."""

    question: str
    answer: str
    kind: str = ""


Item = Passage | Puzzle | Meeting | Asked


def texts_of(item: Item) -> list[str]:
    """What an item says, piece by piece: what is told apart for the held-out split, and compared to evaluated texts."""
    if isinstance(item, Puzzle):
        return [item.question, *(passage.text for passage in item.passages)]
    if isinstance(item, Meeting):
        return ["\n".join(item.turns), *(query for query, *_ in item.queries)]
    if isinstance(item, Asked):
        return [item.question]
    return [item.text, *(question for question, _ in item.questions)]


def identity(item: Item) -> str:
    """What makes an item itself, whatever type holds it: its question, or its text."""
    return texts_of(item)[0]


def read_set(name: str, paths: Iterable[Path], folder: Path) -> list[Item]:
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
    return trec(_labelled(path)) if bare.endswith(".label") else READERS[name](records(path))


def squad(placed: Placed) -> Iterator[Passage]:
    """Paragraphs, each with all its questions; answers are a list, or the hub's columns."""
    grouped: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for position, row in placed:
        given = field(row, "answers", (list, dict), position)
        answers = field(given, "text", list, position) if isinstance(given, dict) else given
        key = (row.get("title") or "", field(row, "context", str, position))
        grouped.setdefault(key, [])
        if answers:
            grouped[key].append((field(row, "question", str, position), answers[0]))
    for (title, paragraph), asked in grouped.items():
        yield Passage(title.replace("_", " "), paragraph, tuple(asked))


def _squad_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Rows of SQuAD's nested JSON, or of the flat forms."""
    if not path.name.removesuffix(".gz").endswith(".json"):
        yield from records(path)
        return
    for a, article in enumerate(field(document(path), "data", list, str(path)), 1):
        for p, paragraph in enumerate(field(article, "paragraphs", list, f"{path}, article {a}"), 1):
            position = f"{path}, article {a}, paragraph {p}"
            shared = {"title": article.get("title"), "context": field(paragraph, "context", str, position)}
            for q in field(paragraph, "qas", list, position):
                answers = [field(answer, "text", str, position) for answer in field(q, "answers", list, position)]
                yield position, {**shared, "question": field(q, "question", str, position), "answers": answers}


def squad_format(path: Path) -> Iterator[Passage]:
    """Paragraphs with extractive questions in SQuAD's nested JSON."""
    yield from squad(_squad_rows(path))


def hotpot(placed: Placed) -> Iterator[Puzzle]:
    """Questions over titled paragraphs: HotpotQA's pairs (2WikiMultihopQA's too), or the hub's columns."""
    for position, row in placed:
        facts = field(row, "supporting_facts", (list, dict), position)
        context = field(row, "context", (list, dict), position)
        if isinstance(facts, dict) and isinstance(context, dict):
            titles = set(field(facts, "title", list, position))
            columns = field(context, "title", list, position), field(context, "sentences", list, position)
            paragraphs = list(zip(*columns, strict=True))
        else:
            titles = {pair(fact, "supporting_facts", position)[0] for fact in facts}
            paragraphs = [pair(entry, "context", position) for entry in context]
        passages = tuple(Passage(title, "".join(lines)) for title, lines in paragraphs)
        needed = frozenset(i for i, passage in enumerate(passages) if passage.title in titles)
        yield Puzzle(field(row, "question", str, position), field(row, "answer", str, position), passages, needed)


def hotpot_like(path: Path) -> Iterator[Puzzle]:
    """Questions over titled paragraphs in HotpotQA's fields."""
    yield from hotpot(records(path))


def musique(placed: Placed) -> Iterator[Puzzle]:
    """MuSiQue's questions over twenty paragraphs."""
    for position, row in placed:
        paragraphs = field(row, "paragraphs", list, position)
        passages = tuple(Passage(p["title"], p["paragraph_text"]) for p in paragraphs)
        needed = frozenset(i for i, p in enumerate(paragraphs) if p["is_supporting"])
        yield Puzzle(field(row, "question", str, position), field(row, "answer", str, position), passages, needed)


def fairytale(placed: Placed) -> Iterator[Passage]:
    """FairytaleQA's whole tales with questions."""
    for position, row in placed:
        asked = [q for q in field(row, "qas", list, position) if q["answers"]]
        qa = tuple((q["question"], q["answers"][0]) for q in asked)
        yield Passage(field(row, "name", str, position), field(row, "story", str, position), qa)


def tales(path: Path) -> Iterator[Passage]:
    """FairytaleQA: whole tales with questions."""
    yield from fairytale(records(path))


def squality(placed: Placed) -> Iterator[Passage]:
    """SQuALITY's long stories with questions."""
    for position, row in placed:
        story = re.sub(r"\n\s*\n?", "\n", field(row, "document", str, position)).strip()
        asked = [q for q in field(row, "questions", list, position) if q["responses"]]
        yield Passage("", story, tuple((q["question_text"], q["responses"][0]["response_text"]) for q in asked))


def narrativeqa(placed: Placed) -> Iterator[Passage]:
    """NarrativeQA's whole stories with their questions, from the hub's rows of one question each; FairytaleQA's form
    stands in for it where there is no story of NarrativeQA's."""
    stories: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for position, row in placed:
        if "qas" in row:
            yield from fairytale([(position, row)])
            continue
        whole = field(row, "document", dict, position)
        if not (answers := field(row, "answers", list, position)):
            continue
        key = field(whole, "id", str, position)
        if key not in stories:
            stories[key] = (field(whole, "text", str, position), [])
        question = field(field(row, "question", dict, position), "text", str, position)
        stories[key][1].append((question, field(answers[0], "text", str, position)))
    for story, asked in stories.values():
        yield Passage("", story, tuple(asked))


def multi_news(placed: Placed) -> Iterator[Passage]:
    """Multi-News: the articles of one event, and their summary."""
    for position, row in placed:
        articles = field(row, "document", str, position).replace("NEWLINE_CHAR", "\n")
        parts = [part.strip() for part in re.split(r"\|\|\|\|\|", articles) if part.strip()]
        summary = field(row, "summary", str, position).removeprefix("\u2013").strip()
        if parts and summary:
            yield Passage("", "\n\n".join(parts), (("Write a one-page summary of all the news.", summary),))


def _paired(path: Path) -> Iterator[tuple[str, Row]]:
    """Multi-News' own pair of files, line by line."""
    target = path.with_name(path.name.replace(".src.cleaned", ".tgt"))
    articles, summaries = lines(text(path)), lines(text(target))
    if len(articles) != len(summaries):
        raise DataError(f"{path} has {len(articles)} lines and {target.name} {len(summaries)}; fetch both again.")
    for i, (article, summary) in enumerate(zip(articles, summaries, strict=True), 1):
        yield f"{path}, line {i}", {"document": article, "summary": summary}


def meetings_of(placed: Placed) -> Iterator[Meeting]:
    """QMSum's meeting transcripts with their specific queries."""
    for position, row in placed:
        turns = tuple(f"{t['speaker']}: {t['content']}" for t in field(row, "meeting_transcripts", list, position))
        queries = []
        for q in field(row, "specific_query_list", list, position):
            spans = [(int(a), int(b)) for a, b in q["relevant_text_span"]]
            if spans:
                queries.append((q["query"], q["answer"], min(a for a, _ in spans), max(b for _, b in spans)))
        yield Meeting(turns, tuple(queries))


def meetings(folder: Path, name: str = "qmsum_train.jsonl.gz") -> list[Meeting]:
    """The meetings of one file."""
    return list(meetings_of(records(folder / name)))


def mts_dialog(placed: Placed) -> Iterator[Passage]:
    """MTS-Dialog: doctor-patient dialogues, each with the note that summarises it."""
    for position, row in placed:
        note = (field(row, "section_header", str, position), field(row, "section_text", str, position))
        yield Passage("", field(row, "dialogue", str, position), (note,))


def mmlu(placed: Placed) -> Iterator[Asked]:
    """MMLU's questions with their choices; rows that name a split other than the training ones are left out."""
    for position, row in placed:
        if row.get("split", "dev") not in MMLU_SPLITS:
            continue
        choices = field(row, "choices", list, position)
        answer = field(row, "answer", (int, str), position)
        number = "ABCD".index(answer) if isinstance(answer, str) else answer
        listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True))
        question = f"{field(row, 'question', str, position)}\n{listed}"
        yield Asked(question, f"{'ABCD'[number]}. {choices[number]}", row.get("subject") or "")


MMLU_SPLITS = ("auxiliary_train", "dev")


def trec(placed: Placed) -> Iterator[Asked]:
    """TREC's questions with their fine classes, by name or by the hub's numbers."""
    for position, row in placed:
        label = field(row, "fine_label", (int, str), position)
        answer = TREC_CLASSES[label] if isinstance(label, int) else label
        yield Asked(field(row, "text", str, position), answer, "TREC")


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
    for i, line in enumerate(lines(text(path, "latin-1")), 1):
        label, _, question = line.partition(" ")
        if label in TREC_CLASSES and question.strip():
            yield f"{path}, line {i}", {"text": question.strip(), "fine_label": label}


def code(placed: Placed) -> Iterator[Passage]:
    """Source files: The Stack's columns, or {path, code}."""
    for position, row in placed:
        path = row.get("max_stars_repo_path") or row.get("path") or ""
        yield Passage(path, field(row, "content" if "content" in row else "code", str, position))


def of_user(placed: Placed) -> Iterator[Passage]:
    """The user's JSON lines: {context, question, answer}, or {text}."""
    for position, row in placed:
        if "text" in row:
            yield Passage("", field(row, "text", str, position))
        else:
            asked = (field(row, "question", str, position), field(row, "answer", str, position))
            yield Passage("", field(row, "context", str, position), (asked,))


def wikitext(path: Path, folder: Path) -> Iterator[Passage]:
    """WikiText-2's articles."""
    whole = text(path).replace(" @-@ ", "-").replace(" @,@ ", ",").replace(" @.@ ", ".").replace("<unk>", "it")
    parts = re.split(r"\n = ([^=\n]+) = \n", whole)
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        yield Passage(title.strip(), body.strip())


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


def pieces(path: Path, folder: Path) -> Iterator[Passage]:
    """A plain file in pieces, so that one long book can serve both for training and for validation."""
    whole = text(path)
    for start in range(0, len(whole), _PIECE_CHARS):
        yield Passage(str(path.relative_to(folder)), whole[start : start + _PIECE_CHARS])


READERS: dict[str, Callable[[Placed], Iterable[Any]]] = {
    "hotpotqa": hotpot, "2wiki": hotpot, "musique": musique, "squad": squad, "covidqa": squad,
    "fairytaleqa": fairytale, "squality": squality, "narrativeqa": narrativeqa, "multi_news": multi_news,
    "qmsum": meetings_of, "mts_dialog": mts_dialog, "mmlu": mmlu, "trec": trec, "the_stack": code, "own": of_user,
}  # fmt: skip
FILES: dict[str, Callable[[Path, Path], Iterable[Any]]] = {"wikitext2": wikitext, "text": pieces, "code": pieces}
