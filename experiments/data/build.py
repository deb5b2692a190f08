"""Training data built into a folder, sample by sample: counted, within its bounds, resumable, the same for one seed.

The folder holds JSON lines for each source (`train-SOURCE-0000.jsonl`, `heldout-...`) and build.json, the manifest: how
they were made, and what was rejected and why. While a build runs, progress.json stands in its place.
"""

import hashlib
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from experiments.data.hub import HUB_SOURCES, LoadDataset, download_rows
from experiments.data.loom import LOOM_RATIOS, Loom, is_usable
from lkv.errors import DataError
from lkv.training.data.decontamination import NgramOverlap
from lkv.training.data.documents import ROW_READERS, item_texts, read_dataset, split_held_out
from lkv.training.data.mixture import BUILTIN_TEXTS, Mixture
from lkv.training.data.public_datasets import PUBLIC_DATASETS, DatasetIndex, digest_of, index_folder
from lkv.training.data.samples import Sample, tokenize_sample
from lkv.training.datasets import FORMAT, MANIFEST, PROGRESS, read_manifest
from lkv.utils.data_files import read_json, read_records
from lkv.utils.files import check_is_not_data, check_writable_folder, file_digest, strip_parent_dirs, write_text
from lkv.utils.prompts import encode, tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from experiments.data.__main__ import Build

_SHARD_SAMPLES = 200  # in a file, after which a stopped build continues
_UNLIMITED = 2**40  # tokens
_CHARS_SAMPLE = 40  # items of which characters a token are counted
_ROWS_A_SAMPLE = {"loom": 4, "loom-literal": 20}  # rows of the hub for one sample
_MIN_ROWS = 2000


class Wide(Mixture):
    """The mixture of `lkv train` as a recipe, which has one source of candidates."""

    def shares(self) -> dict[str, float]:
        """The share of the source."""
        return {"wide": 1.0}

    def num_candidates(self, source: str, samples: int) -> int:
        """How many candidates there are at most for `samples` samples."""
        return 20 * samples

    def candidate(self, source: str, number: int) -> Sample:
        """Make candidate `number`, with as many continuations as preset cpu has."""
        return self.sample(number, 6, 1200)


Recipe = Loom | Wide  # where candidates for samples come from


def build_dataset(
    config: "Build", tokenizer: "PreTrainedTokenizerBase", model_name: str, load: LoadDataset | None = None
) -> dict[str, Any]:
    """Build training data into a folder and return its manifest; `load` replaces `datasets.load_dataset`."""
    if config.recipe == "wide" and config.data is None:
        raise DataError("the recipe wide reads a folder of your own; name it with --data.")
    if config.data is not None:
        check_is_not_data(config.out, config.data, DataError)
    if not getattr(tokenizer, "chat_template", None):
        print(
            f"{model_name} has no chat template: lengths are counted in a plain question-and-answer form",
            file=sys.stderr,
        )
    overlap = NgramOverlap(config.against, config.words, config.share) if config.against else None
    # All that the samples depend on, with no path and no date: two builds give the same bytes.
    sources: dict[str, dict[str, Any]] = {}
    plan: dict[str, Any] = {
        "recipe": config.recipe,
        "seed": config.seed,
        "asked": {"train": config.samples, "heldout": config.held_out},
        "bounds": [config.min_tokens, config.max_tokens],
        "tokenizer": {"name": strip_parent_dirs(model_name), "sha256": tokenizer_digest(tokenizer)},
        "decontamination": overlap and {"n": config.words, "share": config.share, "files": overlap.files},
    }
    check_same_settings(config.out, plan)  # before rows are downloaded, which would replace those of that build

    if config.recipe == "wide":
        training, held_out = _open_wide(config, overlap, sources)
    else:
        training, held_out = _open_loom(config, tokenizer, overlap, sources, load)
    for name, counts in overlap.counts.items() if overlap else ():
        print(
            f"{name}: {counts.shared:,} of {counts.compared:,} items share n-grams, {counts.dropped:,} dropped",
            file=sys.stderr,
        )
        sources[name] |= vars(counts)
    plan["sources"] = sources
    if isinstance(training, Wide):
        plan["weights"] = training.weights
    builder = DatasetBuilder(config.out, plan, tokenizer, (config.min_tokens, config.max_tokens))
    return builder.build({"train": (training, config.samples), "heldout": (held_out, config.held_out)})


