"""Selectors without queries: by keys, by position, and at random."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lkv.hf.prompt_kv import LayerKV, to_fp32
from lkv.methods.base import SINKS, Selector, check_sinks
from lkv.methods.registry import register_selector


@register_selector("knorm", label="Knorm", description="small keys")
class Knorm(Selector):
    """Key norms (Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression").

    Nothing is protected.
    """

    is_local = True

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return minus the L2 norm of k."""
        return -torch.linalg.vector_norm(to_fp32(prompt.key), dim=-1)


@register_selector("keydiff", label="KeyDiff", description="keys unlike the mean key")
class KeyDiff(Selector):
    """KeyDiff (Park et al. 2025): keeps the keys that differ most from others of their head. Nothing is protected."""

    scores_entries = True

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return minus the cosine between a key and the mean direction of all keys of the head."""
        directions = normalize(to_fp32(prompt.key), dim=-1)
        anchor = normalize(directions.mean(2, keepdim=True), dim=-1)
        return -(directions * anchor).sum(-1)


@register_selector("streaming-llm", label="StreamingLLM", description="the first and the most recent tokens")
class StreamingLLM(Selector):
    """StreamingLLM (Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks").

    Keeps the first `sinks` tokens, then the most recent ones, the same in every head. Tokens keep their original
    positions.
    """

    scores_entries = True

    def __init__(self, sinks: int = 4):
        self.sinks = sinks

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return the positions, with the sinks first. Raises PromptError for a prompt of `sinks` tokens or fewer."""
        tokens = prompt.key.shape[2]
        check_sinks(self, tokens, self.sinks)
        order = torch.arange(tokens, dtype=torch.float32, device=prompt.key.device)
        # Earlier sinks score higher: a head that keeps fewer tokens than sinks keeps the first ones.
        order[: self.sinks] = 2 * tokens - order[: self.sinks]
        return order.expand(prompt.key.shape[:3])


@register_selector(
    "duo-window",
    label="DuoAttention",
    description=f"the first {SINKS} and the most recent tokens (DuoAttention)",
    sinks=SINKS,
)
class DuoWindow(StreamingLLM):
    """The window of DuoAttention's streaming heads (Xiao et al. 2024): sinks, then the most recent tokens."""

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Score as `StreamingLLM`, but allow prompts shorter than the sinks, which are kept whole."""
        key = prompt.key
        if key.shape[2] <= self.sinks:
            return key.new_zeros(key.shape[:3], dtype=torch.float32)
        return super().scores(layer, prompt)


@register_selector("random", label="Random", description="chance")
class Random(Selector):
    """Random scores: the baseline that every method has to beat. Nothing is protected."""

    def __init__(self, seed: int = 0):
        self._seed = seed

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return random scores for each head, a function of the seed, the layer and the prompt's length.

        They are the same in all rows of a batch, so that batching does not change the result.
        """
        batch, heads, tokens, _ = prompt.key.shape
        # On the CPU, whose random numbers are the same on every machine.
        generator = torch.Generator("cpu").manual_seed((self._seed * 1_000_003 + layer) % 2**63)
        scores = torch.rand(heads, tokens, dtype=torch.float32, generator=generator, device="cpu")
        return scores.to(prompt.key.device).expand(batch, heads, tokens)
