"""Locks between processes."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lkv.errors import LkvError
from lkv.utils.files import error_reason


@contextmanager
def exclusive_lock(path: Path, error: type[LkvError], busy: str, is_reentrant: bool = False) -> Iterator[None]:
    """Hold the lock file `path` for the block; the system releases it when a process ends, however it ends.

    Args:
        path: The lock file, which is removed afterwards unless the lock is reentrant.
        error: The error to raise where another process, or another block of this one, holds the lock.
        busy: Its message.
        is_reentrant: Blocks of one process may hold the lock at once.
    """
    lock = FileLock(path, timeout=0, is_singleton=is_reentrant)
    try:
        lock.acquire()
    except Timeout:
        raise error(busy) from None
    except OSError as problem:
        raise error(f"{path.parent} cannot be locked ({error_reason(problem)}); give another folder.") from problem
    try:
        yield
    finally:
        if not is_reentrant:
            with suppress(OSError):
                path.unlink()
        lock.release()
