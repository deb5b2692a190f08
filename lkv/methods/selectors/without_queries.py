"""Selectors that read no queries: by the keys alone, by position, and chance."""

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
        """Minus the L2 norm of k."""
        return -torch.linalg.vector_norm(to_fp32(prompt.key), dim=-1)


@register_selector("keydiff", label="KeyDiff", description="keys unlike the mean key")
class KeyDiff(Selector):
    """KeyDiff (Park et al. 2025): keys that are unlike the others of their head are kept. Nothing is protected."""

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Minus the cosine between a key and the mean direction of all the head's keys."""
        directions = normalize(to_fp32(prompt.key), dim=-1)
        anchor = normalize(directions.mean(2, keepdim=True), dim=-1)
        return -(directions * anchor).sum(-1)


@register_selector("streaming-llm", label="StreamingLLM", description="the first and the most recent tokens")
class StreamingLLM(Selector):
    """StreamingLLM (Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks").

    The first `sinks` tokens, then the most recent ones, the same in every head. Tokens keep the positions that they
    were read at.
    """

    def __init__(self, sinks: int = 4):
        self.sinks = sinks

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return the positions, the sinks above all. Raises PromptError for a prompt of no more than `sinks` tokens."""
        tokens = prompt.key.shape[2]
        check_sinks(self, tokens, self.sinks)
        order = torch.arange(tokens, dtype=torch.float32, device=prompt.key.device)
        # The earlier the higher: a head that keeps fewer tokens than there are sinks keeps the first.
        order[: self.sinks] = 2 * tokens - order[: self.sinks]
        return order.expand(prompt.key.shape[:3])


@register_selector(
    "duo-window",
    label="DuoAttention",
    description=f"the first {SINKS} and the most recent tokens (DuoAttention)",
    sinks=SINKS,
)
class DuoWindow(StreamingLLM):
    """What a streaming head of DuoAttention (Xiao et al. 2024) keeps: sinks, then the most recent tokens."""

    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """As `StreamingLLM`, but of a prompt shorter than the sinks such a head keeps everything."""
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
        """Random numbers for each head, the same whenever seed, layer and the prompt's length are.

        All rows of a batch have the same, so that a text is evicted from as it would be alone.
        """
        batch, heads, tokens, _ = prompt.key.shape
        # On the CPU, whose numbers are the same on every machine.
        generator = torch.Generator("cpu").manual_seed((self._seed * 1_000_003 + layer) % 2**63)
        scores = torch.rand(heads, tokens, dtype=torch.float32, generator=generator, device="cpu")
        return scores.to(prompt.key.device).expand(batch, heads, tokens)
