"""Public data sets."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from shutil import copyfileobj
from typing import Any

from lkv.errors import DataError
from lkv.utils.data_files import Row, read_json, read_json_lines
from lkv.utils.extras import require
from lkv.utils.files import atomic_write, check_writable_folder, write_text

CODE_ENDINGS = frozenset({".py", ".java", ".cpp", ".cc", ".c", ".h", ".cs", ".js", ".ts", ".go", ".rs"})
TEXT_ENDINGS = frozenset({".txt", ".md", ".rst"})
_DATA_ENDINGS = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".label", ".zip", ".arrow", ".cleaned", ".tgt")
_OTHER_SPLIT = re.compile(r"(^|[-_./])(dev|val|valid|validation|test)([-_.\d]|$)")


NameMap = Mapping[str, str | list[str]]  # of a set, its file or files


@dataclass(frozen=True)
class HubSource:
    """A data set on the hub: one loading for each of `parts` (config or data folder), of the splits named alone.

    `revision` is a commit. "refs/convert/parquet" stands for the hub's own conversion of a set that has no commit to
    pin: the first build looks up its commit, which every later one can be given.
    """

    repository: str
    parts: tuple[dict[str, str], ...]
    splits: tuple[str, ...] = ("train",)
    revision: str = "refs/convert/parquet"
    gated: bool = False


@dataclass(frozen=True)
class PublicDataset:
    """A public set: `files` are patterns of its official names, matched from the right; `own` is the user's."""

    title: str
    licence: str
    files: tuple[str, ...]
    hub: HubSource | None = None


_LANGUAGES = ("python", "java", "c++", "c-sharp")
PUBLIC_DATASETS: dict[str, PublicDataset] = {
    "hotpotqa": PublicDataset(
        "HotpotQA train",
        "CC BY-SA 4.0",
        ("hotpot_train_v1.1.json*", "fullwiki/train-*.parquet", "distractor/train-*.parquet", "hotpotqa_train*.jsonl*"),
        HubSource("hotpotqa/hotpot_qa", ({"name": "fullwiki"},), revision="1908d6afbbead072334abe2965f91bd2709910ab"),
    ),
    "multi_news": PublicDataset(
        "Multi-News train",
        "research and education only",
        (
            "train.src.cleaned*",
            "multi_news_train*.jsonl*",
            "multi_news/*/train/*.parquet",
            "multi_news/train-*.parquet",
        ),
        HubSource("alexfabbri/multi_news", ({},)),
    ),
    "the_stack": PublicDataset(
        "The Stack (Python, Java, C++, C#)",
        "the licence of each file, all permissive; terms of The Stack",
        (*(f"data/{language}/*.parquet" for language in _LANGUAGES), "code_*.jsonl*"),
        HubSource(
            "bigcode/the-stack-dedup",
            tuple({"data_dir": f"data/{language}"} for language in _LANGUAGES),
            revision="17cad72c886a2858e08d4c349a00d6466f54df63",
            gated=True,
        ),
    ),
    "squad": PublicDataset(
        "SQuAD v1.1 train",
        "CC BY-SA 4.0",
        ("train-v1.1.json*", "plain_text/train-*.parquet", "squad_train*.jsonl*"),
        HubSource("rajpurkar/squad", ({"name": "plain_text"},), revision="7b6d24c440a36b6815f21b70d25016731768db1f"),
    ),
    "trec": PublicDataset(
        "TREC question classification, train",
        "none stated",
        ("train_5500.label*", "trec_train*.label*", "trec/*/train/*.parquet", "trec/train-*.parquet"),
        HubSource("CogComp/trec", ({},), revision="65752bf53af25bc935a0dce92fb5b6c930728450"),
    ),
    "mmlu": PublicDataset(
        "MMLU auxiliary_train and dev",
        "MIT",
        ("all/auxiliary_train-*.parquet", "all/dev-*.parquet", "mmlu_*.jsonl*"),
        HubSource(
            "cais/mmlu",
            ({"name": "all"},),
            ("auxiliary_train", "dev"),
            "c30699e8356da336a370243923dbaf21066bb9fe",
        ),
    ),
    "narrativeqa": PublicDataset(
        "NarrativeQA train",
        "Apache-2.0",
        ("narrativeqa/data/train-*.parquet", "narrativeqa_train*.jsonl*"),
        HubSource("deepmind/narrativeqa", ({},), revision="2e643e7363944af1c33a652d1c87320d0871c4e4"),
    ),
    "2wiki": PublicDataset("2WikiMultihopQA train", "Apache-2.0", ("2wiki*/train.json*", "2wiki_train*.jsonl*")),
    "musique": PublicDataset("MuSiQue train", "CC BY 4.0", ("musique_ans_v1.0_train.jsonl*", "musique_train*.jsonl*")),
    "fairytaleqa": PublicDataset("FairytaleQA train", "Apache-2.0", ("fairytaleqa_train*.jsonl*",)),
    "squality": PublicDataset("SQuALITY train", "CC BY 4.0", ("squality_train*.jsonl*", "squality/*/train.jsonl*")),
    "covidqa": PublicDataset("COVID-QA", "Apache-2.0", ("COVID-QA.json*", "covidqa*.json*")),
    "qmsum": PublicDataset("QMSum train", "MIT", ("qmsum_train*.jsonl*", "QMSum/data/ALL/jsonl/train.jsonl*")),
    "mts_dialog": PublicDataset(
        "MTS-Dialog train", "CC BY 4.0", ("MTS-Dialog-TrainingSet.csv*", "mts_dialog_train*.csv*")
    ),
    "wikitext2": PublicDataset(
        "WikiText-2", "CC BY-SA 3.0", ("wiki.train.tokens*", "wiki.valid.tokens*", "wikitext2*.txt*")
    ),
    "own": PublicDataset("JSON lines of the data folder", "as its owner has it", ()),
    "text": PublicDataset("text files of the data folder", "as its owner has it", ()),
    "code": PublicDataset("source files of the data folder", "as its owner has it", ()),
}


