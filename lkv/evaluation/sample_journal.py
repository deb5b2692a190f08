"""A journal that several processes write to."""

from collections.abc import Sequence
from pathlib import Path

from lkv.errors import DataError
from lkv.evaluation.processes import Process
from lkv.utils.files import check_writable_file
from lkv.utils.journal import Record, append, check_header, read_samples, write_journal

_FREE = ("machine", "date")  # what may differ between the runs that fill one file; the first one's stays
_PLANNED = "planned"  # how many samples a run wants: may differ too; the most is kept
_LISTS, _TABLES, _LATER = (
    ("methods", "retentions"),
    ("policies",),
    ("policy", "policy_revision", "pattern", "pattern_from", "fingerprint"),
)
_GROWING = (*_LISTS, *_TABLES, *_LATER, _PLANNED)  # what may grow between them


class SampleJournal:
    """Finished samples of one run, one JSON line each after a header that tells the settings.

    A later run may ask for more methods, retentions and policies: a sample then stands again, with more rows, until
    `finish` leaves the fullest. A process alone appends to `out` itself. Several write to a part each beside it, which
    the first process merges into `out` at the end, or when the run is taken up again by any number of processes.
    """

    def __init__(self, out: Path, header: Record, process: Process):
        """Raises DataError if `out` or a part holds samples of other settings, or is no file of samples."""
        self._out, self._header, self._process = out, header, process
        self._path = out if process.size == 1 else _part(out, process.rank)
        check_writable_file(out, DataError, "the samples")
        for path in self._files():
            written = read_samples(path)[0] or header
            grown = [name for name in _GROWING if _fits(name, written, header)]
            check_header(path, written, header, [*_FREE, *grown])
            self._header = _grown(self._header, written)
        process.wait()
        self._merge()
        process.wait()
        self.done = {row["key"]: row for row in read_samples(out)[1]}
        if self._path != out:
            write_journal(self._path, [self._header])

    def add(self, row: Record) -> None:
        """Append one sample; `row["key"]` names it."""
        append(self._path, row)

    def finish(self, order: Sequence[str]) -> None:
        """Once every process has come here: all samples in `out`, in the order of their keys."""
        self._process.wait()
        self._merge(order)
        self._process.wait()

    def _files(self) -> list[Path]:
        return [path for path in [self._out, *_parts(self._out)] if path.is_file()]

    def _merge(self, order: Sequence[str] = ()) -> None:
        """All samples into `out`, those of `order` first; a line that an interruption tore is dropped."""
        if self._process.rank:
            return
        samples: dict[str, Record] = {}
        for path in self._files():
            for sample in read_samples(path)[1]:
                if not _is_whole(sample):
                    raise DataError(
                        f"the sample {sample['key']!r} of {path} has rows of another kind; delete what is damaged to "
                        "measure it again, or give another file."
                    )
                if _rows(sample) >= _rows(samples.get(sample["key"], {})):
                    samples[sample["key"]] = sample
        rank = {key: number for number, key in enumerate(order)}
        ordered = sorted(samples.values(), key=lambda sample: rank.get(sample["key"], len(rank)))
        write_journal(self._out, [self._header, *ordered])
        for part in _parts(self._out):
            part.unlink()


def _rows(sample: Record) -> int:
    return len(sample.get("rows", ()))


def _is_whole(sample: Record) -> bool:
    """Whether what says which methods were measured, at which retentions, does so."""
    return all(
        isinstance(rows, list) and all(isinstance(row, dict) and {"method", "retention"} <= row.keys() for row in rows)
        for rows in (sample.get(name, []) for name in ("rows", "skipped"))
    )


def _fits(name: str, written: Record, header: Record) -> bool:
    """Whether the two runs' settings `name` may stand in one file."""
    earlier, later = written.get(name), header.get(name)
    if name in _LISTS:
        return isinstance(written.get(name, []), list)
    if name == _PLANNED:
        return isinstance(written.get(name, 0), int)
    if name in _TABLES:
        if not isinstance(written.get(name, {}), dict):
            return False
        return all(earlier[key] == later[key] for key in earlier.keys() & later.keys()) if earlier and later else True
    return earlier == later or earlier is None or later is None


def _grown(header: Record, written: Record) -> Record:
    """`header` with what an earlier one has beside it; the earlier one's machine and date stay."""
    grown = header | {name: written[name] for name in _FREE if name in written}
    if _PLANNED in written:
        grown[_PLANNED] = max(written[_PLANNED], header.get(_PLANNED, 0))
    for name in _LISTS:
        if name in written and name in header:
            grown[name] = [*dict.fromkeys([*written[name], *header[name]])]
    grown |= {name: {**written[name], **header.get(name, {})} for name in _TABLES if name in written}
    return grown | {name: written[name] for name in _LATER if name in written and header.get(name) is None}


def _part(out: Path, rank: int) -> Path:
    return out.with_name(f"{out.stem}.part{rank}{out.suffix}")


def _parts(out: Path) -> list[Path]:
    start = f"{out.stem}.part"
    paths = [path for path in out.parent.iterdir() if path.name.startswith(start) and path.suffix == out.suffix]
    return sorted(path for path in paths if path.stem.removeprefix(start).isdigit())