def _open_loom(
    config: "Build",
    tokenizer: "PreTrainedTokenizerBase",
    overlap: NgramOverlap | None,
    sources: dict[str, dict[str, Any]],
    load: LoadDataset | None,
) -> tuple[Recipe, Recipe]:
    """Loom's training and held-out sides, from local files or else the hub; `sources` gets the manifest's entries."""
    index: DatasetIndex | None = None
    if config.data is not None:
        index = index_folder(config.data, LOOM_RATIOS)
        print("\n".join(index.lines()), file=sys.stderr)
    items: dict[str, list[Any]] = {}
    for name in LOOM_RATIOS:
        if index and name in index.used:
            paths = index.used[name]
            all_items = read_dataset(name, paths, index.folder)
            origin = ", ".join(f"{path.name} (SHA-256 {file_digest(path)[:16]})" for path in paths)
            sources[name] = _describe_source(name, origin)
        else:
            all_items, sources[name] = _fetch_from_hub(name, config, load)
        usable = [item for item in all_items if is_usable(name, item)]
        sources[name]["items"] = len(usable)
        items[name] = overlap.clean(name, usable) if overlap else usable
        if len(items[name]) < 2:
            title = PUBLIC_DATASETS[name].title
            raise DataError(f"{title} has {len(items[name])} usable items ({sources[name]['from']}); give more of it.")
    chars: dict[str, float] = {}
    for name, group in items.items():
        texts = [max(item_texts(item), key=len)[:20_000] for item in group[:_CHARS_SAMPLE]]
        chars[name] = sum(map(len, texts)) / max(1, sum(len(encode(tokenizer, text)) for text in texts))
    bounds, is_literal = (config.min_tokens, config.max_tokens), config.recipe == "loom-literal"
    sides = [{name: split_held_out(group, side) for name, group in items.items()} for side in (False, True)]
    training, held_out = (Loom(side, chars, bounds, config.seed, is_literal) for side in sides)
    return training, held_out


def _fetch_from_hub(name: str, config: "Build", load: LoadDataset | None) -> tuple[list[Any], dict[str, Any]]:
    """Items drawn over all rows of a set on the hub, and its manifest entry."""
    hub = HUB_SOURCES[name]
    rows = max(_MIN_ROWS, round(_ROWS_A_SAMPLE[config.recipe] * config.samples * LOOM_RATIOS[name] / 100))
    print(
        f"{name}: drawing {rows:,} rows over all of {hub.repository}, {PUBLIC_DATASETS[name].licence}", file=sys.stderr
    )
    path, commit = download_rows(name, config.out / "fetched", rows, load)
    origin = f"{hub.repository} at {commit}, {', '.join(hub.splits)}"
    return list(ROW_READERS[name](read_records(path))), {**_describe_source(name, origin), "commit": commit}


def _describe_source(name: str, origin: str) -> dict[str, Any]:
    """A source in the manifest and on a policy's card."""
    dataset = PUBLIC_DATASETS[name]
    return {"title": dataset.title, "licence": dataset.licence, "from": origin}


def _open_wide(
    config: "Build", overlap: NgramOverlap | None, sources: dict[str, dict[str, Any]]
) -> tuple[Recipe, Recipe]:
    """Training and held-out sides of our own mixture; `sources` gets the manifest's entries."""
    assert config.data is not None
    training = Wide(config.data, (config.min_tokens, config.max_tokens), config.seed, overlap=overlap)
    print("\n".join(training.lines), file=sys.stderr)
    for name, paths in training.index.used.items():
        origin = ", ".join(path.name for path in paths[:8]) + (f" and {len(paths) - 8} more" if paths[8:] else "")
        origin += f" (SHA-256 of all {digest_of(paths)})"
        sources[name] = _describe_source(name, origin) | {"items": training.item_counts.get(name, 0)}
    for name, count in training.builtin_counts.items():
        title, licence, _ = BUILTIN_TEXTS[name]
        python = f"Python {platform.python_version()}"
        sources[name] = {"title": title, "licence": licence, "from": python, "items": count}
    return training, training.held_out(config.seed)


