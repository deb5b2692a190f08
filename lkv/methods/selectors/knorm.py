"""Key norms (Devoto et al. 2024)."""

import torch
from torch import Tensor

from lkv.integrations.transformers.prefill import LayerKV
from lkv.methods.selectors.base import Selector, to_fp32


class Knorm(Selector):
    """Key norms (Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"): minus
    the L2 norm of k. Nothing is protected."""

    is_local = True

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        return -torch.linalg.vector_norm(to_fp32(prompt.key), dim=-1)
