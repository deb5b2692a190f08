"""Compression jobs: waiting, running or failed, for `lkv serve` and vLLM's plugin."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lkv.errors import BusyError, ContextFileError, ContextPendingError, LkvError, UnknownContextError
from lkv.serving.inputs import CompressionSettings, EncodedText
from lkv.serving.request_log import format_facts
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
    text: EncodedText | None = None  # where this process compresses it, until it has
    skipped: list[str] | None = None  # what of a file is not in its text
    progress: float = 0.0
    error: str | None = None
    is_started: bool = False
    is_cancelled: bool = False  # by a deletion or at the end of the server
    is_deleted: bool = False
    is_replaced: bool = False  # deleted, and the text was sent again

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
            **sizes,
        }

    def pending_error(self) -> ContextPendingError:
        """Return the error of a question about this context."""
        if self.error is not None:
            return ContextPendingError(f"the context {self.id!r} could not be made: {self.error}")
        return ContextPendingError(
            f"the context {self.id!r} is still being compressed; ask again when its status is 'ready'."
        )


class JobQueue:
    """The jobs of a server, presented to clients together with the store's contexts.

    It is thread-safe, and holds no lock while the store is read or written.
    """

    def __init__(self, max_unfinished: int):
        """At most `max_unfinished` texts wait or are being compressed."""
        self.hidden: set[str] = set()  # deleted contexts that running requests still use
        self.is_closed = False
        self._max_unfinished = max_unfinished
        self._jobs: dict[str, Job] = {}
        self._unfinished: set[Job] = set()  # deleted ones are in it until they end
        self._changed = threading.Condition()

    def jobs(self) -> list[Job]:
        """Return all jobs."""
        with self._changed:
            return list(self._jobs.values())

    def find_running(self, name: str, title: str = "") -> Job | None:
        """Return the job of a context that is not ready yet, if any, and give it a `title`."""
        with self._changed:
            job = self._jobs.get(name)
            if job is None or job.error is not None:
                return None
            job.title = title or job.title
            return job

    def find_made(self, job: Job, store: ContextStore, check: Callable[[str], Any]) -> "StoredContext | Job | None":
        """Return the running job or the stored context of the text of a new `job`, under the new job's title.

        Args:
            job: The new job. It takes the title of a damaged context.
            store: The store.
            check: Raises ContextFileError or UnknownContextError for a context that cannot be used.

        Returns:
            None if there is no context, or a damaged one, and the store has space for one.

        Raises:
            StoreError: If the store is full, or fails.
        """
        if (running := self.find_running(job.id, job.title)) is not None:
            return running
        stored = self._describe(job.id, store)
        if stored is not None:
            try:
                check(job.id)
            except (ContextFileError, UnknownContextError):
                job.title = job.title or stored.name
                stored = None
        if stored is None:
            store.check_quota()
            return None
        with self._changed:
            failed = self._jobs.get(job.id)
            if failed is not None and failed.error is not None:  # before another server stored it
                del self._jobs[job.id]
        return store.rename(stored, job.title)

    def add(self, job: Job) -> Job:
        """Add a job, or return the running one of the same context.

        Raises BusyError if too many texts wait, or the server is stopping.
        """
        with self._changed:
            if (running := self.find_running(job.id, job.title)) is not None:
                return running
            if self.is_closed or len(self._unfinished) >= self._max_unfinished:
                raise BusyError("as many texts as this server takes wait to be compressed; send this one again later.")
            if (failed := self._jobs.pop(job.id, None)) is not None:
                job.title = job.title or failed.title
            for other in self._unfinished:
                other.is_replaced |= other.id == job.id
            self._jobs[job.id] = job
            self._unfinished.add(job)
            self._changed.notify()
        return job

    def take(self, seconds: float) -> Job | None:
        """Start the job that waits for longest; None if none comes within `seconds`, or the queue is closed."""

        def find() -> Job | None:
            return next((job for job in self._jobs.values() if not job.is_started and job.error is None), None)

        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or find() is not None, seconds)
            job = None if self.is_closed else find()
            if job is not None:
                job.is_started = True
            return job

    def finish(self, job: Job, store: ContextStore, stored: StoredContext | None) -> bool:
        """End a job.

        Args:
            job: The job, with its error if it failed.
            store: The store.
            stored: Its context, which takes a title that came while it was being stored; None without one.

        Returns:
            Whether the job was deleted, so that its context must be, too.
        """
        with self._changed:
            title = job.title
            self._unfinished.discard(job)
            if stored is not None:
                self.hidden.discard(job.id)  # made anew
                if self._jobs.get(job.id) is job:  # else it was deleted, and perhaps sent again
                    del self._jobs[job.id]
            failed = [earlier.id for earlier in self._jobs.values() if earlier.error is not None]
            for name in failed[: max(0, len(failed) - _FAILED_JOBS)]:
                del self._jobs[name]
            is_deleted = job.is_deleted and not job.is_replaced
        if stored is not None and not is_deleted:
            try:
                store.rename(stored, title)
            except LkvError as error:  # the context can be used all the same
                _LOG.warning("the context %s could not be renamed: %s", job.id, error)
        return is_deleted

    def delete(self, name: str) -> Job | None:
        """Remove the job of a context, if any, and cancel it."""
        with self._changed:
            job = self._jobs.pop(name, None)
            if job is not None:
                job.is_deleted = job.is_cancelled = True
                if not job.is_started:
                    self._unfinished.discard(job)
            return job

    def close(self) -> None:
        """Take no more jobs, cancel all, and log which texts get no context."""
        with self._changed:
            self.is_closed = True
            for job in self._jobs.values():
                if job.error is None and not job.is_cancelled:
                    facts = format_facts({"context": job.id, "name": job.title, "progress": round(job.progress, 3)})
                    _LOG.warning("the server stops before a text is compressed, send it again: %s", facts)
                job.is_cancelled = True
            self._changed.notify_all()

    def _describe(self, name: str, store: ContextStore) -> StoredContext | None:
        """Return the description of a stored context; None for one that is deleted, missing or damaged."""
        return None if name in self.hidden else store.describe(name)

    def find(self, name: str, store: ContextStore) -> StoredContext | Job:
        """Return a stored context, or the job of one that is not ready. Raises UnknownContextError."""
        with self._changed:
            job = self._jobs.get(name)
        if job is not None and job.error is None:
            return job
        stored = self._describe(name, store)
        if job is None:
            if stored is None:
                raise unknown_context(name)
            return stored
        if not _is_superseded(job, stored):
            return job
        with self._changed:
            if self._jobs.get(name) is job:
                del self._jobs[name]
        assert stored is not None
        return stored

    def check_ready(self, name: str, store: ContextStore) -> None:
        """Raise UnknownContextError, or ContextPendingError for a pending or failed context."""
        if isinstance(found := self.find(name, store), Job):
            raise found.pending_error()

    def list_contexts(self, store: ContextStore) -> list[StoredContext | Job]:
        """Return the jobs, then the stored contexts without a job."""
        jobs = self.jobs()  # first: what becomes ready meanwhile is in the store
        stored = {context.id: context for context in store.list_contexts() if context.id not in self.hidden}
        current = {job.id: job for job in jobs if not _is_superseded(job, stored.get(job.id))}
        return [*current.values(), *(context for context in stored.values() if context.id not in current)]


def _is_superseded(job: Job, stored: StoredContext | None) -> bool:
    """Return whether the job failed, and another server has stored its context since it began."""
    return job.error is not None and stored is not None and stored.created > job.created
