"""Expected Attention (Devoto et al. 2025)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lkv.hf.prompt_kv import LayerKV, query_rotations, to_fp32
from lkv.kernels.softcap import log_expected_exp
from lkv.methods.base import Selector, check_sinks
from lkv.methods.registry import register_selector

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register_selector(
    "expected",
    label="Expected Attention",
    description="attention expected of queries to come",
    variant="Expected Attention with epsilon 0, kvpress's default",
)
@register_selector(
    "expected-e2",
    label="Expected Attention, epsilon 0.01",
    description="attention expected of queries to come, plus 0.01",
    variant="Expected Attention with epsilon 0.01, as kvpress evaluates it",
    epsilon=0.01,
)
class ExpectedAttention(Selector):
    """Expected Attention (Devoto et al. 2025): the expected attention of future queries, times ||v||.

    Future queries are modelled as normal, with the mean and covariance of the prompt's queries before RoPE, rotated by
    the mean rotation of their positions. The first `sinks` tokens are always kept and excluded from all statistics. A
    prompt's tokens are assumed to be at positions 0 to T - 1.
    """

    required_inputs = ("model",)
    reads_queries = True

    def __init__(
        self, model: "PreTrainedModel", future: int = 512, sinks: int = 4, value_norm: bool = True, epsilon: float = 0.0
    ):
        """Expect queries at `future` positions after the prompt, and always keep the first `sinks` tokens.

        `value_norm`: whether to multiply by the norm of v; `CriticalKV` needs the attention only. `epsilon` is added
        first, and ranks tokens without expected attention (0.01 in kvpress's evaluations with AdaKV). Raises
        UnsupportedModelError for a model whose queries cannot be rotated back.
        """
        self.sinks = sinks
        self._future, self._value_norm, self._epsilon = future, value_norm, epsilon
        self._rotations = query_rotations(model, type(self).__name__)

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Score by expected attention, with the sinks first. Raises PromptError for a prompt within the sinks."""
        key, value, scale = prompt.key, prompt.value, prompt.scale
        heads, tokens = key.shape[1:3]
        query = to_fp32(prompt.query)
        check_sinks(self, tokens, self.sinks)
        rotation = prompt.rotation or self._rotations[layer]
        future = rotation.mean_rotation(query, tokens, tokens + self._future)
        queries = rotation.unrotate(query)[:, :, self.sinks :] @ future
        mean = queries.mean(2, keepdim=True)
        spread = ((queries - mean).transpose(-1, -2) @ (queries - mean) / queries.shape[2]).unflatten(1, (heads, -1))
        keys = to_fp32(key[:, :, None, self.sinks :])
        logits = (keys @ mean.unflatten(1, (heads, -1)).transpose(-1, -2)).squeeze(-1) * scale
        logits = log_expected_exp(logits, ((keys @ spread) * keys).sum(-1) * scale**2, prompt.softcap)
        expected = prompt.softmax(logits[..., None, :]).mean((2, 3))
        if self._value_norm:
            expected = (expected + self._epsilon) * torch.linalg.vector_norm(to_fp32(value[:, :, self.sinks :]), dim=-1)
        first = (expected.max() + 1).expand(*expected.shape[:2], self.sinks)
        return torch.cat([first, expected], -1)
