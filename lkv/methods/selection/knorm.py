"""Key norms (Devoto et al. 2024)."""

import torch
from torch import Tensor

from lkv.methods.selection.base import Selector, precise


class Knorm(Selector):
    """Key norms (Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"): minus
    the L2 norm of k. Nothing is protected."""

    local = True

    @torch.no_grad()
    def scores(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return -torch.linalg.vector_norm(precise(key), dim=-1)
