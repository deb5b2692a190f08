"""Budgets in which heads compete by their scores: AdaKV within a layer, KVzip's over the whole model."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lkv.errors import BudgetError, CacheError, check_retention
from lkv.hf.prompt_kv import LayerKV
from lkv.kernels import FP8
from lkv.methods.base import ROUNDING, Budget, Selector
from lkv.methods.registry import register_budget
from lkv.methods.targets import Precision, RetentionTarget, TierTarget, as_target
from lkv.utils.devices import copy_to_device

# Mean squared error of a normal variable in so many bits (`lkv.kernels.ragged_attention.arguments.LEVELS`).
SQUARED_ERROR = {16: 0.0, 8: 5.1e-5, FP8: 7.0e-4, 4: 0.00969, 3: 0.0346}


def drop_tokens(scores: Tensor, positions: Sequence[int]) -> Tensor:
    """Return `scores` [B, H, T] without the tokens at `positions`."""
    if not positions:
        return scores
    is_left = torch.ones(scores.shape[-1], dtype=torch.bool, device="cpu")
    is_left[list(positions)] = False
    return scores[..., copy_to_device(is_left.nonzero()[:, 0], scores.device)]


@register_budget("ada", label="AdaKV", description="the heads of a layer compete by their scores (AdaKV)")
class Ada(Budget):
    """AdaKV (Feng et al. 2024): the heads of a layer compete for its tokens by their scores.

    A layer keeps H floor(R T) tokens, as many as a uniform budget. Each head keeps at least its own best
    floor(`alpha` floor(R T)) tokens (at least one, unless `alpha` is 0). The rest are the best remaining tokens of all
    heads. Under tensor parallelism the heads of one process compete.
    """

    compares_heads = True

    def __init__(self, retention: float | RetentionTarget, alpha: float = 0.2):
        """Raise BudgetError for an `alpha` outside [0, 1], and RetentionError."""
        if not 0.0 <= alpha <= 1.0:
            raise BudgetError(
                f"alpha is {alpha!r}, but it is the part of an equal share that each head is safe to keep and must lie "
                "in [0, 1]; use 0.2 as in the paper."
            )
        self._target, self._alpha = as_target(retention), alpha

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        """Return each head's guaranteed tokens plus those it wins."""
        batch, heads, tokens = scores.shape
        equal = min(tokens, int(self._target.share(tokens) * tokens + ROUNDING))
        safe = min(equal, max(1, int(equal * self._alpha + ROUNDING))) if self._alpha else 0
        free = heads * (equal - safe)
        if not free:
            return [[safe] * heads for _ in range(batch)]
        # Guaranteed tokens are cut off instead of marked by a large score, because scores may be infinite.
        contested = scores.sort(-1, descending=True).values[..., safe:]
        winners = contested.flatten(1).topk(free, -1, sorted=False).indices // (tokens - safe)
        return [(torch.bincount(row, minlength=heads) + safe).tolist() for row in winners]