@dataclass(frozen=True)
class DatasetIndex:
    """What a folder holds: the files taken for each set, and of every other file why it is left."""

    folder: Path
    taken: dict[str, list[Path]]
    left: dict[Path, str]

    def lines(self) -> list[str]:
        """A line a set with its files, then a line a reason with the files left for it."""
        said = [f"{name}: {_names(self.folder, paths)}" for name, paths in self.taken.items()]
        for why in dict.fromkeys(self.left.values()):
            said.append(f"left, {why}: {_names(self.folder, [p for p, reason in self.left.items() if reason == why])}")
        return said


def sha256_of(path: Path) -> str:
    """Of what a file holds, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(paths: Iterable[Path]) -> str:
    """16 hexadecimal digits of what all of the files hold."""
    return hashlib.sha256(b"".join(bytes.fromhex(sha256_of(path)) for path in paths)).hexdigest()[:16]


def index_folder(
    folder: Path, wanted: Iterable[str] = tuple(PUBLIC_DATASETS), names: NameMap | None = None
) -> DatasetIndex:
    """Look at every file below `folder`, for the sets `wanted`; `names` gives a set's files in place of its patterns.

    Raises DataError for a folder that is not there, and for data files that nothing is known of.
    """
    if not folder.is_dir():
        raise DataError(f"there is no data folder {folder}; give --data a folder with text, code or data sets.")
    if names:
        return _named(folder, names)
    taken: dict[str, list[Path]] = {}
    left: dict[Path, str] = {}
    strange = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        kind = _kind(path, folder)
        if kind in PUBLIC_DATASETS and kind not in wanted:
            left[path] = "of no set that is asked for"
        elif kind in PUBLIC_DATASETS:
            taken.setdefault(kind, []).append(path)
        elif kind:
            left[path] = kind
        else:
            strange.append(path)
    if strange:
        raise DataError(
            f"{folder} holds data that is not recognised: {_names(folder, strange)}; give the files their official "
            "names, write own data as JSON lines {context, question, answer} or {text}, name each in --map, or move "
            "what should not be trained on elsewhere."
        )
    return DatasetIndex(folder, {name: taken[name] for name in PUBLIC_DATASETS if name in taken}, left)


def read_name_map(path: Path) -> NameMap:
    """A map of names: a JSON object from sets to a file or a list of files. Raises DataError for another."""
    mapping = read_json(path)
    if not isinstance(mapping, dict) or not mapping:
        raise DataError(f'{path} is no map of names; write a JSON object such as {{"squad": "my_squad.jsonl.gz"}}.')
    for name, files in mapping.items():
        if name not in PUBLIC_DATASETS or name in ("text", "code"):
            known = ", ".join(known_name for known_name in PUBLIC_DATASETS if known_name not in ("text", "code"))
            raise DataError(f"{path} names the set {name!r}; give one of {known}.")
        if not (
            isinstance(files, str) or (isinstance(files, list) and all(isinstance(f, str) for f in files) and files)
        ):
            raise DataError(f"{path}: the files of {name!r} must be a name or a list of names.")
    return mapping


def _named(folder: Path, names: NameMap) -> DatasetIndex:
    taken = {
        name: [folder / f for f in ([files] if isinstance(files, str) else files)] for name, files in names.items()
    }
    for name, paths in taken.items():
        if missing := [path for path in paths if not path.is_file()]:
            raise DataError(f"{missing[0]}, named for the set {name!r}, is not there; mend the map of names.")
    used = {path for paths in taken.values() for path in paths}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path not in used]
    return DatasetIndex(
        folder, {name: taken[name] for name in PUBLIC_DATASETS if name in taken}, dict.fromkeys(files, "not in the map")
    )


def _kind(path: Path, folder: Path) -> str:
    """The set of a file; else why it is left; "" for data that is not recognised."""
    relative = path.relative_to(folder)
    if name := match_dataset(relative):
        return name
    if path.name.startswith(("README", "LICENSE", "LICENCE")):
        return "no data"
    bare = path.name.removesuffix(".gz")
    if bare.endswith(".tgt") and path.with_name(bare.replace(".tgt", ".src.cleaned")).exists():
        return "read with its source file"
    if bare.endswith(_DATA_ENDINGS) or path.name.endswith(".gz"):
        if _OTHER_SPLIT.search(relative.as_posix()):
            return "not of a training split"
        return _of_user(path) if bare.endswith(".jsonl") else ""
    if path.suffix in CODE_ENDINGS:
        return "code"
    return "text" if path.suffix in TEXT_ENDINGS else "neither text nor code"


def match_dataset(path: Path) -> str:
    """The public set whose official names `path` matches; "" for none."""
    return next(
        (name for name, data_set in PUBLIC_DATASETS.items() if any(path.match(pattern) for pattern in data_set.files)),
        "",
    )


def _of_user(path: Path) -> str:
    """Whether JSON lines are in the user's own form."""
    first = next(iter(read_json_lines(path)), None)
    known = isinstance(first, dict) and ({"context", "question", "answer"} <= set(first) or "text" in first)
    return "own" if known else ""


