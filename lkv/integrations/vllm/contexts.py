"""The stored contexts of vLLM's model, as one process of vLLM sees them, and the plugin's settings."""

import hashlib
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import AutoTokenizer

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import describe_compression
from lkv.context.context import Context
from lkv.errors import ContextFileError, IntegrationError, LkvError, PromptError
from lkv.hf.attention import patch_attention
from lkv.hf.positions import frequency_change
from lkv.hf.prompt_kv import LayerKV
from lkv.integrations.vllm.skeleton import build_skeleton
from lkv.methods.method import Method
from lkv.methods.registry import FULL, parse_method
from lkv.methods.request import resolve_method
from lkv.policy.lookup import resolve_policy
from lkv.policy.policy import Policy
from lkv.serving.inputs import CompressionSettings, encode_text
from lkv.serving.schemas import first_problem
from lkv.serving.settings import ContextSettings
from lkv.serving.store import ContextStore, unknown_context
from lkv.serving.stored_context import StoredContext
from lkv.utils.prompts import ContextKind, Conversation, Tools

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONTEXT, COMPRESS = "lkv_context", "lkv_compress"  # keys of SamplingParams.extra_args
_MAX_WRITES = 256  # contexts whose write outcome is remembered
_REMEMBERED = 5.0  # seconds for which a check of a context is valid
_LOG = logging.getLogger("vllm.lkv")


def plugin_settings(vllm_config: "VllmConfig") -> ContextSettings:
    """Return the settings in `--additional-config`, key `lkv`. Raises IntegrationError for unknown or wrong ones.

    `memory` is that of each worker, and is taken from vLLM's KV cache.
    """
    extra = vllm_config.additional_config
    try:
        return ContextSettings.model_validate(extra.get("lkv", {}) if isinstance(extra, dict) else {}, strict=True)
    except ValidationError as error:
        place, problem = first_problem(error)
        names = ", ".join(ContextSettings.model_fields)
        raise IntegrationError(f"--additional-config: lkv.{place}: {problem}; the settings are {names}.") from None


