"""Where RULER's texts come from: local files, or the data sets' own files on the hub."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import hf_hub_download

from lkv.errors import DataError
from lkv.evaluation.ruler.readers import QuestionSet, read_hotpot, read_squad, read_text


class _Kind(NamedTuple):
    title: str
    patterns: tuple[str, ...]
    hub: dict[str, str]


_KINDS = {
    "squad": _Kind(
        "SQuAD's validation file (dev-v2.0.json)",
        ("dev-v2.0.json", "*quad*.json", "*quad*.json.gz", "*quad*.parquet"),
        {
            "repo_id": "rajpurkar/squad_v2",
            "filename": "squad_v2/validation-00000-of-00001.parquet",
            "revision": "3ffb306f725f7d2ce8394bc1873b24868140c412",
        },
    ),
    "hotpot": _Kind(
        "HotpotQA's validation file (hotpot_dev_distractor_v1.json)",
        ("*hotpot_*.json", "*hotpot_*.json.gz", "*hotpot_*.jsonl.gz", "*hotpot_*.parquet"),  # not LongBench's hotpotqa
        {
            "repo_id": "hotpotqa/hotpot_qa",
            "filename": "distractor/validation-00000-of-00001.parquet",
            "revision": "1908d6afbbead072334abe2965f91bd2709910ab",
        },
    ),
}


@dataclass(frozen=True)
class Sources:
    """The haystack's text and the question sets, each read when a task first needs it.

    `essays` is a text file, a JSON file with the field "text", or a folder of .txt files; `haystack` is another text in
    its place. `squad` and `hotpot` are files in the official formats; where one is None, `download` (in the manner of
    hf_hub_download) fetches it from the hub. Reading raises DataError with the file, the place and the field.
    """

    essays: Path | None = None
    haystack: str | None = None
    squad: Path | None = None
    hotpot: Path | None = None
    download: Callable[..., str] = hf_hub_download

    @classmethod
    def from_folder(
        cls, folder: Path, essays: Path | None = None, download: Callable[..., str] = hf_hub_download
    ) -> "Sources":
        """What lies in a folder: PaulGrahamEssays*.json(.gz) or a folder essays, unless `essays` says where they are;
        *quad*, *hotpot_*. The question sets that are not there come from the hub.

        Files with "train" in their name are passed over. Raises DataError where there is no such folder.
        """
        if not folder.is_dir():
            raise DataError(f"there is no folder {folder}; give one with RULER's source files.")
        essays = essays or _first(folder, ("PaulGrahamEssays*.json", "PaulGrahamEssays*.json.gz", "essays"))
        paths = {name: _first(folder, kind.patterns) for name, kind in _KINDS.items()}
        return cls(essays, None, paths["squad"], paths["hotpot"], download)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The haystack's words."""
        if self.haystack is not None:
            text, where = self.haystack, "the haystack given"
        elif self.essays is None:
            raise DataError(
                "this task hides its needles in essays, which have no official place on the hub: put "
                "PaulGrahamEssays.json or a folder essays with .txt files into the folder with RULER's sources, or "
                "name a text file or such a folder with --haystack."
            )
        else:
            where = str(self.essays)
            files = sorted(self.essays.glob("*.txt")) if self.essays.is_dir() else [self.essays]
            text = "\n".join(read_text(path) for path in files)
        if not text.split():
            raise DataError(f"{where} has no text to hide needles in.")
        return tuple(text.split())

    def questions(self, name: str) -> QuestionSet:
        """The questions of "squad" or "hotpot"."""
        return self._squad if name == "squad" else self._hotpot

    @cached_property
    def _squad(self) -> QuestionSet:
        return read_squad(self._path("squad", self.squad))

    @cached_property
    def _hotpot(self) -> QuestionSet:
        return read_hotpot(self._path("hotpot", self.hotpot))

    def _path(self, name: str, path: Path | None) -> Path:
        kind = _KINDS[name]
        if path is not None:
            return path
        try:
            return Path(self.download(repo_type="dataset", **kind.hub))
        # Whatever stopped the download (no network, no such file, no right to it), the way out is the same.
        except Exception as error:
            raise DataError(
                f"{kind.hub['filename']} of the hub's data set {kind.hub['repo_id']} cannot be fetched "
                f"({type(error).__name__}: {error}); put {kind.title} into the folder "
                f"with RULER's sources, as one of {', '.join(kind.patterns)}."
            ) from error


def _first(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if "train" not in path.name]
    return paths[0] if paths else None
