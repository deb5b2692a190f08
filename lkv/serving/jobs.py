"""Compression jobs: waiting, running or failed, for `lkv serve` and vLLM's plugin."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lkv.errors import BusyError, ContextFileError, ContextPendingError, LkvError, UnknownContextError
from lkv.serving.inputs import CompressionSettings, EncodedText
from lkv.serving.middleware import Facts
from lkv.serving.store import ContextStore, unknown_context
from lkv.serving.stored_context import StoredContext

_FAILED_JOBS = 256  # failed jobs that are still reported
_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A waiting, running or failed compression."""

    id: str
    title: str
    settings: CompressionSettings
    created: float
    text: EncodedText | None = None  # set while this process has to compress it
    skipped: list[str] | None = None  # parts of an uploaded file that its text leaves out
    progress: float = 0.0
    error: str | None = None
    is_started: bool = False
    is_deleted: bool = False

    def as_object(self) -> dict[str, Any]:
        """Return the JSON object of a pending or failed context."""
        sizes = dict.fromkeys(("tokens", "bytes", "full_bytes", "realised_retention"))
        return {
            "object": "context",
            "id": self.id,
            "name": self.title,
            "status": "failed" if self.error else "compressing",
            "progress": round(self.progress, 3),
            "created": int(self.created),
            "error": self.error,
            "method": self.settings.method,
            "memory": self.settings.memory,
            "retention": self.settings.retention,
            "skipped": self.skipped,
            "tools": self.settings.tools,
            **sizes,
        }

    def pending_error(self) -> ContextPendingError:
        """Return the error of a question about this context."""
        if self.error is not None:
            return ContextPendingError(f"the context {self.id!r} could not be made: {self.error}")
        return ContextPendingError(
            f"the context {self.id!r} is still being compressed; ask again when its status is 'ready'."
        )


