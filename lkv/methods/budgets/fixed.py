"""Budgets by the length of the text: one share for all heads, one for each, or a pyramid over the layers."""

from fractions import Fraction
from functools import lru_cache

from lkv.errors import BudgetError
from lkv.methods.base import ROUNDING, FixedBudget
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


@register_budget(
    "pyramid",
    label="PyramidKV",
    description="lower layers keep more (PyramidKV)",
    variant="PyramidKV with the exact budget: a pyramid at every length, which counts the window of recent tokens; the "
    "paper keeps the window in every layer and shares out the rest",
)
class Pyramid(FixedBudget):
    """PyramidKV (Cai et al. 2024): the budget decreases linearly from the first layer to the last.

    At a mean of R T tokens the last layer keeps R T / `beta`, and the first as much above the mean as the last is below
    it. If the first layer would keep more than T tokens, it keeps T and the slope is reduced around the mean. Counts
    are rounded down; the tokens left of floor(L R T) go one each to the layers with the largest fractions, lower
    layers first. All heads of a layer keep the same number.

    The line is the paper's, applied to another amount. In the paper every layer keeps the window of recent tokens, and
    the line distributes the rest of the budget. The authors' code (KVCache-Factory) does the same for a capacity in
    tokens minus the window, rounds the step down to whole tokens, and uses a uniform budget for prompts shorter than
    twice the capacity. Here the line distributes the whole budget, and a layer with fewer tokens than SnapKV's window
    keeps only the most recent ones.
    """

    required_inputs = ("target", "layers")

    def __init__(self, retention: float | RetentionTarget, layers: int, beta: int = 20):
        """`layers`: the number of layers with eviction. Raises RetentionError, and BudgetError for a `beta` below 1."""
        if layers < 1 or beta < 1:
            raise BudgetError(
                f"a pyramid of {layers} layers with beta {beta} cannot be built: both must be 1 or more; use the "
                "model's number of layers, and beta 20 as in the paper (1 makes all layers equal)."
            )
        self._target, self._layers, self._beta = as_target(retention), layers, beta
        self._cached_counts = lru_cache(maxsize=4)(self._layer_counts)

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        """Return the layer's count as a share, the same for all heads."""
        return [self._cached_counts(tokens)[layer] / max(1, tokens)] * heads

    def _layer_counts(self, tokens: int) -> list[int]:
        """Return the number of tokens that a head of each layer keeps, [L]."""
        layers = self._layers
        total = min(layers * tokens, int(self._target.share(tokens) * layers * tokens + ROUNDING))
        # Exact fractions, so that rounding cannot change the total.
        mean = Fraction(total, layers)
        first = min(2 * mean - mean / Fraction(self._beta), Fraction(tokens))
        step = 2 * (first - mean) / max(1, layers - 1)
        line = [first - step * layer if layers > 1 else mean for layer in range(layers)]
        counts = [int(value) for value in line]
        by_fraction = sorted(range(layers), key=lambda layer: counts[layer] - line[layer])
        for layer in by_fraction[: total - sum(counts)]:
            counts[layer] += 1
        return counts


@register_budget(
    "pyramid-kvpress",
    label="PyramidKV of kvpress",
    description="lower layers keep more, in long texts (PyramidKV of kvpress)",
    variant="PyramidKV (kvpress) as kvpress has it: all layers alike where the last would keep less than 64 tokens",
)
class PyramidOfKvpress(Pyramid):
    """PyramidKV as implemented in kvpress, which the LKV paper measured (App. D).

    The last layer keeps R T / `beta`, and the first as much above the mean as the last is below it, at most T -
    `window`; each count is rounded separately. If the last layer would keep less than `window`, all layers keep the
    same: below `window` `beta` / R tokens (8,534 at R = 0.15) it equals SnapKV with uniform budgets.
    """

    exact_name = "pyramid"

    def __init__(self, retention: float | RetentionTarget, layers: int, window: int = 64, beta: int = 20):
        """Arguments as in `Pyramid`; `window`: SnapKV's window."""
        super().__init__(retention, layers, beta)
        self._window = window

    def _layer_counts(self, tokens: int) -> list[int]:
        mean, most = tokens * self._target.share(tokens), tokens - self._window
        first = min(2 * mean - mean / self._beta, most)
        last = 2 * mean - first if first == most else mean / self._beta
        if not tokens >= first >= last >= self._window:
            return [min(tokens, max(1, round(mean)))] * self._layers
        step = (first - last) / max(1, self._layers - 1)
        return [min(tokens, round(first - layer * step)) for layer in range(self._layers)]
