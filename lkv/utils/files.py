"""Output files, written atomically: a reader finds the old file or the new one, never a part of it.

Also digests of files, and files that LKV ships.
"""

import errno
import hashlib
import json
import os
import secrets
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

from lkv.errors import LkvError

_FIGURES = (".png", ".pdf", ".svg")
_STALE_SECONDS = 3600.0


def as_path(name: Any, error: type[LkvError], subject: str) -> Path:
    """`name` as a path; raises `error`, which names `subject`, for a value that cannot be one."""
    try:
        if name != "" and b"\0" not in os.fsencode(name) and not isinstance(name, bytes):
            return Path(name)
    except (TypeError, UnicodeEncodeError):
        pass
    raise error(f"{subject} is {name!r}, but it must be a path: give the name of a file or folder.")


def is_path(name: str) -> bool:
    """Return whether a name can only be a local path, not a hub id."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def strip_parent_dirs(model: str) -> str:
    """Return the name of a local folder or file without its parent directories, any other name unchanged."""
    return Path(os.path.abspath(model)).name if os.path.exists(model) else model


def list_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files in `folder` and the folders below it, sorted, without hidden ones, and what cannot be read.

    The latter are broken links, links to folders, pipes, and folders that may not be listed.
    """
    files: list[Path] = []
    others: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if os.path.isfile(path):
            files.append(path)
        elif not os.path.isdir(path) or os.path.islink(path) or not os.access(path, os.R_OK | os.X_OK):
            others.append(path)
    return files, others


def short_name(model: str) -> str:
    """Return the last part of a model's name, by which it is served."""
    return Path(strip_parent_dirs(model)).name


def package_json(package: str, name: str) -> Any:
    """Return the content of a JSON file that a package of LKV ships."""
    return json.loads(resources.files(package).joinpath(name).read_text(encoding="utf-8"))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Return the folder of converted models, fitted policies and contexts: $LKV_CACHE, else the user's cache folder."""
    if folder := os.environ.get("LKV_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lkv"


@contextmanager
def atomic_write(path: Path, error: type[LkvError], subject: str, mode: int = 0o666) -> Iterator[Path]:
    """Yield an empty temporary file in the folder of `path`; when the block succeeds, that file replaces `path`.

    The temporary file is created exclusively under a random name, so that writers in other processes, containers or
    machines never share it and no planted link is followed. It has the permissions of the file that it replaces, else
    `mode` less the umask, and its content is on the disk before it is renamed. Missing folders are created, and
    temporary files of killed processes that wrote to the same `path` are deleted.

    Raises:
        LkvError: Of the type `error`, naming `subject` and `path`, for a device or a pipe, and for every OSError, in
            the block too; what is at `path` is then unchanged.
    """
    if not path.name:
        raise error(f"{path} is a folder; give a file for {subject}.")
    if _is_special(path):  # who may write to /dev would replace a device by a file
        raise error(f"{path} is a device or a pipe, which a file would replace; give a file for {subject}.")
    prefix = f".{zlib.crc32(os.fsencode(path.name)):08x}-"  # names of files may be as long as the system allows
    temporary = path.with_name(f"{prefix}{secrets.token_hex(8)}.tmp")
    try:
        _make_folder(path.parent)
        _delete_leftovers(path.parent, prefix)
        old_mode = _mode(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        os.close(os.open(temporary, flags, mode if old_mode is None else 0o600))
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        if old_mode is not None:
            temporary.chmod(old_mode)
        os.replace(temporary, path)
    except OSError as problem:
        raise error(
            f"{subject} cannot be written to {path} ({error_reason(problem)}); nothing was changed there: "
            "give another place, or make this one writable."
        ) from problem
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """Create `folder` and those above it that are missing. Raises OSError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except RecursionError:  # a folder a frame
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)) from None


def _delete_leftovers(folder: Path, prefix: str) -> None:
    """Delete temporary files of earlier writes. A running write has changed its file within `_STALE_SECONDS`."""
    for leftover in folder.glob(f"{prefix}*.tmp"):
        with suppress(OSError):
            if leftover.lstat().st_mtime < time.time() - _STALE_SECONDS:
                leftover.unlink()


def _is_special(path: Path) -> bool:
    """Return whether `path` is a device, a pipe or a socket; one call, as another process may delete it."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _mode(path: Path) -> int | None:
    """Return the permissions of the regular file at `path`, None if there is none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return stat.S_IMODE(status.st_mode) & 0o777 if stat.S_ISREG(status.st_mode) else None


def write_text(path: Path, text: str, error: type[LkvError], subject: str, mode: int = 0o666) -> None:
    """Write `text` as UTF-8 to `path`, atomically; `mode` and errors as in `atomic_write`."""
    with atomic_write(path, error, subject, mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_writable_folder(folder: Path, error: type[LkvError], subject: str) -> None:
    """Create `folder` if it is missing and try to write there, before long work; raises `error` if that fails."""
    try:
        _make_folder(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=".tmp"):
            pass
    except OSError as problem:
        raise error(
            f"{subject} cannot be written to {folder} ({error_reason(problem)}); give a folder that can be written to."
        ) from problem


def check_writable_file(path: Path, error: type[LkvError], subject: str) -> None:
    """`check_writable_folder` for the folder of `path`, and that `path` can be the name of a file.

    A folder that it creates may be a mistyped one, so it is reported on stderr.
    """
    is_new = not os.path.exists(path.parent)
    check_writable_folder(path.parent, error, subject)
    if is_new:
        print(f"created the folder {path.parent}", file=sys.stderr)
    try:
        if path.is_dir():
            raise error(f"{path} is a folder; give a file for {subject}.")
    except OSError as problem:
        raise error(f"{subject} cannot be written to {path} ({error_reason(problem)}); give another name.") from problem


def check_is_not_data(out: Path, data: Path, error: type[LkvError]) -> None:
    """Raise `error` if `out` lies inside the folder `data`, where a later run would read it."""
    inside, outside = out.resolve(), data.resolve()
    if inside.is_relative_to(outside) and not any(part.startswith(".") for part in inside.relative_to(outside).parts):
        raise error(f"{out} lies inside {data} and would be read as data; give an --out elsewhere.")


def nearest_folder(path: Path) -> Path:
    """Return `path` if it exists, else its nearest existing parent folder."""
    # For invalid names, such as too long ones, os.path.exists returns False, but Path.exists raises.
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder))


def error_reason(problem: Exception) -> str:
    """Return the system's message of an error, without the name of a temporary file."""
    return getattr(problem, "strerror", None) or str(problem)


def save_figure(figure: Any, path: Path, error: type[LkvError]) -> None:
    """Write a figure of matplotlib as PNG, PDF or SVG, by the name's suffix, but over no other file. Raises `error`."""
    if path.suffix not in _FIGURES:
        raise error(f"{path} is not the name of a figure; end it with one of {', '.join(_FIGURES)}.")
    if os.path.isfile(path) and path.stat().st_size and b"atplotlib" not in path.read_bytes():
        raise error(f"{path} is not a figure of matplotlib and would be overwritten; give another name, or delete it.")
    with atomic_write(path, error, "the figure") as temporary:
        figure.savefig(temporary, dpi=150, format=path.suffix[1:])
