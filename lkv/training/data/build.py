"""A training set written to a folder, sample by sample: counted, within its bounds, resumable, the same for one seed.

The folder holds JSON lines a source (`train-SOURCE-0000.jsonl`, `heldout-...`) and build.json, which says what they
were made of and what was rejected, why. While a build runs, progress.json stands in build.json's place.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from lkv.errors import DataError
from lkv.training.data.records import document
from lkv.training.data.sample import Sample, tokenize
from lkv.utils.files import check_writable_folder, write_text

FORMAT = 1
MANIFEST, PROGRESS = "build.json", "progress.json"
_SHARD = 200  # samples of a file, and between two places that a stopped build goes on from
_BATCH = 16  # candidates counted at a time
_ENDLESS = 2**40


class Recipe(Protocol):
    """Where candidates come from."""

    def shares(self) -> dict[str, float]:
        """Of all samples, the share of each source."""

    def candidates(self, source: str, wanted: int) -> int:
        """How many candidates there are at most for `wanted` samples."""

    def candidate(self, source: str, number: int) -> Sample:
        """Candidate `number` of `source`, the same whenever it is asked for."""


@dataclass
class Stream:
    """How far one source of one side is: the next candidate, and what became of those before it."""

    next: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # name to SHA-256


class Builder:
    """Writes the samples of recipes into a folder."""

    def __init__(self, out: Path, plan: dict[str, Any], tokenizer: Any, bounds: tuple[int, int]):
        """`plan` is everything that the samples depend on; a folder of another plan is refused with DataError.
        `bounds` are the least and the greatest number of tokens of a sample, its answer included."""
        self._out, self._plan, self._tokenizer, self._bounds = out, plan, tokenizer, bounds
        check_writable_folder(out, DataError, "the training data")
        self._streams = self._resumed()

    def build(self, sides: dict[str, tuple[Recipe, int]]) -> dict[str, Any]:
        """Build `sides`, each a recipe and how many samples to make of it; returns and writes the manifest."""
        if (self._out / MANIFEST).is_file():  # of this very plan, and finished
            return read_manifest(self._out)
        wanted: dict[str, int] = {}
        for side, (recipe, samples) in sides.items():
            for source, count in _wanted(recipe.shares(), samples).items():
                wanted[f"{side}-{source}"] = count
                self._fill(recipe, side, source, count)
            if samples:
                self._check_some(side)
        manifest = {"format": FORMAT, **self._plan, "streams": self._told(wanted)}
        write_text(
            self._out / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n", DataError, "the manifest"
        )
        (self._out / PROGRESS).unlink(missing_ok=True)
        return manifest

    def _check_some(self, side: str) -> None:
        """Raise DataError where a side, of which samples are wanted, got none."""
        streams = [stream for name, stream in self._streams.items() if name.startswith(f"{side}-")]
        if streams and not any(stream.tokens for stream in streams):
            rejected = sum((Counter(stream.rejected) for stream in streams), Counter())
            why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(rejected.items())) or "there were none"
            least, most = self._bounds
            raise DataError(
                f"no {side} sample has between {least:,} and {most:,} tokens (candidates: {why}); give other "
                "--min-tokens and --max-tokens, or more data, and another folder for --out."
            )

    def _fill(self, recipe: Recipe, side: str, source: str, wanted: int) -> None:
        stream = self._streams.setdefault(f"{side}-{source}", Stream())
        last = recipe.candidates(source, wanted)
        bar = tqdm(total=wanted, initial=len(stream.tokens), desc=f"{side} {source}", disable=None)
        while len(stream.tokens) < wanted and stream.next < last:
            lines: list[str] = []
            goal = min(_SHARD, wanted - len(stream.tokens))
            while len(lines) < goal and stream.next < last:
                numbers = range(stream.next, min(last, stream.next + _BATCH))
                for sample, tokens in self._counted([recipe.candidate(source, number) for number in numbers]):
                    stream.next += 1
                    if reason := self._reason(tokens):
                        stream.rejected[reason] = stream.rejected.get(reason, 0) + 1
                        continue
                    lines.append(_line(sample, tokens))
                    stream.tokens.append(tokens)
                    bar.update()
                    if len(lines) == goal:
                        break
            if lines:
                self._write(f"{side}-{source}-{len(stream.files):04d}.jsonl", lines, stream)
            self._save()
        bar.close()

    def _counted(self, samples: Sequence[Sample]) -> list[tuple[Sample, int]]:
        """Samples with the tokens of the context and its longest continuation, as a model reads them."""
        counted = []
        for sample in samples:
            ids = tokenize(sample, self._tokenizer, _ENDLESS, _ENDLESS)
            longest = max((len(target) for target, _ in ids.continuations), default=0)
            counted.append((sample, len(ids.context) + longest if longest else 0))
        return counted

    def _reason(self, tokens: int) -> str:
        """Why a sample is rejected; "" where it is not."""
        least, most = self._bounds
        if not tokens:
            return "nothing to answer"
        return "too short" if tokens < least else "too long" if tokens > most else ""

    def _write(self, name: str, lines: list[str], stream: Stream) -> None:
        content = "".join(lines)
        write_text(self._out / name, content, DataError, "the training data")
        stream.files[name] = hashlib.sha256(content.encode()).hexdigest()

    def _save(self) -> None:
        state = {"plan": self._plan, "streams": {name: vars(stream) for name, stream in self._streams.items()}}
        write_text(self._out / PROGRESS, json.dumps(state), DataError, "the progress")

    def _resumed(self) -> dict[str, Stream]:
        for name in (MANIFEST, PROGRESS):
            path = self._out / name
            if path.is_file():
                before = document(path)
                plan = before.get("plan") if name == PROGRESS else {k: before.get(k) for k in self._plan}
                _check_plan(path, plan, self._plan)
        if not (self._out / PROGRESS).is_file():
            return {}
        try:
            return {name: Stream(**fields) for name, fields in document(self._out / PROGRESS)["streams"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{self._out / PROGRESS} is no progress of a build; delete it, or give another folder."
            ) from error

    def _told(self, wanted: dict[str, int]) -> dict[str, Any]:
        return {
            name: {
                "wanted": wanted[name],
                "samples": len(stream.tokens),
                "candidates": stream.next,
                "rejected": dict(sorted(stream.rejected.items())),
                "tokens": _quantiles(stream.tokens),
                "files": stream.files,
            }
            for name, stream in self._streams.items()
            if name in wanted
        }


def _check_plan(path: Path, theirs: Any, ours: dict[str, Any]) -> None:
    told = json.loads(json.dumps(ours))
    if theirs != told:
        apart = [name for name in told if not isinstance(theirs, dict) or theirs.get(name) != told[name]]
        raise DataError(
            f"{path} belongs to a build with other settings ({', '.join(apart)}); give the same settings to go on "
            "with it, or another folder."
        )


def _wanted(shares: dict[str, float], samples: int) -> dict[str, int]:
    """Whole numbers in the ratio of `shares` that sum to `samples`: the largest remainders get what is left over."""
    exact = {name: share * samples for name, share in shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    rest = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in rest[: samples - sum(counts.values())]:
        counts[name] += 1
    return counts


def _quantiles(tokens: list[int]) -> dict[str, float]:
    ordered = sorted(tokens)
    if not ordered:
        return {}
    at = {"least": 0, "quarter": len(ordered) // 4, "median": len(ordered) // 2, "most": len(ordered) - 1}
    return {name: ordered[i] for name, i in at.items()} | {"mean": round(sum(ordered) / len(ordered), 1)}


def _line(sample: Sample, tokens: int) -> str:
    row = {
        "source": sample.source,
        "tokens": tokens,
        "context": sample.context,
        "continuations": [
            {"question": continuation.question, "target": continuation.target} for continuation in sample.continuations
        ],
    }
    # A lone surrogate would not go into UTF-8.
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace").decode() + "\n"


def stats(folder: Path) -> list[str]:
    """Lines that tell what a built folder holds. Raises DataError for one that is none."""
    manifest = read_manifest(folder)
    lines = [
        f"{'':24}{'wanted':>8}{'samples':>8}{'share':>8}{'least':>8}{'median':>8}{'mean':>10}{'most':>8}  rejected"
    ]
    totals = Counter(name.split("-")[0] for name, entry in manifest["streams"].items() for _ in range(entry["samples"]))
    for name, entry in manifest["streams"].items():
        tokens = entry["tokens"]
        share = entry["samples"] / max(1, totals[name.split("-")[0]])
        rejected = ", ".join(f"{count} {reason}" for reason, count in entry["rejected"].items()) or "none"
        numbers = "".join(f"{tokens.get(key, 0):>{width},}" for key, width in _COLUMNS)
        lines.append(f"{name:24}{entry['wanted']:>8,}{entry['samples']:>8,}{share:>8.1%}{numbers}  {rejected}")
    lines.append(
        f"recipe {manifest['recipe']}, seed {manifest['seed']}, lengths counted by {manifest['tokenizer']['name']}"
    )
    for name, entry in manifest["sources"].items():
        dropped = f", {entry['dropped']} dropped for overlap" if "dropped" in entry else ""
        lines.append(
            f"{name}: {entry['title']} ({entry['licence']}), {entry['items']:,} items{dropped}; {entry['from']}"
        )
    return lines


_COLUMNS = (("least", 8), ("median", 8), ("mean", 10), ("most", 8))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a built folder. Raises DataError where the build is not there, or not finished."""
    if (folder / PROGRESS).is_file() and not (folder / MANIFEST).is_file():
        raise DataError(f"the build in {folder} is not finished; run its `lkv data build` again to go on.")
    manifest = document(folder / MANIFEST)
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != FORMAT
        or not isinstance(manifest.get("streams"), dict)
    ):
        raise DataError(f"{folder / MANIFEST} is no manifest of this version's `lkv data build`; build the data again.")
    return manifest
