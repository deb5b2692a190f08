"""Decontamination (App. C.2): which training items share word n-grams with evaluated texts."""

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lkv.errors import DataError
from lkv.training.data.documents import item_texts
from lkv.utils.data_files import read_records, read_text, split_lines
from lkv.utils.extras import require

NGRAM_WORDS = 13  # words: long enough that chance does not make two texts share them
OVERLAP_SHARE = 0.1  # of a text's n-grams
_SHORT = 6  # words from which a whole question is compared
_WORD = re.compile(r"\w+")
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class NgramOverlap:
    """N-grams of the evaluated texts. An item overlaps where one of its pieces (a paragraph, a question) shares at
    least `share` of its n-grams with them, or is shorter than n words and one of their strings as a whole."""

    def __init__(self, files: Iterable[Path], n: int = NGRAM_WORDS, share: float = OVERLAP_SHARE):
        """Raises DataError for a file that cannot be read or holds no text, and MissingPackageError without numpy."""
        require("data", "comparing n-grams")
        import numpy

        self._n, self._share, self._np = n, share, numpy
        self._words: dict[str, int] = {}
        self._factors = [pow(_MULTIPLIER, i, 2**64) for i in range(n)]
        self.files: dict[str, str] = {}
        self._short: set[str] = set()
        grams = [numpy.zeros(0, numpy.uint64)]
        for path in files:
            strings = list(strings_of(path))
            if not any(string.strip() for string in strings):
                raise DataError(f"{path} holds no text to compare with; give files of the evaluated sets.")
            self.files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
            grams += [self._grams(_WORD.findall(string.lower())) for string in strings]
            self._short |= {" ".join(w) for s in strings if _SHORT <= len(w := _WORD.findall(s.lower())) < n}
        self._known = numpy.unique(numpy.concatenate(grams))

    def share(self, piece: str) -> float:
        """Of the n-grams of `piece`, the share that evaluated texts have; 1 for a short piece that is one of theirs."""
        words = _WORD.findall(piece.lower())
        if len(words) < self._n:
            return float(" ".join(words) in self._short)
        grams = self._grams(words)
        places = self._np.searchsorted(self._known, grams).clip(max=max(0, len(self._known) - 1))
        return float((self._known[places] == grams).mean()) if len(self._known) else 0.0

    def clean(self, items: list[Any]) -> tuple[list[Any], "OverlapCounts"]:
        """The items that do not overlap, and what was found."""
        kept, shared = [], 0
        for item in items:
            most = max(map(self.share, item_texts(item)), default=0.0)
            shared += most > 0
            if most < self._share:
                kept.append(item)
        return kept, OverlapCounts(len(items), shared, len(items) - len(kept))

    def _grams(self, words: list[str]) -> Any:
        """A 64-bit hash of each n-gram."""
        np, known = self._np, self._words
        for word in words:
            if word not in known:
                known[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
        ids = np.fromiter((known[word] for word in words), np.uint64, len(words))
        count = max(0, len(words) - self._n + 1)
        total = np.zeros(count, np.uint64)
        for i, factor in enumerate(self._factors):
            total += ids[i : i + count] * np.uint64(factor)
        return total


@dataclass(frozen=True)
class OverlapCounts:
    """Of the items of a set: how many were compared, share any n-gram, and were dropped."""

    compared: int
    shared: int
    dropped: int


def strings_of(path: Path) -> Iterator[str]:
    """Every string in an evaluation file: JSON, JSON lines, CSV, Parquet, a zip of them, or plain text. DataError."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".zip"):
        yield from _zipped(path)
    elif name.endswith(".json"):
        yield from _strings(_json(read_text(path), str(path)))
    elif name.endswith((".jsonl", ".parquet", ".csv")):
        for _, row in read_records(path):
            yield from _strings(row)
    else:
        yield read_text(path)


def _zipped(path: Path) -> Iterator[str]:
    try:
        with zipfile.ZipFile(path) as whole:
            for name in sorted(whole.namelist()):
                if name.endswith((".jsonl", ".json", ".txt")):
                    content = io.TextIOWrapper(whole.open(name), "utf-8", errors="replace").read()
                    for line in split_lines(content) if name.endswith(".jsonl") else [content]:
                        yield from [line] if name.endswith(".txt") else _strings(_json(line, f"{path}, {name}"))
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({error}); give the official file of the evaluated set.") from error


def _json(content: str, origin: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin} is not JSON ({error}); give the official file of the evaluated set.") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
