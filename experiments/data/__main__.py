"""python -m experiments.data: build training data into a folder, and show what a built folder holds."""

import sys
from pathlib import Path
from typing import Literal

from lkv.cli.command import Command, option
from lkv.cli.main import main
from lkv.cli.options import ModelOptions, PositiveInt
from lkv.errors import DataError


class Build(ModelOptions):
    """Build training data; an interrupted build resumes."""

    recipe: Literal["loom", "loom-literal", "wide"] = option(
        "loom: the paper's seven sets in its ratios, packed to a drawn length; loom-literal: the paper's "
        "samples as in its table, after its filter; wide: our own mixture of whatever --data holds",
        "loom",
    )
    out: Path = option("folder for the data", ...)
    data: Path | None = option("folder of data sets under their official names; missing sets are downloaded")
    samples: PositiveInt = option("samples to train on, as many as in the paper", 23_000)
    held_out: PositiveInt = option("samples to validate on, of items never trained on", 64)
    min_tokens: PositiveInt = option("tokens per sample at least, with its answer", 2000)
    max_tokens: PositiveInt = option("tokens per sample at most", 16_000)
    seed: int = option("another seed draws other samples", 0)
    against: tuple[Path, ...] = option(
        "evaluation files: training items that share their n-grams are dropped", (), metavar="FILE"
    )
    words: PositiveInt = option("words per n-gram", 13)
    share: float = option("a text is dropped from this fraction of shared n-grams on", 0.1, gt=0, le=1)

    def run(self) -> None:
        """Build the data and show it."""
        if self.min_tokens >= self.max_tokens:
            raise DataError(
                f"--min-tokens {self.min_tokens} is not below --max-tokens {self.max_tokens}; change one of them."
            )
        if not self.against:
            self.refuse_unread("a build without --against", "--words", "--share")
        from experiments.data.build import build_dataset, describe_dataset
        from lkv.hf.loading import load_tokenizer

        build_dataset(self, load_tokenizer(self.model_name, self.revision), self.model_name)
        print("\n".join(describe_dataset(self.out)))


class Stats(Command):
    """Show what a built folder holds."""

    folder: Path = option("folder of `python -m experiments.data build`", ..., positional=True, metavar="FOLDER")

    def run(self) -> None:
        """Print the statistics."""
        from experiments.data.build import describe_dataset

        print("\n".join(describe_dataset(self.folder)))


Data: dict[str, type[Command]] = {"build": Build, "stats": Stats}


if __name__ == "__main__":
    sys.exit(main(command=Data, program="python -m experiments.data"))
