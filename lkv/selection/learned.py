"""LKV-T (Sec. 3.4)."""

import torch
from torch import Tensor

from lkv.policy import Policy
from lkv.selection.base import Selector


class LearnedScores(Selector):
    """LKV-T: the policy's MLP over [k; v]; no query is read (Sec. 3.4)."""

    # The MLP's hidden layer is as large as k; blocks keep its memory below that of one layer's k and v.
    _BLOCK = 2048
    local = True

    def __init__(self, policy: Policy, heads: slice = slice(None)):
        """`heads`: the KV heads that this process computes."""
        self._policy, self._heads = policy, heads

    @torch.no_grad()
    def scores(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Tensor:
        blocks = zip(key.split(self._BLOCK, 2), value.split(self._BLOCK, 2), strict=True)
        return torch.cat([self._policy.tokens(k, v, layer, self._heads) for k, v in blocks], -1)
