"""Selectors by observed attention: SnapKV, H2O and TOVA."""

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from lkv.errors import PromptError
from lkv.hf.prompt_kv import LayerKV, to_fp32
from lkv.methods.base import Selector, attention_blocks
from lkv.methods.registry import register_selector


@register_selector("snapkv", label="SnapKV", description="attention from the last 64 tokens, smoothed")
class SnapKV(Selector):
    """SnapKV (Li et al. 2024): attention received from the prompt's last `window` tokens, smoothed over positions.

    The window itself is always kept.
    """

    reads_queries = True

    def __init__(self, window: int = 64, kernel: int = 5):
        self._window, self._kernel = window, kernel
        self.last_queries = window

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Score by smoothed attention, with the window first. Raises PromptError for a prompt within the window."""
        key = prompt.key
        batch, heads, tokens, _ = key.shape
        window = self._window
        if tokens <= window:
            raise PromptError(
                f"the prompt has {tokens} tokens, but SnapKV observes the last {window} and needs more than that; "
                "give a longer prompt or another method."
            )
        recent = prompt.query[:, :, -window:].reshape(batch, heads, -1, key.shape[-1])
        logits = prompt.logits(recent, key).view(batch, heads, -1, window, tokens)
        future = torch.ones(window, tokens, dtype=torch.bool, device=key.device).triu(tokens - window + 1)
        attention = prompt.softmax(logits.masked_fill(future, -torch.inf).float())[..., :-window]
        received = attention.mean(-2).flatten(0, 1)
        smooth = avg_pool1d(received, self._kernel, padding=self._kernel // 2, stride=1)
        older = smooth.view(batch, heads, -1, tokens - window).mean(2)
        # The most recent tokens rank first, for budgets smaller than the window.
        recency = torch.linspace(1, 2, window, dtype=older.dtype, device=key.device)
        return torch.cat([older, (older.max() + recency).expand(batch, heads, window)], -1)


@register_selector(
    "h2o",
    label="H2O",
    description="attention received from all tokens",
    variant="H2O without its window of recent tokens",
)
@register_selector(
    "observed",
    label="Observed Attention",
    description="attention received, divided by how many tokens saw it",
    average=True,
)
class H2O(Selector):
    """Heavy hitters (H2O; Zhang et al. 2023): the attention that a token receives from all tokens of the prompt.

    It is averaged over the query heads that share its KV head. `average` divides the sum by the number of tokens that
    attend to the token, which removes the advantage of early ones. No tokens are protected, whereas the paper's H2O
    reserves half of the budget for the most recent tokens.
    """

    reads_queries = True

    def __init__(self, average: bool = False):
        self._average = average

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return the sum or mean of the attention received."""
        key = prompt.key
        batch, heads, tokens, _ = key.shape
        received = to_fp32(key.new_zeros(batch, heads, tokens))
        for _, attention in attention_blocks(prompt):
            received[..., : attention.shape[-1]] += attention.sum(3).mean(2)
            del attention  # before the next block takes memory
        if self._average:
            received /= torch.arange(tokens, 0, -1, device=key.device)
        return received


@register_selector("tova", label="TOVA", description="attention from the last token")
class TOVA(Selector):
    """TOVA (Oren et al. 2024, "Transformers are Multi-State RNNs"): the attention of the prompt's last token.

    It is averaged over all heads of the layer, so that every head keeps the same tokens. No tokens are protected, and
    the last token is scored by its attention to itself. Under tensor parallelism the average is over the heads of one
    process.
    """

    reads_queries = True
    last_queries = 1

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return the attention of the last token, the same for all heads."""
        key = prompt.key
        logits = prompt.logits(prompt.grouped_query[..., -1:, :], key[:, :, None])
        return prompt.softmax(to_fp32(logits)).mean((1, 2, 3))[:, None].expand(key.shape[:3])
