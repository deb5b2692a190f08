"""What the training data shares with evaluated texts, by the package's own n-grams.

python -m experiments.overlap --data TRAIN_FOLDER --against EVAL_FOLDER    (writes overlap.json)

The data is every set of that folder, with MMLU's test questions, which are not trained on.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import experiments.data.loom  # noqa: F401  registers readers
from experiments.common import parse_options
from experiments.result_file import write_results
from lkv.training.data.decontamination import NGRAM_WORDS, OVERLAP_SHARE, NgramOverlap
from lkv.training.data.documents import item_texts, mmlu, read_dataset, read_standard_library
from lkv.training.data.public_datasets import PUBLIC_DATASETS, index_folder
from lkv.utils.data_files import read_records

_TEST_TOO = "mmlu"


def read_items(folder: Path) -> dict[str, list[Any]]:
    """The items of every set of the folder, and Python's standard library."""
    used = index_folder(folder).used
    items = {name: read_dataset(name, paths, folder) for name, paths in used.items()}
    rows = [pair for path in used.get(_TEST_TOO, ()) for pair in read_records(path)]
    items[_TEST_TOO] = list(mmlu((place, {**row, "split": "dev"}) for place, row in rows))
    return items | {"python": read_standard_library()}


def compared(name: str, items: list[Any], overlap: NgramOverlap, each: dict[str, NgramOverlap]) -> dict[str, Any]:
    """A row: how many items of a set overlap, and with which files."""
    clean_items = overlap.clean(name, items)
    counts = overlap.counts[name]
    left = {id(item) for item in clean_items}
    files = Counter(
        file
        for item in items
        if id(item) not in left
        for file, own in each.items()
        if max(map(own.share, item_texts(item))) >= OVERLAP_SHARE
    )
    title = PUBLIC_DATASETS[name].title if name in PUBLIC_DATASETS else "Python standard library"
    row = {"set": name, "title": title, "n": counts.compared, "shared": counts.shared, "value": counts.dropped}
    unit = f"items of which a piece shares {OVERLAP_SHARE:.0%} of its {NGRAM_WORDS}-grams, or a short one is shared"
    return {**row, "unit": unit, "files": dict(sorted(files.items()))}


def main() -> None:
    options = parse_options(__doc__, "overlap", "of training data", against=...)
    paths = sorted(path for path in options.against.rglob("*") if path.is_file())
    overlap, each = NgramOverlap(paths), {path.name: NgramOverlap([path]) for path in paths}
    rows = []
    for name, items in read_items(options.data).items():
        rows.append(compared(name, items, overlap, each))
        print(f"{name:12} {rows[-1]['value']:5,} of {rows[-1]['n']:6,} {rows[-1]['files']}", flush=True)
    command = "python -m experiments.overlap --data TRAIN_FOLDER --against EVAL_FOLDER"
    write_results(options.out, "overlap", rows, 0, command, {"evaluated": overlap.files})


if __name__ == "__main__":
    main()
