"""Cache layers that compute their own attention, the cache that holds them, and what all caches have in common.

An attention function gets no cache. So `BaseCache.update` notes in a thread-local which layer returned which keys, and
the attention function, called right afterwards, takes that note (`take_pending_layer`). A note is matched by the key
tensor itself: one that an exception left behind matches no later call.
"""

import copy
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from lkv.errors import CacheError
from lkv.hf.compiled import count_tokens, note_traced, register_cache
from lkv.hf.masks import KeyOffset

# In place of a mask's offset: the tokens of the pass need no mask.
NO_MASK: Any = None


class _Pending(threading.local):
    # Not a ContextVar: torch.compile cannot trace those, and would break the graphs of models with a stock cache.
    layer: "weakref.ref[AttentionCacheLayer] | None" = None


_pending = _Pending()


def has_pending_layer() -> bool:
    """Whether an LKV layer may be waiting for the attention call that comes next in this thread."""
    return _pending.layer is not None


def take_pending_layer(key: Tensor) -> "AttentionCacheLayer | None":
    """The layer whose `update` returned `key` and that waits for attention over it; it waits no longer."""
    layer = None if _pending.layer is None else _pending.layer()
    _pending.layer = None
    if layer is None or layer.pending_key is not key:
        return None
    layer.pending_key = None
    return layer


class AttentionCacheLayer(CacheLayerMixin):
    """A cache layer that computes the attention over what it stores: nothing, unless a subclass does."""

    is_compileable = False
    is_sliding = False
    # The configuration object of the only model whose k and v this layer may store; None for any model.
    model_config: Any = None
    # What `update` returned last, until attention over it is computed.
    pending_key: Tensor | None = None
    # Whether `attend` lets attention sinks take their share, where the model has some.
    takes_sinks = False
    # Whether compiled models may leave the layer to `lkv::extend`, and whether it then reads a prompt.
    is_traceable = False
    is_reading_prompt = True

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        """Compute attention for the tokens of the last `update`.

        Args:
            query: Queries after RoPE, [B, Hq, T, d].
            key: The keys that `update` returned, [B, Hkv, K, d].
            value: The values that `update` returned, [B, Hkv, K, dv].
            mask: None, a `key_mask` [B, K] or a whole attention mask [B, 1, T, K], bool or additive.
            scale: What the products of queries and keys are multiplied by.
            stock: Computes the model's own attention over `key` and `value`.

        Returns:
            The attention output, [B, T, Hq, dv].
        """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and device from the first keys."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new k and v alone."""
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        """Tokens read so far."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that `update` returns."""
        return query_length, self.get_seq_length()

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.17."""
        return self.get_max_length()


class BaseCache(Cache):
    """A cache of `AttentionCacheLayer`s, with one interface to all supported versions of transformers."""

    is_assisted = False  # whether assisted decoding has just begun

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.name = register_cache(self)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Give new k and v [B, Hkv, T, d] to a layer; the attention call that follows goes to the same layer."""
        if torch.compiler.is_dynamo_compiling() and self._is_traceable(layer_idx):
            note_traced(self, layer_idx)
            return key_states, value_states
        return self._update(key_states, value_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable
    def _update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.before_update(key_states, layer_idx)
        key, value = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if isinstance(layer, AttentionCacheLayer):
            layer.pending_key = key
            _pending.layer = weakref.ref(layer)
        return key, value

    def compute_layer(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        stock: Callable[[], Any],
    ) -> Tensor:
        """`update`, and the attention over the layer; arguments and outputs are those of `AttentionCacheLayer`."""
        key, value = self.update(key, value, layer_idx)
        layer = take_pending_layer(key)
        assert layer is not None
        return layer.attend(query, key, value, mask, scale, stock)

    def _is_traceable(self, layer_idx: int) -> bool:
        layer = self.layers[layer_idx]
        return isinstance(layer, AttentionCacheLayer) and layer.is_traceable

    def _hides_length(self, layer_idx: int) -> bool:
        """Whether the length of the text must be no constant of what is traced."""
        layer: Any = self.layers[layer_idx]
        return self._is_traceable(layer_idx) and not layer.is_reading_prompt

    def before_update(self, key_states: Tensor, layer_idx: int) -> None:
        """Raise CacheError or PromptError where a layer cannot take the new keys; called first in `update`."""

    def announce_inputs(self, ids: Tensor, is_full: bool, is_first_step: bool, is_chunk: bool) -> None:
        """Raise CacheError where the cache cannot take what `generate` is about to feed.

        Args:
            ids: Token ids [B, T]: of the whole text if `is_full`, else of its new tokens.
            is_full: Whether `ids` begin with the first token of the text.
            is_first_step: Whether this is the first step of a `generate` call, not one of decoding.
            is_chunk: Whether `ids` are one of the chunks in which `generate` reads a prompt.
        """

    def announce_adapters(self, adapters: str) -> None:
        """Raise CacheError where the text was read with other adapters, as `read_adapters` names them."""

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """(length, offset) of the keys that the layer's mask covers."""
        if isinstance(query_length, Tensor):  # before transformers 5.4: the positions of the queries
            query_length = query_length.shape[0]
        if torch.compiler.is_dynamo_compiling() and query_length == 1 and self._hides_length(layer_idx):
            return 1, NO_MASK
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length, KeyOffset(offset) if isinstance(self.layers[layer_idx], AttentionCacheLayer) else offset

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Tokens read so far; a tensor where a decode step is traced."""
        if torch.compiler.is_dynamo_compiling() and self._hides_length(layer_idx):
            return count_tokens(self.name, layer_idx)
        return super().get_seq_length(layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Cut `-tokens_to_remove` (<= 0) tokens off the end of every layer.

        Raises CacheError for a length to keep, which is what assisted decoding gives before transformers 5.17.
        """
        if isinstance(tokens_to_remove, bool) or not hasattr(tokens_to_remove, "__index__"):
            raise CacheError(f"crop({tokens_to_remove!r}) is no number of tokens to cut: give a whole one <= 0.")
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop({tokens_to_remove}) is no number of tokens to cut: give one <= 0. If assisted decoding did "
                "this, it needs transformers 5.17 or newer; reset() the cache and read the prompt again."
            )
        super().crop(tokens_to_remove)


