"""LongBench: its 16 English and code tasks (Section 4.1; the paper leaves out the five Chinese ones).

Rows come from local files or the hub; prompts, generation lengths and metrics are the official ones, in longbench.json.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from itertools import islice
from pathlib import Path
from reprlib import repr as short
from typing import Any

from huggingface_hub import hf_hub_download

from lkv.errors import DataError
from lkv.evaluation.example import Example
from lkv.evaluation.metrics import require_rouge
from lkv.utils.data_files import Row, read_member, read_records, replace_lone_surrogates, require_texts, split_lines
from lkv.utils.files import package_json

# The columns of the paper's Table 1 (tab:longbench), with the tasks of its appendix.
CATEGORIES = {
    "Single-Doc QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "Multi-Doc QA": ("hotpotqa", "2wikimqa", "musique"),
    "Summarization": ("gov_report", "qmsum", "multi_news"),
    "Few-Shot": ("trec", "triviaqa", "samsum"),
    "Synthetic": ("passage_count", "passage_retrieval_en"),
    "Code": ("lcc", "repobench-p"),
}
TASKS = tuple(task for tasks in CATEGORIES.values() for task in tasks)

_HUB = "zai-org/LongBench"
_ARCHIVE = "data.zip"
# The upload of data.zip; later revisions change only the card.
_REVISION = "4a90f81c8db79f60c15f77dcd207a1099038c775"


def load_examples(task: str, folder: Path | None, count: int | None = None) -> list[Example]:
    """Load the first `count` rows of `task`.

    Args:
        task: One of `TASKS`.
        folder: Holds TASK.jsonl, TASK.jsonl.gz or LongBench's data.zip; None downloads data.zip from the hub (114 MB,
            once).
        count: How many rows; None for all.

    Raises:
        DataError: For an unknown task, and files that are missing or malformed.
        MissingPackageError: If the metric of the task needs a package that is missing.
    """
    check_task(task)
    if count is not None and count < 1:
        raise DataError(f"count is {count}, but at least 1 row of {task} is needed; give None for all.")
    if _definitions()[task]["metric"] == "rouge_l":
        require_rouge()
    path = _download() if folder is None else _find_file(task, Path(folder))
    rows = islice(_read_rows(path, task), count)
    examples = [_make_example(task, number, row, position) for number, (position, row) in enumerate(rows)]
    if not examples:
        raise DataError(f"{path} has no row of {task}; get the file again, or leave the task out.")
    return examples


def check_task(task: str) -> None:
    """Raise DataError for a task that is not one of `TASKS`."""
    if task not in TASKS:
        near = get_close_matches(task, TASKS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(TASKS)}."
        raise DataError(f"there is no LongBench task {task!r}; {hint} (The five Chinese tasks are left out.)")


@cache
def _definitions() -> dict[str, dict[str, Any]]:
    return package_json("lkv.evaluation", "longbench.json")["tasks"]


def _download() -> Path:
    try:
        return Path(hf_hub_download(_HUB, _ARCHIVE, repo_type="dataset", revision=_REVISION))
    except Exception as error:  # the HTTP client's errors have no common type
        raise DataError(
            f"{_ARCHIVE} of {_HUB} could not be downloaded ({error}); try again with a connection, "
            "or give a folder with the task's .jsonl."
        ) from error


def _find_file(task: str, folder: Path) -> Path:
    names = (f"{task}.jsonl", f"{task}.jsonl.gz", _ARCHIVE)
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder} holds none of {', '.join(names)}; give the folder with LongBench's files.")


def _read_rows(path: Path, task: str) -> Iterator[tuple[str, Row]]:
    """Return the rows of a task, each with its position in the file."""
    if path.suffix != ".zip":
        yield from read_records(path)
        return
    try:
        with zipfile.ZipFile(path) as archive:
            content = read_member(archive, f"data/{task}.jsonl", path).decode()
    except KeyError as error:
        raise DataError(f"{path} has no data/{task}.jsonl; get LongBench's {_ARCHIVE} again.") from error
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); get the file again.") from error
    for number, line in enumerate(split_lines(content), 1):
        try:
            yield f"{path}, line {number}", replace_lone_surrogates(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not a JSON object ({error}).") from error


def _make_example(task: str, number: int, row: Row, position: str) -> Example:
    definition = _definitions()[task]
    given, text = require_texts(row, position, "input", "context")
    if not text.strip():
        raise DataError(f"{position}: field 'context' is empty, but it is the text to compress.")
    answers = _text_list(row, "answers", position)
    if definition["metric"] == "retrieval" and not all(re.search(r"Paragraph \d", answer) for answer in answers):
        raise DataError(f"{position}: field 'answers' must name a paragraph ('Paragraph 3'), but is {short(answers)}.")
    # In some tasks the input ends with the beginning of the answer, possibly followed by white space.
    end = definition["input_ends_with"]
    prefix = match[0] if end and (match := re.search(re.escape(end) + r"\s*\Z", given)) else ""
    classes = _text_list(row, "all_classes", position) if definition["metric"] == "classification" else ()
    settings = ("max_new_tokens", "metric", "first_line", "stop_at_newline", "chat")
    return Example(
        suite="longbench",
        task=task,
        number=number,
        context=definition["context"].format(context=text),
        question=definition["question"].format(input=given).removesuffix(prefix),
        answer_prefix=prefix or definition["answer_prefix"],
        answers=tuple(answers),
        classes=tuple(classes),
        **{name: definition[name] for name in settings},
    )


def _text_list(row: Row, field: str, position: str) -> list[str]:
    value = row.get(field)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise DataError(f"{position}: field {field!r} must be a list of at least one text, but is {short(value)}.")
    return value