def check_same_settings(out: Path, plan: dict[str, Any]) -> None:
    """Raise DataError where `out` holds a build, finished or not, whose settings differ from those in `plan`."""
    plan = json.loads(json.dumps(plan))
    for path, earlier in _earlier_plans(out):
        if changed := [k for k in plan if not isinstance(earlier, dict) or earlier.get(k) != plan[k]]:
            raise DataError(
                f"{path} belongs to a build with other settings ({', '.join(changed)}); give the same settings "
                "to continue it, or another folder."
            )


def _earlier_plans(out: Path) -> Iterator[tuple[Path, Any]]:
    """The files of a build in `out` that hold its settings, with these."""
    for path in (out / MANIFEST, out / PROGRESS):
        if path.is_file():
            content = read_json(path)
            yield path, content.get("plan") if path.name == PROGRESS and isinstance(content, dict) else content


@dataclass
class SourceProgress:
    """Progress of one source of one side: the next candidate, and what became of those before it."""

    next: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # name to SHA-256


class DatasetBuilder:
    """Writes samples into `out`, for a `plan` that is all they depend on, with their tokens in `bounds`."""

    def __init__(self, out: Path, plan: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", bounds: tuple[int, int]):
        self._out, self._plan, self._tokenizer, self._bounds = out, plan, tokenizer, bounds
        self._progress: dict[str, SourceProgress] = {}
        check_writable_folder(out, DataError, "the training data")
        check_same_settings(out, plan)
        if (path := out / PROGRESS).is_file():
            try:
                self._progress = {k: SourceProgress(**values) for k, values in read_json(path)["streams"].items()}
            except (KeyError, TypeError, AttributeError) as error:
                raise DataError(f"{path} is not the progress of a build; delete it, or give another folder.") from error

    def build(self, sides: dict[str, tuple[Recipe, int]]) -> dict[str, Any]:
        """Build `sides`, each a recipe and its number of samples; returns and writes the manifest.

        Of a finished build, the sources of which a file is missing or damaged are built again.
        """
        finished = read_manifest(self._out) if (self._out / MANIFEST).is_file() else None
        streams: dict[str, Any] = finished["streams"] if finished else {}
        streams = {name: stream for name, stream in streams.items() if self._has_files(stream["files"])}
        if finished and len(streams) == len(finished["streams"]):
            return finished
        for side, (recipe, samples) in sides.items():
            rejected: Counter[str] = Counter()
            for source, count in split_samples(recipe.shares(), samples).items():
                name = f"{side}-{source}"
                if name in streams:
                    continue
                progress = self._build_source(recipe, name, source, count)
                rejected.update(progress.rejected)
                streams[name] = {
                    "wanted": count,
                    "samples": len(progress.tokens),
                    "candidates": progress.next,
                    "rejected": dict(sorted(progress.rejected.items())),
                    "tokens": _quantiles(progress.tokens),
                    "files": progress.files,
                }
            if samples and not any(s["samples"] for key, s in streams.items() if key.startswith(f"{side}-")):
                reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(rejected.items()))
                raise DataError(
                    f"no {side} sample has between {self._bounds[0]:,} and {self._bounds[1]:,} tokens (candidates: "
                    f"{reasons or 'there were none'}); give other --min-tokens and --max-tokens, or more data, and "
                    "another folder for --out."
                )
        manifest = {"format": FORMAT, **self._plan, "streams": streams}
        text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
        write_text(self._out / MANIFEST, text, DataError, "the manifest")
        (self._out / PROGRESS).unlink(missing_ok=True)
        return manifest

    def _build_source(self, recipe: Recipe, name: str, source: str, count: int) -> SourceProgress:
        if name not in self._progress or not self._has_files(self._progress[name].files):
            self._progress[name] = SourceProgress()
        progress = self._progress[name]
        (least, most), end = self._bounds, recipe.num_candidates(source, count)
        bar = tqdm(total=count, initial=len(progress.tokens), desc=name.replace("-", " ", 1), disable=None)
        while len(progress.tokens) < count and progress.next < end:
            lines: list[str] = []
            shard_size = min(_SHARD_SAMPLES, count - len(progress.tokens))
            while len(lines) < shard_size and progress.next < end:
                sample = recipe.candidate(source, progress.next)
                progress.next += 1
                ids = tokenize_sample(sample, self._tokenizer, _UNLIMITED, _UNLIMITED)
                # Of the context and its longest continuation, as a model reads them.
                tokens = len(ids.context) + max((len(target) for target, _ in ids.continuations), default=0)
                if not ids.continuations or not least <= tokens <= most:
                    reason = "too short" if tokens < least else "too long"
                    reason = reason if ids.continuations else "nothing to answer"
                    progress.rejected[reason] = progress.rejected.get(reason, 0) + 1
                    continue
                answers = [{"question": c.question, "target": c.target} for c in sample.continuations]
                row = {"source": sample.source, "tokens": tokens, "context": sample.context, "continuations": answers}
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
                progress.tokens.append(tokens)
                bar.update()
            if lines:
                file, content = f"{name}-{len(progress.files):04d}.jsonl", "".join(lines)
                write_text(self._out / file, content, DataError, "the training data")
                progress.files[file] = hashlib.sha256(content.encode()).hexdigest()
            state = {"plan": self._plan, "streams": {key: vars(value) for key, value in self._progress.items()}}
            write_text(self._out / PROGRESS, json.dumps(state), DataError, "the progress")
        bar.close()
        return progress

    def _has_files(self, files: dict[str, str]) -> bool:
        """Whether all `files`, from names to their SHA-256, are in the folder as they were written."""
        paths = {self._out / name: digest for name, digest in files.items()}
        return all(path.is_file() and file_digest(path) == digest for path, digest in paths.items())


