"""Budget rules: how many tokens each KV head may keep."""

from lkv.budget.base import ROUNDING, Budget, FixedBudget, PerHead, Share, Uniform, share
from lkv.budget.contest import GlobalTopK
from lkv.budget.learned import LearnedBudget

__all__ = ["ROUNDING", "Budget", "FixedBudget", "GlobalTopK", "LearnedBudget", "PerHead", "Share", "Uniform", "share"]
