"""lkv data: build training data into a folder, and show what a built folder holds."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lkv.cli.arguments import Argument, Command
from lkv.cli.options import ModelOptions, PositiveInt
from lkv.errors import DataError


class Build(ModelOptions, Command):
    """Build training data; an interrupted build resumes."""

    recipe: Literal["loom", "loom-literal", "wide"] = Field(
        default="loom",
        description="loom: the paper's seven sets in its ratios, packed to a drawn length; loom-literal: the paper's "
        "samples as in its table, after its filter; wide: our own mixture of whatever --data holds",
    )
    out: Path = Field(description="folder for the data")
    data: Path | None = Field(
        default=None, description="folder of data sets under their official names; missing sets are downloaded"
    )
    map: Path | None = Field(default=None, description='JSON file with names of sets: {"squad": "mine.jsonl.gz"}')
    samples: PositiveInt = Field(default=23_000, description="samples to train on, as many as in the paper")
    held_out: PositiveInt = Field(default=64, description="samples to validate on, of items never trained on")
    min_tokens: PositiveInt = Field(default=2000, description="tokens per sample at least, with its answer")
    max_tokens: PositiveInt = Field(default=16_000, description="tokens per sample at most")
    seed: int = Field(default=0, description="another seed draws other samples")
    against: Annotated[tuple[Path, ...], Argument(metavar="FILE")] = Field(
        default=(), description="evaluation files: training items that share their n-grams are dropped"
    )
    words: PositiveInt = Field(default=13, description="words per n-gram")
    share: float = Field(
        default=0.1, gt=0, le=1, description="a text is dropped from this fraction of shared n-grams on"
    )
    lock: Path | None = Field(default=None, description="build.json of an earlier build, to use its Hub commits")

    def run(self) -> None:
        """Build the data and show it."""
        if self.min_tokens >= self.max_tokens:
            raise DataError(
                f"--min-tokens {self.min_tokens} is not below --max-tokens {self.max_tokens}; change one of them."
            )
        from lkv.models.loading import DEFAULT, load_tokenizer
        from lkv.training.data.build import DataBuildConfig, build_dataset, describe_dataset

        config = DataBuildConfig(
            recipe=self.recipe,
            out=self.out,
            data=self.data,
            names=self.map,
            samples=self.samples,
            held_out=self.held_out,
            seed=self.seed,
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
            against=self.against,
            ngram_words=self.words,
            overlap_share=self.share,
            lock=self.lock,
        )
        name = self.model or DEFAULT
        build_dataset(config, load_tokenizer(name, self.revision), name)
        print("\n".join(describe_dataset(self.out)))


class Stats(Command):
    """Show what a built folder holds."""

    folder: Annotated[Path, Argument(positional=True, metavar="FOLDER")] = Field(
        description="folder that `lkv data build` wrote"
    )

    def run(self) -> None:
        """Print the statistics."""
        from lkv.training.data.build import describe_dataset

        print("\n".join(describe_dataset(self.folder)))


COMMAND = {"build": Build, "stats": Stats}
