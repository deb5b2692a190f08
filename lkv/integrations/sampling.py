"""How the next token of an answer is drawn."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lkv.errors import PromptError


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 takes the most probable token. `top_p`: only the most probable ones that together reach that
    share; `top_k`: only so many. The same `seed` draws the same tokens from the same probabilities.

    Raises PromptError for what is none of these.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature <= 2:
            raise PromptError(f"temperature is {self.temperature!r}; give a number from 0 (no chance) to 2.")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise PromptError(f"top_p is {self.top_p!r}; give a share in (0, 1].")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise PromptError(f"top_k is {self.top_k!r}; give a number of tokens, 1 or more.")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise PromptError(f"seed is {self.seed!r}; give a whole number from 0 to 2^63 - 1.")

    def drawer(self) -> "Sampler | None":
        """What draws the tokens of one answer; None where the most probable is taken."""
        return Sampler(self) if self.temperature else None


class Sampler:
    """Draws the tokens of one answer, one after another."""

    def __init__(self, sampling: SamplingParams):
        self._sampling = sampling
        self._random = torch.Generator("cpu")
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token, from its logits [V]."""
        count = min(self._sampling.top_k or len(logits), len(logits))
        values, tokens = logits.float().cpu().div(self._sampling.temperature).topk(count)
        shares = values.softmax(-1)
        # The token that reaches top_p is the last one of those that may be drawn.
        shares[shares.cumsum(-1) - shares >= self._sampling.top_p] = 0
        return int(tokens[torch.multinomial(shares, 1, generator=self._random)])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
