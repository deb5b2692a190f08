"""Layers of a cache that compute their own attention."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from lkv.hf.masks import Mask


class AttentionCacheLayer(CacheLayerMixin):
    """A cache layer that computes attention over its own entries. This base class stores nothing."""

    is_compileable = False
    is_sliding = False
    # The configuration object of the only model whose k and v this layer may store; None for any model.
    model_config: Any = None
    # The last k and v that `update` returned, until attention over them is computed.
    pending_key: Tensor | None = None
    # How many later layers read the k and v of this one, the keys that they get, and how many have not read them yet.
    readers = 0
    shared_key: Tensor | None = None
    reads_left = 0
    # Whether compiled models may run the layer through `lkv::extend`, and whether it is still reading the prompt.
    is_traceable = False
    is_before_eviction = True
    # Whether the last attention was over entries that are detached from the pass that made them.
    is_detached = False

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, model_attention: Callable[[], Tensor]
    ) -> Tensor:
        """Compute attention for the tokens of the last `update`.

        Args:
            query: Queries after RoPE, [B, Hq, T, d].
            key: The keys that `update` returned, [B, Hkv, K, d].
            value: The values that `update` returned, [B, Hkv, K, dv].
            mask: None, a `key_mask` [B, K] or a whole attention mask [B, 1, T, K], bool or additive.
            scale: The attention scaling factor.
            model_attention: Computes the model's own attention over `key` and `value`.

        Returns:
            The attention output, [B, T, Hq, dv].
        """

    def attend_again(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, model_attention: Callable[[], Tensor]
    ) -> Tensor:
        """Compute attention of a later layer to the keys of the last `update`; arguments and result as of `attend`."""
        return self.attend(query, key, value, mask, scale, model_attention)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and device from the first keys."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return only the new k and v."""
        return key_states, value_states

    def get_seq_length(self, *args: object) -> int:
        """Return the number of tokens read so far."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (length, offset) of the keys that `update` returns."""
        return query_length, self.get_seq_length()

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return `get_max_length()`, under the name used before transformers 5.17."""
        return self.get_max_length()


def crop_to(cache: Any, length: int) -> None:
    """Crop every layer of `cache`, LKV's or transformers' own, to its first `length` tokens.

    Only negative arguments of `crop` mean the same in every version: 0 removes all tokens before 5.17, none since.
    """
    # Layer by layer: an interrupted forward pass leaves them unequal.
    for layer in cache.layers:
        if excess := layer.get_seq_length() - length:
            layer.crop(-excess)
