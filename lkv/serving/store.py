"""The context store: files in a folder or at an fsspec URL, the most recently used contexts in memory."""

import math
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import fsspec
from fsspec.implementations.local import LocalFileSystem
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lkv.context.context import Context
from lkv.context.saved_context import check_replaceable
from lkv.errors import ContextFileError, StoreError, UnknownContextError
from lkv.hf.attention import patch_attention
from lkv.serving.stored_context import StoredContext
from lkv.utils.devices import is_out_of_memory
from lkv.utils.files import error_reason, write_text

_CONTEXT, _DESCRIPTION, _TEMPORARY = ".kv", ".json", ".tmp"
_MAX_DESCRIPTION = 2**19  # bytes, of which the tools take most
_HOUR = 3600.0  # seconds in which the use of a context is recorded once
_DAY = 86400.0  # seconds after which files of a write that never ended are deleted
_SPACE = "free some space, or give another place for contexts"
_ID = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}")


def unknown_context(name: str) -> UnknownContextError:
    """Return the error for an id that is not stored; ids come from clients and may be long."""
    return UnknownContextError(f"there is no context {name[:80]!r}; GET /v1/contexts lists all contexts.")


def _modified(file: dict[str, Any], default: float) -> float:
    """Return the modification time of a listed file, in seconds since 1970; `default` if it is unknown."""
    written = file.get("mtime") or file.get("LastModified") or file.get("created")
    if isinstance(written, datetime):
        return written.timestamp()
    return written if isinstance(written, int | float) else default


