"""The samples behind a result file, kept beside it as samples/NAME.jsonl.gz; the result holds their digest."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

from lkv.errors import DataError
from lkv.utils.files import atomic_write
from lkv.utils.journal import Record


def samples_path(result: Path) -> Path:
    """The file of a result's samples."""
    return result.parent / "samples" / f"{result.stem}.jsonl.gz"


def keep_samples(result: Path, samples: Mapping[str, Record]) -> str:
    """Write the samples of a result file by key, one a line; return their digest. Raises DataError."""
    lines = "".join(json.dumps({"key": key} | row) + "\n" for key, row in samples.items()).encode()
    with atomic_write(samples_path(result), DataError, "the samples") as temporary:
        temporary.write_bytes(gzip.compress(lines, mtime=0))
    return hashlib.sha256(lines).hexdigest()


def read_kept_samples(result: Path) -> dict[str, Record]:
    """Read the samples of a result file by key.

    Raises:
        DataError: A file is missing or damaged, or the samples are those of another run.
    """
    path = samples_path(result)
    try:
        digest = json.loads(result.read_text()).get("samples")
        lines = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{result} and its samples {path} cannot be read ({error}); measure them again.") from error
    if digest != hashlib.sha256(lines).hexdigest():
        raise DataError(f"{path} holds samples of another run than {result}; take both from one run.")
    return {row.pop("key"): row for row in map(json.loads, lines.splitlines())}
