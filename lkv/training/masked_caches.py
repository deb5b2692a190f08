"""Caches of the distillation: continuations over a frozen prompt, or whole sequences, under a soft mask."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from lkv.hf.base_cache import BaseCache
from lkv.hf.cache_layers import AttentionCacheLayer
from lkv.hf.prompt_kv import FrozenPromptLayer, LayerKV, as_prompt_kv
from lkv.hf.state import PatchedModel
from lkv.kernels.soft_mask_attention import continuation_attention, soft_mask_attention


class FrozenPrompt(BaseCache):
    """k and v [C, H, T, d] of C prompts for one pass over continuations, whose own k and v are not stored.

    `log_mask` [L, n, H, T] weights the prompt's tokens for n continuations (None: the full cache). `owners` [n] are the
    prompt indices of the continuations (None: there is one prompt). `rows` is n.
    """

    def __init__(
        self, prompt: list[LayerKV], log_mask: Tensor | None = None, owners: Tensor | None = None, rows: int = 1
    ):
        masks: Any = [None] * len(prompt) if log_mask is None else log_mask
        layers = [_MaskedLayer(layer, mask, owners) for layer, mask in zip(prompt, masks, strict=True)]
        super().__init__(*as_prompt_kv(prompt).continuation_layers(layers, rows))


class _MaskedLayer(FrozenPromptLayer):
    def __init__(self, prompt: LayerKV, log_mask: Tensor | None, owners: Tensor | None):
        super().__init__(prompt)
        self._log_mask, self._owners = log_mask, owners

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        # The model may be on several devices; the masks of all layers are on one.
        owners, log_mask = (x if x is None else x.to(key.device) for x in (self._owners, self._log_mask))
        # Under autocast RoPE returns q and k in float32, while v is in half precision.
        query, key = query.to(value.dtype), key.to(value.dtype)
        prompt = self._prompt
        given = query, key, value, prompt.key, prompt.value, log_mask, owners, scale
        out = continuation_attention(*given, sinks=prompt.sinks, softcap=prompt.softcap)
        return out.transpose(1, 2)


class MaskedSequence(BaseCache):
    """Masks [L, n, H, T] of the prompt in every row of a pass over prompt and continuation; None: plain attention.

    `patched` has the kinds of the model's layers, their attention sinks and cap.
    """

    def __init__(self, patched: PatchedModel, log_mask: Tensor | None = None):
        masks, sinks = iter([None] * len(patched.sinks) if log_mask is None else log_mask), iter(patched.sinks)
        # Every layer reads the whole text in one pass, possibly twice for recomputation, so none stores anything.
        is_full, softcap = [kind.is_evicted for kind in patched.kinds], patched.softcap
        super().__init__(
            [_SequenceLayer(next(masks), next(sinks), softcap) if full else _SequenceLayer() for full in is_full]
        )


class _SequenceLayer(AttentionCacheLayer):
    def __init__(self, log_mask: Tensor | None = None, sinks: Tensor | None = None, softcap: float | None = None):
        super().__init__()
        self._log_mask, self._sinks, self._softcap = log_mask, sinks, softcap

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, stock: Callable[[], Tensor]
    ) -> Tensor:
        if self._log_mask is None:
            return stock()
        query, key = query.to(value.dtype), key.to(value.dtype)
        log_mask = pad(self._log_mask.to(key.device), (0, key.shape[2] - self._log_mask.shape[-1]))
        out = soft_mask_attention(query, key, value, log_mask, scale, sinks=self._sinks, softcap=self._softcap)
        return out.transpose(1, 2)
