"""A journal that several processes write to."""

from collections.abc import Sequence
from pathlib import Path

from lkv.errors import DataError
from lkv.evals.processes import Process
from lkv.files import check_place
from lkv.journal import Record, append, check_header, read_samples, write_lines

_FREE = ("machine", "date")  # what may differ between the runs that fill one file


class SharedJournal:
    """Finished samples of one run, one JSON line each after a header that tells the settings.

    A process alone appends to `out` itself. Several write to a part each beside it, which the first process merges into
    `out` at the end, or when the run is taken up again by any number of processes.
    """

    def __init__(self, out: Path, header: Record, process: Process):
        """Raises DataError if `out` or a part holds samples of other settings, or is no file of samples."""
        self._out, self._header, self._process = out, header, process
        self._path = out if process.size == 1 else _part(out, process.rank)
        check_place(out, DataError, "the samples")
        for path in self._files():
            check_header(path, read_samples(path)[0] or header, header, _FREE)
        process.wait()
        self._merge()
        process.wait()
        self.done = {row["key"]: row for row in read_samples(out)[1]}
        if self._path != out:
            write_lines(self._path, [self._header])

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
        headers = []
        for path in self._files():
            header, read = read_samples(path)
            headers += [header] if header is not None else []
            for sample in read:
                samples.setdefault(sample["key"], sample)
        rank = {key: number for number, key in enumerate(order)}
        ordered = sorted(samples.values(), key=lambda sample: rank.get(sample["key"], len(rank)))
        write_lines(self._out, [*(headers or [self._header])[:1], *ordered])
        for part in _parts(self._out):
            part.unlink()


def _part(out: Path, rank: int) -> Path:
    return out.with_name(f"{out.stem}.part{rank}{out.suffix}")


def _parts(out: Path) -> list[Path]:
    start = f"{out.stem}.part"
    paths = [path for path in out.parent.iterdir() if path.name.startswith(start) and path.suffix == out.suffix]
    return sorted(path for path in paths if path.stem.removeprefix(start).isdigit())
