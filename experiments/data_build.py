"""Building the paper's training data from local files: seconds, ratios, bounds, and whether two builds are the same.

python -m experiments.data_build --data TRAIN_FOLDER    (writes data_build.json)

The folder holds other sets than the paper's: `STAND_INS` has the official name under which each serves. Items serve
again in other company where a set has fewer than are wanted. An interrupted run with --work resumes there.
"""

import json
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from experiments.common import parse_options, save_rows
from experiments.data.build import DataBuildConfig, build_dataset
from experiments.data.loom import LOOM_RATIOS
from lkv.hf.loading import DEFAULT, load_tokenizer
from lkv.training.data.samples import Continuation, Sample, tokenize_sample
from lkv.training.datasets import MANIFEST

STAND_INS = {
    "hotpotqa_train_200.jsonl.gz": "hotpotqa_train.jsonl.gz",
    "multi_news_train_sample.jsonl.gz": "multi_news_train.jsonl.gz",
    "code_java_cpp_csharp.jsonl.gz": "code_java_cpp_csharp.jsonl.gz",
    "squad_train_subset.jsonl.gz": "squad_train.jsonl.gz",
    "trec_train_5500.label.gz": "train_5500.label.gz",
    "mmlu_dev_test.jsonl.gz": "mmlu_dev.jsonl.gz",
    "fairytaleqa_train.jsonl.gz": "narrativeqa_train.jsonl.gz",
}
BOUNDS = (2000, 16_000)  # tokens
_HELD_OUT, _RECOUNTED = 64, 500


def measured(folder: Path, options: Namespace, samples: int) -> list[dict[str, Any]]:
    """Rows of one number of samples: built once, and again where that is few."""
    outs = [folder / f"{samples}-{turn}" for turn in range(2 if samples <= options.twice_up_to else 1)]
    seconds = [built(out, options, samples) for out in outs]
    tokenizer, first = load_tokenizer(DEFAULT), outs[0]
    counts, contexts = Counter(row["source"] for row in _lines(first)), {hash(row["context"]) for row in _lines(first)}
    total, every = counts.total(), max(1, counts.total() // _RECOUNTED)
    again = [_counted(row, tokenizer) - row["tokens"] for n, row in enumerate(_lines(first)) if n % every == 0]
    processor, wall = (min(own[clock] for own in seconds) for clock in ("processor", "wall"))
    distances = (abs(100 * counts[name] / total - ratio) for name, ratio in LOOM_RATIOS.items())
    outside = sum(not BOUNDS[0] <= row["tokens"] <= BOUNDS[1] for row in _lines(first))
    measures: dict[str, tuple[float, str]] = {
        "samples": (total, f"built of {samples:,} asked for"),
        "processor seconds": (processor, "of one process, one thread"),
        "seconds": (wall, "of the clock" + " at most: the machine was busy" * options.busy),
        "samples a second": (total / processor, "of the processor, one thread"),
        "largest distance from a ratio": (max(distances), "points of a hundred"),
        "out of bounds": (outside, "samples"),
        "counted otherwise": (sum(map(bool, again)), f"of {len(again):,} samples, read back and tokenized again"),
        "different contexts": (len(contexts), f"of {total:,}"),
    }
    if len(outs) == 2:
        measures["files that differ"] = (_differing(*outs), f"of {len(list(first.iterdir()))}, two builds of one seed")
    rows = [
        {"asked": samples, "measure": name, "value": value, "unit": unit} for name, (value, unit) in measures.items()
    ]
    return rows + [_lengths(first, samples, name) for name in LOOM_RATIOS]


def built(out: Path, options: Namespace, samples: int) -> dict[str, float]:
    """Build into `out`, going on where an earlier run was stopped; the seconds of all runs together."""
    seconds_path, data = out.with_suffix(".seconds"), out.with_suffix(".data")
    spent = json.loads(seconds_path.read_text()) if seconds_path.is_file() else {"wall": 0.0, "processor": 0.0}
    data.mkdir(exist_ok=True)
    for name, official_name in STAND_INS.items():
        if not (data / official_name).exists():
            (data / official_name).symlink_to((options.data / name).resolve())
    settings = DataBuildConfig("loom", out, data, samples, _HELD_OUT, options.seed, *BOUNDS)
    if (out / MANIFEST).is_file():
        return spent
    clocks = time.perf_counter(), time.process_time()
    try:
        build_dataset(settings, load_tokenizer(DEFAULT), DEFAULT)
    finally:
        spent["wall"] += time.perf_counter() - clocks[0]
        spent["processor"] += time.process_time() - clocks[1]
        seconds_path.write_text(json.dumps(spent))
    return spent


def _lengths(folder: Path, samples: int, name: str) -> dict[str, Any]:
    own = sorted(row["tokens"] for row in _lines(folder) if row["source"] == name)
    sizes = {"least": own[0], "median": own[len(own) // 2], "most": own[-1]}
    return {"asked": samples, "measure": f"samples of {name}", "value": len(own), "unit": "samples", "tokens": sizes}


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("train-*.jsonl")):
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _counted(row: dict[str, Any], tokenizer: Any) -> int:
    """Tokens of a sample as a model reads them, counted anew from the file."""
    continuations = tuple(Continuation(own["question"], own["target"]) for own in row["continuations"])
    ids = tokenize_sample(Sample(row["source"], row["context"], continuations), tokenizer, 2**40, 2**40)
    return len(ids.context) + max(len(own) for own, _ in ids.continuations)


def _differing(first: Path, second: Path) -> int:
    """How many files are not byte for byte the same, or are in one folder alone."""
    one, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (first, second))
    return sum(one.get(name) != other.get(name) for name in one | other)


def main() -> None:
    options = parse_options(
        __doc__, "data_build", "with the files of STAND_INS", samples=[2000, 23_000], twice_up_to=2000, seed=0,
        busy=False, work=Path,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    with nullcontext(options.work) if options.work else tempfile.TemporaryDirectory() as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for samples in options.samples:
            rows += measured(Path(folder), options, samples)
            print("\n".join(f"{row['asked']:7,} {row['measure']:30} {row['value']:.5g}" for row in rows), flush=True)
    changed = {"busy": None, "work": None}
    save_rows(Namespace(**vars(options) | changed), "data_build", rows, options.seed, "TRAIN_FOLDER")


if __name__ == "__main__":
    main()