class SlidingWindowLayer(DynamicSlidingWindowLayer):
    """A sliding-window layer of transformers, for caches in which other layers are evicted from."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append k and v; returns all that the new tokens may see."""
        rows = key_states.shape[0]
        if self.keys is not None and self.values is not None and len(self.keys) == 1 < rows:
            # One text continues in several rows.
            self.keys, self.values = self.keys.expand(rows, -1, -1, -1), self.values.expand(rows, -1, -1, -1)
        visible = super().update(key_states, value_states, *args, **kwargs)
        # What is stored is a view of all keys; after a long prompt it would keep the whole prompt in memory.
        if key_states.shape[2] > self.sliding_window and self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return visible

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that `update` returns."""
        stored = min(self.cumulative_length, self.sliding_window - 1)
        return stored + query_length, self.cumulative_length - stored

    def reset(self) -> None:
        """Forget everything; what forks have stays."""
        self.keys = self.values = None
        self.is_initialized, self.cumulative_length = False, 0

    def fork(self) -> "SlidingWindowLayer":
        """A copy that continues independently; its tensors are replaced, never written to."""
        return copy.copy(self)

    def state(self) -> dict[str, Tensor]:
        """The last tokens: k and v [B, H, T, d]."""
        if self.keys is None or self.values is None:
            raise CacheError("there is no text in a sliding layer to save; read one first.")
        return {"sliding_k": self.keys, "sliding_v": self.values}

    def restore(self, state: dict[str, Tensor], tokens: int, like: Tensor) -> None:
        """Load what `state` returned after `tokens` tokens, on the device and in the dtype of `like`."""
        self.lazy_initialization(like, like)
        self.keys, self.values = state["sliding_k"].to(like), state["sliding_v"].to(like)
        self.cumulative_length = tokens

    def nbytes(self) -> int:
        """Bytes of k and v."""
        tensors = (self.keys, self.values) if self.is_initialized else ()
        return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)


def kv_nbytes(cache: Any) -> int:
    """Bytes of storage behind the k and v of one of transformers' own caches."""
    return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))


def crop_to(cache: Any, length: int) -> None:
    """Cut every layer of `cache`, LKV's or transformers' own, back to its first `length` tokens.

    Only a number below 0 means the same to `crop` in every version: from 5.17 on 0 cuts nothing, before it cuts all.
    """
    # Layer by layer: an interrupted forward pass leaves them unequal.
    for layer in cache.layers:
        if excess := layer.get_seq_length() - length:
            layer.crop(-excess)
