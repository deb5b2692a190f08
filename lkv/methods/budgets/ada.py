"""AdaKV (Feng et al. 2024)."""

import torch
from torch import Tensor

from lkv.errors import BudgetError
from lkv.methods.budgets.base import ROUNDING, Budget, RetentionTarget, as_target
from lkv.methods.registry import register_budget


@register_budget("ada", label="AdaKV", description="the heads of a layer compete by their scores (AdaKV)")
class Ada(Budget):
    """AdaKV (Feng et al. 2024): the heads of a layer compete for its tokens by their scores.

    A layer keeps H floor(R T) tokens, as many as with equal shares. Each head is safe to keep floor(`alpha` floor(R T))
    of its own best (at least one, unless `alpha` is 0); the best of all others, whichever head they are in, get the
    rest. The heads that compete are those whose scores are given: under tensor parallelism the ones of this process.
    """

    compares_heads = True

    def __init__(self, retention: float | RetentionTarget, alpha: float = 0.2):
        """Raises BudgetError for an `alpha` outside [0, 1], and RetentionError."""
        if not 0.0 <= alpha <= 1.0:
            raise BudgetError(
                f"alpha is {alpha!r}, but it is the part of an equal share that each head is safe to keep and must lie "
                "in [0, 1]; use 0.2 as in the paper."
            )
        self._target, self._alpha = as_target(retention), alpha

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        batch, heads, tokens = scores.shape
        equal = min(tokens, int(self._target.share(tokens) * tokens + ROUNDING))
        safe = min(equal, max(1, int(equal * self._alpha + ROUNDING))) if self._alpha else 0
        rest = tokens - safe
        free = heads * (equal - safe)
        if not free:
            return [[safe] * heads for _ in range(batch)]
        # What is safe is cut off, not marked by a large number: a selector's own scores may be infinite.
        open_to_all = scores.sort(-1, descending=True).values[..., safe:]
        winners = open_to_all.flatten(1).topk(free, -1, sorted=False).indices // rest
        return [(torch.bincount(row, minlength=heads) + safe).tolist() for row in winners]
