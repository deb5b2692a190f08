"""Contexts as files under the text's hash and the settings' digest, the most recently used ones in memory."""

import hashlib
import json
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lkv.context.context import Context
from lkv.errors import ContextFileError, StoreError, UnknownContextError
from lkv.utils.files import error_reason, write_text

_CONTEXT, _ABOUT = ".kv", ".json"


class Settings(NamedTuple):
    """All that decides what a text is compressed to, beside the text: two with equal settings share their contexts."""

    method: str
    retention: float
    policy: str | None  # digest
    model: str  # digest of its fingerprint
    tokenizer: str  # digest of its template and of how it cuts
    system: str | None = None

    def digest(self) -> str:
        """64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(list(self)).encode()).hexdigest()


def name_of(text: str, settings: Settings) -> str:
    """The id of a context: half of the text's hash, a quarter of the settings' digest."""
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}-{settings.digest()[:16]}"


class Entry(NamedTuple):
    """What is known of a stored context without loading it."""

    id: str
    name: str
    created: float  # seconds since 1970
    tokens: int
    nbytes: int
    full_nbytes: int
    method: str
    retention: float
    realised_retention: float


def entry_of(name: str, title: str, context: Context, settings: Settings) -> Entry:
    """The entry of a context that has just been made."""
    return Entry(
        name, title, time.time(), context.tokens, context.nbytes(), context.full_nbytes(), settings.method,
        settings.retention, round(context.realised_retention(), 6),
    )  # fmt: skip


class ContextStore:
    """Contexts of one model in a folder, local or remote. It may be used from several threads and processes."""

    def __init__(self, url: str, model: Any, tokenizer: Any, policy: str | None, memory_bytes: int):
        """`url` as fsspec has it: a local folder, s3://..., memory://...; `policy` is the digest of the one in use.
        At most `memory_bytes` of contexts stay in memory, at least the one used last.

        Raises StoreError for a place that cannot be used.
        """
        self._model, self._tokenizer, self._policy, self._limit = model, tokenizer, policy, memory_bytes
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
            self._files.makedirs(self._root, exist_ok=True)
        except (OSError, ValueError, ImportError) as error:
            raise StoreError(
                f"contexts cannot be kept at {url} ({error}); give a folder, or a URL of fsspec's."
            ) from error
        self._local = isinstance(self._files, LocalFileSystem)
        self._loaded: OrderedDict[str, Context] = OrderedDict()
        self._lock = threading.Lock()
        self._loading: dict[str, threading.Lock] = {}

    def put(self, entry: Entry, context: Context) -> None:
        """Keep a context, on disk and in memory. Raises StoreError where it cannot be written; an older file of the
        same name then stays as it was."""
        try:
            with self._writing(entry.id + _CONTEXT) as path:
                context.save(path)
            # Written last: what is listed is complete.
            with self._writing(entry.id + _ABOUT) as path:
                write_text(path, json.dumps(entry._asdict()), ContextFileError, "the context")
        except (OSError, ContextFileError) as error:
            raise StoreError(
                f"the context cannot be kept ({error_reason(error)}); make room, or give another place for contexts."
            ) from error
        self._keep(entry.id, context)

    def get(self, name: str) -> Context:
        """A context, from memory or from its file. Raises UnknownContextError where there is none, ContextFileError
        where its file is damaged or belongs to another model or policy."""
        stored = _is_name(name) and self._files.exists(self._path(name + _ABOUT))
        with self._lock:
            if not stored:  # deleted by another process of the same store
                self._loaded.pop(name, None)
            if name in self._loaded:
                self._loaded.move_to_end(name)
                return self._loaded[name]
            turn = self._loading.setdefault(name, threading.Lock())
        # Two requests for one context load it once.
        with turn:
            with self._lock:
                if name in self._loaded:
                    return self._loaded[name]
            context = self._load(name)
            self._keep(name, context)
        with self._lock:
            self._loading.pop(name, None)
        return context

    def entry(self, name: str) -> Entry | None:
        """What is known of a context, None where there is none or its description is damaged."""
        if not _is_name(name):
            return None
        try:
            return Entry(**json.loads(self._files.cat_file(self._path(name + _ABOUT))))
        except (OSError, ValueError, TypeError):
            return None

    def entries(self) -> list[Entry]:
        """All stored contexts, the newest first."""
        try:
            files = self._files.ls(self._root, detail=False, refresh=True)
        except OSError as error:
            raise StoreError(
                f"the stored contexts cannot be listed ({error_reason(error)}); look after {self._root}."
            ) from error
        names = [Path(file).name.removesuffix(_ABOUT) for file in files if file.endswith(_ABOUT)]
        entries = [entry for name in names if (entry := self.entry(name)) is not None]
        return sorted(entries, key=lambda entry: entry.created, reverse=True)

    def delete(self, name: str) -> bool:
        """Forget a context and its file; answers at hand are not disturbed. False where there was none."""
        with self._lock:
            known = self._loaded.pop(name, None) is not None
        if not _is_name(name):
            return False
        for suffix in (_ABOUT, _CONTEXT):
            try:
                self._files.rm_file(self._path(name + suffix))
                known = True
            except FileNotFoundError:
                pass
            except OSError as error:
                raise StoreError(
                    f"the context cannot be deleted ({error_reason(error)}); look after its folder."
                ) from error
        return known

    def resident(self) -> dict[str, int]:
        """Bytes of every context in memory."""
        with self._lock:
            return {name: context.nbytes() for name, context in self._loaded.items()}

    def _keep(self, name: str, context: Context) -> None:
        """Hold a context in memory, and let go those that have not been used for longest."""
        with self._lock:
            self._loaded[name] = context
            self._loaded.move_to_end(name)
            held = sum(loaded.nbytes() for loaded in self._loaded.values())
            while held > self._limit and len(self._loaded) > 1:
                held -= self._loaded.popitem(last=False)[1].nbytes()

    def _load(self, name: str) -> Context:
        if not _is_name(name) or not self._files.exists(self._path(name + _CONTEXT)):
            raise UnknownContextError(f"there is no context {name!r}; compress its text first.")
        with self._reading(name + _CONTEXT) as path:
            context = Context.load(path, self._model, self._tokenizer)
        if context.metadata["policy"] not in (None, self._policy):
            raise ContextFileError(
                f"the context {name!r} was compressed under another policy than this one; compress its text again."
            )
        return context

    def _path(self, file: str) -> str:
        return f"{self._root}/{file}"

    @contextmanager
    def _reading(self, file: str) -> Iterator[Path]:
        """A local path with the content of `file`."""
        if self._local:
            yield Path(self._path(file))
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / file
            self._files.get_file(self._path(file), str(path))
            yield path

    @contextmanager
    def _writing(self, file: str) -> Iterator[Path]:
        """A local path whose content takes the place of `file` when the block ends well."""
        if self._local:
            yield Path(self._path(file))  # what writes there replaces the file at once
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / file
            yield path
            # An object appears whole or not at all.
            self._files.put_file(str(path), self._path(file))


def _is_name(name: str) -> bool:
    """Whether `name` may be an id; nothing else comes near a path."""
    head, _, tail = name.partition("-")
    return len(head) == 32 and len(tail) == 16 and set(head + tail) <= set("0123456789abcdef")
