"""What a built folder holds, and which files of a folder are which data sets."""

from collections import Counter
from pathlib import Path

from lkv.errors import DataError
from lkv.training.data.public_datasets import PUBLIC_DATASETS, NameMap
from lkv.training.datasets import read_manifest
from lkv.utils.data_files import read_json


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


def read_name_map(path: Path) -> NameMap:
    """Read a map of names: a JSON object from sets to a file or a list of files. Raises DataError for another."""
    mapping = read_json(path)
    if not isinstance(mapping, dict) or not mapping:
        raise DataError(f'{path} is not a map of names; write a JSON object such as {{"squad": "my_squad.jsonl.gz"}}.')
    allowed = [name for name in PUBLIC_DATASETS if name not in ("text", "code")]
    for name, files in mapping.items():
        if name not in allowed:
            raise DataError(f"{path} names the set {name!r}; give one of {', '.join(allowed)}.")
        names = [files] if isinstance(files, str) else files
        if not isinstance(names, list) or not names or not all(isinstance(file, str) for file in names):
            raise DataError(f"{path}: the files of {name!r} must be a name or a list of names.")
    return mapping
