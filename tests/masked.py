"""The stock model with a -inf mask on the evicted entries: what every eviction is held against."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

Seen = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v) to what each row sees, [B, H, T, T]


@contextmanager
def attention_over(model: Any, seen: Seen) -> Iterator[None]:
    """In the block each row of a whole text sees what `seen` gives, in plain softmax attention."""

    def attention(module, query, key, value, mask, scaling, **kwargs):
        visible = seen(module.layer_idx, query, key, value)
        groups = query.shape[1] // key.shape[1]
        key, value, visible = (x.repeat_interleave(groups, 1) for x in (key, value, visible))
        logits = (query @ key.transpose(-1, -2) * scaling).masked_fill(~visible, -torch.inf)
        return (torch.softmax(logits, -1) @ value).transpose(1, 2), None

    AttentionInterface.register("masked_oracle", attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = "masked_oracle"
    try:
        yield
    finally:
        model.config._attn_implementation = before


def hidden_from_continuation(model: Any, hidden: list[Tensor], prompt: int) -> Any:
    """In the block, rows from `prompt` on do not see the entries where `hidden[layer]` [B, H, T] is True."""

    def seen(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        visible = causal(key)
        gone = hidden[layer]
        visible[:, :, prompt:, : gone.shape[-1]] &= ~gone[:, :, None]
        return visible

    return attention_over(model, seen)


def causal(key: Tensor) -> Tensor:
    """Each row sees itself and what is before it: [B, H, T, T]."""
    batch, heads, tokens = key.shape[:3]
    return torch.ones(tokens, tokens, dtype=torch.bool).tril().repeat(batch, heads, 1, 1)
