"""RULER's examples at a length, for any tokenizer, and their source texts: local files, or the hub's."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from huggingface_hub import hf_hub_download

from lkv.errors import DataError, EvaluationError
from lkv.evaluation.example import Example
from lkv.evaluation.ruler import tasks as ruler_tasks
from lkv.evaluation.ruler.tasks import NEEDLE_TASKS, QUESTION_TASKS, TASKS, ExampleTemplate, Question, QuestionSet
from lkv.utils import data_files, qa_readers
from lkv.utils.data_files import read_json, read_records, require_field
from lkv.utils.prompts import chat_template_parts, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A first token, and one for each of the four places where texts that are tokenised separately meet.
_RESERVED_TOKENS = 5


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
        raise DataError(f"{path} is not UTF-8 text (it holds null bytes); give a text file.")
    return text


def make_examples(
    task: str, length: int, count: int, tokenizer: "PreTrainedTokenizerBase", sources: Sources, seed: int = 0
) -> list[Example]:
    """Make the first `count` examples of a task at `length` tokens.

    Context, chat template, question, answer prefix and the tokens to generate take at most `length` tokens together.
    They fall short of it by at most length / 256, or one unit of the task (a line, a word, a document) if that is more;
    five tokens are reserved where the texts meet. An example depends on the task, the length, the tokenizer, the seed
    and its own number, never on `count`. Questions whose needed documents exceed the length are skipped.

    Args:
        task: One of `TASKS`.
        length: The maximum number of tokens of an example.
        count: How many examples.
        tokenizer: The model's.
        sources: Where essays and questions are read.
        seed: Another seed makes other examples.

    Raises:
        EvaluationError: For an unknown task, and a length that is too short or too long for it.
        DataError: For a source that is missing or malformed.
    """
    check_task(task)
    if count < 1:
        raise EvaluationError(f"count is {count}, but at least 1 example of {task} is needed.")
    examples = list(islice(_generate(task, length, tokenizer, sources, seed), count))
    if len(examples) < count:
        raise EvaluationError(
            f"{task} has only {len(examples)} questions that fit {length} tokens, not {count}; ask for fewer."
        )
    return examples


def check_task(task: str) -> None:
    """Raise EvaluationError for a task that is not one of `TASKS`."""
    if task not in TASKS:
        near = get_close_matches(task, TASKS, 3) or TASKS
        raise EvaluationError(f"RULER has no task {task!r}; did you mean {', '.join(near)}?")


def check_sources(tasks: Sequence[str], sources: Sources) -> None:
    """Read what the tasks need, to find missing files before a long run. Raises DataError."""
    for task in tasks:
        if name := QUESTION_TASKS.get(task):
            sources.questions(name)
        elif task in NEEDLE_TASKS and NEEDLE_TASKS[task].haystack == "essay":
            _ = sources.words


def _generate(
    task: str, length: int, tokenizer: "PreTrainedTokenizerBase", sources: Sources, seed: int
) -> Iterator[Example]:
    fixed_tokens = _RESERVED_TOKENS + sum(_count(tokenizer, part) for part in chat_template_parts(tokenizer))
    number, too_long = 0, []
    for template in _templates(task, length, tokenizer, sources, f"{task}-{length}-{seed}"):
        prompt, ask, prefix = template.prompt, template.question, template.answer_prefix
        other_tokens = fixed_tokens + prompt.max_new_tokens + _count(tokenizer, ask + prefix)
        count_tokens = partial(_count_context, tokenizer, template)
        fit = largest_fit(count_tokens, length - other_tokens, template.min_units, template.max_units)
        total = other_tokens + fit.tokens
        if total > length:
            too_long.append(total)
            if task in QUESTION_TASKS:
                continue
            break
        if fit.units == template.max_units and total < length - length // 256:
            raise EvaluationError(
                f"all {fit.units} documents for {task} have {total} tokens, fewer than the length of {length}; "
                "give a larger set or a shorter length."
            )
        context = template.render_context(fit.units)
        parts = ("ruler", task, number, context, ask, prefix, template.answers, prompt.max_new_tokens, prompt.metric)
        yield Example(*parts, length=length)
        number += 1
    if number == 0 and too_long:
        raise EvaluationError(
            f"{task} needs at least {min(too_long)} tokens with this tokenizer, but the length is {length}; "
            "give a longer one."
        )


def _templates(
    task: str, length: int, tokenizer: "PreTrainedTokenizerBase", sources: Sources, seed: str
) -> Iterator[ExampleTemplate]:
    make: Callable[[str], ExampleTemplate]
    if name := QUESTION_TASKS.get(task):
        yield from ruler_tasks.question_templates(seed, sources.questions(name))
        return
    if task == "cwe":
        make = partial(ruler_tasks.common_words_template, length=length)
    elif task == "fwe":
        make = partial(ruler_tasks.frequent_words_template, length=length)
    elif task == "vt":
        # The solved example has as many noise lines as fit.
        count_demo = lambda lines: _count(tokenizer, ruler_tasks.chain_demo(lines))  # noqa: E731
        demo = largest_fit(count_demo, ruler_tasks.DEMO_TOKENS, ruler_tasks.MIN_CHAIN_LINES)
        make = partial(ruler_tasks.chain_template, demo_lines=demo.units)
    else:
        needles = NEEDLE_TASKS[task]
        essay = sources.words if needles.haystack == "essay" else ()
        make = partial(ruler_tasks.needle_template, task=needles, essay=essay)
    yield from (make(f"{seed}-{number}") for number in count())


class LengthFit(NamedTuple):
    """A number of units and how many tokens they take."""

    units: int
    tokens: int


def largest_fit(
    count_tokens: Callable[[int], int], limit: int, min_units: int, max_units: int | None = None
) -> LengthFit:
    """Find the most units whose tokens, which grow with the units, stay within `limit`.

    The search ends early once less than 1/256 of `limit` is left. Interpolation finds a long text in about five
    tokenisations, a third of what bisection takes; every third guess doubles or bisects, which bounds the search where
    tokens do not grow evenly. Its guesses determine the examples, so that another search would make other ones.

    Args:
        count_tokens: Returns the tokens of a number of units.
        limit: The maximum number of tokens; if `min_units` exceed it, they are returned.
        min_units: The fewest units.
        max_units: The maximum number of units; None for any number.
    """
    target, enough = limit - limit // 512, limit - limit // 256
    low = first = LengthFit(min_units, count_tokens(min_units))
    high: LengthFit | None = None
    step = 0
    while low.tokens < enough and low.units != max_units and (high is None or high.units - low.units > 1):
        is_third = step % 3 == 2
        if high is not None and is_third:
            guess = (low.units + high.units) // 2
        elif high is not None:
            share = (target - low.tokens) / max(1, high.tokens - low.tokens)
            guess = low.units + int(share * (high.units - low.units))
            guess = min(high.units - 1, max(low.units + 1, guess))
        elif low is first:
            guess = 2 * min_units + 16
        elif is_third:
            guess = 2 * low.units
        else:
            slope = max(1, low.tokens - first.tokens) / (low.units - first.units)
            guess = low.units + int((target - low.tokens) / slope)
            guess = min(max(guess, low.units + 1), 64 * low.units)
        guess = guess if max_units is None else min(guess, max_units)
        fit = LengthFit(guess, count_tokens(guess))
        if fit.tokens <= limit:
            low = fit
        else:
            high = fit
        step += 1
    return low


def _count(tokenizer: "PreTrainedTokenizerBase", text: str) -> int:
    return len(encode(tokenizer, text))


def _count_context(tokenizer: "PreTrainedTokenizerBase", template: ExampleTemplate, units: int) -> int:
    return _count(tokenizer, template.render_context(units))
