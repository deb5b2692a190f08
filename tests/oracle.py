"""The stock model with a -inf mask on the evicted entries: what every eviction is held against."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AttentionInterface


@contextmanager
def hidden_from_continuation(model, hidden: list[Tensor], prompt: int) -> Iterator[None]:
    """In the block, rows from `prompt` on do not see the entries where `hidden[layer]` [B, H, T] is True."""

    def attention(module, query, key, value, mask, scaling, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(-1, -2) * scaling
        rows = scores.shape[-1]
        scores = scores.masked_fill(~torch.ones(rows, rows, dtype=torch.bool).tril(), -torch.inf)
        gone = hidden[module.layer_idx].repeat_interleave(groups, 1)
        scores[:, :, prompt:, : gone.shape[-1]] += torch.where(gone, -torch.inf, 0.0)[:, :, None].to(scores.dtype)
        return (torch.softmax(scores, -1) @ value).transpose(1, 2), None

    AttentionInterface.register("masked_oracle", attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = "masked_oracle"
    try:
        yield
    finally:
        model.config._attn_implementation = before
