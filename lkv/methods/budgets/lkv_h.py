"""LKV-H (Sec. 3.3)."""

from lkv.methods.budgets.budget import FixedBudget, RetentionTarget, as_target
from lkv.methods.registry import register_budget
from lkv.policy.policy import Policy


@register_budget("lkv-h", label="LKV-H", description="learned budgets (LKV-H)")
class LearnedBudget(FixedBudget):
    """LKV-H: the policy's ratios, fixed after training (Sec. 3.3)."""

    required_inputs = ("policy", "target", "heads")

    def __init__(self, policy: Policy, retention: float | RetentionTarget, heads: slice = slice(None)):
        """`heads`: the KV heads that this process computes."""
        self._policy, self._target, self._heads = policy, as_target(retention), heads
        self._solved: tuple[float, list[list[float]]] | None = None

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        """The ratios of the policy for this length."""
        retention = self._target.share(tokens)
        # One Soft-TopK over all heads of the model serves every layer and process. Another thread may solve meanwhile.
        solved = self._solved
        if solved is None or solved[0] != retention:
            solved = self._solved = (retention, self._policy.inference_ratios(retention)[:, self._heads].tolist())
        return solved[1][layer]
