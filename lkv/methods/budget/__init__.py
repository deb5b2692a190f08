"""Budget rules: how many tokens each KV head may keep."""

from lkv.methods.budget.ada import Ada
from lkv.methods.budget.base import ROUNDING, Amount, Budget, FixedBudget, PerHead, Uniform, amount_of
from lkv.methods.budget.contest import Contest, GlobalTopK
from lkv.methods.budget.duo import Duo
from lkv.methods.budget.learned import LearnedBudget
from lkv.methods.budget.pyramid import Pyramid
from lkv.methods.budget.retrieval import estimate_pattern
from lkv.methods.budget.tables import check_table, read_pattern

__all__ = [
    "ROUNDING",
    "Ada",
    "Amount",
    "Budget",
    "Contest",
    "Duo",

    "FixedBudget",
    "GlobalTopK",
    "LearnedBudget",
    "PerHead",
    "Pyramid",
    "Uniform",
    "amount_of",
    "check_table",
    "estimate_pattern",
    "read_pattern",

]  # fmt: skip
