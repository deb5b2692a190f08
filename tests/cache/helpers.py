"""Texts, scores and a method that the tests of the cache and its oracles share."""

import torch

from lkv.methods.budgets import PerHead
from lkv.methods.method import Method
from lkv.methods.selectors import Selector

RATIOS = [[0.5, 0.2], [0.05, 0.6], [0.0, 1.0]]


def score(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (key.sum(-1) - 0.5 * value.square().sum(-1)).float()


class OwnScores(Selector):
    """A selector that looks at k and v of the token alone."""

    is_local = True

    def scores(self, layer, prompt):
        return score(prompt.key, prompt.value)


METHOD = Method("own", PerHead(RATIOS), OwnScores())


def ids(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 67, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padded(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Texts [1, t] of unequal length as one batch padded on the left."""
    longest = max(text.shape[1] for text in texts)
    rows = [torch.nn.functional.pad(text, (longest - text.shape[1], 0)) for text in texts]
    masks = [torch.nn.functional.pad(torch.ones_like(text), (longest - text.shape[1], 0)) for text in texts]
    return {"input_ids": torch.cat(rows), "attention_mask": torch.cat(masks)}
