"""lkv data: training data built into a folder, and what a built folder holds."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lkv.cli.options import add_model, positive

_RECIPES = {
    "loom": "the paper's seven sets in its ratios, packed to a drawn length",
    "loom-literal": "the paper's samples as its table has them, and what its filter leaves of them",
    "wide": "our own mixture, of whatever --data holds",
}

_OPTIONS: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "data": (
        Path,
        None,
        "folder of data sets under their official names; what it lacks of the paper's is fetched",
    ),
    "map": (Path, None, 'JSON file that names the files of sets: {"squad": "mine.jsonl.gz"}'),
    "samples": (positive, 23_000, "samples to train on, as many as the paper has"),
    "held-out": (positive, 64, "samples to validate on, of items never trained on"),
    "min-tokens": (positive, 2000, "tokens of a sample at least, its answer included"),
    "max-tokens": (positive, 16_000, "tokens of a sample at most"),
    "seed": (int, 0, "another one draws other samples"),
    "words": (positive, 13, "words of an n-gram"),
    "share": (float, 0.1, "of a text's n-grams from which on it is dropped"),
    "lock": (Path, None, "build.json of an earlier build, whose commits on the hub are taken"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    build = actions.add_parser("build", help="build training data; run again, it goes on where it was")
    build.set_defaults(action=_build)
    recipes = "; ".join(f"{name}: {meaning}" for name, meaning in _RECIPES.items())
    build.add_argument("--recipe", choices=sorted(_RECIPES), default="loom", help=recipes)
    build.add_argument("--out", type=Path, required=True, help="folder for the data")
    for name, (kind, default, meaning) in _OPTIONS.items():
        shown = "" if default is None else f" (default: {default:,})"
        build.add_argument(f"--{name}", type=kind, default=default, help=meaning + shown)
    against = "evaluation files: training items that share their n-grams are dropped"
    build.add_argument("--against", type=Path, nargs="+", default=[], metavar="FILE", help=against)
    add_model(build)
    stats = actions.add_parser("stats", help="show what a built folder holds")
    stats.set_defaults(action=_stats)
    stats.add_argument("folder", type=Path, help="what `lkv data build` wrote")


def run(options: argparse.Namespace) -> None:
    """Build, or show."""
    options.action(options)


def _build(options: argparse.Namespace) -> None:
    from lkv.models.loading import DEFAULT, load_tokenizer
    from lkv.training.data.build import DataBuildConfig, build_dataset, describe_dataset

    _check(options)
    name = options.model or DEFAULT
    settings = DataBuildConfig(
        options.recipe, options.out, options.data, options.map, options.samples, options.held_out, options.seed,
        options.min_tokens, options.max_tokens, tuple(options.against), options.words, options.share, options.lock,
    )  # fmt: skip
    build_dataset(settings, load_tokenizer(name), name)
    print("\n".join(describe_dataset(options.out)))


def _check(options: argparse.Namespace) -> None:
    from lkv.errors import DataError

    if options.min_tokens >= options.max_tokens:
        raise DataError(
            f"--min-tokens {options.min_tokens} is not below --max-tokens {options.max_tokens}; change one of them."
        )
    if not 0 < options.share <= 1:
        raise DataError(f"--share is {options.share}, but it is above 0 and at most 1; give another.")


def _stats(options: argparse.Namespace) -> None:
    from lkv.training.data.build import describe_dataset

    print("\n".join(describe_dataset(options.folder)))
