"""The stock model with a -inf mask on the evicted entries: what every eviction is held against."""

from collections.abc import Callable, Iterator, Sequence
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


@contextmanager
def evicting_at(
    model, places: Sequence[int], score: Callable[[Tensor, Tensor], Tensor], ratios: list[list[float]]
) -> Iterator[None]:
    """In the block each head, before it reads the token at each of `places`, keeps its best floor(r t) tokens.

    `score(k, v)` gives [B, H, T]. One pass over the whole text: what was evicted is hidden from later rows only.
    """

    def attention(module, query, key, value, mask, scaling, **kwargs):
        scores_of = score(key, value).detach()
        batch, heads, tokens = scores_of.shape
        visible = torch.ones(tokens, tokens, dtype=torch.bool).tril().repeat(batch, heads, 1, 1)
        for b in range(batch):
            for h in range(heads):
                alive: list[int] = []
                before = 0
                for place in (p for p in places if p < tokens):
                    alive += range(before, place)
                    count = int(ratios[module.layer_idx][h] * place + 1e-6)
                    alive = sorted(sorted(alive, key=lambda i: -float(scores_of[b, h, i]))[:count])
                    gone = torch.ones(place, dtype=torch.bool)
                    gone[alive] = False
                    visible[b, h, place:, :place] = ~gone
                    before = place
        groups = query.shape[1] // heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        logits = query @ key.transpose(-1, -2) * scaling
        logits = logits.masked_fill(~visible.repeat_interleave(groups, 1), -torch.inf)
        return (torch.softmax(logits, -1) @ value).transpose(1, 2), None

    AttentionInterface.register("evicting_oracle", attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = "evicting_oracle"
    try:
        yield
    finally:
        model.config._attn_implementation = before