def split_samples(shares: dict[str, float], samples: int) -> dict[str, int]:
    """Whole numbers in the ratio of `shares` that sum to `samples`: the largest remainders get what is left over."""
    exact = {name: share * samples for name, share in shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: samples - sum(counts.values())]:
        counts[name] += 1
    return counts


def _quantiles(tokens: list[int]) -> dict[str, float]:
    ordered = sorted(tokens)
    if not ordered:
        return {}
    at = {"least": 0, "quarter": len(ordered) // 4, "median": len(ordered) // 2, "most": len(ordered) - 1}
    return {name: ordered[i] for name, i in at.items()} | {"mean": round(sum(ordered) / len(ordered), 1)}


def describe_dataset(folder: Path) -> list[str]:
    """Lines that describe a built folder. Raises DataError for one that is none."""
    manifest = read_manifest(folder)
    columns = {"least": 8, "median": 8, "mean": 10, "most": 8}
    heading = "".join(f"{name:>{width}}" for name, width in columns.items())
    lines = [f"{'':24}{'wanted':>8}{'samples':>8}{'share':>8}{heading}  rejected"]
    totals: Counter[str] = Counter()
    for name, stream in manifest["streams"].items():
        totals[name.split("-")[0]] += stream["samples"]
    for name, stream in manifest["streams"].items():
        share = stream["samples"] / max(1, totals[name.split("-")[0]])
        rejected = ", ".join(f"{count} {reason}" for reason, count in stream["rejected"].items()) or "none"
        numbers = "".join(f"{stream['tokens'].get(key, 0):>{width},}" for key, width in columns.items())
        lines.append(f"{name:24}{stream['wanted']:>8,}{stream['samples']:>8,}{share:>8.1%}{numbers}  {rejected}")
    lines.append(
        f"recipe {manifest['recipe']}, seed {manifest['seed']}, lengths counted by {manifest['tokenizer']['name']}"
    )
    for name, source in manifest["sources"].items():
        dropped = f", {source['dropped']} dropped for overlap" if "dropped" in source else ""
        lines.append(
            f"{name}: {source['title']} ({source['licence']}), {source['items']:,} items{dropped}; {source['from']}"
        )
    return lines
