"""Budget rules: how many tokens each KV head may keep."""

from lkv.methods.budgets.ada import Ada
from lkv.methods.budgets.base import ROUNDING, Amount, Budget, FixedBudget, PerHead, Uniform, amount_of
from lkv.methods.budgets.contest import Contest, GlobalTopK
from lkv.methods.budgets.duo import Duo, DuoOfHeads
from lkv.methods.budgets.learned import LearnedBudget
from lkv.methods.budgets.pyramid import Pyramid, PyramidOfKvpress
from lkv.methods.budgets.retrieval import estimate_mean_pattern, estimate_pattern
from lkv.methods.budgets.tables import check_table, read_pattern

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
