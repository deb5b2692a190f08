"""The public data sets behind the recipes: licences, official file names, where on the hub they are; no torch here.

`index_folder` says of every file of a folder what it is used for, or why it is skipped. A data file that is not
recognised is refused: training on a part of what was meant would show nowhere.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice, product
from pathlib import Path
from shutil import copyfileobj
from typing import Any, NamedTuple

from lkv.errors import DataError
from lkv.utils.data_files import Row, read_json, read_json_lines
from lkv.utils.extras import require
from lkv.utils.files import atomic_write, check_writable_folder, write_text

_CODE_SUFFIXES = frozenset({".py", ".java", ".cpp", ".cc", ".c", ".h", ".cs", ".js", ".ts", ".go", ".rs"})
_TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst"})
DOCUMENT_SUFFIXES = frozenset({".pdf", ".html", ".htm"})  # read with the extra `documents`
_DATA_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".label", ".zip", ".arrow", ".cleaned", ".tgt")
_OTHER_SPLIT = re.compile(r"(^|[-_./])(dev|val|valid|validation|test)([-_./\d]|$)")

NameMap = Mapping[str, str | list[str]]  # from a set to its file or files
LoadDataset = Callable[..., Iterable[Row]]  # `datasets.load_dataset`


class HubSource(NamedTuple):
    """A data set on the hub: `parts` are arguments of `load_dataset` for each config or data folder that is read.

    `revision` is a commit; "refs/convert/parquet" is the hub's own conversion of a set that has no commit to pin: the
    first build looks up its commit, which later ones can be given. `files`: rows of a set too large to read whole come
    from the beginnings of that many files.
    """

    repository: str
    parts: tuple[dict[str, str], ...]
    splits: tuple[str, ...] = ("train",)
    revision: str = "refs/convert/parquet"
    gated: bool = False
    files: int = 0


class PublicDataset(NamedTuple):
    """A public set; `files` are patterns of its official names, matched from the right."""

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
            files=16,
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
        (
            "all/auxiliary_train-*.parquet",
            "all/dev-*.parquet",
            "mmlu_auxiliary_train*.jsonl*",
            "mmlu_train*.jsonl*",
            "mmlu_dev*.jsonl*",
        ),
        HubSource(
            "cais/mmlu", ({"name": "all"},), ("auxiliary_train", "dev"), "c30699e8356da336a370243923dbaf21066bb9fe"
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


class DatasetIndex(NamedTuple):
    """The files of a folder: those used for each set, and why each of the others is skipped."""

    folder: Path
    used: dict[str, list[Path]]
    skipped: dict[Path, str]

    def skip(self, unused: Mapping[Path, str]) -> "DatasetIndex":
        """The index without the files `unused`, which are skipped for the reasons given."""
        kept = {name: [path for path in paths if path not in unused] for name, paths in self.used.items()}
        used = {name: paths for name, paths in kept.items() if paths}
        return self._replace(used=used, skipped={**self.skipped, **unused})

    def lines(self) -> list[str]:
        """A line for each set with its files, then a line for each reason with the files skipped for it."""
        lines = [f"used as {name}: {_join_names(self.folder, paths)}" for name, paths in self.used.items()]
        for reason in dict.fromkeys(self.skipped.values()):
            paths = [path for path, why in self.skipped.items() if why == reason]
            lines.append(f"skipped ({reason}): {_join_names(self.folder, paths)}")
        return lines


def check_data_folder(folder: Path) -> None:
    """Raise DataError unless `folder` is a folder."""
    if not folder.is_dir():
        problem = f"{folder} is a file" if folder.exists() else f"there is no data folder {folder}"
        raise DataError(f"{problem}; give --data a folder with text, code or data sets.")


def index_folder(
    folder: Path,
    datasets: Iterable[str] = tuple(PUBLIC_DATASETS),
    names: NameMap | None = None,
    skip_unknown: bool = False,
) -> DatasetIndex:
    """Classify every file below `folder` for the sets `datasets`, by official names or `names`.

    Raises DataError where there is no folder, for names of other sets, and, unless `skip_unknown`, for data that is not
    recognised.
    """
    datasets = tuple(datasets)
    check_data_folder(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    used: dict[str, list[Path]] = {}
    skipped: dict[Path, str] = {}
    for name, listed in (names or {}).items():
        if name not in datasets:
            raise DataError(
                f"the map names the set {name!r}, which this recipe does not read; give sets of {', '.join(datasets)}."
            )
        used[name] = [folder / file for file in ([listed] if isinstance(listed, str) else listed)]
        if missing := [path for path in used[name] if not path.is_file()]:
            raise DataError(f"{missing[0]}, named for the set {name!r}, is not there; correct the map of names.")
    if names:
        mapped = {path for paths in used.values() for path in paths}
        skipped = {path: "not in the map" for path in files if path not in mapped}
        files = []
    unknown = []
    for path in files:
        relative = path.relative_to(folder)
        if any(part.startswith(".") for part in relative.parts):
            continue
        name, reason = _classify(path, relative)
        if name and name in datasets:
            used.setdefault(name, []).append(path)
        elif name or reason:
            skipped[path] = reason or "not used by this recipe"
        else:
            unknown.append(path)
    if skip_unknown:
        skipped |= dict.fromkeys(unknown, "data of unknown form")
    elif unknown:
        raise DataError(
            f"{folder} holds data that is not recognised: {_join_names(folder, unknown)}; give the files their "
            "official names, write own data as JSON lines {context, question, answer} or {text}, name each in the "
            "--map of `python -m experiments.data`, or move what should not be trained on elsewhere."
        )
    index = DatasetIndex(folder, {name: used[name] for name in PUBLIC_DATASETS if name in used}, skipped)
    if not {*used} - {"own", "text", "code"}:
        return index
    about = [path for path in used.get("text", ()) if path.name.startswith("README")]
    return index.skip(dict.fromkeys(about, "describes the data sets"))


def _classify(path: Path, relative: Path) -> tuple[str, str]:
    """The set of a file, else the reason to skip it; both empty for data that is not recognised."""
    if name := match_dataset(relative):
        return name, ""
    if path.name.startswith(("LICENSE", "LICENCE")):
        return "", "a licence"
    plain_name = path.name.removesuffix(".gz")
    if plain_name.endswith(".tgt") and path.with_name(path.name.replace(".tgt", ".src.cleaned")).exists():
        return "", "read with its source file"
    if plain_name.endswith(_DATA_SUFFIXES) or path.name.endswith(".gz"):
        if _OTHER_SPLIT.search(relative.as_posix()):
            return "", "not a training split"
        if plain_name.endswith(".jsonl"):
            first = next(iter(read_json_lines(path)), None)
            if isinstance(first, dict) and ({"context", "question", "answer"} <= set(first) or "text" in first):
                return "own", ""
        return "", ""
    suffix = path.suffix.lower()
    if suffix in _CODE_SUFFIXES:
        return "code", ""
    is_text = suffix in _TEXT_SUFFIXES or suffix in DOCUMENT_SUFFIXES
    return ("text", "") if is_text else ("", "neither text nor code")


def match_dataset(path: Path) -> str:
    """The public set whose official names `path` matches; "" for none."""
    return next((name for name, dataset in PUBLIC_DATASETS.items() if any(map(path.match, dataset.files))), "")


def read_name_map(path: Path) -> NameMap:
    """Read a map of names: a JSON object from sets to a file or a list of files. Raises DataError for another."""
    mapping = read_json(path)
    if not isinstance(mapping, dict) or not mapping:
        raise DataError(f'{path} is not a map of names; write a JSON object such as {{"squad": "my_squad.jsonl.gz"}}.')
    allowed = [name for name in PUBLIC_DATASETS if name not in ("text", "code")]
    for name, files in mapping.items():
        if name not in allowed:
            raise DataError(f"{path} names the set {name!r}; give one of {', '.join(allowed)}.")
        names = [files] if isinstance(files, str) else files
        if not isinstance(names, list) or not names or not all(isinstance(file, str) for file in names):
            raise DataError(f"{path}: the files of {name!r} must be a name or a list of names.")
    return mapping


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(paths: Iterable[Path]) -> str:
    """16 hexadecimal digits over the contents of all files."""
    return hashlib.sha256(b"".join(bytes.fromhex(sha256_of(path)) for path in paths)).hexdigest()[:16]


def _join_names(folder: Path, paths: Iterable[Path]) -> str:
    names = [path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name for path in paths]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else "")


# The columns stored of a row that has more than are read.
_COLUMNS = {"the_stack": ("content", "max_stars_repo_path", "max_stars_repo_licenses", "lang")}


def download_rows(
    name: str, folder: Path, rows: int, revision: str | None = None, load: LoadDataset | None = None
) -> tuple[Path, str]:
    """Draw `rows` rows over all of the set `name` on the hub into a file in `folder`, unless they are there.

    A download that breaks keeps the splits that are complete. Returns the file and the commit. Raises DataError.
    """
    source = PUBLIC_DATASETS[name].hub
    assert source is not None
    check_writable_folder(folder, DataError, "the download")
    path, about_path = folder / f"{name}.jsonl", folder / f"{name}.about.json"
    if about_path.is_file() and path.is_file():
        about = read_json(about_path)
        drawn = about.get("asked", about["rows"])  # other rows than of a smaller or larger draw, unless these are all
        if (drawn == rows or (about["all"] and drawn < rows)) and revision in (None, about["revision"]):
            return path, about["revision"]
    if load is None:
        require("data", "downloading data sets from the hub")
        import datasets

        load = datasets.load_dataset
    count = -(-rows // (len(source.parts) * len(source.splits)))
    parts, written = [], []
    try:
        commit = revision or source.revision
        if "/" in commit:  # the hub's own conversion, as it is now
            from huggingface_hub import HfApi

            commit = str(HfApi().dataset_info(source.repository, revision=commit).sha)
        for number, (options, split) in enumerate(product(source.parts, source.splits)):
            part = folder / f"{name}.{commit[:12]}.{number}.{count}.part"
            if not part.is_file():
                stream = load(source.repository, split=split, revision=commit, streaming=True, **options)
                lines = _draw_lines(name, _spread(stream, source.files, count), count)
                temporary = part.with_suffix(".part.tmp")
                temporary.write_bytes(b"".join(line + b"\n" for line in lines))
                temporary.replace(part)
            with part.open("rb") as file:
                written.append(sum(1 for _ in file))
            parts.append(part)
    except DataError:
        raise
    # Whatever stopped it (no network, no permission, a set that has moved), the way out is the same.
    except Exception as error:
        dataset, first = PUBLIC_DATASETS[name], (str(error).strip() or "no message").splitlines()[0]
        reason = f"{type(error).__name__}: {first:.200}"
        terms = " its terms must be accepted there first (`hf auth login`);" if source.gated else ""
        raise DataError(
            f"{dataset.title} cannot be downloaded from {source.repository} ({reason});{terms} "
            f"run the same command again to continue, or put one of {', '.join(dataset.files)} into the --data folder."
        ) from error
    with atomic_write(path, DataError, "the download") as temporary, temporary.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                copyfileobj(file, whole)
    about = {"revision": commit, "rows": sum(written), "asked": rows, "all": all(n < count for n in written)}
    write_text(about_path, json.dumps(about), DataError, "the download")
    for part in folder.glob(f"{name}.*.part*"):
        part.unlink()
    return path, commit


def _spread(stream: Any, files: int, count: int) -> Iterable[Row]:
    """`stream`, or where it has more than `files` files (0: any number) the first rows of so many, spread evenly."""
    shards = getattr(stream, "num_shards", 1)
    if not files or shards <= files:
        return stream
    beginnings = (stream.shard(num_shards=shards, index=number * shards // files) for number in range(files))
    return chain.from_iterable(islice(shard, -(-count // files)) for shard in beginnings)


def _draw_lines(name: str, rows: Iterable[Row], count: int) -> list[bytes]:
    """`count` of all `rows` as JSON, each as likely as the others, in their order, without columns that are not read.

    A story of NarrativeQA comes with its first question alone.
    """
    rng, columns, stories = random.Random(0), _COLUMNS.get(name), dict[str, str]()
    drawn: list[tuple[int, Row]] = []
    for number, row in enumerate(rows):
        place = number if number < count else rng.randrange(number + 1)
        if place >= count:
            continue
        if columns:
            row = {key: row[key] for key in columns if key in row}
        if name == "narrativeqa" and isinstance(row.get("document"), dict):
            story = row["document"]
            stories.setdefault(story.get("id"), story.get("text"))
            row = {**row, "document": {"id": story.get("id"), "text": ""}}
        drawn[place : place + 1] = [(number, row)]
    drawn.sort(key=lambda pair: pair[0])
    for _, row in drawn:
        if name == "narrativeqa" and isinstance(row.get("document"), dict):
            row["document"]["text"] = stories.pop(row["document"]["id"], "")
    return [json.dumps(row, ensure_ascii=False, sort_keys=True).encode() for _, row in drawn]
