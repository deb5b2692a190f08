"""The texts that `lkv fit` learns from."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

    def with_lengths(self, min_tokens: int, max_tokens: int) -> "FitTexts":
        """The same texts in contexts of about `min_tokens` to `max_tokens` tokens."""
        training, held_out = (side.with_lengths(min_tokens, max_tokens) for side in (self.training, self.held_out))
        return self._replace(training=training, held_out=held_out)


def open_texts(
    texts: Sequence[str] = (), data: str | Path | None = None, against: Sequence[str | Path] = ()
) -> FitTexts:
    """Read texts, a folder or both, beside those of Python and LKV, without what overlaps with `against`.

    Raises DataError for texts that are no strings, and for too little text of one's own.
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
    overlap = OverlapFilter([as_path(path, DataError, "an evaluated file") for path in against]) if against else None
    more: dict[str, Any] = {"filter_items": overlap} if overlap else {}
    lengths = RECIPE.min_tokens, RECIPE.max_tokens
    mixture = Mixture(folder, *lengths, RECIPE.seed, texts=texts, builtin=BUILTIN_SOURCES, skip_unknown=True, **more)
    if (folder is not None or texts) and mixture.own_chars < _MIN_CHARS:
        where = "the texts hold" if folder is None else f"{folder} and the texts hold" if texts else f"{folder} holds"
        clean = "without what overlaps with the evaluated files, " if overlap else ""
        skipped = "; ".join(line for line in mixture.lines if line.startswith("skipped"))
        raise DataError(
            f"{clean}{where} {mixture.own_chars:,} characters of text; give at least {_MIN_CHARS:,} in .txt, .md, "
            ".jsonl, .html, .pdf or source files, or no data to use what comes with Python and LKV"
            f"{f' ({skipped})' if skipped else ''}."
        )
    files = overlap.files.values() if overlap else ()
    digest = hashlib.sha256("".join([mixture.digest, *files]).encode()).hexdigest()[:16]
    return FitTexts(mixture, mixture.held_out(RECIPE.seed), digest, overlap.card() if overlap else None)
