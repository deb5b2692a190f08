"""Build."""

import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os.path import exists
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from lkv.errors import DataError
from lkv.training.data.decontamination import NGRAM_WORDS, OVERLAP_SHARE, NgramOverlap
from lkv.training.data.documents import READERS, item_texts, read_dataset
from lkv.training.data.packing import ask_to_repeat
from lkv.training.data.public_datasets import (
    PUBLIC_DATASETS,
    DatasetIndex,
    LoadDataset,
    digest_of,
    download_rows,
    index_folder,
    match_dataset,
    read_name_map,
    sha256_of,
)
from lkv.training.data.recipes import LOOM_RATIOS, Loom, Mixture, is_usable, split_held_out
from lkv.training.data.samples import Continuation, Sample, tokenize_sample
from lkv.utils.data_files import read_json, read_records
from lkv.utils.files import check_writable_folder, write_text
from lkv.utils.prompts import encode, tokenizer_digest

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
class SourceProgress:
    """How far one source of one side is: the next candidate, and what became of those before it."""

    next: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # name to SHA-256


class DatasetBuilder:
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
        stream = self._streams.setdefault(f"{side}-{source}", SourceProgress())
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
            ids = tokenize_sample(sample, self._tokenizer, _ENDLESS, _ENDLESS)
            longest = max((len(target) for target, _ in ids.continuations), default=0)
            counted.append((sample, len(ids.context) + longest if longest else 0))
        return counted

    def _reason(self, tokens: int) -> str:
        """Why a sample is rejected; "" where it is not."""
        least, most = self._bounds
        if not tokens:
            return "nothing to answer"
        return "too short" if tokens < least else "too long" if tokens > most else ""

    def _write(self, name: str, lines: list[str], stream: SourceProgress) -> None:
        content = "".join(lines)
        write_text(self._out / name, content, DataError, "the training data")
        stream.files[name] = hashlib.sha256(content.encode()).hexdigest()

    def _save(self) -> None:
        state = {"plan": self._plan, "streams": {name: vars(stream) for name, stream in self._streams.items()}}
        write_text(self._out / PROGRESS, json.dumps(state), DataError, "the progress")

    def _resumed(self) -> dict[str, SourceProgress]:
        for name in (MANIFEST, PROGRESS):
            path = self._out / name
            if path.is_file():
                before = read_json(path)
                plan = before.get("plan") if name == PROGRESS else {k: before.get(k) for k in self._plan}
                _check_plan(path, plan, self._plan)
        if not (self._out / PROGRESS).is_file():
            return {}
        try:
            return {
                name: SourceProgress(**fields) for name, fields in read_json(self._out / PROGRESS)["streams"].items()
            }
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


def describe_dataset(folder: Path) -> list[str]:
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
    manifest = read_json(folder / MANIFEST)
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != FORMAT
        or not isinstance(manifest.get("streams"), dict)
    ):
        raise DataError(f"{folder / MANIFEST} is no manifest of this version's `lkv data build`; build the data again.")
    return manifest


def is_built(folder: Path) -> bool:
    """Whether `folder` is one of `lkv data build`, finished or not."""
    return (folder / MANIFEST).is_file() or (folder / PROGRESS).is_file()


class BuiltDataset:
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
            asked.append(ask_to_repeat(rng, sample["context"]))
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


RECIPES = ("loom", "loom-literal", "wide")
_MEASURED = 40  # items whose characters a token are counted
_ROWS = {"loom": 4, "loom-literal": 20}  # rows of the hub for one wanted sample
_LEAST_ROWS = 2000


@dataclass(frozen=True)
class DataBuildConfig:
    """What `lkv data build` was asked for."""

    recipe: str
    out: Path
    data: Path | None = None
    names: Path | None = None
    samples: int = 23_000
    held_out: int = 64
    seed: int = 0
    min_tokens: int = 2000
    max_tokens: int = 16_000
    against: tuple[Path, ...] = ()
    n: int = NGRAM_WORDS
    share: float = OVERLAP_SHARE
    lock: Path | None = None


