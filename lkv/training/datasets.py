"""The data of `lkv train` and `lkv fit`: open it, draw samples as token ids, and record it in the policy's card."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lkv.errors import DataError, TrainingError
from lkv.training.config import TrainingConfig
from lkv.training.data.built_dataset import BuiltDataset, is_built
from lkv.training.data.decontamination import NgramOverlap
from lkv.training.data.mixture import BUILTIN_SOURCES, Mixture
from lkv.training.data.samples import TokenizedSample, tokenize_sample
from lkv.training.fit_plan import RECIPE
from lkv.utils.devices import dtype_name
from lkv.utils.files import as_path, strip_parent_dirs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Dataset = Mixture | BuiltDataset
_MIN_CHARS = 2000  # the least characters of own texts


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
    tokenizer: "PreTrainedTokenizerBase",
    config: TrainingConfig,
    max_tokens: int | None = None,
) -> TokenizedSample:
    """Draw a sample as token ids.

    Args:
        data: Where to draw it from.
        number: The number of the sample, which determines its content.
        tokenizer: The model's tokenizer.
        config: The settings of continuations and lengths.
        max_tokens: The most tokens of the context (default: as in the settings).
    """
    sample = data.sample(number, config.continuations, config.tokens_a_continuation)
    return tokenize_sample(sample, tokenizer, max_tokens or config.max_tokens, config.max_continuation)


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
