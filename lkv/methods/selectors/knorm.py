"""Key norms (Devoto et al. 2024)."""

import torch
from torch import Tensor

from lkv.integrations.transformers.prefill import LayerKV, to_fp32
from lkv.methods.registry import register_selector
from lkv.methods.selectors.base import Selector


@register_selector("knorm", label="Knorm", description="small keys")
class Knorm(Selector):
    """Key norms (Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"): minus
    the L2 norm of k. Nothing is protected."""

    is_local = True

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        return -torch.linalg.vector_norm(to_fp32(prompt.key), dim=-1)
