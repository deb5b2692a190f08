"""Selectors: which tokens of a head are worth keeping."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from lkv.errors import PromptError
from lkv.policy import Policy


class Selector(ABC):
    """Scores the tokens of a prompt once a layer has attended over it."""

    reads_queries = False
    # A token's score depends on its own k and v alone: computed once, it is final, however the text goes on.
    local = False

    @abstractmethod
    def scores(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Scores [B, H, T], higher is kept; `query` [B, Hq, T, d] (None where no selector reads it), `key` and `value`
        [B, H, T, d], after RoPE."""


class LearnedScores(Selector):
    """LKV-T: the policy's MLP over [k; v]; no query is read (Sec. 3.4)."""

    # The MLP's hidden layer is as large as k; blocks keep its memory below that of one layer's k and v.
    _BLOCK = 2048
    local = True

    def __init__(self, policy: Policy, heads: slice = slice(None)):
        """`heads`: the KV heads that this process computes."""
        self._policy, self._heads = policy, heads

    @torch.no_grad()
    def scores(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Tensor:
        blocks = zip(key.split(self._BLOCK, 2), value.split(self._BLOCK, 2), strict=True)
        return torch.cat([self._policy.tokens(k, v, layer, self._heads) for k, v in blocks], -1)


class SnapKV(Selector):
    """SnapKV (Li et al. 2024): attention received from the prompt's last `window` tokens, smoothed over positions."""

    reads_queries = True

    def __init__(self, window: int = 64, kernel: int = 5):
        self._window, self._kernel = window, kernel

    @torch.no_grad()
    def scores(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Tensor:
        batch, heads, tokens, _ = key.shape
        if query is None:
            raise ValueError("SnapKV reads the queries; call read_prompt with queries=True.")
        window = self._window
        if tokens <= window:
            raise PromptError(
                f"the prompt has {tokens} tokens, but SnapKV observes the last {window} and needs more than that; "
                "give a longer prompt or another method."
            )
        recent = query[:, :, -window:].reshape(batch, heads, -1, query.shape[-1])
        logits = (recent @ key.transpose(-1, -2) * scale).view(batch, heads, -1, window, tokens)
        future = torch.ones(window, tokens, dtype=torch.bool, device=key.device).triu(tokens - window + 1)
        attention = torch.softmax(logits.masked_fill(future, -torch.inf).float(), -1)[..., :-window]
        received = attention.mean(-2).flatten(0, 1)
        smooth = avg_pool1d(received, self._kernel, padding=self._kernel // 2, stride=1)
        older = smooth.view(batch, heads, -1, tokens - window).mean(2)
        # The window itself is always kept.
        return torch.cat([older, older.max().expand(batch, heads, window) + 1], -1)


class GivenScores(Selector):
    """Scores computed elsewhere, as a table [L, B, H, T]."""

    def __init__(self, table: Tensor):
        self._table = table

    def scores(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return self._table[layer]