def build_dataset(
    settings: DataBuildConfig, tokenizer: Any, name: str, load: LoadDataset | None = None
) -> dict[str, Any]:
    """Build the data that `settings` name with the lengths of `tokenizer`, that of the model `name`; the manifest.

    Raises DataError where a source is missing or holds nothing usable, before anything is written.
    """
    if settings.recipe == "wide" and settings.data is None:
        raise DataError("the recipe wide reads a folder of your own; name it with --data.")
    if not getattr(tokenizer, "chat_template", None):
        print(f"{name} has no chat template: lengths are counted in a plain question-and-answer form", file=sys.stderr)
    overlap = NgramOverlap(settings.against, settings.n, settings.share) if settings.against else None
    make = _wide if settings.recipe == "wide" else _loom
    training, held_out, sources = make(settings, tokenizer, overlap, load)
    plan = _plan(settings, tokenizer, name, sources, overlap)
    builder = DatasetBuilder(settings.out, plan, tokenizer, (settings.min_tokens, settings.max_tokens))
    return builder.build({"train": (training, settings.samples), "heldout": (held_out, settings.held_out)})


def _plan(
    settings: DataBuildConfig, tokenizer: Any, name: str, sources: dict[str, Any], overlap: NgramOverlap | None
) -> dict[str, Any]:
    """All that the samples depend on, with no path and no date: two builds give the same bytes."""
    checked = {"n": settings.n, "share": settings.share, "files": overlap.files} if overlap else None
    return {
        "recipe": settings.recipe,
        "seed": settings.seed,
        "asked": {"train": settings.samples, "heldout": settings.held_out},
        "bounds": [settings.min_tokens, settings.max_tokens],
        "tokenizer": {"name": Path(name).name if exists(name) else name, "sha256": tokenizer_digest(tokenizer)},
        "decontamination": checked,
        "sources": sources,
    }


def _loom(
    settings: DataBuildConfig, tokenizer: Any, overlap: NgramOverlap | None, load: LoadDataset | None
) -> tuple[Loom, Loom, dict[str, Any]]:
    surveyed = _survey(settings)
    sources: dict[str, Any] = {}
    items: dict[str, list[Any]] = {}
    for name in LOOM_RATIOS:
        raw, origin = _local(surveyed, name) if surveyed and name in surveyed.taken else _fetched(settings, name, load)
        good = [item for item in raw if is_usable(name, item)]
        sources[name] = _about(name, len(good), origin, surveyed)
        items[name] = _checked(name, good, overlap, sources[name])
        if len(items[name]) < 2:
            raise DataError(
                f"{PUBLIC_DATASETS[name].title} has {len(items[name])} usable items ({origin}); give more of it."
            )
    chars = {name: _chars(listed, tokenizer) for name, listed in items.items()}
    bounds, literal = (settings.min_tokens, settings.max_tokens), settings.recipe == "loom-literal"
    sides = [
        Loom(
            {name: split_held_out(listed, side) for name, listed in items.items()},
            chars,
            bounds,
            settings.seed,
            literal,
        )
        for side in (False, True)
    ]
    return sides[0], sides[1], sources


def _survey(settings: DataBuildConfig) -> DatasetIndex | None:
    if settings.data is None:
        return None
    names = read_name_map(settings.names) if settings.names else None
    surveyed = index_folder(settings.data, LOOM_RATIOS, names)
    print("\n".join(surveyed.lines()), file=sys.stderr)
    return surveyed


def _local(surveyed: DatasetIndex, name: str) -> tuple[list[Any], str]:
    paths = surveyed.taken[name]
    digests = ", ".join(f"{path.name} (SHA-256 {sha256_of(path)[:16]})" for path in paths)
    return read_dataset(name, paths, surveyed.folder), digests


def _fetched(settings: DataBuildConfig, name: str, load: LoadDataset | None) -> tuple[list[Any], str]:
    hub = PUBLIC_DATASETS[name].hub
    assert hub is not None
    rows = max(_LEAST_ROWS, round(_ROWS[settings.recipe] * settings.samples * LOOM_RATIOS[name] / 100))
    locked = _locked(settings.lock, name) if settings.lock else None
    print(f"{name}: fetching up to {rows:,} rows of {hub.repository}, {PUBLIC_DATASETS[name].licence}", file=sys.stderr)
    path, commit = download_rows(name, settings.out / "fetched", rows, locked, load)
    return list(READERS[name](read_records(path))), f"{hub.repository} at {commit}, {', '.join(hub.splits)}"


