"""The plain budgets: one share for all heads, or one for each."""

from lkv.methods.base import FixedBudget
from lkv.methods.registry import register_budget
from lkv.methods.targets import RetentionTarget, as_target


@register_budget("uniform", label="Uniform", description="every head keeps the same share")
class Uniform(FixedBudget):
    """Every head keeps the same share."""

    def __init__(self, retention: float | RetentionTarget):
        self._target = as_target(retention)

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        """Return the target's share for every head."""
        return [self._target.share(tokens)] * heads


class PerHead(FixedBudget):
    """Each head keeps floor(r t) tokens by its own fixed ratio r, from a list [L][H]."""

    def __init__(self, ratios: list[list[float]]):
        self._ratios = ratios

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        """Return the layer's ratios."""
        return self._ratios[layer]