@register_budget("global", label="Global top-k", description="all heads of all layers compete by their scores (KVzip)")
class GlobalTopKBudget(Budget):
    """The heads of all layers compete for the whole budget by their raw scores (KVzip's rule).

    The counts follow from the scores of a whole prompt: `for_prompt` computes them once the prompt has been read. Under
    tensor parallelism the heads of one process compete.
    """

    compares_heads = True

    def __init__(self, target: RetentionTarget):
        self._target = target
        self.prompt_counts: Tensor | None = None  # [L, B, H]

    @classmethod
    def from_scores(cls, table: Tensor, retention: float) -> "GlobalTopKBudget":
        """Return the budget of one prompt whose scores [L, B, H, T] are known. Raises RetentionError."""
        return cls(RetentionTarget(check_retention(retention)))._with_counts(table)

    def for_prompt(
        self, selector: Selector, prompt: list[LayerKV], protected: Sequence[int] = ()
    ) -> "GlobalTopKBudget":
        """Make the budget for one prefilled prompt from the scores of `selector`, without `protected` tokens."""
        scores = [drop_tokens(selector.scores(index, layer), protected) for index, layer in enumerate(prompt)]
        return self._with_counts(torch.stack([part.to(scores[0].device) for part in scores]))

    def totals(self, rows: Tensor, tokens: int) -> list[int]:
        """Count the entries to keep of each row of `rows`, the scores [B, L H T] of `tokens` tokens."""
        return [int(self._target.share(tokens) * rows.shape[1] + ROUNDING)] * len(rows)

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        """Return the counts of the prompt. Raises CacheError before `for_prompt`."""
        if self.prompt_counts is None:
            raise CacheError(
                "the budget needs the scores of all layers before it can evict from the first one: compress the text "
                "with lkv.compress(..., method=...), or use another budget."
            )
        return self.prompt_counts[layer].tolist()

    def _with_counts(self, table: Tensor) -> "GlobalTopKBudget":
        layers, _, heads, tokens = table.shape
        budget, rows = type(self)(self._target), table.transpose(0, 1).flatten(1)
        winners = []
        for row, total in zip(rows, self.totals(rows, tokens), strict=True):
            best = row.topk(total).indices // tokens
            winners.append(torch.bincount(best, minlength=layers * heads).view(layers, heads))
        budget.prompt_counts = torch.stack(winners, 1)
        return budget


@register_budget(
    "water-filling",
    label="water-filling",
    description="entries of all heads and layers compete for bits by their scores (RDKV)",
    variant="RDKV's allocation of bits to entries; its paper has an importance of its own, and bits by channel",
)
class WaterFillingBudget(GlobalTopKBudget):
    """The entries of all heads and layers compete for bits by reverse water-filling (RDKV, Zhang et al. 2026).

    Evicting an entry of score w costs a distortion of w^2, and storing it in a precision costs w^2 D, where D is the
    mean squared error of its codes of k and v. The least distortion within a memory budget sets one level for all
    entries: those whose gain per bit reaches it are stored, and among them those whose further gain reaches it are
    stored in the better of the two precisions. Where scores are negative, w is the difference to the least. With a
    retention it is `GlobalTopKBudget`.
    """

    def totals(self, rows: Tensor, tokens: int) -> list[int]:
        """As in `GlobalTopKBudget`, of this and better precisions."""
        target = self._target
        if not isinstance(target, TierTarget):
            return super().totals(rows, tokens)
        shares = [0.0, *target.shares(tokens).values()]
        parts = zip(target.table.precisions, itertools.pairwise(shares), strict=True)
        used = [(precision, after - before) for precision, (before, after) in parts if after > before]
        if len(used) < 2:
            return super().totals(rows, tokens)
        (better, worse), (high, low) = zip(*((each, target.shape.entry_bits(each)) for each, _ in used), strict=True)
        bits = rows.shape[1] * sum(share * size for (_, share), size in zip(used, (high, low), strict=True))
        gain = (squared_error(worse) - squared_error(better)) / (high - low)  # of a bit, by the squared score
        factor = math.sqrt((1 - squared_error(worse)) / low / gain)  # between the least scores of both precisions
        numbers = torch.arange(1, rows.shape[1] + 1, device=rows.device)
        totals = []
        weights = (rows - rows.amin(-1, keepdim=True).clamp_max(0)).float()  # scores of some selectors are negative
        for row in weights.sort(-1).values:
            # With the n best entries kept, those in the better precision; what is left of the bits is for more of them.
            least = (row.flip(0) * factor).clamp_min(torch.finfo(row.dtype).tiny)  # no entry of weight 0
            improved = len(row) - torch.searchsorted(row, least)
            count = int((numbers * low + improved * (high - low) <= bits + ROUNDING).sum())
            best = min(count, int((bits + ROUNDING - count * low) // (high - low)))
            totals.append(best if target.precision == better else count)
        return totals


def squared_error(precision: Precision) -> float:
    """Return the mean squared error of an entry's codes, of k and v, relative to the entry's square."""
    return (SQUARED_ERROR[precision.key_bits] + SQUARED_ERROR[precision.value_bits]) / 2