def _locked(lock: Path, name: str) -> str | None:
    """The commit that an earlier build's manifest names for a set, None where that was of local files."""
    try:
        commit = read_json(lock)["sources"][name].get("commit")
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{lock} names no source {name!r}; give the manifest of a build of the same recipe.") from error
    return None if commit is None else str(commit)


def _about(name: str, items: int, origin: str, surveyed: DatasetIndex | None = None) -> dict[str, Any]:
    """What a manifest and a policy's card tell of a source, a set that stands in for it by the map named as itself."""
    files = surveyed.taken.get(name, []) if surveyed else []
    known = PUBLIC_DATASETS[next((meant for path in files if (meant := match_dataset(path)) not in ("", name)), name)]
    title = (
        known.title if known is PUBLIC_DATASETS[name] else f"{known.title}, in place of {PUBLIC_DATASETS[name].title}"
    )
    about: dict[str, Any] = {"title": title, "licence": known.licence, "items": items, "from": origin}
    if " at " in origin:
        about["commit"] = origin.split(" at ")[1].split(",")[0]
    return about


def _checked(name: str, items: list[Any], overlap: NgramOverlap | None, about: dict[str, Any]) -> list[Any]:
    """The items that evaluated texts do not hold; how many those were goes into `about`."""
    if overlap is None:
        return items
    kept, counts = overlap.clean(items)
    about |= {"compared": counts.compared, "shared": counts.shared, "dropped": counts.dropped}
    print(
        f"{name}: {counts.shared:,} of {counts.compared:,} items share n-grams, {counts.dropped:,} dropped",
        file=sys.stderr,
    )
    return kept


def _chars(items: list[Any], tokenizer: Any) -> float:
    """Characters a token of a source's own text."""
    texts = [max(item_texts(item), key=len)[:20_000] for item in items[:_MEASURED]]
    return sum(map(len, texts)) / max(1, sum(len(encode(tokenizer, text)) for text in texts))


class Wide:
    """Our own mixture as one stream of candidates."""

    def __init__(self, mixture: Mixture):
        self._mixture = mixture

    def shares(self) -> dict[str, float]:
        return {"wide": 1.0}

    def candidates(self, source: str, wanted: int) -> int:
        return 20 * wanted

    def candidate(self, source: str, number: int) -> Sample:
        return self._mixture.sample(number, _CONTINUATIONS, _TOKENS_A_CONTINUATION)


_CONTINUATIONS, _TOKENS_A_CONTINUATION = 6, 1200  # as preset cpu asks for


def _wide(
    settings: DataBuildConfig, tokenizer: Any, overlap: NgramOverlap | None, load: LoadDataset | None
) -> tuple[Wide, Wide, dict[str, Any]]:
    assert settings.data is not None
    dropped: dict[str, dict[str, Any]] = {}

    def checked(name: str, items: list[Any]) -> list[Any]:
        return _checked(name, items, overlap, dropped.setdefault(name, {})) if items else items

    names = read_name_map(settings.names) if settings.names else None
    folder, bounds = settings.data, (settings.min_tokens, settings.max_tokens)

    def make(validation: bool) -> Mixture:
        return Mixture(folder, *bounds, settings.seed, validation, checked, names)

    training, held_out = make(False), make(True)
    print("\n".join(training.survey.lines()), file=sys.stderr)
    sources = {}
    for name, paths in training.survey.taken.items():
        origin = ", ".join(path.name for path in paths[:8]) + (f" and {len(paths) - 8} more" if paths[8:] else "")
        origin += f" (SHA-256 of all {digest_of(paths)})"
        sources[name] = _about(name, training.items.get(name, 0), origin) | dropped.get(name, {})
    return Wide(training), Wide(held_out), sources
