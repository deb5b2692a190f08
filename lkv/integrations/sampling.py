"""Sampling parameters of one answer, and the sampler that applies them with transformers' logits warpers."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lkv.errors import PromptError

# Below, logits divided by the temperature could overflow, and the most probable token is drawn almost surely.
LEAST_TEMPERATURE = 1e-3


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one answer are chosen.

    Args:
        temperature: From 0 to 2; below 0.001 the most probable token is taken (greedy decoding).
        top_p: Sample from the most probable tokens that together reach this share, in (0, 1].
        top_k: Sample from this many of the most probable tokens.
        seed: The same seed draws the same tokens from the same probabilities.

    Raises:
        PromptError: For values outside these ranges.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature <= 2:
            raise PromptError(f"temperature is {self.temperature!r}; give a number from 0 (greedy) to 2.")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise PromptError(f"top_p is {self.top_p!r}; give a share in (0, 1].")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise PromptError(f"top_k is {self.top_k!r}; give a number of tokens, 1 or more.")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 2**63):
            raise PromptError(f"seed is {self.seed!r}; give a whole number from 0 to 2^63 - 1.")

    def sampler(self) -> "Sampler | None":
        """The sampler of one answer; None for greedy decoding."""
        return Sampler(self) if self.temperature >= LEAST_TEMPERATURE else None


class Sampler:
    """Draws the tokens of one answer with a random generator of its own."""

    def __init__(self, params: SamplingParams):
        self._warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
        if params.top_k is not None:
            self._warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            self._warpers.append(TopPLogitsWarper(float(params.top_p)))
        self._generator = torch.Generator("cpu")
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def __call__(self, logits: Tensor) -> int:
        """Draw the next token from its logits [V]."""
        no_ids: Any = None  # the warpers read no ids
        scores = self._warpers(no_ids, logits[None].float().cpu())
        return int(torch.multinomial(scores[0].softmax(-1), 1, generator=self._generator))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
