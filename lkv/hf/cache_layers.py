"""Layers of a cache that compute their own attention."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


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
        """Return the new k and v alone."""
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
        """Return the name of `get_max_length` before transformers 5.17."""
        return self.get_max_length()


def crop_to(cache: Any, length: int) -> None:
    """Cut every layer of `cache`, LKV's or transformers' own, back to its first `length` tokens.

    Only a number below 0 means the same to `crop` in every version: from 5.17 on 0 cuts nothing, before it cuts all.
    """
    # Layer by layer: an interrupted forward pass leaves them unequal.
    for layer in cache.layers:
        if excess := layer.get_seq_length() - length:
            layer.crop(-excess)
