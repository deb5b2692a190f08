"""A cache layer that computes its own attention: the base of the ragged cache and of the training student.

An attention function sees no cache. So a layer tags the key tensor that its `update` returns with a hook, and the
attention function that `attention` registers hands the call to that hook.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from lkv.errors import CacheError

HOOK = "_lkv_hook"


class AttentionCacheLayer(CacheLayerMixin):
    """A cache layer that computes the attention over what it holds."""

    is_compileable = False
    is_sliding = False
    # The configuration object of the one model whose k and v this layer may hold; None for any.
    model_config: Any = None

    def tag(self, key: Tensor) -> Tensor:
        """A view of `key` marked so that the attention function hands its call to `attend`.

        A layer stores `key` itself, never the view: the mark refers to the layer, and together they would never die.
        """
        view = key.view_as(key)
        setattr(view, HOOK, self.attend)
        return view

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        """Attention output [B, T, Hq, d] for `query` [B, Hq, T, d]; `stock()` is the model's own attention."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that `update` returns."""
        return query_length, self.get_seq_length()

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.17."""
        return self.get_max_length()


class BaseCache(Cache):
    """A cache of hooked layers: whatever the version of transformers, they are called as its newest one does."""

    assisted = False  # whether assisted decoding has just begun

    def expect(self, ids: Tensor, whole: bool, begins: bool, part: bool) -> None:
        """Hear from `generate` that `ids` [B, T] come: all from the first on if `whole`, else the new ones alone.

        `begins`: this is a first step, not one of decoding. `part`: `generate` reads the prompt in parts, of which this
        is one.
        """

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        if isinstance(query_length, Tensor):  # before transformers 5.4: the positions of the queries
            query_length = query_length.shape[0]
        return super().get_mask_sizes(query_length, layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Cut `-tokens_to_remove` (<= 0) tokens off the end of every layer, and nothing for 0.

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
    """transformers' own layer for sliding attention: the last tokens, whole, beside layers that are evicted from."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows = key_states.shape[0]
        if self.keys is not None and self.values is not None and len(self.keys) == 1 < rows:
            # One text that goes on in several rows.
            self.keys, self.values = self.keys.expand(rows, -1, -1, -1), self.values.expand(rows, -1, -1, -1)
        seen = super().update(key_states, value_states, *args, **kwargs)
        # What is kept is a view of all that was seen; after a long prompt that would hold the whole prompt.
        if key_states.shape[2] > self.sliding_window and self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        return seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = min(self.cumulative_length, self.sliding_window - 1)
        return held + query_length, self.cumulative_length - held

    def fork(self) -> "SlidingWindowLayer":
        """A copy that goes on independently; what it holds is replaced, never written to."""
        return copy.copy(self)

    def state(self) -> dict[str, Tensor]:
        """k and v [B, H, T, d] of the last tokens."""
        if self.keys is None or self.values is None:
            raise CacheError("there is no text in a sliding layer to save; read one first.")
        return {"sliding_k": self.keys, "sliding_v": self.values}

    def restore(self, state: dict[str, Tensor], tokens: int, like: Tensor) -> None:
        """Take up what `state` gave after `tokens` tokens, on the device and in the dtype of `like`."""
        self.lazy_initialization(like, like)
        self.keys, self.values = state["sliding_k"].to(like), state["sliding_v"].to(like)
        self.cumulative_length = tokens

    def nbytes(self) -> int:
        """Bytes of the k and v held."""
        held = (self.keys, self.values) if self.is_initialized else ()
        return sum(x.untyped_storage().nbytes() for x in held if x is not None)


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


__all__ = [
    "HOOK",
    "AttentionCacheLayer",
    "BaseCache",
    "SlidingWindowLayer",
    "crop_to",
    "kv_nbytes",
]
