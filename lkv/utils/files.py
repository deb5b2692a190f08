"""Output files: written beside their place under a name of their own, then renamed, so that none is ever half there."""

import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lkv.errors import LkvError


def as_path(name: Any, error: type[LkvError], subject: str) -> Path:
    """`name` as a path; `error`, which names `subject`, for a value that cannot be one."""
    try:
        if b"\0" not in os.fsencode(name) and not isinstance(name, bytes):
            return Path(name)
    except (TypeError, UnicodeEncodeError):
        pass
    raise error(f"{subject} is {name!r}, but it is a path: give a text (str) or a pathlib.Path.")


@contextmanager
def atomic_write(path: Path, error: type[LkvError], subject: str) -> Iterator[Path]:
    """Give a path to write to; when the block ends well, what was written takes the place of `path`.

    Missing folders are made. Whatever the system refuses, in the block too, becomes one `error` naming `subject` and
    `path`; an older file then stays as it was.
    """
    if not path.name:
        raise error(f"{path} is a folder; give a file for {subject}.")
    # Of a fixed length, as the name itself may be as long as names can be; two threads never share one.
    temporary = path.with_name(f".{zlib.crc32(os.fsencode(path.name)):08x}-{threading.get_native_id()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as problem:
        raise error(
            f"{subject} cannot be written to {path} ({error_reason(problem)}); nothing was changed there: "
            "give another place, or make this one writable."
        ) from problem
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, error: type[LkvError], subject: str) -> None:
    """Write `text` as UTF-8, whole or not at all; `replacing` says what is raised."""
    with atomic_write(path, error, subject) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_writable_folder(folder: Path, error: type[LkvError], subject: str) -> None:
    """Make `folder` and try it out, before long work whose results are to go there; `error` if it takes none."""
    trial = folder / f".{threading.get_native_id()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as problem:
        raise error(
            f"{subject} cannot be written to {folder} ({error_reason(problem)}); give a folder that can be written to."
        ) from problem


def check_writable_file(path: Path, error: type[LkvError], subject: str) -> None:
    """`check_writable_folder` for the folder of the file `path`, and that there can be a file of that name."""
    check_writable_folder(path.parent, error, subject)
    try:
        if path.is_dir():
            raise error(f"{path} is a folder; give a file for {subject}.")
    except OSError as problem:
        raise error(f"{subject} cannot be written to {path} ({error_reason(problem)}); give another name.") from problem


def error_reason(problem: Exception) -> str:
    """What the system says, without the name of a temporary file."""
    return getattr(problem, "strerror", None) or str(problem)