class ContextStore:
    """Contexts of one model in a folder, local or remote. Several threads and processes may use it.

    A context is two files: ID.kv, as `Context.save` writes it, and its description, ID.json, which is written last, so
    that listed contexts are complete. The modification time of the description is the last use, to the hour.
    """

    def __init__(
        self,
        url: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy: str | None,
        memory_bytes: int,
        max_bytes: float = math.inf,
    ):
        """Open or create a store.

        Args:
            url: A folder, or a URL of fsspec (s3://..., memory://...).
            model: The model of its contexts.
            tokenizer: The model's tokenizer.
            policy: The digest of the policy in use.
            memory_bytes: Contexts beyond it leave memory, except the last used one.
            max_bytes: Bytes of files from which on `check_quota` refuses further contexts.

        Raises:
            StoreError: For a place that cannot be used.
        """
        self._model, self._tokenizer, self._policy, self._limit = model, tokenizer, policy, memory_bytes
        self.max_bytes = max_bytes
        self._fingerprint = patch_attention(model).spec.digest()
        try:
            # Other servers of the same store add and delete files.
            self._files, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
            self._files.makedirs(self._root, exist_ok=True)
        except Exception as error:  # of fsspec, and of the library behind it
            raise StoreError(f"contexts cannot be stored at {url} ({error}); give a folder or a fsspec URL.") from error
        self._is_local = isinstance(self._files, LocalFileSystem)
        self._loaded: OrderedDict[str, Context] = OrderedDict()
        # Those and the ones that running answers alone hold: they are in memory, too.
        self._contexts: WeakValueDictionary[str, Context] = WeakValueDictionary()
        self._last_asked: dict[str, float] = {}  # when contexts were last asked here, in seconds since 1970
        self._lock = threading.RLock()
        self._describing = threading.Lock()  # one rewrite at a time: recording a use cannot undo a rename
        self._loading = threading.Lock()  # serialises loading, because contexts count in memory only once loaded
        self.queries = self.hits = 0  # how often `get` was called for stored contexts, and they were in memory

    def put(self, stored: StoredContext, context: Context) -> None:
        """Write a context and keep it in memory; after a StoreError older files of the same id are unchanged."""
        stored = stored.model_copy(update={"model": self._fingerprint})
        context.metadata["stored_id"] = stored.id
        with self._store_errors("written", _SPACE):
            with self._local_path(stored.id + _CONTEXT, is_written=True) as path:
                try:
                    check_replaceable(path)
                except ContextFileError:
                    path.unlink()  # the store's own file, damaged
                context.save(path)
            self._write_description(stored)
        self._keep(stored.id, context)

    def _write_description(self, stored: StoredContext) -> None:
        with self._local_path(stored.id + _DESCRIPTION, is_written=True) as path:
            write_text(path, stored.model_dump_json(), ContextFileError, "the context", mode=0o600)

    def get(self, name: str) -> Context:
        """Return a context, from memory or its file.

        Raises UnknownContextError, ContextFileError for a damaged file, and StoreError where it cannot be read or does
        not fit into memory.
        """
        with self._store_errors("read", "try again"):
            is_stored = bool(_ID.fullmatch(name)) and self._files.exists(self._path(name + _DESCRIPTION))
        if is_stored:
            self._record_use(name)
        with self._lock:
            if not is_stored:  # perhaps deleted by another process
                self.release(name)
                self._last_asked.pop(name, None)
                raise unknown_context(name)
            self.queries += 1
            context = self._contexts.get(name)
            self.hits += context is not None
            if context is not None:
                self._keep(name, context)
                return context
        with self._loading:
            with self._lock:  # another request may have loaded it meanwhile
                context = self._contexts.get(name)
            if context is None:
                context = self._load(name)
            self._keep(name, context)
            return context

    def _record_use(self, name: str) -> None:
        """Note that a context is used; once an hour also in the store, for other processes and after a restart."""
        now = time.time()
        with self._lock:
            before, self._last_asked[name] = self._last_asked.get(name, 0.0), now
        if before // _HOUR == now // _HOUR:
            return
        with suppress(StoreError):  # the context can be used all the same
            if self._is_local:
                with self._store_errors("written", "check its folder"):
                    os.utime(self._path(name + _DESCRIPTION))
            else:
                with self._describing:
                    if (stored := self.describe(name)) is not None:
                        self._rewrite(stored)

    def rename(self, stored: StoredContext, title: str) -> StoredContext:
        """Give a stored context another title; no title, or its own, changes nothing. Raises StoreError."""
        if title in ("", stored.name):
            return stored
        renamed = stored.model_copy(update={"name": title, "model": self._fingerprint})
        with self._describing:
            self._rewrite(renamed)
        return renamed

    def _rewrite(self, stored: StoredContext) -> None:
        """Replace the description of a stored context. Raises StoreError, or UnknownContextError for a deleted one."""
        with self._store_errors("written", _SPACE):
            self._write_description(stored)
            is_deleted = not self._files.exists(self._path(stored.id + _CONTEXT))
        if is_deleted:  # meanwhile, by another request or process
            self.delete(stored.id)
            raise unknown_context(stored.id)

    def describe(self, name: str) -> StoredContext | None:
        """Return the description of a context; None if there is none, or it is damaged or not for this user."""
        if not _ID.fullmatch(name):
            return None
        try:
            data = self._files.cat_file(self._path(name + _DESCRIPTION), start=0, end=_MAX_DESCRIPTION)
            stored = StoredContext.model_validate_json(data)
        except (FileNotFoundError, PermissionError, ValueError):
            return None
        except Exception as error:
            raise StoreError(f"the stored context cannot be read ({error_reason(error)}); try again.") from error
        return stored if stored.id == name else None

    def list_contexts(self) -> list[StoredContext]:
        """Return the descriptions of all stored contexts of this model that can be read, the newest first."""
        files = self._listing()
        own = [stored for stored in self._descriptions(files) if stored.model == self._fingerprint]
        own = [stored for stored in own if stored.id + _CONTEXT in files]
        return sorted(own, key=lambda stored: stored.created, reverse=True)

    def _descriptions(self, files: dict[str, dict[str, Any]]) -> list[StoredContext]:
        """Return the descriptions among `files` that can be read, those of other models among them."""
        names = [name for name in files if name.endswith(_DESCRIPTION)]
        return [stored for name in names if (stored := self.describe(name.removesuffix(_DESCRIPTION))) is not None]

    def check_quota(self) -> None:
        """Raise StoreError if the store is full."""
        if self.usage()[1] >= self.max_bytes:
            raise StoreError(f"the store is full ({self.max_bytes:,} bytes); delete contexts first.")

    def usage(self) -> tuple[int, int]:
        """Return how many contexts are stored, and the bytes of all files of the store."""
        files = self._listing()
        contexts = [name for name in files if _ID.fullmatch(name.removesuffix(_DESCRIPTION))]
        return len(contexts), sum(file.get("size") or 0 for file in files.values())

    def _listing(self) -> dict[str, dict[str, Any]]:
        """Return the file system's information on each regular file, by name; not on folders, links and pipes."""
        with self._store_errors("listed", "check its folder"):
            try:
                files = self._files.ls(self._root, detail=True, refresh=True)
            except FileNotFoundError:  # an object store has no empty folders
                files = []
            return {Path(file["name"]).name: dict(file) for file in files if file.get("type", "file") == "file"}

    def delete(self, name: str) -> bool:
        """Delete a context; running answers continue. False if there is none."""
        with self._lock:
            is_stored = self.release(name)
            self._last_asked.pop(name, None)
        if not _ID.fullmatch(name):
            return False
        for suffix in (_DESCRIPTION, _CONTEXT):
            is_stored |= self._delete_file(name + suffix)
        return is_stored

    def _delete_file(self, file: str) -> bool:
        """Delete a file of the store. False if there is none."""
        with self._store_errors("deleted", "check its folder"):
            try:
                self._files.rm_file(self._path(file))
            except FileNotFoundError:
                return False
        return True

    def release(self, name: str) -> bool:
        """Drop a context from memory; running answers alone keep theirs. False if it is not in memory."""
        with self._lock:
            self._contexts.pop(name, None)
            return self._loaded.pop(name, None) is not None

    def expire(self, seconds: float | None) -> None:
        """Delete contexts that nobody has asked for `seconds`, and files of writes that were cut off a day ago.

        Raises StoreError if one cannot be deleted, after all others.
        """
        problem: StoreError | None = None
        for delete, name in self._expired(seconds):
            try:
                delete(name)
            except StoreError as error:
                problem = error
        if problem is not None:
            raise problem

    def _expired(self, seconds: float | None) -> Iterator[tuple[Callable[[str], bool], str]]:
        """Yield the deletions of `expire`, as (function, argument)."""
        files = self._listing()
        for name, file in files.items():
            stem, suffix = name.rpartition(".")[0], name[name.rfind(".") :]
            is_cut_off = suffix == _TEMPORARY and name.startswith(".")
            is_cut_off |= suffix == _CONTEXT and bool(_ID.fullmatch(stem)) and stem + _DESCRIPTION not in files
            if is_cut_off and _modified(file, time.time()) < time.time() - _DAY:
                yield self._delete_file, name
        if seconds is None:
            return
        for stored in self._descriptions(files):
            last_use = _modified(files.get(stored.id + _DESCRIPTION, {}), 0.0)
            if max(stored.created, last_use, self._last_asked.get(stored.id, 0.0)) < time.time() - seconds:
                yield self.delete, stored.id

    def resident(self) -> dict[str, int]:
        """Return the bytes of every context in memory."""
        with self._lock:
            return {name: context.nbytes() for name, context in self._contexts.items()}

    def saved_nbytes(self) -> int:
        """Return the bytes that compression saves over all contexts in memory."""
        with self._lock:
            return sum(max(0, context.full_nbytes() - context.nbytes()) for context in self._contexts.values())

    def _keep(self, name: str, context: Context) -> None:
        """Keep a context in memory, and drop those that were not used for longest."""
        with self._lock:
            self._contexts[name] = self._loaded[name] = context
            self._loaded.move_to_end(name)
            total = sum(loaded.nbytes() for loaded in self._loaded.values())
            while total > self._limit and len(self._loaded) > 1:
                total -= self._loaded.popitem(last=False)[1].nbytes()

    def _load(self, name: str) -> Context:
        with self._store_errors("read", "compress its text again"):
            try:
                with self._local_path(name + _CONTEXT) as path:
                    context = Context.load(path, self._model, self._tokenizer)
            except FileNotFoundError as error:
                raise unknown_context(name) from error
            except ContextFileError as error:
                if not self._files.exists(self._path(name + _CONTEXT)):  # deleted meanwhile
                    raise unknown_context(name) from error
                if is_out_of_memory(error):
                    raise StoreError(f"the context {name} does not fit into free memory; ask again later.") from error
                # Clients learn no path of this machine.
                raise ContextFileError(str(error).replace(str(path), f"the context {name}")) from error
        own_id = context.metadata.get("stored_id", name)
        if own_id != name or context.metadata["text_sha256"][:32] != name[:32]:  # copied or renamed by hand
            raise ContextFileError(
                f"the file of the context {name!r} holds another context; compress its text again, or restore the file."
            )
        if context.metadata["policy"] not in (None, self._policy):
            raise ContextFileError(
                f"the context {name!r} was compressed under another policy than this one; compress its text again."
            )
        return context

    def _path(self, file: str) -> str:
        return f"{self._root}/{file}"

    @contextmanager
    def _store_errors(self, what: str, advice: str) -> Iterator[None]:
        """Turn every exception of the file system, or of the library behind it, into a StoreError."""
        try:
            yield
        except ContextFileError as error:
            if what != "written":
                raise
            reason = error_reason(error.__cause__) if isinstance(error.__cause__, OSError) else str(error)
            raise StoreError(f"the context cannot be written ({reason}); {advice}.") from error
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"the contexts cannot be {what} ({error_reason(error)}); {advice}.") from error

    @contextmanager
    def _local_path(self, file: str, is_written: bool = False) -> Iterator[Path]:
        """Return a local path with the content of `file`, or whose content replaces it when the block succeeds."""
        if self._is_local:
            yield Path(self._path(file))  # written atomically there
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / file
            if not is_written:
                self._files.get_file(self._path(file), str(path))
            yield path
            if is_written:  # an object appears whole or not at all
                self._files.put_file(str(path), self._path(file))
