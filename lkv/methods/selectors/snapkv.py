"""SnapKV (Li et al. 2024)."""

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from lkv.errors import PromptError
from lkv.integrations.transformers.prefill import LayerKV
from lkv.methods.registry import register_selector
from lkv.methods.selectors.base import Selector


@register_selector("snapkv", label="SnapKV", description="attention from the last 64 tokens, smoothed")
class SnapKV(Selector):
    """SnapKV (Li et al. 2024): attention received from the prompt's last `window` tokens, smoothed over positions."""

    reads_queries = True

    def __init__(self, window: int = 64, kernel: int = 5):
        self._window, self._kernel = window, kernel
        self.last_queries = window

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        key = prompt.key
        batch, heads, tokens, _ = key.shape
        window = self._window
        if tokens <= window:
            raise PromptError(
                f"the prompt has {tokens} tokens, but SnapKV observes the last {window} and needs more than that; "
                "give a longer prompt or another method."
            )
        recent = prompt.query[:, :, -window:].reshape(batch, heads, -1, key.shape[-1])
        logits = (recent * prompt.scale @ key.transpose(-1, -2)).view(batch, heads, -1, window, tokens)
        future = torch.ones(window, tokens, dtype=torch.bool, device=key.device).triu(tokens - window + 1)
        attention = torch.softmax(logits.masked_fill(future, -torch.inf).float(), -1)[..., :-window]
        received = attention.mean(-2).flatten(0, 1)
        smooth = avg_pool1d(received, self._kernel, padding=self._kernel // 2, stride=1)
        older = smooth.view(batch, heads, -1, tokens - window).mean(2)
        # The window comes first, the most recent tokens foremost where a budget is smaller than it.
        recency = torch.linspace(1, 2, window, device=key.device)
        return torch.cat([older, (older.max() + recency).expand(batch, heads, window)], -1)