def _names(folder: Path, paths: Iterable[Path]) -> str:
    names = [path.relative_to(folder).as_posix() for path in paths]
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


# What is kept of a row, where it has more than is read.
_COLUMNS = {"the_stack": ("content", "max_stars_repo_path", "max_stars_repo_licenses", "lang")}
_FLUSH = 200  # rows between two writes that a stopped fetch can go on from

LoadDataset = Callable[..., Iterable[Row]]


def download_rows(
    name: str, folder: Path, rows: int, revision: str | None = None, load: LoadDataset | None = None
) -> tuple[Path, str]:
    """(file, commit) of the first `rows` rows of the set `name`, fetched into `folder` unless they are there already.

    A fetch that stops goes on where it was. `revision` takes the place of the pinned one; `load` is
    `datasets.load_dataset`. Raises DataError naming the local files that would do, and MissingPackageError.
    """
    hub = PUBLIC_DATASETS[name].hub
    assert hub is not None
    check_writable_folder(folder, DataError, "what is fetched")
    done, about = folder / f"{name}.jsonl", folder / f"{name}.about.json"
    if about.is_file() and done.is_file():
        known = read_json(about)
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


def _streamed(
    name: str, hub: HubSource, commit: str, rows: int, load: LoadDataset, folder: Path
) -> tuple[list[Path], bool]:
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


def _commit(name: str, hub: HubSource) -> str:
    """The pinned commit, or that of the hub's own conversion as it is now."""
    if "/" not in hub.revision:
        return hub.revision
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(hub.repository, revision=hub.revision).sha)
    except Exception as error:
        raise _unreachable(name, error) from error


def _unreachable(name: str, error: Exception) -> DataError:
    known = PUBLIC_DATASETS[name]
    assert known.hub is not None
    terms = " its terms must be accepted there first (`hf auth login`);" if known.hub.gated else ""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DataError(
        f"{known.title} cannot be fetched from {known.hub.repository} ({type(error).__name__}: {first:.200});{terms} "
        f"run the same command again to go on, or put one of {', '.join(known.files)} into the --data folder."
    )


def _load() -> LoadDataset:
    require("data", "fetching data sets from the hub")
    from datasets import load_dataset

    return load_dataset
