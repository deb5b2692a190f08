"""From the command line's settings to a built folder: sources found or fetched, checked, told of, and written."""

import sys
from dataclasses import dataclass
from os.path import exists
from pathlib import Path
from typing import Any

from lkv.errors import DataError
from lkv.training.data.build import Builder
from lkv.training.data.hub import Load, fetch
from lkv.training.data.loom import RATIOS, Loom, usable
from lkv.training.data.mixture import Mixture, split
from lkv.training.data.overlap import SHARE, N, Overlap
from lkv.training.data.records import document, records
from lkv.training.data.sample import Sample
from lkv.training.data.sets import SETS, Survey, digest_of, read_names, set_of, sha256_of, survey
from lkv.training.data.sources import READERS, read_set, texts_of
from lkv.utils.prompts import encode, tokenizer_digest

RECIPES = ("loom", "loom-literal", "wide")
_MEASURED = 40  # items whose characters a token are counted
_ROWS = {"loom": 4, "loom-literal": 20}  # rows of the hub for one wanted sample
_LEAST_ROWS = 2000


@dataclass(frozen=True)
class Settings:
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
    n: int = N
    share: float = SHARE
    lock: Path | None = None


def build(settings: Settings, tokenizer: Any, name: str, load: Load | None = None) -> dict[str, Any]:
    """Build the data that `settings` name with the lengths of `tokenizer`, that of the model `name`; the manifest.

    Raises DataError where a source is missing or holds nothing usable, before anything is written.
    """
    if settings.recipe == "wide" and settings.data is None:
        raise DataError("the recipe wide reads a folder of your own; name it with --data.")
    if not getattr(tokenizer, "chat_template", None):
        print(f"{name} has no chat template: lengths are counted in a plain question-and-answer form", file=sys.stderr)
    overlap = Overlap(settings.against, settings.n, settings.share) if settings.against else None
    make = _wide if settings.recipe == "wide" else _loom
    training, held_out, sources = make(settings, tokenizer, overlap, load)
    plan = _plan(settings, tokenizer, name, sources, overlap)
    builder = Builder(settings.out, plan, tokenizer, (settings.min_tokens, settings.max_tokens))
    return builder.build({"train": (training, settings.samples), "heldout": (held_out, settings.held_out)})


def _plan(
    settings: Settings, tokenizer: Any, name: str, sources: dict[str, Any], overlap: Overlap | None
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
    settings: Settings, tokenizer: Any, overlap: Overlap | None, load: Load | None
) -> tuple[Loom, Loom, dict[str, Any]]:
    surveyed = _survey(settings)
    sources: dict[str, Any] = {}
    items: dict[str, list[Any]] = {}
    for name in RATIOS:
        raw, origin = _local(surveyed, name) if surveyed and name in surveyed.taken else _fetched(settings, name, load)
        good = [item for item in raw if usable(name, item)]
        sources[name] = _about(name, len(good), origin, surveyed)
        items[name] = _checked(name, good, overlap, sources[name])
        if len(items[name]) < 2:
            raise DataError(f"{SETS[name].title} has {len(items[name])} usable items ({origin}); give more of it.")
    chars = {name: _chars(listed, tokenizer) for name, listed in items.items()}
    bounds, literal = (settings.min_tokens, settings.max_tokens), settings.recipe == "loom-literal"
    sides = [
        Loom({name: split(listed, side) for name, listed in items.items()}, chars, bounds, settings.seed, literal)
        for side in (False, True)
    ]
    return sides[0], sides[1], sources


def _survey(settings: Settings) -> Survey | None:
    if settings.data is None:
        return None
    names = read_names(settings.names) if settings.names else None
    surveyed = survey(settings.data, RATIOS, names)
    print("\n".join(surveyed.lines()), file=sys.stderr)
    return surveyed


def _local(surveyed: Survey, name: str) -> tuple[list[Any], str]:
    paths = surveyed.taken[name]
    digests = ", ".join(f"{path.name} (SHA-256 {sha256_of(path)[:16]})" for path in paths)
    return read_set(name, paths, surveyed.folder), digests


def _fetched(settings: Settings, name: str, load: Load | None) -> tuple[list[Any], str]:
    hub = SETS[name].hub
    assert hub is not None
    rows = max(_LEAST_ROWS, round(_ROWS[settings.recipe] * settings.samples * RATIOS[name] / 100))
    locked = _locked(settings.lock, name) if settings.lock else None
    print(f"{name}: fetching up to {rows:,} rows of {hub.repository}, {SETS[name].licence}", file=sys.stderr)
    path, commit = fetch(name, settings.out / "fetched", rows, locked, load)
    return list(READERS[name](records(path))), f"{hub.repository} at {commit}, {', '.join(hub.splits)}"


def _locked(lock: Path, name: str) -> str | None:
    """The commit that an earlier build's manifest names for a set, None where that was of local files."""
    try:
        commit = document(lock)["sources"][name].get("commit")
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{lock} names no source {name!r}; give the manifest of a build of the same recipe.") from error
    return None if commit is None else str(commit)


def _about(name: str, items: int, origin: str, surveyed: Survey | None = None) -> dict[str, Any]:
    """What a manifest and a policy's card tell of a source, a set that stands in for it by the map named as itself."""
    files = surveyed.taken.get(name, []) if surveyed else []
    known = SETS[next((meant for path in files if (meant := set_of(path)) not in ("", name)), name)]
    title = known.title if known is SETS[name] else f"{known.title}, in place of {SETS[name].title}"
    about: dict[str, Any] = {"title": title, "licence": known.licence, "items": items, "from": origin}
    if " at " in origin:
        about["commit"] = origin.split(" at ")[1].split(",")[0]
    return about


def _checked(name: str, items: list[Any], overlap: Overlap | None, about: dict[str, Any]) -> list[Any]:
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
    texts = [max(texts_of(item), key=len)[:20_000] for item in items[:_MEASURED]]
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
    settings: Settings, tokenizer: Any, overlap: Overlap | None, load: Load | None
) -> tuple[Wide, Wide, dict[str, Any]]:
    assert settings.data is not None
    dropped: dict[str, dict[str, Any]] = {}

    def checked(name: str, items: list[Any]) -> list[Any]:
        return _checked(name, items, overlap, dropped.setdefault(name, {})) if items else items

    names = read_names(settings.names) if settings.names else None
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
