"""What a server does, without HTTP: texts compressed in the background, questions answered side by side."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lkv.context.context import Context, check_text, compress_ids
from lkv.errors import BusyError, LkvError, PromptError, UnknownContextError, check_retention
from lkv.integrations.continuous import Answer, start
from lkv.integrations.sampling import SamplingParams
from lkv.integrations.transformers.attention import patch_attention
from lkv.integrations.transformers.spec import max_positions
from lkv.methods.registry import parse_method
from lkv.models.loading import DEFAULT, cache_folder, load_model
from lkv.policy.lookup import load_policy, resolve_policy
from lkv.policy.policy import Policy
from lkv.serving.store import ContextStore, Entry, Settings, entry_of, name_of
from lkv.utils.devices import on_device, torch_dtype
from lkv.utils.prompts import bos_ids, encode, encode_context, render_messages, tokenizer_digest

_WINDOW = 10.0  # seconds over which tokens a second are taken
_REMEMBERED = 256  # failed jobs that are still told of


@dataclass(frozen=True)
class Limits:
    """What one server takes: bytes of an upload, requests at once, texts that wait, tokens and seconds of an answer."""

    upload_bytes: int = 16 * 2**20
    requests: int = 64
    texts: int = 16
    answer_tokens: int = 1024
    seconds: float = 300.0


@dataclass
class Job:
    """A text on its way to being a context."""

    id: str
    title: str
    text: str
    settings: Settings
    created: float
    progress: float = 0.0
    error: str | None = None
    cancelled: bool = False


class _CancelledError(Exception):
    """The text's context was deleted before it was there."""


