"""H2O (Zhang et al. 2023)."""

import torch
from torch import Tensor

from lkv.integrations.transformers.prefill import LayerKV, to_fp32
from lkv.methods.registry import register_selector
from lkv.methods.selectors.base import Selector

_ROWS = 256  # attention rows held at a time


@register_selector("h2o", label="H2O", description="attention received from all tokens")
@register_selector(
    "observed",
    label="Observed Attention",
    description="attention received, divided by how many tokens saw it",
    average=True,
)
class H2O(Selector):
    """Heavy hitters (H2O; Zhang et al. 2023): the attention that a token has received from all tokens of the prompt,
    averaged over the query heads that share its KV head.

    `average` divides the sum by the number of tokens that saw the token, which takes away the advantage of early ones.
    Nothing is protected; the paper gives half of a budget to the most recent tokens, which a score cannot express.
    """

    reads_queries = True

    def __init__(self, average: bool = False):
        self._average = average

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        key = prompt.key
        batch, heads, tokens, _ = key.shape
        rows = prompt.grouped_query
        received = to_fp32(key.new_zeros(batch, heads, tokens))
        for start in range(0, tokens, _ROWS):
            block = rows[..., start : start + _ROWS, :]
            end = start + block.shape[3]
            logits = to_fp32(block * prompt.scale @ key[:, :, None, :end].transpose(-1, -2))
            future = torch.ones(end - start, end, dtype=torch.bool, device=key.device).triu(start + 1)
            received[..., :end] += torch.softmax(logits.masked_fill_(future, -torch.inf), -1).sum(3).mean(2)
        if self._average:
            received /= torch.arange(tokens, 0, -1, device=key.device)
        return received
