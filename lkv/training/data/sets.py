"""The public sets that are read: their licences, their files' official names, where on the hub they lie; no torch here.

`survey` says of every file of a folder what it is taken for, or why it is left. A data file that is not recognised is
refused: training on a part of what was meant would show nowhere.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lkv.errors import DataError
from lkv.training.data.records import document, rows

CODE_ENDINGS = frozenset({".py", ".java", ".cpp", ".cc", ".c", ".h", ".cs", ".js", ".ts", ".go", ".rs"})
TEXT_ENDINGS = frozenset({".txt", ".md", ".rst"})
_DATA_ENDINGS = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".label", ".zip", ".arrow", ".cleaned", ".tgt")
_OTHER_SPLIT = re.compile(r"(^|[-_./])(dev|val|valid|validation|test)([-_.\d]|$)")


Names = Mapping[str, str | list[str]]  # of a set, its file or files


@dataclass(frozen=True)
class Hub:
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
class DataSet:
    """A public set: `files` are patterns of its official names, matched from the right; `own` is the user's."""

    title: str
    licence: str
    files: tuple[str, ...]
    hub: Hub | None = None


_LANGUAGES = ("python", "java", "c++", "c-sharp")
SETS: dict[str, DataSet] = {
    "hotpotqa": DataSet(
        "HotpotQA train",
        "CC BY-SA 4.0",
        ("hotpot_train_v1.1.json*", "fullwiki/train-*.parquet", "distractor/train-*.parquet", "hotpotqa_train*.jsonl*"),
        Hub("hotpotqa/hotpot_qa", ({"name": "fullwiki"},), revision="1908d6afbbead072334abe2965f91bd2709910ab"),
    ),
    "multi_news": DataSet(
        "Multi-News train",
        "research and education only",
        (
            "train.src.cleaned*",
            "multi_news_train*.jsonl*",
            "multi_news/*/train/*.parquet",
            "multi_news/train-*.parquet",
        ),
        Hub("alexfabbri/multi_news", ({},)),
    ),
    "the_stack": DataSet(
        "The Stack (Python, Java, C++, C#)",
        "the licence of each file, all permissive; terms of The Stack",
        (*(f"data/{language}/*.parquet" for language in _LANGUAGES), "code_*.jsonl*"),
        Hub(
            "bigcode/the-stack-dedup",
            tuple({"data_dir": f"data/{language}"} for language in _LANGUAGES),
            revision="17cad72c886a2858e08d4c349a00d6466f54df63",
            gated=True,
        ),
    ),
    "squad": DataSet(
        "SQuAD v1.1 train",
        "CC BY-SA 4.0",
        ("train-v1.1.json*", "plain_text/train-*.parquet", "squad_train*.jsonl*"),
        Hub("rajpurkar/squad", ({"name": "plain_text"},), revision="7b6d24c440a36b6815f21b70d25016731768db1f"),
    ),
    "trec": DataSet(
        "TREC question classification, train",
        "none stated",
        ("train_5500.label*", "trec_train*.label*", "trec/*/train/*.parquet", "trec/train-*.parquet"),
        Hub("CogComp/trec", ({},), revision="65752bf53af25bc935a0dce92fb5b6c930728450"),
    ),
    "mmlu": DataSet(
        "MMLU auxiliary_train and dev",
        "MIT",
        ("all/auxiliary_train-*.parquet", "all/dev-*.parquet", "mmlu_*.jsonl*"),
        Hub(
            "cais/mmlu",
            ({"name": "all"},),
            ("auxiliary_train", "dev"),
            "c30699e8356da336a370243923dbaf21066bb9fe",
        ),
    ),
    "narrativeqa": DataSet(
        "NarrativeQA train",
        "Apache-2.0",
        ("narrativeqa/data/train-*.parquet", "narrativeqa_train*.jsonl*"),
        Hub("deepmind/narrativeqa", ({},), revision="2e643e7363944af1c33a652d1c87320d0871c4e4"),
    ),
    "2wiki": DataSet("2WikiMultihopQA train", "Apache-2.0", ("2wiki*/train.json*", "2wiki_train*.jsonl*")),
    "musique": DataSet("MuSiQue train", "CC BY 4.0", ("musique_ans_v1.0_train.jsonl*", "musique_train*.jsonl*")),
    "fairytaleqa": DataSet("FairytaleQA train", "Apache-2.0", ("fairytaleqa_train*.jsonl*",)),
    "squality": DataSet("SQuALITY train", "CC BY 4.0", ("squality_train*.jsonl*", "squality/*/train.jsonl*")),
    "covidqa": DataSet("COVID-QA", "Apache-2.0", ("COVID-QA.json*", "covidqa*.json*")),
    "qmsum": DataSet("QMSum train", "MIT", ("qmsum_train*.jsonl*", "QMSum/data/ALL/jsonl/train.jsonl*")),
    "mts_dialog": DataSet("MTS-Dialog train", "CC BY 4.0", ("MTS-Dialog-TrainingSet.csv*", "mts_dialog_train*.csv*")),
    "wikitext2": DataSet("WikiText-2", "CC BY-SA 3.0", ("wiki.train.tokens*", "wiki.valid.tokens*", "wikitext2*.txt*")),
    "own": DataSet("JSON lines of the data folder", "as its owner has it", ()),
    "text": DataSet("text files of the data folder", "as its owner has it", ()),
    "code": DataSet("source files of the data folder", "as its owner has it", ()),
}


