"""Key norms (Devoto et al. 2024)."""

import torch
from torch import Tensor

from lkv.methods.selection.base import Selector, precise
from lkv.prefill import PromptLayer


class Knorm(Selector):
    """Key norms (Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"): minus
    the L2 norm of k. Nothing is protected."""

    local = True

    @torch.no_grad()
    def scores(self, layer: int, prompt: PromptLayer) -> Tensor:
        return -torch.linalg.vector_norm(precise(prompt.key), dim=-1)