class VllmContexts:
    """The contexts of one engine's model, in one process: loaded, made and described.

    Only vLLM holds the weights: `model` is the transformers model without weights, with its shape, its rotary embedding
    and the fingerprint of the checkpoint's weights.
    """

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, memory_bytes: int | None = None):
        """`memory_bytes`: contexts in memory; by default as the settings say.

        Raises LkvError if contexts cannot work with this model or these settings of vLLM.
        """
        if problem := unsupported_reason(vllm_config):
            raise IntegrationError(f"contexts cannot be used here: {problem}")
        self.settings = settings = plugin_settings(vllm_config)
        if settings.method == FULL:
            raise IntegrationError("lkv.method is 'full', but only compressed contexts can be stored; give 'lkv'.")
        config = vllm_config.model_config
        self.model = build_skeleton(
            config.model, config.revision, config.dtype, device, vllm_config.load_config.download_dir
        )
        patched = patch_attention(self.model)
        if any(kind.other for kind in patched.kinds):
            raise IntegrationError(
                "models with sliding-window or recurrent layers cannot be served with contexts by vLLM yet."
            )
        if patched.softcap is not None or any(sinks is not None for sinks in patched.sinks):
            raise IntegrationError(
                "models with attention sinks or capped attention scores cannot be served with contexts by vLLM yet."
            )
        if patched.position_hook is not None:
            raise IntegrationError("models with multimodal RoPE cannot be served with contexts by vLLM yet.")
        self.rotations, self.max_positions = patched.rotations, patched.spec.max_positions
        if (change := frequency_change(config.hf_text_config)) is not None:
            # Beyond it LongRoPE rotates questions unlike the context, which was read before.
            self.max_positions = min(self.max_positions, change)
        self.tokenizer = AutoTokenizer.from_pretrained(
            config.tokenizer, revision=config.tokenizer_revision or "main", trust_remote_code=False
        )
        self.policy: Policy | None = None
        if parse_method(settings.method).needs_policy:
            self.policy = resolve_policy(patched.spec, settings.policy)
        elif settings.policy:
            raise IntegrationError(f"lkv.method is {settings.method!r}, which takes no lkv.policy; leave it out.")
        self.compression = CompressionSettings.of_server(settings, patched.spec, self.tokenizer, self.policy)
        self.method(self.compression)  # refuses methods that do not fit, before any text is read
        self.store = self.open_store(settings.contexts_bytes if memory_bytes is None else memory_bytes)
        self.secret = secrets.token_hex()  # of requests that compress: otherwise a client could replace any context
        self._checked_files: dict[str, tuple[float, ...]] = {}
        self._checking = threading.Lock()
        self._remembered_tokens: dict[str, tuple[float, int]] = {}  # of requests on their way, with the time
        self._writes: dict[str, Future[None]] = {}

    def open_store(self, memory_bytes: int) -> ContextStore:
        """Open the store once more, with memory of its own."""
        settings = self.settings
        return ContextStore(
            settings.store_url, self.model, self.tokenizer, self.compression.policy, memory_bytes, settings.store_bytes
        )

    def method(self, settings: CompressionSettings, protected: Sequence[int] = ()) -> Method:
        """Return the method that keeps as much as `settings` say. Raises LkvError for one that cannot work in vLLM."""
        method = resolve_method(settings.request(self.policy, protected), self.model, self.tokenizer)
        if method.reads_queries or method.needs_whole_prompt:
            raise IntegrationError(
                f"lkv.method is {method.name!r}, which reads queries or the whole text, but vLLM's pages hold keys and "
                "values alone; use a method such as 'lkv', or compress with lkv.compress and store the file."
            )
        return method

    def encode(self, text: str | Conversation, settings: CompressionSettings) -> "NewContext":
        """Return what the engine needs to compress `text`. Raises LkvError for a text that cannot be compressed."""
        encoded = encode_text(self.tokenizer, self.max_positions, text, settings)
        new_context = NewContext(
            id=encoded.id,
            retention=settings.retention,
            memory=settings.memory,
            kind=settings.kind,
            tools=settings.tools,
            sha256=hashlib.sha256(encoded.text.encode()).hexdigest(),
            ids=encoded.ids,
            protected=encoded.protected,
            secret=self.secret,
        )
        self.method_of(new_context).check_length(len(encoded.ids))
        return new_context

    def settings_of(self, new_context: "NewContext") -> CompressionSettings:
        """Return the settings of a text."""
        own = new_context
        return self.compression._replace(retention=own.retention, memory=own.memory, kind=own.kind, tools=own.tools)

    def method_of(self, new_context: "NewContext") -> Method:
        """Return the method that compresses a text."""
        return self.method(self.settings_of(new_context), new_context.protected)

    def store_in_background(self, name: str, store: Callable[[], None]) -> None:
        """Run `store`, which stores the context `name`, in a thread: no request waits for the disk."""
        while len(self._writes) >= _MAX_WRITES:
            del self._writes[next(iter(self._writes))]
        # A thread that stays would keep its OpenMP threads: more of them than processors sleep at each barrier instead
        # of spinning, and every later step of the model takes half as long again.
        writer = ThreadPoolExecutor(1, "lkv-writer")
        self._writes[name] = writer.submit(store)
        writer.shutdown(wait=False)

    def outcome(self, name: str) -> str | None:
        """Return why storing the context `name` failed, once; "" if it succeeded or is unknown; None while pending."""
        write = self._writes.get(name)
        if write is not None and not write.done():
            return None
        error = self._writes.pop(name).exception() if write is not None else None
        if error is not None and not isinstance(error, LkvError):
            _LOG.error("a text could not be compressed", exc_info=error)
            return f"{type(error).__name__}: {error}"
        return "" if error is None else str(error)

    def tokens(self, name: str) -> int:
        """Return the number of tokens of a stored context, after checking its file, once unless it changes.

        Raises UnknownContextError, or ContextFileError for a damaged one and one of another model or policy.
        """
        stored = self.store.describe(name)
        if stored is None:
            raise unknown_context(name)
        state = (stored.created, stored.tokens, *self._file_state(name))
        if self._checked_files.get(name) == state:
            return stored.tokens
        with self._checking:  # one file at a time is read whole, and kept in the memory of workers alone
            if self._checked_files.get(name) != state:
                if self.open_store(0).get(name).tokens != stored.tokens:
                    raise ContextFileError(f"the context {name!r} is not the one described; compress its text again.")
                self._checked_files[name] = state
        return stored.tokens

    def remember_tokens(self, name: str, tokens: int) -> None:
        """Have `recent_tokens` find the tokens of a context that has just been checked."""
        now = time.monotonic()
        fresh = {other: found for other, found in self._remembered_tokens.items() if found[0] > now - _REMEMBERED}
        self._remembered_tokens = {**fresh, name: (now, tokens)}

    def recent_tokens(self, name: str) -> int:
        """`tokens`, or what `remember_tokens` was given seconds ago: vLLM waits for this with all other requests."""
        checked, tokens = self._remembered_tokens.get(name, (-math.inf, 0))
        return tokens if checked > time.monotonic() - _REMEMBERED else self.tokens(name)

    def _file_state(self, name: str) -> tuple[float, ...]:
        """Return what changes with a context's file in a local folder; nothing is known of those elsewhere."""
        with suppress(OSError, ValueError):
            status = os.stat(f"{self.settings.store_url}/{name}.kv")
            return status.st_mtime_ns, status.st_size
        return ()


