"""Chance, as the floor that every method has to clear."""

import torch
from torch import Tensor

from lkv.integrations.transformers.prefill import LayerKV
from lkv.methods.registry import register_selector
from lkv.methods.selectors.base import Selector


@register_selector("random", label="Random", description="chance")
class Random(Selector):
    """Scores drawn at random, of each head its own, the same whenever `seed`, the layer and the prompt's length are.

    All rows of a batch have the same scores, so that a text is evicted as it would be alone. Nothing is protected.
    """

    def __init__(self, seed: int = 0):
        self._seed = seed

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        batch, heads, tokens, _ = prompt.key.shape
        # On the CPU, whose numbers are the same on every machine.
        generator = torch.Generator("cpu").manual_seed((self._seed * 1_000_003 + layer) % 2**63)
        scores = torch.rand(heads, tokens, generator=generator, device="cpu")
        return scores.to(prompt.key.device).expand(batch, heads, tokens)
