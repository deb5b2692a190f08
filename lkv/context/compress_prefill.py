"""`compress_prefill`: a context manager in which `model.generate` compresses its prompts automatically."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from typing import Any

from torch import Tensor

from lkv.cache.cache_config import CacheConfig
from lkv.cache.ragged_cache import RaggedCache
from lkv.context.generation import effective_option, requested_option
from lkv.errors import CacheError
from lkv.hf.attention import read_weights
from lkv.hf.cache_argument import NAMES, cache_argument, find_cache
from lkv.methods.request import CompressionRequest
from lkv.utils.cpu_threads import adapted_threads
from lkv.utils.overrides import current_method, override_method

_logger = logging.getLogger(__name__)
_own_blocks: ContextVar[tuple["PrefillCompression", ...]] = ContextVar("lkv_prefill_blocks", default=())


class PrefillCompression:
    """The object that `compress_prefill` yields.

    Attributes:
        cache: The cache of the last call of `generate`; None before the first.
    """

    def __init__(self) -> None:
        self.cache: RaggedCache | None = None
        self._is_open = True
        self._is_reported = False

    def _applies(self) -> bool:
        """Return whether the calling thread or task has entered the block; otherwise log once that it has not."""
        if self._is_open and self not in _own_blocks.get() and not self._is_reported:
            self._is_reported = True
            _logger.warning(
                "generate was called outside of the thread or task of an open compress_prefill block, so its prompt "
                "is not compressed. For a thread of the block: Thread(target=contextvars.copy_context().run, "
                "args=(model.generate,), kwargs=...)."
            )
        return self._is_open and self in _own_blocks.get()


def _check_cache_options(options: dict[str, Any]) -> None:
    """Raise CacheError for options of generate by which it would use no cache, or another one."""
    if options.get("use_cache") is False:
        raise CacheError("use_cache=False leaves no cache to compress; leave it out, or end the block before.")
    if other := requested_option(options, "cache_implementation"):
        raise CacheError(f"cache_implementation={other!r} is another cache; leave it out, or end the block before.")


@contextmanager
def compress_prefill(model: Any, **options: Any) -> Iterator[PrefillCompression]:
    """Let `model.generate` compress every prompt that it reads in the block.

    ```python
    with lkv.compress_prefill(model, memory=0.1) as compression:
        output = model.generate(**inputs, max_new_tokens=32)
    print(compression.cache.nbytes(), compression.cache.full_nbytes())
    ```

    Each call uses a new `RaggedCache`, unless you pass a cache. The block applies to the thread or asyncio task that
    enters it; other threads generate as without it, or by a block of their own. For a thread that you start in the
    block, such as with a streamer, give it the block's context:
    `Thread(target=contextvars.copy_context().run, args=(model.generate,), kwargs=...)`.

    Args:
        model: The model whose `generate` is called, also by a pipeline.
        **options: Options of `RaggedCache`: memory or retention, method, policy, ..., but not `prompt_tokens`, which
            follows from the prompt.

    Yields:
        An object whose `cache` is the cache of the last call.

    Raises:
        CacheError: For `prompt_tokens`, and in the block for `use_cache=False` and another `cache_implementation`.
        LkvError: As RaggedCache raises for its arguments.
    """
    if unfit := sorted(options.keys() & {"prompt_tokens", "chunk", "protected"}):
        raise CacheError(
            f"{', '.join(unfit)} follows from each prompt here; leave it out, or pass a RaggedCache to generate."
        )
    # Load the policy once and reject invalid options before the first prompt. Streaming needs any prompt length here.
    config = CacheConfig.resolve(CompressionRequest(prompt_tokens=1, **options), model)
    compression, generate = PrefillCompression(), current_method(model, "generate")

    @wraps(generate)  # keeps the signature, from which transformers reads the options
    def generate_compressed(*args: object, **kwargs: object) -> Any:
        if find_cache(kwargs) is None and compression._applies():
            _check_cache_options(kwargs)
            if effective_option(model, kwargs, "cache_implementation"):  # set for the model
                kwargs["cache_implementation"] = None
            ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
            tokens = ids.shape[-1] if isinstance(ids, Tensor) else None
            # transformers warns of two caches even if the one under the other name is None.
            kwargs = {name: value for name, value in kwargs.items() if name not in NAMES}
            request, weights = replace(config.request, prompt_tokens=tokens), read_weights(model)
            compression.cache = RaggedCache.from_config(model, replace(config, request=request, weights=weights))
            kwargs |= cache_argument(compression.cache)
            with adapted_threads(getattr(model, "device", None)):
                return generate(*args, **kwargs)
        return generate(*args, **kwargs)

    _own_blocks.set((*_own_blocks.get(), compression))
    try:
        with override_method(model, "generate", generate_compressed):
            yield compression
    finally:
        compression._is_open = False
        _own_blocks.set(tuple(block for block in _own_blocks.get() if block is not compression))
