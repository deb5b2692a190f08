"""Decontamination (App. C.2): which training items share word n-grams with evaluated texts."""

import hashlib
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lkv.errors import DataError
from lkv.training.data.documents import ItemT, item_texts
from lkv.utils.data_files import read_json, read_member, read_records, read_text, split_lines

NGRAM_WORDS = 13  # long enough that chance does not make two texts share them
OVERLAP_SHARE = 0.1  # share of a text's n-grams
_SHORT_WORDS = 6  # per n-gram of a text that is shorter than an n-gram
Hashes = NDArray[np.uint64]
_WORD = re.compile(r"\w+")
_MULTIPLIER = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class OverlapCounts:
    """The number of a set's items that were compared, share an n-gram, and were dropped."""

    compared: int
    shared: int
    dropped: int


class NgramOverlap:
    """N-grams of the evaluated texts in `files`: JSON, JSON lines, CSV, Parquet, text, or a zip of JSON and text.

    An item overlaps if one of its texts (a paragraph, a question) shares at least `share` of its n-grams with them, or
    has fewer than n words and shares all of its 6-grams. `files` has their SHA-256, `counts` the results of `clean`.
    """

    def __init__(self, files: Iterable[Path], n: int = NGRAM_WORDS, share: float = OVERLAP_SHARE):
        self._n, self._share = n, share
        self._word_hashes: dict[str, int] = {}
        self._factors = [pow(_MULTIPLIER, i, 2**64) for i in range(max(n, _SHORT_WORDS))]
        self.files: dict[str, str] = {}
        self.counts: dict[str, OverlapCounts] = {}
        grams = {size: [np.zeros(0, np.uint64)] for size in (n, _SHORT_WORDS)}
        for path in files:
            strings = list(read_strings(path))
            if not any(string.strip() for string in strings):
                raise DataError(f"{path} has no text to compare with; give files of the evaluated sets.")
            name, digest = path.name, hashlib.sha256(path.read_bytes()).hexdigest()
            for folder in path.parents:  # parent folders distinguish files of the same name
                if self.files.get(name, digest) == digest:
                    break
                name = f"{folder.name}/{name}"
            self.files[name] = digest
            for words in map(self._hash_words, strings):
                for size, hashes in grams.items():
                    hashes.append(self._hash_grams(words, size))
        self._grams = {size: np.unique(np.concatenate(grams.pop(size))) for size in list(grams)}

    def share(self, text: str) -> float:
        """Return the share of n-grams of `text` found in evaluated texts; 1 or 0 for a text shorter than an n-gram."""
        words = self._hash_words(text)
        is_short = len(words) < self._n
        size = _SHORT_WORDS if is_short else self._n
        grams, evaluated = self._hash_grams(words, size), self._grams[size]
        if not len(grams) or not len(evaluated):
            return 0.0
        places = np.searchsorted(evaluated, grams).clip(max=len(evaluated) - 1)
        shared = float((evaluated[places] == grams).mean())
        return float(shared == 1.0) if is_short else shared

    def clean(self, name: str, items: list[ItemT]) -> list[ItemT]:
        """Return the items of the set `name` that do not overlap."""
        shares = [max(map(self.share, item_texts(item)), default=0.0) for item in items]
        clean = [item for item, share in zip(items, shares, strict=True) if share < self._share]
        if items:
            shared = sum(share > 0 for share in shares)
            self.counts[name] = OverlapCounts(len(items), shared, len(items) - len(clean))
        return clean

    def card(self) -> dict[str, Any]:
        """Return the record of decontamination, for a policy's card."""
        sets = {
            name: {"compared": counts.compared, "shared": counts.shared, "overlapping": counts.dropped}
            for name, counts in self.counts.items()
        }
        return {"n": self._n, "share": self._share, "files": self.files, "removed": True, "sets": sets}

    def _hash_words(self, text: str) -> Hashes:
        """Return a 64-bit hash of each word."""
        words = _WORD.findall(text.lower())
        for word in {word for word in words if word not in self._word_hashes}:
            digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
            self._word_hashes[word] = int.from_bytes(digest, "big")
        return np.fromiter((self._word_hashes[word] for word in words), np.uint64, len(words))

    def _hash_grams(self, words: Hashes, size: int) -> Hashes:
        """Return a 64-bit hash of each n-gram of `size` words, given the words' hashes."""
        count = max(0, len(words) - size + 1)
        total = np.zeros(count, np.uint64)
        for i, factor in enumerate(self._factors[:size]):
            total += words[i : i + count] * np.uint64(factor)
        return total


def read_strings(path: Path) -> Iterator[str]:
    """Read every string in an evaluation file. Raises DataError."""
    name = path.name.removesuffix(".gz")
    try:
        if name.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                for member in sorted(archive.namelist()):
                    content = read_member(archive, member, path).decode(errors="replace")
                    if member.endswith(".txt"):
                        yield content
                    elif member.endswith((".json", ".jsonl")):
                        for part in split_lines(content) if member.endswith(".jsonl") else [content]:
                            yield from _strings(json.loads(part))
        elif name.endswith(".json"):
            yield from _strings(read_json(path))
        elif name.endswith((".jsonl", ".parquet", ".csv")):
            for _, row in read_records(path):
                yield from _strings(row)
        else:
            yield read_text(path)
    except (OSError, ValueError, RecursionError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read ({error}); give the official file of the evaluated set.") from error


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
