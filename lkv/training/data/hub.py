"""Rows of a public set from the hub, streamed into a file of their own: only the named splits, at a pinned commit."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from shutil import copyfileobj
from typing import Any

from lkv.errors import DataError
from lkv.training.data.records import Row, document
from lkv.training.data.sets import SETS, Hub
from lkv.utils.extras import require
from lkv.utils.files import atomic_write, check_writable_folder, write_text

# What is kept of a row, where it has more than is read.
_COLUMNS = {"the_stack": ("content", "max_stars_repo_path", "max_stars_repo_licenses", "lang")}
_FLUSH = 200  # rows between two writes that a stopped fetch can go on from

Load = Callable[..., Iterable[Row]]


def fetch(
    name: str, folder: Path, rows: int, revision: str | None = None, load: Load | None = None
) -> tuple[Path, str]:
    """(file, commit) of the first `rows` rows of the set `name`, fetched into `folder` unless they are there already.

    A fetch that stops goes on where it was. `revision` takes the place of the pinned one; `load` is
    `datasets.load_dataset`. Raises DataError naming the local files that would do, and MissingPackageError.
    """
    hub = SETS[name].hub
    assert hub is not None
    check_writable_folder(folder, DataError, "what is fetched")
    done, about = folder / f"{name}.jsonl", folder / f"{name}.about.json"
    if about.is_file() and done.is_file():
        known = document(about)
        # Of the commit that is asked for, enough of every split.
        if revision in (None, known["revision"]) and (known.get("asked", known["rows"]) >= rows or known["all"]):
            return done, known["revision"]
    commit = revision or _commit(name, hub)
    try:
        parts, ended = _streamed(name, hub, commit, rows, load or _load(), folder)
    except DataError:
        raise
    # Whatever stopped it (no network, no right to it, a set that has moved), the way out is the same.
    except Exception as error:
        raise _unreachable(name, error) from error
    with atomic_write(done, DataError, "what is fetched") as temporary, temporary.open("wb") as whole:
        for part in parts:
            with part.open("rb") as fetched:
                copyfileobj(fetched, whole)
    told = {"revision": commit, "rows": _whole_lines(done), "asked": rows, "all": ended}
    write_text(about, json.dumps(told), DataError, "what is fetched")
    for part in parts:
        part.unlink()
    return done, commit


def _streamed(name: str, hub: Hub, commit: str, rows: int, load: Load, folder: Path) -> tuple[list[Path], bool]:
    """A file of rows for each split, with what it lacks appended, and whether none of the splits has more."""
    share = -(-rows // (len(hub.parts) * len(hub.splits)))
    parts, ended = [], True
    for number, (options, split) in enumerate((options, split) for options in hub.parts for split in hub.splits):
        part = folder / f"{name}.{commit[:12]}.{number}.part"
        have = _whole_lines(part)
        stream: Any = load(hub.repository, split=split, revision=commit, streaming=True, **options)
        unread = iter(stream.skip(have)) if have and hasattr(stream, "skip") else islice(iter(stream), have, None)
        with part.open("ab") as file:
            for count, row in enumerate(islice(_thin(name, unread), max(0, share - have)), have + 1):
                file.write(json.dumps(row, ensure_ascii=False, sort_keys=True).encode() + b"\n")
                if count % _FLUSH == 0:
                    file.flush()
        parts.append(part)
        ended = ended and _whole_lines(part) < share
    return parts, ended


def _whole_lines(part: Path) -> int:
    """How many whole rows a stopped fetch left; half a row is cut off."""
    if not part.is_file():
        return 0
    data = part.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(part, end)
    return data.count(b"\n", 0, end)


def _thin(name: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Rows without what is not read; a story of NarrativeQA comes with its first question alone."""
    told: set[str] = set()
    for row in rows:
        if columns := _COLUMNS.get(name):
            row = {key: row[key] for key in columns if key in row}
        if name == "narrativeqa" and isinstance(row.get("document"), dict):
            whole = row["document"]
            text = "" if whole.get("id") in told else whole.get("text")
            told.add(whole.get("id"))
            row = {**row, "document": {"id": whole.get("id"), "text": text}}
        yield row


def _commit(name: str, hub: Hub) -> str:
    """The pinned commit, or that of the hub's own conversion as it is now."""
    if "/" not in hub.revision:
        return hub.revision
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(hub.repository, revision=hub.revision).sha)
    except Exception as error:
        raise _unreachable(name, error) from error


def _unreachable(name: str, error: Exception) -> DataError:
    known = SETS[name]
    assert known.hub is not None
    terms = " its terms must be accepted there first (`hf auth login`);" if known.hub.gated else ""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DataError(
        f"{known.title} cannot be fetched from {known.hub.repository} ({type(error).__name__}: {first:.200});{terms} "
        f"run the same command again to go on, or put one of {', '.join(known.files)} into the --data folder."
    )


def _load() -> Load:
    require("data", "fetching data sets from the hub")
    from datasets import load_dataset

    return load_dataset
