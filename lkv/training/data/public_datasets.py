"""The public data sets of the recipes: licences and official file names. Does not import torch.

`index_folder` assigns every file of a folder to a set, or gives the reason to skip it. Unrecognised data files raise an
error, because training on partial data would go unnoticed.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from lkv.errors import DataError
from lkv.utils.data_files import read_json_lines
from lkv.utils.files import file_digest, list_files, package_json

_CODE_SUFFIXES = frozenset({".py", ".java", ".cpp", ".cc", ".c", ".h", ".cs", ".js", ".ts", ".go", ".rs"})
_TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst"})
DOCUMENT_SUFFIXES = frozenset({".pdf", ".html", ".htm"})  # read with the extra `documents`
_DATA_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".label", ".zip", ".arrow", ".cleaned", ".tgt")
_OTHER_SPLIT = re.compile(r"(^|[-_./])(dev|val|valid|validation|test)([-_./\d]|$)")


class PublicDataset(NamedTuple):
    """A public set; `files` are patterns of its official names, matched from the right."""

    title: str
    licence: str
    files: list[str]


_SETS = package_json("lkv.training.data", "public_datasets.json")
PUBLIC_DATASETS = {name: PublicDataset(**fields) for name, fields in _SETS.items()}


class DatasetIndex(NamedTuple):
    """The files of a folder: those used for each set, and why each of the others is skipped."""

    folder: Path
    used: dict[str, list[Path]]
    skipped: dict[Path, str]

    def skip(self, unused: Mapping[Path, str]) -> "DatasetIndex":
        """Return the index with the files `unused` skipped for the given reasons."""
        kept = {name: [path for path in paths if path not in unused] for name, paths in self.used.items()}
        used = {name: paths for name, paths in kept.items() if paths}
        return self._replace(used=used, skipped={**self.skipped, **unused})

    def lines(self) -> list[str]:
        """Return a line for each set with its files, then a line for each reason with the files skipped for it."""
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
    folder: Path, datasets: Collection[str] = tuple(PUBLIC_DATASETS), skip_unknown: bool = False
) -> DatasetIndex:
    """Classify every file below a folder, of which the sets `datasets` are used.

    Raises DataError if there is no folder or, unless `skip_unknown`, data that is not recognised.
    """
    check_data_folder(folder)
    used: dict[str, list[Path]] = {}
    files, others = list_files(folder)
    skipped = dict.fromkeys(others, "links to folders, broken links, pipes or folders without access")
    unknown = []
    for path in files:
        name, reason = _classify(path, path.relative_to(folder))
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
            "official names, write own data as JSON lines {context, question, answer} or {text}, or move what should "
            "not be trained on elsewhere."
        )
    index = DatasetIndex(folder, {name: used[name] for name in PUBLIC_DATASETS if name in used}, skipped)
    if not {*used} - {"own", "text", "code"}:
        return index
    about = [path for path in used.get("text", ()) if path.name.startswith("README")]
    return index.skip(dict.fromkeys(about, "describes the data sets"))


def _classify(path: Path, relative: Path) -> tuple[str, str]:
    """Return the set of a file, else the reason to skip it; both empty for data that is not recognised."""
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
    """Return the public set whose official names `path` matches; "" for none."""
    return next((name for name, dataset in PUBLIC_DATASETS.items() if any(map(path.match, dataset.files))), "")


def digest_of(paths: Iterable[Path]) -> str:
    """16 hexadecimal digits over the contents of all files."""
    return hashlib.sha256(b"".join(bytes.fromhex(file_digest(path)) for path in paths)).hexdigest()[:16]


def _join_names(folder: Path, paths: Iterable[Path]) -> str:
    names = [path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name for path in paths]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else "")
