"""Loom's data sets on the hub: where they are, and rows drawn from them."""

import json
import random
from collections.abc import Callable, Iterable
from itertools import chain, islice, product
from pathlib import Path
from shutil import copyfileobj
from typing import Any, NamedTuple

from lkv.errors import DataError
from lkv.training.data.public_datasets import PUBLIC_DATASETS
from lkv.utils.data_files import Row, read_json
from lkv.utils.extras import require
from lkv.utils.files import atomic_write, check_writable_folder, write_text

LoadDataset = Callable[..., Iterable[Row]]  # `datasets.load_dataset`


class HubSource(NamedTuple):
    """A data set on the hub: `parts` are arguments of `load_dataset` for each config or data folder that is read.

    `revision` is a commit; "refs/convert/parquet" is the hub's own conversion of a set that has no commit to pin: the
    first build looks up its commit, which later ones can be given. `files`: rows of a set too large to read whole come
    from the beginnings of that many files.
    """

    repository: str
    parts: tuple[dict[str, str], ...]
    splits: tuple[str, ...] = ("train",)
    revision: str = "refs/convert/parquet"
    gated: bool = False
    files: int = 0


_LANGUAGES = ("python", "java", "c++", "c-sharp")
HUB_SOURCES: dict[str, HubSource] = {
    "hotpotqa": HubSource(
        "hotpotqa/hotpot_qa", ({"name": "fullwiki"},), revision="1908d6afbbead072334abe2965f91bd2709910ab"
    ),
    "multi_news": HubSource("alexfabbri/multi_news", ({},)),
    "the_stack": HubSource(
        "bigcode/the-stack-dedup",
        tuple({"data_dir": f"data/{language}"} for language in _LANGUAGES),
        revision="17cad72c886a2858e08d4c349a00d6466f54df63",
        gated=True,
        files=16,
    ),
    "squad": HubSource(
        "rajpurkar/squad", ({"name": "plain_text"},), revision="7b6d24c440a36b6815f21b70d25016731768db1f"
    ),
    "trec": HubSource("CogComp/trec", ({},), revision="65752bf53af25bc935a0dce92fb5b6c930728450"),
    "mmlu": HubSource(
        "cais/mmlu", ({"name": "all"},), ("auxiliary_train", "dev"), "c30699e8356da336a370243923dbaf21066bb9fe"
    ),
    "narrativeqa": HubSource("deepmind/narrativeqa", ({},), revision="2e643e7363944af1c33a652d1c87320d0871c4e4"),
}
# The columns stored of a row that has more than are read.
_COLUMNS = {"the_stack": ("content", "max_stars_repo_path", "max_stars_repo_licenses", "lang")}


def download_rows(name: str, folder: Path, rows: int, load: LoadDataset | None = None) -> tuple[Path, str]:
    """Draw `rows` rows over all of the set `name` on the hub into a file in `folder`, unless they are there.

    A download that breaks keeps the splits that are complete. Returns the file and the commit. Raises DataError.
    """
    source = HUB_SOURCES[name]
    check_writable_folder(folder, DataError, "the download")
    path, about_path = folder / f"{name}.jsonl", folder / f"{name}.about.json"
    if about_path.is_file() and path.is_file():
        about = read_json(about_path)
        drawn = about.get("asked", about["rows"])  # other rows than of a smaller or larger draw, unless these are all
        if drawn == rows or (about["all"] and drawn < rows):
            return path, about["revision"]
    if load is None:
        require("data", "downloading data sets from the hub")
        import datasets

        load = datasets.load_dataset
    count = -(-rows // (len(source.parts) * len(source.splits)))
    parts, written = [], []
    try:
        commit = source.revision
        if "/" in commit:  # the hub's own conversion, as it is now
            from huggingface_hub import HfApi

            commit = str(HfApi().dataset_info(source.repository, revision=commit).sha)
        for number, (options, split) in enumerate(product(source.parts, source.splits)):
            part = folder / f"{name}.{commit[:12]}.{number}.{count}.part"
            if not part.is_file():
                stream = load(source.repository, split=split, revision=commit, streaming=True, **options)
                lines = _draw_lines(name, _spread(stream, source.files, count), count)
                temporary = part.with_suffix(".part.tmp")
                temporary.write_bytes(b"".join(line + b"\n" for line in lines))
                temporary.replace(part)
            with part.open("rb") as file:
                written.append(sum(1 for _ in file))
            parts.append(part)
    except DataError:
        raise
    # Whatever stopped it (no network, no permission, a set that has moved), the way out is the same.
    except Exception as error:
        dataset, first = PUBLIC_DATASETS[name], (str(error).strip() or "no message").splitlines()[0]
        reason = f"{type(error).__name__}: {first:.200}"
        terms = " its terms must be accepted there first (`hf auth login`);" if source.gated else ""
        raise DataError(
            f"{dataset.title} cannot be downloaded from {source.repository} ({reason});{terms} "
            f"run the same command again to continue, or put one of {', '.join(dataset.files)} into the --data folder."
        ) from error
    with atomic_write(path, DataError, "the download") as temporary, temporary.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                copyfileobj(file, whole)
    about = {"revision": commit, "rows": sum(written), "asked": rows, "all": all(n < count for n in written)}
    write_text(about_path, json.dumps(about), DataError, "the download")
    for part in folder.glob(f"{name}.*.part*"):
        part.unlink()
    return path, commit


def _spread(stream: Any, files: int, count: int) -> Iterable[Row]:
    """`stream`, or where it has more than `files` files (0: any number) the first rows of so many, spread evenly."""
    shards = getattr(stream, "num_shards", 1)
    if not files or shards <= files:
        return stream
    beginnings = (stream.shard(num_shards=shards, index=number * shards // files) for number in range(files))
    return chain.from_iterable(islice(shard, -(-count // files)) for shard in beginnings)


def _draw_lines(name: str, rows: Iterable[Row], count: int) -> list[bytes]:
    """`count` of all `rows` as JSON, each as likely as the others, in their order, without columns that are not read.

    A story of NarrativeQA comes with its first question alone.
    """
    rng, columns, stories = random.Random(0), _COLUMNS.get(name), dict[str, str]()
    drawn: list[tuple[int, Row]] = []
    for number, row in enumerate(rows):
        place = number if number < count else rng.randrange(number + 1)
        if place >= count:
            continue
        if columns:
            row = {key: row[key] for key in columns if key in row}
        if name == "narrativeqa" and isinstance(row.get("document"), dict):
            story = row["document"]
            stories.setdefault(story.get("id"), story.get("text"))
            row = {**row, "document": {"id": story.get("id"), "text": ""}}
        drawn[place : place + 1] = [(number, row)]
    drawn.sort(key=lambda pair: pair[0])
    for _, row in drawn:
        if name == "narrativeqa" and isinstance(row.get("document"), dict):
            row["document"]["text"] = stories.pop(row["document"]["id"], "")
    return [json.dumps(row, ensure_ascii=False, sort_keys=True).encode() for _, row in drawn]
