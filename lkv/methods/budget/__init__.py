"""Budget rules: how many tokens each KV head may keep."""

from lkv.methods.budget.ada import Ada
from lkv.methods.budget.base import ROUNDING, Budget, FixedBudget, PerHead, Share, Uniform, share
from lkv.methods.budget.contest import Contest, GlobalTopK
from lkv.methods.budget.duo import Duo
from lkv.methods.budget.learned import LearnedBudget
from lkv.methods.budget.pyramid import Pyramid
from lkv.methods.budget.retrieval import estimate_pattern
from lkv.methods.budget.tables import FileBudget, check_table, read_pattern, read_ratios

__all__ = [
    "ROUNDING", "Ada", "Budget", "Contest", "Duo", "FileBudget", "FixedBudget", "GlobalTopK", "LearnedBudget",
    "PerHead", "Pyramid", "Share", "Uniform", "check_table", "estimate_pattern", "read_pattern", "read_ratios", "share",
]  # fmt: skip
