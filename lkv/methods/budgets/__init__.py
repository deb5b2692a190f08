"""Budgets, which decide how many tokens each KV head keeps. Each class registers its own name."""

from lkv.methods.base import Budget, FixedBudget
from lkv.methods.budgets.competitive import Ada, GlobalTopKBudget, WaterFillingBudget, drop_tokens
from lkv.methods.budgets.duo import Duo, DuoOfHeads, check_table, estimate_mean_pattern, estimate_pattern, read_pattern
from lkv.methods.budgets.fixed import PerHead, Pyramid, PyramidOfKvpress, Uniform
from lkv.methods.budgets.lkv_h import LearnedBudget

__all__ = [
    "Ada", "Budget", "Duo", "DuoOfHeads", "FixedBudget", "GlobalTopKBudget", "LearnedBudget", "PerHead",
    "Pyramid", "PyramidOfKvpress", "Uniform", "WaterFillingBudget", "check_table", "drop_tokens",
    "estimate_mean_pattern", "estimate_pattern", "read_pattern",
]  # fmt: skip
