"""KeyDiff (Park et al. 2025)."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lkv.integrations.transformers.prefill import LayerKV, to_fp32
from lkv.methods.registry import register_selector
from lkv.methods.selectors.base import Selector


@register_selector("keydiff", label="KeyDiff", description="keys unlike the mean key")
class KeyDiff(Selector):
    """KeyDiff (Park et al. 2025): minus the cosine between a key and the mean direction of all the head's keys, so that
    keys unlike the others stay. Nothing is protected."""

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        directions = normalize(to_fp32(prompt.key), dim=-1)
        anchor = normalize(directions.mean(2, keepdim=True), dim=-1)
        return -(directions * anchor).sum(-1)
