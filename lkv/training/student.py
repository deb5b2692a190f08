"""Teacher and student of the distillation share one frozen prompt; the student sees it under a soft mask (Sec. 3.5).

Eviction in a layer follows that layer's own attention over the whole prompt, so the prompt's k and v are those of the
uncompressed model. Only the continuation rows differ, and only they are computed twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lkv.integrations.transformers.cache_layers import AttentionCacheLayer, BaseCache
from lkv.integrations.transformers.prefill import FrozenPromptLayer, LayerKV, as_prompt_kv
from lkv.kernels.soft_mask_attention import soft_mask_attention


class FrozenPrompt(BaseCache):
    """A cache holding the full k and v [1, H, T, d] of a prompt, layer by layer, for continuations of any number.

    `log_mask` [L, n, H, T] weighs the prompt's tokens for each of n continuations (None: the full cache). Own tokens
    of a continuation are not masked. Of several prompts, [C, H, T, d], `owners` [n] says which one each continuation
    follows. For one forward pass: what it appends is not stored.
    """

    def __init__(self, prompt: list[LayerKV], log_mask: Tensor | None = None, owners: Tensor | None = None):
        masks: Any = [None] * len(prompt) if log_mask is None else log_mask
        layers = [_MaskedLayer(layer, mask, owners) for layer, mask in zip(prompt, masks, strict=True)]
        super().__init__(layers=as_prompt_kv(prompt).continuation_layers(layers))


class _MaskedLayer(FrozenPromptLayer):
    def __init__(self, prompt: LayerKV, log_mask: Tensor | None, owners: Tensor | None):
        super().__init__(prompt)
        self._log_mask, self._owners = log_mask, owners

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        rows, heads, new, _ = key.shape
        k = torch.cat([self._of_rows(self._prompt.key, rows), key], 2)
        v = torch.cat([self._of_rows(self._prompt.value, rows), value], 2)
        log_mask = k.new_zeros((rows, heads, k.shape[2]), dtype=torch.float32)
        if self._log_mask is not None:
            # A model may be spread over devices: the masks of all layers are made on one.
            given = self._log_mask.to(k.device)
            log_mask = torch.cat([given, log_mask[..., :new].to(given.dtype)], -1)
        # Under autocast the rotation leaves q and k in float32 beside v in half precision.
        return soft_mask_attention(query.to(v.dtype), k.to(v.dtype), v, log_mask, scale).transpose(1, 2)

    def _of_rows(self, x: Tensor, rows: int) -> Tensor:
        """The prompt's x for each of `rows` continuations."""
        return x.expand(rows, -1, -1, -1) if self._owners is None else x[self._owners.to(x.device)]


class MaskedSequence(BaseCache):
    """No cache at all, but masks for a forward pass over whole sequences, prompt and continuation together: every query
    row sees the prompt's tokens under `log_mask` [L, n, H, T] (the literal student of Sec. 3.5; None: plain attention).
    """

    def __init__(self, layers: int, log_mask: Tensor | None = None):
        masks: Any = [None] * layers if log_mask is None else log_mask
        super().__init__(layers=[_SequenceLayer(mask) for mask in masks])


class _SequenceLayer(AttentionCacheLayer):
    def __init__(self, log_mask: Tensor | None):
        super().__init__()
        self._log_mask = log_mask

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.tag(key_states), value_states

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        if self._log_mask is None:
            return stock()
        follows = key.shape[2] - self._log_mask.shape[-1]
        free = self._log_mask.new_zeros((*self._log_mask.shape[:2], follows))
        log_mask = torch.cat([self._log_mask, free], -1)
        out = soft_mask_attention(query.to(value.dtype), key.to(value.dtype), value, log_mask, scale)
        return out.transpose(1, 2)
