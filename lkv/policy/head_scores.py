"""LKV-H (Sec. 3.3): a score for every KV head, from which the budgets follow.

The budgets are r = SoftTopK(scores) (`lkv.kernels.soft_topk`), computed by `Policy.ratios`; the budget that a cache
uses is `lkv.methods.budgets.lkv_h.LearnedBudget`.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class HeadScores(nn.Module):
    """LKV-H: one embedding per KV head and a shared MLP d -> d/2 -> 1 score every head of the model (Sec. 3.3)."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.embeddings = nn.Parameter(torch.randn(layers, kv_heads, head_dim) * 0.1)
        self.hidden = nn.Linear(head_dim, head_dim // 2)
        self.output = nn.Linear(head_dim // 2, 1, bias=False)

    def forward(self) -> Tensor:
        """Scores s [L, H]."""
        return self.output(silu(self.hidden(self.embeddings))).squeeze(-1)
