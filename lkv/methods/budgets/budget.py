"""The interface of budgets, and the plain ones: one share for all heads, or one for each."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lkv.errors import CacheError, RetentionError, check_retention
from lkv.methods.registry import Buildable, register_budget

# r t is rounded down (Sec. 3.3); the margin keeps 0.15 x 4000 = 599.9999 from losing a token to rounding.
ROUNDING = 1e-6


@dataclass(frozen=True)
class RetentionTarget:
    """How much of a text to keep.

    Attributes:
        retention: the share of its tokens, in (0, 1]; kvpress's `compression_ratio` is 1 - retention.
        tokens: instead of the share, how many tokens a head keeps on average.
        protected: how many of the text's tokens every head keeps in any case. Budgets share out what they leave.
    """

    retention: float = 0.15
    tokens: int | None = None
    protected: int = 0

    def __post_init__(self) -> None:
        # A float, whatever number it was given as, so that it can be saved.
        object.__setattr__(self, "retention", check_retention(self.retention))
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise RetentionError(f"budget_tokens is {self.tokens!r}, but a head keeps a whole number of tokens >= 1.")

    @classmethod
    def from_arguments(cls, retention: float | None, tokens: int | None, protected: int = 0) -> "RetentionTarget":
        """The target of a caller who may give one of the two. Raises RetentionError for both, or for bad numbers."""
        if retention is not None and tokens is not None:
            raise RetentionError(
                f"retention {retention!r} and budget_tokens {tokens!r} both say how much to keep; give one of them."
            )
        return cls(cls.retention if retention is None else retention, tokens, protected)

    def share(self, tokens: int) -> float:
        """The fraction to keep of a text's `tokens` tokens that are not protected, in [0, 1]."""
        whole = tokens + self.protected
        share = self.retention if self.tokens is None else min(1.0, self.tokens / max(1, whole))
        return max(0.0, share * whole - self.protected) / max(1, tokens) if self.protected else share

    def total_share(self, tokens: int) -> float:
        """As `share`, of all precisions where entries are stored in several: what is kept at all."""
        return self.share(tokens)

    def protected_entries(self, tokens: int) -> int:
        """How many protected entries a head has here, in addition to its share of `tokens` others."""
        return self.protected

    def __str__(self) -> str:
        return f"retention {self.retention}" if self.tokens is None else f"budget_tokens {self.tokens}"


def as_target(target: float | RetentionTarget) -> RetentionTarget:
    """A retention as an `RetentionTarget`. Raises RetentionError outside (0, 1]."""
    return target if isinstance(target, RetentionTarget) else RetentionTarget(check_retention(target))


def drop_tokens(scores: Tensor, positions: Sequence[int]) -> Tensor:
    """`scores` [B, H, T] of all tokens but those at `positions`."""
    if not positions:
        return scores
    is_left = torch.ones(scores.shape[-1], dtype=torch.bool, device="cpu")
    is_left[list(positions)] = False
    return scores[..., is_left.nonzero()[:, 0].to(scores.device)]


class Budget(Buildable, ABC):
    """How many tokens each KV head keeps.

    A subclass implements `counts` and is registered with `lkv.methods.registry.register_budget` (in this package) or
    `lkv.register_method` (in any other).

    Attributes:
        compares_heads: whether heads compete for tokens by their scores, which must then be comparable across heads.
        exact_name: of a budget that may keep more than its target, the name of the one like it that does not.
    """

    required_inputs: tuple[str, ...] = ("target",)
    compares_heads = False
    exact_name: str | None = None

    @abstractmethod
    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        """Count the tokens to keep.

        Args:
            layer: number of the layer, among those evicted from.
            scores: the selector's scores of its tokens, [B, H, T].

        Returns:
            How many tokens each head keeps, `[B][H]`, each from 0 to T.
        """


class FixedBudget(Budget):
    """A budget that depends on the prompt's length alone, so that it can be applied while a text is still read."""

    @abstractmethod
    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        """The share of its tokens that each head keeps.

        Args:
            layer: number of the layer, among those evicted from.
            heads: how many KV heads this process computes.
            tokens: length of the prompt.

        Returns:
            A number from 0 to 1 for each head.
        """

    def limits(self, layer: int, heads: int, tokens: int) -> list[int]:
        """Count floor(r t) for each head, [H]. Raises CacheError for unusable ratios."""
        ratios = self.ratios(layer, heads, tokens)
        if len(ratios) != heads:
            raise CacheError(
                f"the budget {type(self).__name__} gives {len(ratios)} ratios, but there are {heads} heads here."
            )
        if not all(ratio >= 0 for ratio in ratios):  # not a number fails, too
            raise CacheError(
                f"the budget {type(self).__name__} gives layer {layer} the ratios {ratios}; give numbers from 0 to 1."
            )
        return [min(tokens, int(ratio * tokens + ROUNDING)) for ratio in ratios]

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        """The same `limits` for every row."""
        batch, heads, tokens = scores.shape
        return [self.limits(layer, heads, tokens)] * batch


@register_budget("uniform", label="Uniform", description="every head keeps the same share")
class Uniform(FixedBudget):
    """Every head keeps the same share."""

    def __init__(self, retention: float | RetentionTarget):
        self._target = as_target(retention)

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        """The target's share for every head."""
        return [self._target.share(tokens)] * heads


class PerHead(FixedBudget):
    """Each head keeps floor(r t) tokens by its own fixed ratio r, from a list [L][H]."""

    def __init__(self, ratios: list[list[float]]):
        self._ratios = ratios

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        """The layer's ratios."""
        return self._ratios[layer]
