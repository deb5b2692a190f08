"""Selectors by the keys alone: Knorm and KeyDiff."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lkv.integrations.transformers.prefill import LayerKV, to_fp32
from lkv.methods.registry import register_selector
from lkv.methods.selectors.base import Selector


@register_selector("knorm", label="Knorm", description="small keys")
class Knorm(Selector):
    """Key norms (Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression").

    Nothing is protected.
    """

    is_local = True

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Minus the L2 norm of k."""
        return -torch.linalg.vector_norm(to_fp32(prompt.key), dim=-1)


@register_selector("keydiff", label="KeyDiff", description="keys unlike the mean key")
class KeyDiff(Selector):
    """KeyDiff (Park et al. 2025): keys that are unlike the others of their head are kept. Nothing is protected."""

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Minus the cosine between a key and the mean direction of all the head's keys."""
        directions = normalize(to_fp32(prompt.key), dim=-1)
        anchor = normalize(directions.mean(2, keepdim=True), dim=-1)
        return -(directions * anchor).sum(-1)
