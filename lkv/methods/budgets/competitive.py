"""Budgets in which heads compete by their scores: AdaKV within a layer, KVzip's over the whole model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lkv.errors import BudgetError, CacheError, check_retention
from lkv.hf.prompt_kv import LayerKV
from lkv.methods.base import ROUNDING, Budget, Selector
from lkv.methods.registry import register_budget
from lkv.methods.targets import RetentionTarget, as_target
from lkv.utils.devices import copy_to_device


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
        budget = cls(RetentionTarget(check_retention(retention)))
        layers, _, heads, tokens = table.shape
        total = int(budget._target.retention * layers * heads * tokens + ROUNDING)
        best = table.transpose(0, 1).flatten(1).topk(total, -1).indices // tokens
        winners = [torch.bincount(row, minlength=layers * heads).view(layers, heads) for row in best]
        budget.prompt_counts = torch.stack(winners, 1)
        return budget

    def for_prompt(
        self, selector: Selector, prompt: list[LayerKV], protected: Sequence[int] = ()
    ) -> "GlobalTopKBudget":
        """Make the budget for one prefilled prompt from the scores of `selector`, without `protected` tokens."""
        scores = [drop_tokens(selector.scores(index, layer), protected) for index, layer in enumerate(prompt)]
        table = torch.stack([part.to(scores[0].device) for part in scores])
        return self.from_scores(table, self._target.share(table.shape[-1]))

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        """Return the counts of the prompt. Raises CacheError before `for_prompt`."""
        if self.prompt_counts is None:
            raise CacheError(
                "the budget 'global' needs the scores of all layers before it can evict from the first one: compress "
                "the text with lkv.compress(..., method=...), or use another budget."
            )
        return self.prompt_counts[layer].tolist()
