"""LKV-H (Sec. 3.3)."""

from functools import lru_cache

import torch
from torch import Tensor

from lkv.methods.base import FixedBudget
from lkv.methods.registry import register_budget
from lkv.methods.targets import RetentionTarget, as_target
from lkv.policy.policy import Policy

# The least that a head keeps, in tokens and as a share of the heads' mean, whichever is less. A share sufficient for a
# long text may leave a head without any token of a short one, which can cost more than all other evictions.
LEAST_TOKENS, LEAST_SHARE = 5, 0.25


@register_budget("lkv-h", label="LKV-H", description="learned budgets (LKV-H)")
class LearnedBudget(FixedBudget):
    """LKV-H: the policy's ratios, fixed after training (Sec. 3.3).

    Unlike in the paper, every head keeps at least `LEAST_TOKENS` tokens; the other ratios shrink in proportion.
    """

    required_inputs = ("policy", "target", "heads")

    def __init__(self, policy: Policy, retention: float | RetentionTarget, heads: slice = slice(None)):
        """`heads`: the KV heads of this process."""
        self._target = as_target(retention)

        # One Soft-TopK over all heads of the model is used for every layer and process.
        @lru_cache(maxsize=4)
        def ratios_of_layers(retention: float, tokens: int) -> list[list[float]]:
            return raise_to_least(policy.inference_ratios(retention), LEAST_TOKENS / max(1, tokens))[:, heads].tolist()

        self._ratios_of_layers = ratios_of_layers

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        """Return the ratios of the policy for this length."""
        return self._ratios_of_layers(self._target.share(tokens), tokens)[layer]


def raise_to_least(ratios: Tensor, least: float) -> Tensor:
    """Raise `ratios` [L, H] to at least `least` (or `LEAST_SHARE` of their mean) without changing their sum.

    The other ratios are scaled down by a common factor.
    """
    ratios = ratios.double()
    total, least = ratios.sum(), min(least, LEAST_SHARE * float(ratios.mean()))
    ordered = ratios.flatten().sort().values
    # If the k smallest are raised, the others share the rest of the sum.
    raised = torch.arange(len(ordered), dtype=ordered.dtype, device=ordered.device)
    scales = (total - least * raised) / ordered.flip(0).cumsum(0).flip(0)
    scale = scales[int((ordered * scales >= least).to(torch.uint8).argmax())]
    return (ratios * scale).clamp(min=least)
