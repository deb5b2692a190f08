"""Samples of a folder that `lkv data build` wrote, for training."""

import json
import random
from functools import cached_property
from pathlib import Path
from typing import Any

from lkv.errors import DataError
from lkv.training.data.build import MANIFEST, PROGRESS, read_manifest
from lkv.training.data.packing import repeat
from lkv.training.data.sample import Continuation, Sample
from lkv.training.data.sets import digest_of


def is_built(folder: Path) -> bool:
    """Whether `folder` is one of `lkv data build`, finished or not."""
    return (folder / MANIFEST).is_file() or (folder / PROGRESS).is_file()


class Built:
    """The samples of one side, in an order that `seed` shuffles anew each time that all were read."""

    def __init__(self, folder: Path, seed: int = 0, validation: bool = False):
        """Raises DataError for a folder that is not finished, or files that are not those that were built."""
        self._folder, self._seed = folder, seed
        self.manifest = read_manifest(folder)
        side = "heldout-" if validation else "train-"
        self._places: list[tuple[Path, int, int]] = []
        for stream in (entry for name, entry in self.manifest["streams"].items() if name.startswith(side)):
            for name in stream["files"]:
                self._places += _lines(folder / name)
        expected = sum(entry["samples"] for name, entry in self.manifest["streams"].items() if name.startswith(side))
        if len(self._places) != expected:
            raise DataError(f"{folder} holds {len(self._places)} of {expected} samples; build it again.")
        if not self._places:
            raise DataError(f"{folder} holds no {'held-out' if validation else 'training'} samples; build more.")
        self._epoch, self._order = -1, list[int]()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def max_tokens(self) -> int:
        """The longest that a sample can be."""
        return int(self.manifest["bounds"][1])

    @property
    def digest(self) -> str:
        """Digest of the manifest, which has those of the files."""
        return digest_of([self._folder / MANIFEST])

    @property
    def origins(self) -> dict[str, str]:
        """Sources with their data sets and licences, for a policy's card."""
        return {name: f"{source['title']} ({source['licence']})" for name, source in self.manifest["sources"].items()}

    @property
    def decontamination(self) -> dict[str, Any] | None:
        """What was compared with which evaluated texts, for a policy's card; None where nothing was."""
        checked = self.manifest["decontamination"]
        if checked is None:
            return None
        sets = {
            name: {"compared": source["compared"], "shared": source["shared"], "overlapping": source["dropped"]}
            for name, source in self.manifest["sources"].items()
            if "compared" in source
        }
        return {**checked, "removed": True, "sets": sets}

    def sample(self, index: int, continuations: int, tokens_a_continuation: int = 0) -> Sample:
        """Sample number `index`; where it has fewer than `continuations`, it is asked to repeat parts of its text."""
        epoch, turn = divmod(index, len(self._places))
        if epoch != self._epoch:
            self._order = random.Random(f"{self._seed}-{epoch}").sample(range(len(self)), len(self))
            self._epoch = epoch
        sample = self._read(self._order[turn])
        wanted = continuations
        if tokens_a_continuation:
            wanted = min(continuations, 2 + max(0, int(sample["tokens"] - 2000) // tokens_a_continuation))
        asked = [
            Continuation(continuation["question"], continuation["target"]) for continuation in sample["continuations"]
        ][:wanted]
        rng = random.Random(f"{self._seed}-{index}")
        while len(asked) < wanted:
            asked.append(repeat(rng, sample["context"]))
        return Sample(sample["source"], sample["context"], tuple(asked))

    @cached_property
    def lines(self) -> list[str]:
        """What is trained on, for people."""
        return [f"{name}: {origin}" for name, origin in self.origins.items()]

    def _read(self, number: int) -> dict[str, Any]:
        path, start, size = self._places[number]
        try:
            with path.open("rb") as file:
                file.seek(start)
                return json.loads(file.read(size))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not what was built ({error}); build it again.") from error


def _lines(path: Path) -> list[tuple[Path, int, int]]:
    """Where each line of a file starts, and its size."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); build the data again.") from error
    starts, start = [], 0
    while (end := data.find(b"\n", start)) >= 0:
        starts.append((path, start, end - start))
        start = end + 1
    return starts
