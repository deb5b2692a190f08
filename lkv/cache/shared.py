"""SharedCache: many rows that follow one compressed text, which all read and none writes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lkv.cache.layer import RaggedLayer
from lkv.cache.ragged import RaggedCache
from lkv.integrations.transformers.hooks import Cache, HookedLayer
from lkv.kernels.ragged_attention import masked_attention, merge_attention, ragged_attention


class SharedLayer(HookedLayer):
    """One layer's k and v of what follows, [B, H, n, d], beside the spans of the one row that `text` holds."""

    def __init__(self, text: RaggedLayer):
        super().__init__()
        self._text = text
        self.model_config = text.model_config
        self.reset()

    def reset(self) -> None:
        """Forget what follows the text."""
        self._tail: tuple[Tensor, Tensor] | None = None
        self.is_initialized = False

    def get_seq_length(self, *args: Any) -> int:
        """Tokens of the text and of what follows."""
        return self._text.prompt_length + self._followed

    @property
    def _followed(self) -> int:
        return 0 if self._tail is None else self._tail[0].shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask is one over what follows alone: all rows see the whole text."""
        return self._followed + query_length, self._text.prompt_length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.to(value_states.dtype), value_states
        if self._tail is not None:
            new = torch.cat([self._tail[0], new[0]], 2), torch.cat([self._tail[1], new[1]], 2)
        self._tail = new
        return self.tag(key_states), value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        assert self._tail is not None and self._text.spans is not None
        batch, _, new, _ = query.shape
        key, value = self._tail
        late, late_lse = masked_attention(query.to(value.dtype), key, value, _visible(mask, new, key), scale)
        # To the text all rows are new tokens of one: it is read once for all of them.
        rows = query.transpose(0, 1).flatten(1, 2)[None].to(value.dtype)
        out, lse = ragged_attention(rows, *self._text.spans.settled(), scale, causal=False, lse=True)
        out, lse = (x[0].unflatten(1, (batch, new)).transpose(0, 1) for x in (out, lse))
        return merge_attention(out, lse, late, late_lse)[0].transpose(1, 2)


class SharedCache(Cache):
    """For `generate` with rows of ids that begin with the text of `cache`, a compressed cache of one row.

    `cache` must have no sliding layers. It may go on being asked meanwhile; its settled entries are read alone.
    """

    def __init__(self, cache: RaggedCache):
        super().__init__(layers=[SharedLayer(layer) for layer in cache.ragged])


def _visible(mask: Any, new: int, key: Tensor) -> Tensor:
    """What the `new` last tokens see of `key` [B, H, n, d], from transformers' mask: bool [B or 1, 1, new, n]."""
    if not isinstance(mask, Tensor):
        return torch.ones(1, 1, new, key.shape[2], dtype=torch.bool, device=key.device).tril(key.shape[2] - new)
    return mask if mask.dtype == torch.bool else mask == 0
