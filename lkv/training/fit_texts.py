"""The texts that `lkv fit` learns from."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lkv.config import TrainingConfig
from lkv.errors import DataError
from lkv.training.data.built_dataset import is_built
from lkv.training.data.decontamination import OverlapFilter
from lkv.training.data.mixture import BUILTIN_SOURCES, Mixture
from lkv.training.fit_plan import RECIPE
from lkv.utils.files import as_path

_MIN_CHARS = 2000  # of own texts


class FitTexts(NamedTuple):
    """What a run of `lkv fit` reads: samples to learn from, held-out ones, their digest, and what was left out."""

    training: Mixture
    held_out: Mixture
    digest: str
    decontamination: dict[str, Any] | None


def open_texts(
    texts: Sequence[str],
    data: str | Path | None,
    config: TrainingConfig = RECIPE,
    filter_items: OverlapFilter | None = None,
) -> FitTexts:
    """Open a folder or texts, beside Python's own. Raises DataError for too little text of one's own."""
    folder = None if data is None else as_path(data, DataError, "the data folder")
    if folder is not None and is_built(folder):
        raise DataError(
            f"{folder} holds samples of `lkv data build`, which `lkv train` reads; give the folder of the documents "
            "themselves (--against leaves evaluated texts out here too)."
        )
    bounds = config.min_tokens, config.max_tokens
    keep_all = filter_items or (lambda _, items: items)
    mixture = Mixture(folder, *bounds, config.seed, keep_all, texts=texts, builtin=BUILTIN_SOURCES)
    if (folder is not None or texts) and mixture.own_chars < _MIN_CHARS:
        where = "the texts hold" if folder is None else f"{folder} holds"
        raise DataError(
            f"{where} {mixture.own_chars:,} characters of text; give at least {_MIN_CHARS:,} in .txt, .md, .jsonl, "
            ".pdf or source files, or no data to use Python's own texts."
        )
    files = filter_items.files.values() if filter_items else ()
    digest = hashlib.sha256("".join([mixture.digest, *files]).encode()).hexdigest()[:16]
    names = {*mixture.item_counts, *mixture.builtin_counts, "texts"}
    decontamination = filter_items.card(names) if filter_items else None
    return FitTexts(mixture, mixture.held_out(config.seed), digest, decontamination)
