"""BaseCache: the base class of all LKV caches. `state` describes how attention finds their layers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from lkv.errors import CacheError, check_count
from lkv.hf.cache_layers import AttentionCacheLayer
from lkv.hf.compiled import count_tokens
from lkv.hf.image_positions import ImageOffset
from lkv.hf.masks import KeyOffset, MaskOffset
from lkv.hf.other_layers import OtherLayer, RecurrentLayer
from lkv.hf.state import note_pending_layer, note_traced_layer, register_cache, take_pending_layer

# Replaces the mask offset for passes that need no mask.
NO_MASK: Any = None


class BaseCache(Cache):
    """A cache of `AttentionCacheLayer`s and others, with one interface to all supported versions of transformers."""

    is_assisted = False  # whether assisted decoding has just begun
    image_offset: ImageOffset | None = None  # of a prompt with images, in a model with multimodal RoPE
    reads_all_queries = False  # whether layers that share keys and values must compute all tokens

    def __init__(self, layers: Sequence[Any], others: dict[int, OtherLayer] | None = None):
        """Combine layers as `make_layers` returns them: `others` maps layer indices to layers without eviction."""
        super().__init__(layers=[*layers])
        self.others = others or {}
        self.name = register_cache(self)

    def _parts(self) -> list[OtherLayer]:
        """Return the parts of hybrid layers that `layers` does not contain."""
        return [other for index, other in self.others.items() if self.layers[index] is not other]

    def set_others(self, others: dict[int, OtherLayer]) -> None:
        """Replace the layers without eviction."""
        layers: list[Any] = self.layers
        self.layers = [
            layer if isinstance(layer, AttentionCacheLayer) else others.get(index, layer)
            for index, layer in enumerate(layers)
        ]
        self.others = others

    def reset(self) -> None:
        """Drop all stored tokens and free their memory."""
        super().reset()
        for part in self._parts():
            part.reset()

    def reorder_cache(self, beam_idx: Any) -> None:
        """Make row i a copy of the row `beam_idx[i]`."""
        super().reorder_cache(beam_idx)
        for part in self._parts():
            part.reorder_cache(beam_idx)
        if self.image_offset is not None:
            self.image_offset = self.image_offset.select(beam_idx)

    @torch.compiler.disable
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the convolution state of a layer before this pass, None before the first one; models write to it."""
        if state_idx == 0:
            self.before_states(layer_idx)
        layer = self._recurrent(layer_idx)
        return layer.conv_states[state_idx] if layer.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the recurrent state of a layer before this pass, None before the first one."""
        layer = self._recurrent(layer_idx)
        return layer.recurrent_states[state_idx] if layer.has_previous_state[state_idx] else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Store the convolution state of a layer; returns it with the one before."""
        return self._recurrent(layer_idx).update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Store the recurrent state of a layer."""
        return self._recurrent(layer_idx).update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def _recurrent(self, layer_idx: int) -> RecurrentLayer:
        layer = self.others[layer_idx]
        assert isinstance(layer, RecurrentLayer)
        return layer

    def before_states(self, layer_idx: int) -> None:
        """Raise CacheError if a recurrent layer cannot continue; called before its states are read."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Pass new k and v [B, Hkv, T, d] to a layer; the next attention call goes to the same layer."""
        if torch.compiler.is_dynamo_compiling() and self._is_traceable(layer_idx):
            note_traced_layer(self, layer_idx)
            return key_states, value_states
        return self._update(key_states, value_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable
    def _update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.before_update(key_states, layer_idx)
        key, value = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if isinstance(layer, AttentionCacheLayer):
            note_pending_layer(self, layer, key)
        return key, value

    def compute_layer(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        model_attention: Callable[[], Any],
    ) -> Tensor:
        """Call `update`, then compute attention; arguments and outputs as in `AttentionCacheLayer.attend`."""
        key, value = self.update(key, value, layer_idx)
        layer = take_pending_layer(key)
        assert layer is not None
        return layer.attend(query, key, value, mask, scale, model_attention)

    def _is_traceable(self, layer_idx: int) -> bool:
        layer = self.layers[layer_idx]
        return isinstance(layer, AttentionCacheLayer) and layer.is_traceable

    def _hides_length(self, layer_idx: int) -> bool:
        """Return whether tracing must not bake in the length of the text as a constant."""
        layer: Any = self.layers[layer_idx]
        return self._is_traceable(layer_idx) and not layer.is_before_eviction

    def before_update(self, key_states: Tensor, layer_idx: int) -> None:
        """Raise CacheError or PromptError if a layer cannot take the new keys; called first in `update`."""

    def announce_inputs(self, ids: Tensor, is_full: bool, is_first_step: bool, is_chunk: bool) -> None:
        """Raise CacheError if the cache cannot take the token ids that `generate` is about to feed.

        Args:
            ids: Token ids [B, T] of the whole text if `is_full`, else of the new tokens only.
            is_full: Whether `ids` begin with the first token of the text.
            is_first_step: Whether this is the first step of a `generate` call rather than a decode step.
            is_chunk: Whether `ids` are one of the chunks in which `generate` reads a prompt.
        """

    def announce_adapters(self, adapters: str) -> None:
        """Raise CacheError if the text was read with other adapters; `adapters` is a digest of `read_adapters`."""

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """Return (length, offset) of the keys that the layer's mask covers."""
        if isinstance(query_length, Tensor):  # before transformers 5.4: the positions of the queries
            query_length = query_length.shape[0]
        if torch.compiler.is_dynamo_compiling() and query_length == 1 and self._hides_length(layer_idx):
            return 1, NO_MASK
        layer_idx = self._attention_index(layer_idx)
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        is_key_mask_enough = isinstance(self.layers[layer_idx], AttentionCacheLayer)
        return length, KeyOffset(offset) if is_key_mask_enough else MaskOffset(offset)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number of tokens read so far; a tensor while a decode step is traced."""
        layer_idx = self._attention_index(layer_idx)
        if torch.compiler.is_dynamo_compiling() and self._hides_length(layer_idx):
            return count_tokens(self.name, layer_idx)
        return super().get_seq_length(layer_idx)

    def _attention_index(self, layer_idx: int) -> int:
        """Return `layer_idx`, or the index of the first full-attention layer if that layer counts no tokens."""
        if isinstance(self.layers[layer_idx], CacheLayerMixin):
            return layer_idx
        return next(index for index, layer in enumerate(self.layers) if isinstance(layer, AttentionCacheLayer))

    def crop(self, tokens_to_remove: int) -> None:
        """Cut `-tokens_to_remove` (<= 0) tokens off the end of every layer.

        Raises CacheError for a positive number, a length to keep: assisted decoding passes it before transformers 5.17.
        """
        problem = f"crop({tokens_to_remove!r}) is not a number of tokens to cut: give a whole one <= 0."
        tokens_to_remove = check_count(tokens_to_remove, CacheError(problem), -math.inf)
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop({tokens_to_remove}) is not a number of tokens to cut: give one <= 0. If assisted decoding did "
                "this, it needs transformers 5.17 or newer; reset() the cache and read the prompt again."
            )
        if tokens_to_remove and any(isinstance(other, RecurrentLayer) for other in self.others.values()):
            raise CacheError(
                "the states of recurrent layers cannot be cut back by some tokens: call rewind() to go back to the end "
                "of the prompt, or continue from a fork() made before."
            )
        super().crop(tokens_to_remove)
