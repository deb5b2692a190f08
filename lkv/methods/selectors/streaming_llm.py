"""StreamingLLM (Xiao et al. 2023)."""

import torch
from torch import Tensor

from lkv.integrations.transformers.prefill import LayerKV
from lkv.methods.budgets.duo import SINKS
from lkv.methods.registry import register_selector
from lkv.methods.selectors.base import Selector, check_sinks


@register_selector("streaming-llm", label="StreamingLLM", description="the first and the most recent tokens")
class StreamingLLM(Selector):
    """StreamingLLM (Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"): the first `sinks`
    tokens, then the most recent ones, the same in every head.

    Tokens keep the positions that they were read at. Raises PromptError for a prompt of no more than `sinks` tokens.
    """

    def __init__(self, sinks: int = 4):
        self.sinks = sinks

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        key = prompt.key
        tokens = key.shape[2]
        check_sinks(self, tokens, self.sinks)
        order = torch.arange(tokens, dtype=torch.float32, device=key.device)
        # Above all others, and the earlier the higher: a head with fewer places than sinks keeps the first.
        order[: self.sinks] = 2 * tokens - order[: self.sinks]
        return order.expand(key.shape[:3])


@register_selector(
    "duo-window",
    label="DuoAttention",
    description="the first 128 and the most recent tokens (DuoAttention)",
    sinks=SINKS,
)
class DuoWindow(StreamingLLM):
    """What a streaming head of DuoAttention (Xiao et al. 2024) keeps: the first `sinks` tokens, then the most recent.

    As `StreamingLLM`, but a prompt shorter than the sinks is in order: such a head keeps all of it.
    """

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        key = prompt.key
        if key.shape[2] <= self.sinks:
            return key.new_zeros(key.shape[:3], dtype=torch.float32)
        return super().scores(layer, prompt)
