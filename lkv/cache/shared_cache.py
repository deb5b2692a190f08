"""SharedCache: a batch whose rows share one compressed prompt."""

from collections.abc import Callable

import torch
from torch import Tensor

from lkv.cache.layer import RaggedLayer
from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.base_cache import BaseCache
from lkv.hf.cache_layers import AttentionCacheLayer
from lkv.hf.masks import Mask, expand_mask
from lkv.kernels.ragged_attention import join_sinks, masked_attention, merge_attention


class SharedCache(BaseCache):
    """A cache for a batch whose rows share one compressed prompt, stored once.

    The prompt's cache remains usable, because its compressed entries are only read.

    Args:
        cache: A cache of one row that has read its prompt, without sliding-window layers.
    """

    def __init__(self, cache: RaggedCache):
        super().__init__([SharedLayer(layer) for layer in cache.ragged_layers])
        self.image_offset = cache.image_offset


class SharedLayer(AttentionCacheLayer):
    """One layer of a `SharedCache`: the prompt's shared entries, and k and v [B, H, T, d] of the tokens after it."""

    def __init__(self, prompt: RaggedLayer):
        super().__init__()
        self._prompt = prompt
        self.model_config = prompt.model_config
        self.reset()

    def reset(self) -> None:
        """Drop the tokens after the prompt."""
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self.is_initialized = False

    @property
    def _appended_tokens(self) -> int:
        return 0 if self._key is None else self._key.shape[2]

    def get_seq_length(self, *args: object) -> int:
        """Return the number of tokens of the prompt and after it."""
        return self._prompt.prompt_length + self._appended_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (length, offset) of the tokens after the prompt only: all rows see the whole prompt."""
        return self._appended_tokens + query_length, self._prompt.prompt_length

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append k and v of new tokens and return them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        key, value = key_states.to(value_states.dtype), value_states
        if self._key is not None and self._value is not None:
            key, value = torch.cat([self._key, key], 2), torch.cat([self._value, value], 2)
        self._key, self._value = key, value
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, model_attention: Callable[[], Tensor]
    ) -> Tensor:
        """Compute attention over the prompt and over the later tokens, merged by log-sum-exp."""
        assert self._key is not None and self._value is not None and self._prompt.store is not None
        (sinks, softcap), (batch, _, new, _) = self._prompt.context.softmax_options, query.shape
        query, key, value = query.to(self._value.dtype), self._key, self._value
        visible = expand_mask(mask, new, key.shape[2], key.device)
        new_output, new_lse = masked_attention(query, key, value, visible, scale, softcap)
        # All rows attend to the prompt as new tokens of one row, so that it is read only once.
        rows = query.transpose(0, 1).flatten(1, 2)[None]
        rows = rows.to(self._prompt.store.dtype)
        out, lse = self._prompt.store.attend_compressed(rows, scale, softcap)
        out, lse = (x[0].unflatten(1, (batch, new)).transpose(0, 1) for x in (out.to(query.dtype), lse))
        out, lse = merge_attention(out, lse, new_output, new_lse)
        return (out if sinks is None else join_sinks(out, lse, sinks)).transpose(1, 2)