class NewContext(BaseModel):
    """A text to be compressed: travels with the request that reads it, as `SamplingParams.extra_args["lkv_compress"]`.

    `ids` are the request's prompt, and do not travel twice.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str
    retention: float | None = None
    memory: str | None = None  # instead of the retention
    kind: ContextKind = "text"
    tools: Tools | None = None  # what the model may call, before the text
    sha256: str
    protected: list[int] = Field(default_factory=list)  # positions of tokens that every head keeps
    name: str = Field(default="", max_length=200)
    created: float = Field(default_factory=time.time)  # seconds since 1970
    skipped: list[str] | None = None  # parts of an uploaded file that its text leaves out
    secret: str = ""  # `VllmContexts.secret`
    ids: list[int] = Field(default_factory=list, exclude=True)

    @classmethod
    def parse(cls, text: str) -> "NewContext":
        """Parse the JSON of a request. Raises PromptError if it is invalid."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise PromptError(
                f"lkv_compress: {' '.join(first_problem(error))}; create a context by POST /v1/contexts, or with "
                "lkv.integrations.vllm.requests.compress."
            ) from None


class Compression:
    """A compression during vLLM's prefill: evicts from a layer once all of its k and v are in pages."""

    def __init__(self, contexts: VllmContexts, new_context: NewContext):
        self._contexts, self._new_context = contexts, new_context
        self._cache = RaggedCache(contexts.model, method=contexts.method_of(new_context), slack=0)
        self._error: Exception | None = None

    def add_layer(self, layer: int, key: torch.Tensor, value: torch.Tensor, scale: float) -> None:
        """Evict from the whole k and v of one layer; a failure ends this compression alone.

        Args:
            layer: The layer's number.
            key: Its keys [1, H, T, d].
            value: Its values [1, H, T, d].
            scale: The scale of attention scores.
        """
        prompt = LayerKV(key, value, scale, rotation=self._contexts.rotations[layer])
        try:
            if self._error is None:
                self._cache.ragged_layers[layer].fill(prompt)
        except Exception as error:
            self._error = error

    def store_in_background(self, ids: list[int]) -> None:
        """Have the context of the text `ids` stored; `VllmContexts.outcome` says when it is, or why it cannot be."""
        self._contexts.store_in_background(self._new_context.id, partial(self._store, ids))

    @torch.inference_mode()
    def _store(self, ids: list[int]) -> None:
        if self._error is not None:
            raise self._error
        contexts, new_context, cache = self._contexts, self._new_context, self._cache
        contexts.store.check_quota()  # again: other texts were stored since the request
        cache.history.ids = torch.tensor([ids], device=contexts.model.device)
        metadata = describe_compression(cache, new_context.sha256, new_context.kind)
        context = Context(contexts.model, contexts.tokenizer, ids, cache, metadata)
        settings = contexts.settings_of(new_context)
        text = new_context
        stored = StoredContext.describe(text.id, text.name, context, settings, text.created, text.skipped)
        contexts.store.put(stored, context)


def unsupported_reason(vllm_config: "VllmConfig") -> str | None:
    """Return why contexts cannot be used with these settings of vLLM, in one sentence; None if they can."""
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    speculation = vllm_config.speculative_config
    change = frequency_change(model.hf_text_config)
    has_overrides = bool(getattr(model, "hf_overrides", None) or getattr(model, "hf_config_path", None))
    sizes = [
        getattr(parallel, f"{kind}_parallel_size", 1) for kind in ("pipeline", "decode_context", "prefill_context")
    ]
    problems = [
        (
            speculation is not None and speculation.method not in ("ngram", "suffix"),
            "a draft model proposes tokens without reading the context, and passes are planned before it is known how "
            "many are accepted; use speculative decoding with the method ngram.",
        ),
        (
            vllm_config.lora_config is not None,
            "LoRA is on, and entries computed with different adapters do not go together; start vLLM without it.",
        ),
        (
            max(sizes) > 1,
            "pipeline and context parallelism split what a context needs together; use tensor or data parallelism.",
        ),
        (
            getattr(parallel, "_api_process_count", 1) > 1,
            "several API servers know nothing of each other's texts; start vLLM with --api-server-count 1.",
        ),
        (
            has_overrides,
            "the model's configuration is overridden (--hf-overrides, --hf-config-path), which contexts do not follow; "
            "write it into config.json.",
        ),
        (bool(getattr(parallel, "enable_dbo", False)), "micro-batches (DBO) are on; start vLLM without them."),
        (
            cache.sliding_window is not None,
            "vLLM makes all layers of this model sliding-window layers, which contexts do not work with yet; use "
            "another.",
        ),
        (
            change is not None and model.max_model_len > change,
            "vLLM's longest text exceeds the length at which LongRoPE changes, so that vLLM rotates shorter texts "
            f"unlike transformers; start vLLM with --max-model-len {change} or less.",
        ),
        (
            vllm_config.scheduler_config.scheduler_cls is not None,
            "a scheduler of its own (--scheduler-cls) could keep pages of lost contexts; start vLLM without it.",
        ),
        (cache.cache_dtype != "auto", "the KV cache is quantised; start vLLM with --kv-cache-dtype auto."),
    ]
    return next((problem for applies, problem in problems if applies), None)
