"""Budget rules: how many tokens each KV head may keep."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lkv.errors import CacheError, RetentionError, check_retention
from lkv.policy import Policy

# r t is rounded down (Sec. 3.3); the margin keeps 0.15 x 4000 = 599.9999 from losing a token to rounding.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Share:
    """What to keep of a text: a fraction of its tokens or, where `tokens` is given, that many a head on average."""

    retention: float = 0.15
    tokens: int | None = None

    def __post_init__(self) -> None:
        check_retention(self.retention)
        if self.tokens is not None and (not isinstance(self.tokens, int) or self.tokens < 1):
            raise RetentionError(f"budget_tokens is {self.tokens!r}, but a head keeps a whole number of tokens >= 1.")

    def of(self, tokens: int) -> float:
        """The fraction to keep of a text of `tokens` tokens, in (0, 1]."""
        return self.retention if self.tokens is None else min(1.0, self.tokens / max(1, tokens))

    def __str__(self) -> str:
        return f"retention {self.retention}" if self.tokens is None else f"budget_tokens {self.tokens}"


def share(amount: float | Share) -> Share:
    """A retention as a `Share`. Raises RetentionError outside (0, 1]."""
    return amount if isinstance(amount, Share) else Share(check_retention(amount))


class Budget(Protocol):
    """A rule that turns the scores of a prompt into token counts."""

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        """How many tokens each head of `layer` keeps, [B][H], given its scores [B, H, T]."""
        ...


class FixedBudget(ABC):
    """A rule that looks at the prompt's length alone, so that it can be applied while a text still grows."""

    @abstractmethod
    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        """The share of `tokens` that each head of `layer` keeps."""

    def limits(self, layer: int, heads: int, tokens: int) -> list[int]:
        """floor(r t) of each head."""
        ratios = self.ratios(layer, heads, tokens)
        if len(ratios) != heads:
            raise CacheError(f"the budget rule names {len(ratios)} heads a layer, but {heads} are computed here.")
        return [min(tokens, int(ratio * tokens + ROUNDING)) for ratio in ratios]

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        batch, heads, tokens = scores.shape
        return [self.limits(layer, heads, tokens)] * batch


class Uniform(FixedBudget):
    """Every head keeps the same share."""

    def __init__(self, retention: float | Share):
        self._share = share(retention)

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        return [self._share.of(tokens)] * heads


class PerHead(FixedBudget):
    """Each head keeps floor(r t) tokens by its own fixed ratio r, from a list [L][H]."""

    def __init__(self, ratios: list[list[float]]):
        self._ratios = ratios

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        return self._ratios[layer]


class LearnedBudget(FixedBudget):
    """LKV-H: the policy's ratios, fixed after training (Sec. 3.3)."""

    def __init__(self, policy: Policy, retention: float | Share, heads: slice = slice(None)):
        """`heads`: the KV heads that this process computes."""
        self._policy, self._share, self._heads = policy, share(retention), heads
        self._solved: tuple[float, list[list[float]]] | None = None

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        retention = self._share.of(tokens)
        # One Soft-TopK over all heads of the model serves every layer and process.
        if self._solved is None or self._solved[0] != retention:
            self._solved = (retention, self._policy.inference_ratios(retention)[:, self._heads].tolist())
        return self._solved[1][layer]


class GlobalTopK:
    """One contest of all tokens of all heads by raw scores [L, B, H, T] (KVzip's rule)."""

    def __init__(self, table: Tensor, retention: float):
        layers, _, heads, tokens = table.shape
        room = int(check_retention(retention) * layers * heads * tokens + ROUNDING)
        best = table.transpose(0, 1).flatten(1).topk(room, -1).indices // tokens
        winners = [torch.bincount(row, minlength=layers * heads).view(layers, heads) for row in best]
        self._counts = torch.stack(winners, 1)

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        return self._counts[layer].tolist()
