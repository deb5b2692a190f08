"""Layers of a cache: those that compute their own attention, and sliding windows, which are not evicted from."""

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from lkv.errors import CacheError
from lkv.hf.model_spec import ModelSpec


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


class OtherLayer(Protocol):
    """A layer that nothing is evicted from, beside those of a `RaggedCache` that are evicted from."""

    def get_seq_length(self) -> int:
        """Return the number of tokens read so far."""

    def activate_past_recording(self) -> None:
        """Prepare for assisted decoding, which cuts off rejected tokens."""

    def fork(self) -> "OtherLayer":
        """Return a copy that continues independently."""

    def state(self) -> dict[str, Tensor]:
        """Return what is stored, as tensors to be saved. Raises CacheError where no text was read."""

    def restore(self, state: dict[str, Tensor], tokens: int, spec: ModelSpec, like: Tensor) -> None:
        """Load what `state` returned for one text.

        Args:
            state: The tensors.
            tokens: The length of the text.
            spec: The description of the model.
            like: A tensor of the dtype and on the device to store them in.

        Raises:
            ValueError: For tensors that `state` cannot have returned.
        """

    def nbytes(self) -> int:
        """Return the bytes of storage."""


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
        """Return a copy that continues independently: tensors are replaced, never written to."""
        return copy.copy(self)

    def state(self) -> dict[str, Tensor]:
        """The last tokens: k and v [B, H, T, d]."""
        if self.keys is None or self.values is None:
            raise CacheError("there is no text in a sliding layer to save; read one first.")
        return {"sliding_k": self.keys, "sliding_v": self.values}

    def restore(self, state: dict[str, Tensor], tokens: int, spec: ModelSpec, like: Tensor) -> None:
        """Load what `state` returned for one text; see `OtherLayer`."""
        shape = (1, spec.kv_heads, min(tokens, self.sliding_window - 1), spec.head_dim)
        is_whole = state.keys() == {"sliding_k", "sliding_v"}
        if not is_whole or any(tuple(x.shape) != shape or not x.is_floating_point() for x in state.values()):
            raise ValueError(f"k and v of a sliding layer are not {shape}")
        self.lazy_initialization(like, like)
        self.keys, self.values = state["sliding_k"].to(like), state["sliding_v"].to(like)
        self.cumulative_length = tokens

    def nbytes(self) -> int:
        """Bytes of k and v."""
        tensors = (self.keys, self.values) if self.is_initialized else ()
        return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)


def crop_to(cache: Any, length: int) -> None:
    """Cut every layer of `cache`, LKV's or transformers' own, back to its first `length` tokens.

    Only a number below 0 means the same to `crop` in every version: from 5.17 on 0 cuts nothing, before it cuts all.
    """
    # Layer by layer: an interrupted forward pass leaves them unequal.
    for layer in cache.layers:
        if excess := layer.get_seq_length() - length:
            layer.crop(-excess)
