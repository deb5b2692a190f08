"""KVzip's budgets: one top-k over all tokens of all heads of all layers."""

from typing import Any

import torch
from torch import Tensor

from lkv.errors import CacheError, check_retention
from lkv.methods.budgets.base import ROUNDING, Budget, RetentionTarget
from lkv.methods.registry import register_budget


@register_budget("global", label="Global top-k", description="all heads of all layers compete by their scores (KVzip)")
class GlobalTopKBudget(Budget):
    """The heads of all layers compete for the whole budget by their raw scores (KVzip's rule).

    The counts follow from the scores of a whole prompt: `for_prompt` computes them once the prompt has been read. Under
    tensor parallelism the heads of one process compete.
    """

    compares_heads = True

    def __init__(self, target: RetentionTarget):
        self._target = target
        self._counts: Tensor | None = None

    @classmethod
    def from_scores(cls, table: Tensor, retention: float) -> "GlobalTopKBudget":
        """The budget of one prompt whose scores [L, B, H, T] are known. Raises RetentionError."""
        budget = cls(RetentionTarget(check_retention(retention)))
        layers, _, heads, tokens = table.shape
        total = int(budget._target.retention * layers * heads * tokens + ROUNDING)
        best = table.transpose(0, 1).flatten(1).topk(total, -1).indices // tokens
        winners = [torch.bincount(row, minlength=layers * heads).view(layers, heads) for row in best]
        budget._counts = torch.stack(winners, 1)
        return budget

    @property
    def has_counts(self) -> bool:
        """Whether the counts of a prompt are known."""
        return self._counts is not None

    def for_prompt(self, selector: Any, prompt: list[Any]) -> "GlobalTopKBudget":
        """The budget for one prompt, read into `prompt`, by the scores of `selector`."""
        scores = [selector.scores(index, layer) for index, layer in enumerate(prompt)]
        table = torch.stack([part.to(scores[0].device) for part in scores])
        return self.from_scores(table, self._target.share(table.shape[-1]))

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        """How many tokens each head of `layer` keeps, [B][H]. Raises CacheError before `for_prompt`."""
        if self._counts is None:
            raise CacheError(
                "The budget 'global' needs the scores of all layers before it can evict from the first one: compress "
                "the text with lkv.compress(..., method=...), or use another budget."
            )
        return self._counts[layer].tolist()
