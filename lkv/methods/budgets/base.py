"""What every budget rule is, and the plain ones: a share for all heads, or one for each."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lkv.errors import CacheError, RetentionError, check_retention

# r t is rounded down (Sec. 3.3); the margin keeps 0.15 x 4000 = 599.9999 from losing a token to rounding.
ROUNDING = 1e-6


@dataclass(frozen=True)
class RetentionTarget:
    """What to keep of a text: a fraction of its tokens or, where `tokens` is given, that many a head on average."""

    retention: float = 0.15
    tokens: int | None = None

    def __post_init__(self) -> None:
        # A float, whatever number it was given as, so that it can be saved.
        object.__setattr__(self, "retention", check_retention(self.retention))
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise RetentionError(f"budget_tokens is {self.tokens!r}, but a head keeps a whole number of tokens >= 1.")

    @classmethod
    def from_arguments(cls, retention: float | None, tokens: int | None) -> "RetentionTarget":
        """What a caller asked for, one of the two or neither. Raises RetentionError for both, or for bad numbers."""
        if retention is not None and tokens is not None:
            raise RetentionError(
                f"retention {retention!r} and budget_tokens {tokens!r} both say how much to keep; give one of them."
            )
        return cls(cls.retention if retention is None else retention, tokens)

    def share(self, tokens: int) -> float:
        """The fraction to keep of a text of `tokens` tokens, in (0, 1]."""
        return self.retention if self.tokens is None else min(1.0, self.tokens / max(1, tokens))

    def __str__(self) -> str:
        return f"retention {self.retention}" if self.tokens is None else f"budget_tokens {self.tokens}"


def as_target(target: float | RetentionTarget) -> RetentionTarget:
    """A retention as an `RetentionTarget`. Raises RetentionError outside (0, 1]."""
    return target if isinstance(target, RetentionTarget) else RetentionTarget(check_retention(target))


class Budget(Protocol):
    """A rule that turns the scores of a prompt into token counts."""

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        """How many tokens each head of `layer` keeps, `[B][H]`, given its scores [B, H, T]."""
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
        if not all(ratio >= 0 for ratio in ratios):  # not a number fails, too
            raise CacheError(
                f"the budget rule gives layer {layer} the ratios {ratios}; a ratio is a number from 0 to 1."
            )
        return [min(tokens, int(ratio * tokens + ROUNDING)) for ratio in ratios]

    def counts(self, layer: int, scores: Tensor) -> list[list[int]]:
        batch, heads, tokens = scores.shape
        return [self.limits(layer, heads, tokens)] * batch


class Uniform(FixedBudget):
    """Every head keeps the same share."""

    def __init__(self, retention: float | RetentionTarget):
        self._target = as_target(retention)

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        return [self._target.share(tokens)] * heads


class PerHead(FixedBudget):
    """Each head keeps floor(r t) tokens by its own fixed ratio r, from a list [L][H]."""

    def __init__(self, ratios: list[list[float]]):
        self._ratios = ratios

    def ratios(self, layer: int, heads: int, tokens: int) -> list[float]:
        return self._ratios[layer]
