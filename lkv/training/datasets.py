"""The data of `lkv train` and `lkv fit`: open it, draw samples as token ids, and record it in the policy's card.

`BuiltDataset` reads what `python -m experiments.data build` wrote.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lkv.errors import DataError, TrainingError
from lkv.training.config import RECIPE, TrainingConfig
from lkv.training.data.decontamination import NgramOverlap
from lkv.training.data.mixture import BUILTIN_SOURCES, OWN_SOURCES, Mixture
from lkv.training.data.packing import fill_continuations
from lkv.training.data.public_datasets import digest_of
from lkv.training.data.samples import Continuation, Sample, TokenizedSample, tokenize_sample
from lkv.utils.data_files import read_json
from lkv.utils.devices import dtype_name
from lkv.utils.files import as_path, strip_parent_dirs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MIN_CHARS = 2000  # the least characters of own texts
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
            raise DataError(f"{folder} has no {title} samples; build more.")
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


Dataset = Mixture | BuiltDataset


def open_dataset(folder: Path, config: TrainingConfig) -> Dataset:
    """Open a folder that `python -m experiments.data build` wrote, or one of texts, code and data sets."""
    if not is_built(folder):
        return Mixture(folder, (config.min_tokens, config.max_tokens), config.seed)
    built = BuiltDataset(folder, config.seed)
    if built.max_tokens > config.max_tokens + config.max_continuation:
        raise TrainingError(
            f"{folder} was built for up to {built.max_tokens:,} tokens, but max_tokens is {config.max_tokens:,}; build "
            "it with a lower --max-tokens, or raise that of the training."
        )
    return built


def open_texts(
    texts: Sequence[str] = (), data: str | Path | None = None, against: Sequence[str | Path] = ()
) -> Mixture:
    """Open texts, a folder or both, plus those of Python and LKV, without items that overlap with `against`.

    Raises DataError for texts that are not strings, and for too little own text.
    """
    is_one = isinstance(texts, str)
    texts = tuple(texts)
    if is_one or not all(isinstance(text, str) for text in texts):
        raise DataError("texts must be a list of strings, one for each document.")
    folder = None if data is None else as_path(data, DataError, "the data folder")
    if folder is not None and is_built(folder):
        raise DataError(
            f"{folder} holds samples of experiments.data, which `lkv train` reads; give the folder of the documents "
            "themselves (--against leaves evaluated texts out here too)."
        )
    mixture = Mixture(
        folder,
        (RECIPE.min_tokens, RECIPE.max_tokens),
        RECIPE.seed,
        texts=texts,
        builtin=BUILTIN_SOURCES,
        overlap=NgramOverlap([as_path(path, DataError, "an evaluated file") for path in against]) if against else None,
        skip_unknown=True,
    )
    if (folder is not None or texts) and mixture.own_chars < _MIN_CHARS:
        where = "the texts hold" if folder is None else f"{folder} and the texts hold" if texts else f"{folder} holds"
        clean = "without what overlaps with the evaluated files, " if against else ""
        skipped = "; ".join(line for line in mixture.lines if line.startswith("skipped"))
        raise DataError(
            f"{clean}{where} {mixture.own_chars:,} characters of text; give at least {_MIN_CHARS:,} in .txt, .md, "
            ".jsonl, .html, .pdf or source files, or no data to use what comes with Python and LKV"
            f"{f' ({skipped})' if skipped else ''}."
        )
    return mixture


def draw_sample(
    data: Dataset,
    number: int,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    config: TrainingConfig,
    max_tokens: int | None = None,
) -> TokenizedSample:
    """Draw a sample as token ids.

    Args:
        data: Where to draw it from.
        number: The number of the sample, which determines its content.
        model: The model that reads it.
        tokenizer: Its tokenizer.
        config: The settings of continuations and lengths.
        max_tokens: The maximum number of tokens of the context (default: as in the settings).

    Raises:
        PromptError: For a token that the model has no embedding of.
    """
    from lkv.hf.spec import check_ids

    sample = data.sample(number, config.continuations, config.tokens_a_continuation)
    tokenized = tokenize_sample(sample, tokenizer, max_tokens or config.max_tokens, config.max_continuation)
    for ids in (tokenized.context, *(ids for ids, _ in tokenized.continuations)):
        check_ids(model, tokenizer, ids)
    return tokenized


def require_samples(samples: list[TokenizedSample]) -> list[TokenizedSample]:
    """Return the samples with continuations. Raises DataError if there are none."""
    if samples and not any(sample.continuations for sample in samples):
        raise DataError("no sample has a continuation to learn from; give longer texts, or lower --min-tokens.")
    return [sample for sample in samples if sample.continuations]


def make_card(
    model: "PreTrainedModel", model_name: str, config: TrainingConfig, data: Dataset, trained_tokens: int
) -> dict[str, Any]:
    """Make the card of a policy: its model and its training data.

    Args:
        model: The model.
        model_name: Its folder or hub id; folders above it are left out.
        config: The settings of the training.
        data: The training data.
        trained_tokens: The length in tokens of the longest contexts.
    """
    card = {
        "model": strip_parent_dirs(model_name),
        "data": data.origins,
        "data_digest": data.digest,
        "training": asdict(config) | {"dtype": dtype_name(model.dtype)},
        "trained_tokens": trained_tokens,
    }
    if data.decontamination:
        card["decontamination"] = data.decontamination
    if commit := getattr(model.config, "_commit_hash", None):
        card["revision"] = commit
    return card
