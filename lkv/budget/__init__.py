"""Budget rules: how many tokens each KV head may keep."""

from lkv.budget.ada import Ada
from lkv.budget.base import ROUNDING, Budget, FixedBudget, PerHead, Share, Uniform, share
from lkv.budget.contest import GlobalTopK
from lkv.budget.duo import Duo
from lkv.budget.learned import LearnedBudget
from lkv.budget.pyramid import Pyramid
from lkv.budget.retrieval import estimate_pattern
from lkv.budget.tables import FileBudget, check_table, read_pattern, read_ratios

__all__ = [
    "ROUNDING", "Ada", "Budget", "Duo", "FileBudget", "FixedBudget", "GlobalTopK", "LearnedBudget", "PerHead",
    "Pyramid", "Share", "Uniform", "check_table", "estimate_pattern", "read_pattern", "read_ratios", "share",
]  # fmt: skip
