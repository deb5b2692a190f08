"""What evictions of a whole prompt, and of a text as it grows, are held against."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.masked import attention_over, causal, hidden_from_continuation

__all__ = ["evicting_at", "hidden_from_continuation"]


def evicting_at(
    model, places: Sequence[int], score: Callable[[Tensor, Tensor], Tensor], ratios: list[list[float]]
) -> Any:
    """In the block each head, before it reads the token at each of `places`, keeps its best floor(r t) tokens.

    `score(k, v)` gives [B, H, T]. One pass over the whole text: what was evicted is hidden from later rows only.
    """

    def seen(layer: int, key: Tensor, value: Tensor) -> Tensor:
        scores = score(key, value).detach()
        visible = causal(key)
        batch, heads, tokens = scores.shape
        for b in range(batch):
            for h in range(heads):
                alive: list[int] = []
                before = 0
                for place in (p for p in places if p < tokens):
                    alive += range(before, place)
                    count = int(ratios[layer][h] * place + 1e-6)
                    alive = sorted(sorted(alive, key=lambda i: -float(scores[b, h, i]))[:count])
                    gone = torch.ones(place, dtype=torch.bool)
                    gone[alive] = False
                    visible[b, h, place:, :place] = ~gone
                    before = place
        return visible

    return attention_over(model, seen)