class Service:
    """One model, its policy, its contexts and its engine."""

    def __init__(
        self, model: Any, tokenizer: Any, name: str, store: str, policy: Policy | None = None, method: str = "lkv",
        retention: float = 0.15, memory_bytes: int = 2**30, limits: Limits | None = None, **sizes: int,
    ):  # fmt: skip
        """`name` is what clients call the model; `store` a folder or fsspec URL; `sizes` go to the engine."""
        self.limits = limits or Limits()
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self._policy = policy
        spec = patch_attention(model).spec
        digest = None if policy is None else policy.digest()
        self._settings = Settings(
            method, check_retention(retention), digest, spec.digest(), tokenizer_digest(tokenizer)
        )
        self.store = ContextStore(store, model, tokenizer, digest, memory_bytes)
        self.engine = start(model, tokenizer, self.limits.requests, **sizes)
        self._jobs: dict[str, Job] = {}
        self._waiting: queue.Queue[Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._rate: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._stopping = False
        self._worker = threading.Thread(target=self._compress_all, daemon=True)
        self._worker.start()

    # Contexts

    def add(self, text: str, title: str = "", system: str | None = None, retention: float | None = None) -> Entry | Job:
        """The stored context of `text`, or the job that makes it.

        Raises PromptError for a text that cannot be read, BusyError where too many wait.
        """
        check_text(text, "the text", "give some text to compress")
        if system is not None:
            check_text(system, "the system prompt", "give some text, or leave it out")
        share = self._settings.retention if retention is None else check_retention(retention)
        settings = self._settings._replace(retention=share, system=system)
        self._check_length(text, system)
        name = name_of(text, settings)
        with self._lock:
            job = self._jobs.get(name)
            if job is not None and job.error is None:
                return job
            if (entry := self._stored(name)) is not None:
                return entry
            if self._stopping or self._waiting.qsize() >= self.limits.texts:
                raise BusyError("as many texts as this server takes wait to be compressed; send this one again later.")
            job = self._jobs[name] = Job(name, title, text, settings, time.time())
            self._waiting.put(job)
        return job

    def job(self, name: str) -> Job | None:
        """A text that is being compressed, waits for it or could not be."""
        return self._jobs.get(name)

    def jobs(self) -> list[Job]:
        """All of them."""
        with self._lock:
            return list(self._jobs.values())

    def delete(self, name: str) -> bool:
        """Delete a context, or the job that makes it; False where there is none. Answers at hand are not disturbed."""
        with self._lock:
            job = self._jobs.pop(name, None)
        if job is not None:
            job.cancelled = True
        return self.store.delete(name) or job is not None

    def context(self, name: str) -> Context:
        """A context that is there. Raises UnknownContextError, which says so where it is on its way."""
        job = self._jobs.get(name)
        if job is not None and job.error is None:
            raise UnknownContextError(f"the context {name!r} is being compressed ({job.progress:.0%}); ask it later.")
        if job is not None:
            raise UnknownContextError(f"the context {name!r} could not be made: {job.error}")
        return self.store.get(name)

    def _stored(self, name: str) -> Entry | None:
        """The entry of a context whose file can be read; a damaged one is made anew."""
        entry = self.store.entry(name)
        if entry is not None:
            try:
                self.store.get(name)
            except LkvError:
                return None
        return entry

    def _check_length(self, text: str, system: str | None) -> None:
        limit = max_positions(self.model)
        # What is far too long is not encoded whole; where a token stands for more, `compress` itself refuses.
        tokens = len(encode_context(self.tokenizer, text[: 64 * limit], system))
        if tokens >= limit:
            raise PromptError(
                f"the text has {tokens if len(text) <= 64 * limit else f'more than {tokens}'} tokens, but the model "
                f"reads at most {limit}, question and answer included; shorten it."
            )

    def _compress_all(self) -> None:
        while (job := self._waiting.get()) is not None:
            if not job.cancelled:
                self._compress(job)
            del job

    def _compress(self, job: Job) -> None:
        def progress(share: float) -> None:
            job.progress = share
            if job.cancelled:
                raise _CancelledError

        settings = job.settings
        try:
            # Not `compress`: whether a text names a file of this machine is nothing that a client may learn.
            context = compress_ids(
                self.model, self.tokenizer, encode_context(self.tokenizer, job.text, settings.system),
                method=settings.method, retention=settings.retention, policy=self._policy, progress=progress,
                text=job.text,
            )  # fmt: skip
            if not job.cancelled:
                self.store.put(entry_of(job.id, job.title, context, settings), context)
        except _CancelledError:
            return
        except LkvError as error:
            job.error = str(error)
        except Exception as error:  # told to whoever sent the text; the next text is not to suffer
            job.error = f"the text could not be compressed ({type(error).__name__}: {error}); send it again."
        self._done(job)

    def _done(self, job: Job) -> None:
        job.text = ""
        with self._lock:
            if job.cancelled:
                self.store.delete(job.id)
            elif job.error is None:
                self._jobs.pop(job.id, None)
            failed = [earlier.id for earlier in self._jobs.values() if earlier.error is not None]
            for name in failed[: max(0, len(failed) - _REMEMBERED)]:
                del self._jobs[name]

    # Answers

    def ask(
        self, messages: list[dict[str, str]], context: Context | None, max_tokens: int | None, sampling: SamplingParams,
        notify: Callable[[], None] | None = None,
    ) -> Answer:  # fmt: skip
        """The answer to the last of `messages`, about `context` where there is one.

        Raises PromptError for messages that the model's template refuses, or that are too long; BusyError.
        """
        check_text(messages[-1]["content"], "the question", "ask something")
        for message in messages[:-1]:
            # Empty ones do no harm, unlike what no tokenizer can read.
            check_text(message["content"] + ".", "a message", "give text")
        text = render_messages(self.tokenizer, messages, context is not None)
        ids = encode(self.tokenizer, text)
        if context is None and not getattr(self.tokenizer, "chat_template", None):
            ids = bos_ids(self.tokenizer) + ids
        length = min(max_tokens or self.limits.answer_tokens, self.limits.answer_tokens)
        if max_tokens is None:
            # Unless asked for, an answer takes what is left of the positions.
            held = len(ids) + (0 if context is None else context.tokens)
            length = max(1, min(length, max_positions(self.model) + 1 - held))
        return self.engine.submit(ids, context, length, sampling, notify)

    def tokens_a_second(self) -> float:
        """Tokens generated a second, over the last ten seconds or since it was asked for last."""
        now, count = time.monotonic(), self.engine.tokens
        while len(self._rate) > 1 and now - self._rate[0][0] > _WINDOW:
            self._rate.popleft()
        before, had = self._rate[0]
        self._rate.append((now, count))
        return (count - had) / max(now - before, 1e-9)

    def stop(self, seconds: float = 30.0) -> None:
        """Take nothing new, finish the answers at hand for up to `seconds`, and drop texts that still wait."""
        with self._lock:
            self._stopping = True
            for job in self._jobs.values():
                job.cancelled = True
        self._waiting.put(None)
        self.engine.stop(seconds)
        self._worker.join(seconds)


def make_service(options: dict[str, Any]) -> Service:
    """The service that the options of `lkv serve`, by name, describe. Raises what loading a model and a policy does."""
    name = options["model"] or DEFAULT
    model, tokenizer = load_model(name, torch_dtype(options["dtype"]), options["revision"])
    model = on_device(model, options["device"])
    policy = None
    if parse_method(options["method"]).needs_policy:
        given = options["policy"] or None
        if given is not None:
            given = load_policy(given, options["strict"], options["policy_revision"])
        policy = resolve_policy(patch_attention(model).spec, given)
    limits = Limits(
        options["max_upload"] * 2**20, options["max_requests"], options["max_texts"], options["max_tokens"],
        options["timeout"],
    )  # fmt: skip
    return Service(
        model, tokenizer, options["name"] or Path(name).name, options["store"] or str(cache_folder() / "contexts"),
        policy, options["method"], options["retention"], int(options["memory"] * 2**20), limits,
        pages=options["pages"],
    )  # fmt: skip
