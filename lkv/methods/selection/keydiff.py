"""KeyDiff (Park et al. 2025)."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lkv.methods.selection.base import Selector, precise


class KeyDiff(Selector):
    """KeyDiff (Park et al. 2025): minus the cosine between a key and the mean direction of all the head's keys, so that
    keys unlike the others stay. Nothing is protected."""

    @torch.no_grad()
    def scores(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Tensor:
        directions = normalize(precise(key), dim=-1)
        anchor = normalize(directions.mean(2, keepdim=True), dim=-1)
        return -(directions * anchor).sum(-1)
