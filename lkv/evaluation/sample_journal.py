"""The journal of an evaluation, which can be extended by later runs and shared by several processes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lkv.errors import DataError
from lkv.utils.files import check_writable_file
from lkv.utils.journal import Record, append_sample, check_header, read_samples, write_journal

# Settings that may differ between the runs that fill one file; all others must be equal.
_FROM_FIRST_RUN = ("machine", "date")
_LISTS = ("methods", "retentions", "planned")
_SET_ONCE = ("policy", "policy_revision", "pattern", "pattern_from", "fingerprint")  # None until a run needs them
_MERGED = (*_LISTS, *_SET_ONCE, "policies")
_CONFLICT = object()


class SampleJournal:
    """Finished samples of an evaluation: one JSON line each, after a header with the settings.

    A later run may add methods, retentions and policies: it appends the sample again with more rows, and `finish`
    keeps the most complete line of each sample. A single process appends to `out`. Several processes append to one
    part file each; the first process merges the parts into `out` at the end, or when a later run of any number of
    processes resumes.
    """

    def __init__(
        self,
        out: Path,
        header: Record,
        rank: int = 0,
        world_size: int = 1,
        barrier: Callable[[], Any] = lambda: None,
        *,
        samples: Mapping[str, Record] | None = None,
    ):
        """Open `out` to add samples measured with the settings in `header`.

        Args:
            out: The file; it and its folder are created if needed. One that is refused stays as it was.
            header: The settings of this run.
            rank: The number of this process.
            world_size: How many processes share the samples.
            barrier: Returns once all processes have called it.
            samples: By key, what lines of this run's samples must agree with in the fields that they have.

        Raises:
            DataError: If `out` or a part holds samples of other settings or texts, or is not a journal.
        """
        self._out, self._header, self._rank, self._barrier = out, header, rank, barrier
        self._path = out if world_size == 1 else out.with_name(f"{out.stem}.part{rank}{out.suffix}")
        check_writable_file(out, DataError, "the samples")
        for path in self._files():
            written, lines = read_samples(path)
            for line in lines:
                _check_sample(path, line, (samples or {}).get(line["key"], {}))
            self._header = _merge_headers(path, written or header, self._header)
        barrier()
        self._merge_files()
        barrier()
        self.done = {row["key"]: row for row in read_samples(out)[1]}
        if self._path != out:
            write_journal(self._path, [self._header])

    def add(self, row: Record) -> None:
        """Append one sample; `row["key"]` is its name."""
        append_sample(self._path, row)

    def finish(self, order: Sequence[str]) -> None:
        """Wait for all processes and write all samples to `out`, in the order of their keys."""
        self._barrier()
        self._merge_files(order)
        self._barrier()

    def _files(self) -> list[Path]:
        return [path for path in [self._out, *self._parts()] if path.is_file()]

    def _parts(self) -> list[Path]:
        prefix = f"{self._out.stem}.part"
        paths = [path for path in self._out.parent.iterdir() if path.name.startswith(prefix)]
        return sorted(p for p in paths if p.suffix == self._out.suffix and p.stem.removeprefix(prefix).isdigit())

    def _merge_files(self, order: Sequence[str] = ()) -> None:
        """Write the samples of all files to `out`, those of `order` first, without incomplete lines."""
        if self._rank:
            return
        samples: dict[str, Record] = {}
        for path in self._files():
            for sample in read_samples(path)[1]:
                if not _has_valid_rows(sample):
                    raise DataError(
                        f"the sample {sample['key']!r} of {path} has rows of another kind; delete its line to measure "
                        "it again, or give another file."
                    )
                previous = samples.get(sample["key"], {})
                if len(sample.get("rows", ())) >= len(previous.get("rows", ())):
                    samples[sample["key"]] = sample
        position = {key: number for number, key in enumerate(order)}
        ordered = sorted(samples.values(), key=lambda sample: position.get(sample["key"], len(position)))
        write_journal(self._out, [self._header, *ordered])
        for part in self._parts():
            part.unlink()


def _check_sample(path: Path, line: Record, expected: Record) -> None:
    """Raise DataError if the line's sample differs in text, question or scoring."""
    changes = {"text_sha256": "of another text or --seed", "scoring_sha256": "with another metric or prompt"}
    for name, what in changes.items():
        if name in line and line[name] != expected.get(name, line[name]):
            raise DataError(
                f"{path} holds the sample {line['key']!r} {what}; use what it was made with, or another file."
            )


def _has_valid_rows(sample: Record) -> bool:
    """Return whether each measured or skipped row names its method and retention."""
    return all(
        isinstance(rows, list) and all(isinstance(row, dict) and {"method", "retention"} <= row.keys() for row in rows)
        for rows in (sample.get(name, []) for name in ("rows", "skipped"))
    )


def _merge_headers(path: Path, written: Record, header: Record) -> Record:
    """Return the header of a file that holds the samples of both runs. Raises DataError if their settings conflict."""
    merged = {name: _merge_setting(name, written, header) for name in {**header, **written}}
    check_header(path, written, header, [name for name, value in merged.items() if value is not _CONFLICT])
    return merged


def _merge_setting(name: str, written: Record, header: Record) -> Any:
    old: Any = written.get(name)
    new: Any = header.get(name)
    if name in _FROM_FIRST_RUN or old == new or (name in _MERGED and new is None):
        return old if name in written else new
    if (name in _MERGED and name not in written) or (name in _SET_ONCE and old is None):
        return new
    if name in _LISTS and isinstance(old, list):
        return [*old, *(value for value in new if value not in old)]
    if name == "policies" and isinstance(old, dict) and all(old[key] == new[key] for key in old.keys() & new.keys()):
        return old | new
    return _CONFLICT
