"""A folder that `python -m experiments.data build` wrote: its manifest and its samples."""

import json
import random
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from lkv.errors import DataError
from lkv.training.data.mixture import OWN_SOURCES
from lkv.training.data.packing import fill_continuations
from lkv.training.data.public_datasets import digest_of
from lkv.training.data.samples import Continuation, Sample
from lkv.utils.data_files import read_json

MANIFEST, PROGRESS = "build.json", "progress.json"
FORMAT = 1


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a built folder. Raises DataError if the build is missing or unfinished."""
    if (folder / PROGRESS).is_file() and not (folder / MANIFEST).is_file():
        raise DataError(f"the build in {folder} is not finished; run `python -m experiments.data build` again.")
    manifest = read_json(folder / MANIFEST)
    is_valid = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    if not is_valid or not isinstance(manifest.get("streams"), dict):
        raise DataError(
            f"{folder / MANIFEST} is not a manifest of this version's experiments.data; build the data again."
        )
    return manifest


def is_built(folder: Path) -> bool:
    """Return whether `folder` is one of `python -m experiments.data build`, finished or not."""
    return (folder / MANIFEST).is_file() or (folder / PROGRESS).is_file()


class BuiltDataset:
    """The training or held-out samples of a finished build, reshuffled for every epoch."""

    def __init__(self, folder: Path, seed: int = 0, side: Literal["train", "heldout"] = "train"):
        self._folder, self._seed = folder, seed
        self.manifest = read_manifest(folder)
        streams = [stream for name, stream in self.manifest["streams"].items() if name.startswith(f"{side}-")]
        self._lines: list[tuple[Path, int]] = []  # file and first byte of each sample
        for path in (folder / name for stream in streams for name in stream["files"]):
            try:
                with path.open("rb") as file:
                    sizes = [len(line) for line in file]
            except OSError as error:
                raise DataError(f"{path} cannot be read ({error.strerror}); build the data again.") from error
            self._lines += [(path, end - size) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        expected = sum(stream["samples"] for stream in streams)
        if len(self._lines) != expected:
            raise DataError(f"{folder} holds {len(self._lines)} of {expected} samples; build it again.")
        if not self._lines:
            title = "training" if side == "train" else "held-out"
            raise DataError(f"{folder} holds no {title} samples; build more.")
        self._epoch, self._order = -1, list[int]()

    def held_out(self, seed: int = 0) -> "BuiltDataset":
        """Return the samples that are not for training. Raises DataError if there are none."""
        return BuiltDataset(self._folder, seed, "heldout")

    def __len__(self) -> int:
        return len(self._lines)

    def sample(self, index: int, continuations: int, tokens_a_continuation: int = 0) -> Sample:
        """Return sample number `index`; arguments as in `Mixture.sample`."""
        epoch, position = divmod(index, len(self))
        if epoch != self._epoch:
            self._order = random.Random(f"{self._seed}-{epoch}").sample(range(len(self)), len(self))
            self._epoch = epoch
        path, start = self._lines[self._order[position]]
        try:
            with path.open("rb") as file:
                file.seek(start)
                row = json.loads(file.readline())
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not what was built ({error}); build it again.") from error
        answers = [Continuation(c["question"], c["target"]) for c in row["continuations"]]
        rng = random.Random(f"{self._seed}-{index}")
        answers = fill_continuations(rng, row["context"], answers, row["tokens"], continuations, tokens_a_continuation)
        return Sample(row["source"], row["context"], tuple(answers))

    @property
    def max_tokens(self) -> int:
        """The greatest number of tokens that a sample can have."""
        return int(self.manifest["bounds"][1])

    @property
    def digest(self) -> str:
        """The digest of the manifest, which includes digests of the files."""
        return digest_of([self._folder / MANIFEST])

    @property
    def origins(self) -> dict[str, str]:
        """Sources with their data sets and licences, for a policy's card."""
        origins = {name: f"{own['title']} ({own['licence']})" for name, own in self.manifest["sources"].items()}
        return origins | ({"facts": OWN_SOURCES["facts"]} if self.manifest["recipe"] == "wide" else {})

    @property
    def lines(self) -> list[str]:
        """Lines that list the sources."""
        return [f"{name}: {origin}" for name, origin in self.origins.items()]

    @property
    def decontamination(self) -> dict[str, Any] | None:
        """The record of decontamination, for a policy's card; None without decontamination."""
        if self.manifest["decontamination"] is None:
            return None
        sets = {
            name: {"compared": source["compared"], "shared": source["shared"], "overlapping": source["dropped"]}
            for name, source in self.manifest["sources"].items()
            if "compared" in source
        }
        return {**self.manifest["decontamination"], "removed": True, "sets": sets}
