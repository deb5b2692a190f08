"""TOVA (Oren et al. 2024)."""

import torch
from torch import Tensor

from lkv.integrations.transformers.prefill import LayerKV, to_fp32
from lkv.methods.registry import register_selector
from lkv.methods.selectors.base import Selector


@register_selector("tova", label="TOVA", description="attention from the last token")
class TOVA(Selector):
    """TOVA (Oren et al. 2024, "Transformers are Multi-State RNNs"): the attention of the prompt's last token, averaged
    over all heads of the layer, so that every head keeps the same tokens.

    Nothing is protected: the last token itself stays only for the attention that it pays to itself. Under tensor
    parallelism the average is over the heads of one process.
    """

    reads_queries = True
    last_queries = 1

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        key = prompt.key
        last = prompt.grouped_query[..., -1, :]
        attention = torch.softmax(to_fp32(last * prompt.scale @ key.transpose(-1, -2)), -1)
        return attention.mean((1, 2))[:, None].expand(key.shape[:3])
