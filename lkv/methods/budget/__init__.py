"""Budget rules: how many tokens each KV head may keep."""

from lkv.methods.budget.ada import Ada
from lkv.methods.budget.base import ROUNDING, Amount, Budget, FixedBudget, PerHead, Uniform, amount_of
from lkv.methods.budget.contest import Contest, GlobalTopK
from lkv.methods.budget.duo import Duo, DuoOfHeads
from lkv.methods.budget.learned import LearnedBudget
from lkv.methods.budget.pyramid import Pyramid, PyramidOfKvpress
from lkv.methods.budget.retrieval import estimate_mean_pattern, estimate_pattern
from lkv.methods.budget.tables import check_table, read_pattern

__all__ = [
    "ROUNDING",
    "Ada",
    "Amount",
    "Budget",
    "Contest",
    "Duo",
    "DuoOfHeads",

    "FixedBudget",
    "GlobalTopK",
    "LearnedBudget",
    "PerHead",
    "Pyramid",
    "PyramidOfKvpress",
    "Uniform",
    "amount_of",
    "check_table",
    "estimate_mean_pattern",
    "estimate_pattern",
    "read_pattern",

]  # fmt: skip
