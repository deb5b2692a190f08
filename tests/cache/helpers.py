"""Texts, scores and a method that the tests of the cache and its oracles share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lkv.cache.ragged_store import RaggedStore
from lkv.cache.tiers import TierSplit
from lkv.methods.budgets import PerHead
from lkv.methods.method import Method
from lkv.methods.selectors import Selector
from tests.masked import attention_over, causal

RATIOS = [[0.5, 0.2], [0.05, 0.6], [0.0, 1.0]]


def score(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (key.sum(-1) - 0.5 * value.square().sum(-1)).float()


class OwnScores(Selector):
    """A selector that looks at k and v of the token alone."""

    is_local = True

    def scores(self, layer, prompt):
        return score(prompt.key, prompt.value)


METHOD = Method("own", PerHead(RATIOS), OwnScores())


def head_entries(store: RaggedStore, row: int, head: int) -> tuple[Tensor, Tensor]:
    """The compressed k and v [n, d] of one row and head."""
    start = int(store.starts[row, head])
    entries = slice(start, start + int(store.lens[row, head]))
    return store.k[entries], store.v[entries]


def ids(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 67, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padded(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Texts [1, t] of unequal length as one batch padded on the left."""
    longest = max(text.shape[1] for text in texts)
    rows = [torch.nn.functional.pad(text, (longest - text.shape[1], 0)) for text in texts]
    masks = [torch.nn.functional.pad(torch.ones_like(text), (longest - text.shape[1], 0)) for text in texts]
    return {"input_ids": torch.cat(rows), "attention_mask": torch.cat(masks)}


def evicting_at(
    model, places: Sequence[int], score: Callable[[Tensor, Tensor], Tensor], ratios: list[list[float]],
    observe: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Any:  # fmt: skip
    """In the block each head, before it reads the token at each of `places`, keeps its best floor(r t) tokens.

    `score(k, v)` gives [B, H, T]. Instead of it, `observe(q, k)` gives the scores [n] of the n tokens that a head still
    has, from their k [n, d] and the queries [G, t, d] of all t tokens before the place. One pass over the whole text:
    what was evicted is hidden from later rows only.
    """

    def seen(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = score(key, value).detach()
        visible = causal(key)
        batch, heads, tokens = scores.shape
        queries = query.detach().unflatten(1, (heads, -1))
        for b in range(batch):
            for h in range(heads):
                alive: list[int] = []
                before = 0
                for place in (p for p in places if p < tokens):
                    alive += range(before, place)
                    count = int(ratios[layer][h] * place + 1e-6)
                    if observe is not None:
                        scores[b, h, alive] = observe(queries[b, h, :, :place], key[b, h, alive].detach()).to(scores)
                    alive = sorted(sorted(alive, key=lambda i: -float(scores[b, h, i]))[:count])
                    gone = torch.ones(place, dtype=torch.bool)
                    gone[alive] = False
                    visible[b, h, place:, :place] = ~gone
                    before = place
        return visible

    return attention_over(model, seen)


def tier_numbers(split: TierSplit) -> torch.Tensor:
    """The tier of each entry."""
    tiers = torch.arange(len(split.lens)).repeat_interleave(split.lens.flatten(1).sum(1))
    return torch.empty_like(tiers).index_copy(0, split.order, tiers)
