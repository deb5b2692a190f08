"""LKV-H (Sec. 3.3)."""

from functools import lru_cache

import torch
from torch import Tensor

from lkv.methods.base import FixedBudget
from lkv.methods.registry import register_budget
from lkv.methods.targets import RetentionTarget, as_target
from lkv.policy.policy import Policy

# What a head keeps at least, in tokens and as a share of the heads' mean, whichever is less. A share that is enough in
# a long text leaves a head without a token in a short one, which can cost more than all other evictions.
LEAST_TOKENS, LEAST_SHARE = 5, 0.25


@register_budget("lkv-h", label="LKV-H", description="learned budgets (LKV-H)")
class LearnedBudget(FixedBudget):
    """LKV-H: the policy's ratios, fixed after training (Sec. 3.3).

    Unlike in the paper, no head keeps fewer than `LEAST_TOKENS` tokens; the others make room for them in proportion.
    """

    required_inputs = ("policy", "target", "heads")

    def __init__(self, policy: Policy, retention: float | RetentionTarget, heads: slice = slice(None)):
        """`heads`: the KV heads that this process computes."""
        self._target = as_target(retention)
        # One Soft-TopK over all heads of the model serves every layer, process and length.
        learned = lru_cache(maxsize=4)(policy.inference_ratios)

        @lru_cache(maxsize=4)
        def ratios_of_layers(retention: float, tokens: int) -> list[list[float]]:
            return raise_to_least(learned(retention), LEAST_TOKENS / max(1, tokens))[:, heads].tolist()

        self._ratios_of_layers = ratios_of_layers

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        """Return the ratios of the policy for this length."""
        return self._ratios_of_layers(self._target.share(tokens), tokens)[layer]


def raise_to_least(ratios: Tensor, least: float) -> Tensor:
    """Ratios [L, H] with the same sum, none of which is below `least` (or below `LEAST_SHARE` of their mean).

    The others are multiplied by one number.
    """
    ratios = ratios.double()
    total, least = ratios.sum(), min(least, LEAST_SHARE * float(ratios.mean()))
    ordered = ratios.flatten().sort().values
    # If the k smallest are raised, the rest has what is left of the sum.
    raised = torch.arange(len(ordered), dtype=ordered.dtype, device=ordered.device)
    scales = (total - least * raised) / ordered.flip(0).cumsum(0).flip(0)
    scale = scales[int((ordered * scales >= least).to(torch.uint8).argmax())]
    return (ratios * scale).clamp(min=least)
