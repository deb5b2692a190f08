"""BaseCache: what all caches of LKV have in common. `state` describes how attention finds their layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from lkv.errors import CacheError
from lkv.hf.cache_layers import AttentionCacheLayer
from lkv.hf.compiled import count_tokens
from lkv.hf.masks import KeyOffset
from lkv.hf.state import note_pending_layer, note_traced_layer, register_cache, take_pending_layer

# In place of a mask's offset: the tokens of the pass need no mask.
NO_MASK: Any = None


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
            note_traced_layer(self, layer_idx)
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
            note_pending_layer(layer, key)
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
