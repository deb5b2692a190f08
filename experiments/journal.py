"""Journals of finished samples, from which an interrupted measurement resumes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lkv.utils.journal import Record, append_sample, check_header, lock_journal, read_samples, write_journal


class Journal(dict[str, Record]):
    """Finished samples by key, each appended to its file when it is added."""

    def __init__(self, path: Path, settings: Record):
        """Read the samples of `path`. Raises DataError if they were measured with other settings."""
        self._path = path
        header, samples = read_samples(path) if path.exists() else (None, [])
        check_header(path, settings if header is None else header, settings)
        write_journal(path, [settings, *samples])  # drops an incomplete last line: that sample is measured again
        super().__init__({row["key"]: {name: row[name] for name in row if name != "key"} for row in samples})

    def add(self, key: str, row: Record) -> None:
        """Append one sample. Raises DataError if the system refuses."""
        self[key] = row
        append_sample(self._path, {"key": key} | row)


@contextmanager
def open_journal(path: Path, settings: Record) -> Iterator[Journal]:
    """Open the journal of a resumable measurement.

    The file is deleted when the block ends without an error, and stays to resume from otherwise.
    """
    with lock_journal(path):
        yield Journal(path, settings)
        path.unlink(missing_ok=True)