class ContextRegistry:
    """All contexts of a server: the stored ones, and the jobs that compress new ones.

    It is thread-safe, and holds no lock while the store is read or written.
    """

    def __init__(self, store: ContextStore, max_unfinished: int):
        """At most `max_unfinished` texts wait or are being compressed."""
        self.store = store
        self.is_closed = False
        self._max_unfinished = max_unfinished
        self._jobs: list[Job] = []  # deleted ones are in it until they end
        self._changed = threading.Condition()

    def jobs(self) -> list[Job]:
        """Return all jobs that are not deleted."""
        with self._changed:
            return [job for job in self._jobs if not job.is_deleted]

    def _find(self, name: str) -> Job | None:
        return next((job for job in self.jobs() if job.id == name), None)

    def _join_unfinished(self, new: Job) -> Job | None:
        """Return the unfinished job with the id of `new`, after giving it the title of `new`; None if there is none."""
        with self._changed:
            job = self._find(new.id)
            if job is None or job.error is not None:
                return None
            job.title = new.title or job.title
            return job

    def _forget_failed(self, name: str) -> str:
        """Forget the failed job of a context, if there is one, and return its title."""
        with self._changed:
            failed = [job for job in self._jobs if job.id == name and job.error is not None]
            self._jobs = [job for job in self._jobs if job not in failed]
            return failed[0].title if failed else ""

    def submit(self, job: Job, check: Callable[[str], Any]) -> StoredContext | Job:
        """Add a job, unless the context is stored or being compressed.

        Then only the context's title is updated, if the job has one.

        Args:
            job: The new job. Without a title it gets that of the damaged context or failed job that it replaces.
            check: Raises ContextFileError or UnknownContextError for a context that cannot be used.

        Returns:
            The job that makes the context, or the stored one.

        Raises:
            BusyError: If too many texts wait, or the server is stopping.
            StoreError: If the store is full, or fails.
        """
        if (running := self._join_unfinished(job)) is not None:
            return running
        stored = self.store.describe(job.id)
        if stored is not None:
            try:
                check(job.id)
            except (ContextFileError, UnknownContextError):
                job.title = job.title or stored.name
            else:
                self._forget_failed(job.id)  # from before another server stored the context
                return self.store.rename(stored, job.title)
        self.store.check_quota()
        with self._changed:
            if (running := self._join_unfinished(job)) is not None:
                return running
            if self.is_closed:
                raise BusyError("the server is stopping; send the text again when it runs.")
            if sum(other.error is None for other in self._jobs) >= self._max_unfinished:
                raise BusyError(
                    f"{self._max_unfinished} texts are waiting or being compressed, as many as are allowed; send this "
                    "one again later."
                )
            failed_title = self._forget_failed(job.id)
            job.title = job.title or failed_title
            self._jobs.append(job)
            self._changed.notify()
        return job

    def take(self, seconds: float) -> Job | None:
        """Start the job that waits for longest; None if none comes within `seconds`, or the registry is closed."""

        def find() -> Job | None:
            return next((job for job in self._jobs if not job.is_started and job.error is None), None)

        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or find() is not None, seconds)
            job = None if self.is_closed else find()
            if job is not None:
                job.is_started = True
            return job

    def finish(self, job: Job, stored: StoredContext | None) -> bool:
        """End a job, and delete its context if the job was deleted meanwhile.

        Args:
            job: The job, with its error if it failed.
            stored: The context stored under the job's id, if any. It is renamed if the job's title changed during
                the compression.

        Returns:
            Whether the context was deleted.

        Raises:
            StoreError: If it cannot be deleted.
        """
        with self._changed:
            title = job.title
            failed = [other for other in self._jobs if other.error is not None]
            ended = failed[: max(0, len(failed) - _FAILED_JOBS)]
            if job.error is None or job.is_deleted:
                ended.append(job)
            self._jobs = [other for other in self._jobs if other not in ended]
            is_replaced = self._find(job.id) is not None
        if stored is None:
            return False
        if job.is_deleted:  # a context whose text was sent again is kept
            return stored.created == job.created and not is_replaced and self.store.delete(job.id)
        try:
            self.store.rename(stored, title)
        except LkvError as error:  # the context can be used all the same
            _LOG.warning("the context %s could not be renamed: %s", job.id, error)
        return False

    def delete(self, name: str) -> Job | None:
        """Delete a context, and the job that makes it, if there is one.

        Raises UnknownContextError for neither, and StoreError if the store fails.
        """
        with self._changed:
            job = self._find(name)
            if job is not None:
                job.is_deleted = True
                if not job.is_started or job.error is not None:
                    self._jobs.remove(job)
        if not self.store.delete(name) and job is None:
            raise unknown_context(name)
        return job

    def close(self) -> None:
        """Take no more jobs, and log which texts get no context."""
        with self._changed:
            self.is_closed = True
            for job in self.jobs():
                if job.error is None:
                    facts = Facts(context=job.id, name=job.title, progress=round(job.progress, 3))
                    _LOG.warning("the server stops before a text is compressed, send it again: %s", facts)
            self._changed.notify_all()

    def find(self, name: str) -> StoredContext | Job:
        """Return a stored context, or the job of one that is not ready. Raises UnknownContextError."""
        job = self._find(name)
        if job is not None and job.error is None:
            return job
        stored = self.store.describe(name)
        if job is not None and not _is_superseded(job, stored):
            return job
        self._forget_failed(name)
        if stored is None:
            raise unknown_context(name)
        return stored

    def find_ready(self, name: str) -> StoredContext:
        """Return a stored context. Raises UnknownContextError, or ContextPendingError for a pending or failed one."""
        if isinstance(found := self.find(name), Job):
            raise found.pending_error()
        return found

    def list_contexts(self) -> list[StoredContext | Job]:
        """Return the jobs, then the stored contexts without a job."""
        jobs = self.jobs()  # first: what becomes ready meanwhile is in the store
        stored = {context.id: context for context in self.store.list_contexts()}
        current = {job.id: job for job in jobs if not _is_superseded(job, stored.get(job.id))}
        return [*current.values(), *(context for context in stored.values() if context.id not in current)]


def _is_superseded(job: Job, stored: StoredContext | None) -> bool:
    """Return whether the job failed, and another server has stored its context since it began."""
    return job.error is not None and stored is not None and stored.created > job.created