@dataclass(frozen=True)
class Survey:
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


def survey(folder: Path, wanted: Iterable[str] = tuple(SETS), names: Names | None = None) -> Survey:
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
        if kind in SETS and kind not in wanted:
            left[path] = "of no set that is asked for"
        elif kind in SETS:
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
    return Survey(folder, {name: taken[name] for name in SETS if name in taken}, left)


def read_names(path: Path) -> Names:
    """A map of names: a JSON object from sets to a file or a list of files. Raises DataError for another."""
    mapping = document(path)
    if not isinstance(mapping, dict) or not mapping:
        raise DataError(f'{path} is no map of names; write a JSON object such as {{"squad": "my_squad.jsonl.gz"}}.')
    for name, files in mapping.items():
        if name not in SETS or name in ("text", "code"):
            known = ", ".join(known_name for known_name in SETS if known_name not in ("text", "code"))
            raise DataError(f"{path} names the set {name!r}; give one of {known}.")
        if not (
            isinstance(files, str) or (isinstance(files, list) and all(isinstance(f, str) for f in files) and files)
        ):
            raise DataError(f"{path}: the files of {name!r} must be a name or a list of names.")
    return mapping


def _named(folder: Path, names: Names) -> Survey:
    taken = {
        name: [folder / f for f in ([files] if isinstance(files, str) else files)] for name, files in names.items()
    }
    for name, paths in taken.items():
        if missing := [path for path in paths if not path.is_file()]:
            raise DataError(f"{missing[0]}, named for the set {name!r}, is not there; mend the map of names.")
    used = {path for paths in taken.values() for path in paths}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path not in used]
    return Survey(folder, {name: taken[name] for name in SETS if name in taken}, dict.fromkeys(files, "not in the map"))


def _kind(path: Path, folder: Path) -> str:
    """The set of a file; else why it is left; "" for data that is not recognised."""
    relative = path.relative_to(folder)
    if name := set_of(relative):
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


def set_of(path: Path) -> str:
    """The public set whose official names `path` matches; "" for none."""
    return next((name for name, data_set in SETS.items() if any(path.match(pattern) for pattern in data_set.files)), "")


def _of_user(path: Path) -> str:
    """Whether JSON lines are in the user's own form."""
    first = next(iter(rows(path)), None)
    known = isinstance(first, dict) and ({"context", "question", "answer"} <= set(first) or "text" in first)
    return "own" if known else ""


def _names(folder: Path, paths: Iterable[Path]) -> str:
    names = [path.relative_to(folder).as_posix() for path in paths]
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
