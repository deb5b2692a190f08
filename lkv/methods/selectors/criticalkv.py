"""CriticalKV (Feng et al. 2025)."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lkv.errors import CacheError, LkvError
from lkv.hf.prompt_kv import LayerKV, to_fp32
from lkv.hf.spec import output_projections
from lkv.methods.base import MethodInputs, Selector
from lkv.methods.registry import register_selector
from lkv.methods.selectors.expected_attention import ExpectedAttention
from lkv.methods.selectors.observed_attention import SnapKV

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BLOCK = 256  # values projected at a time


@register_selector(
    "critical-snapkv",
    label="CriticalKV",
    description="SnapKV, weighed by the size of the projected values (CriticalKV)",
    inner="snapkv",
)
@register_selector(
    "critical-expected",
    label="CriticalKV over Expected Attention",
    description="Expected Attention, weighed by the size of the projected values (CriticalKV)",
    inner="expected",
)
class CriticalKV(Selector):
    """CriticalKV (Feng et al. 2025): another selector's ranking, refined by the norms of the projected values.

    Of a head's budget, the share `first_stage` goes to the best tokens by the inner selector's scores. The rest goes to
    the best remaining tokens by (score + `epsilon`) times the L1 norm of the value after the output projection,
    averaged over the query heads that share the KV head. Tokens that the inner selector protects stay first. Heads are
    ranked separately, so they cannot compete by these scores.

    Raises UnsupportedModelError for a model whose output projections cannot be read.
    """

    reads_queries = True
    refines = True

    def __init__(self, model: "PreTrainedModel", inner: Selector, first_stage: float = 0.5, epsilon: float = 1e-4):
        """`inner` must return non-negative scores, such as attention. Raises LkvError for an invalid `first_stage`."""
        if not 0.0 <= first_stage <= 1.0:
            raise LkvError(f"first_stage is {first_stage!r}, but it is a share of the budget and must lie in [0, 1].")
        self._weights = output_projections(model)
        self._inner, self._first_stage, self._epsilon = inner, first_stage, epsilon
        self.reads_queries, self.last_queries = inner.reads_queries, inner.last_queries

    @classmethod
    def from_inputs(cls, inputs: MethodInputs, inner: str = "snapkv", **options: Any) -> "CriticalKV":
        """Build the selector over SnapKV or Expected Attention."""
        model = inputs.require("model")
        attention = SnapKV() if inner == "snapkv" else ExpectedAttention(model, value_norm=False)
        return cls(model, attention, **options)

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return the inner selector's scores. Raises CacheError if one is negative."""
        attention = to_fp32(self._inner.scores(layer, prompt))
        if bool((attention < 0).any()):
            raise CacheError(
                f"CriticalKV weighs scores by the size of the values, and {type(self._inner).__name__} gives scores "
                "below 0; wrap a selector of attention, such as SnapKV, H2O or ExpectedAttention."
            )
        return attention

    @torch.no_grad()
    def refine(self, layer: int, prompt: LayerKV, scores: Tensor, counts: list[list[int]]) -> Tensor:
        """Rank the first stage's tokens by `scores`, above all others by the weighted scores."""
        first = (torch.tensor(counts, device=scores.device).double() * self._first_stage + 1e-9).long()
        order = scores.argsort(stable=True, dim=-1, descending=True)  # ties go to the earlier token
        steps = torch.arange(scores.shape[-1], device=scores.device)
        ranks = torch.empty_like(order).scatter_(-1, order, steps.expand_as(order))
        refined = (scores + self._epsilon) * self._value_norms(layer, prompt.value)
        # Return ranks, which rounding cannot make equal: a memory budget stores the best of them in more bits.
        top = (refined.amax(-1, keepdim=True) + 1) * (2 - ranks / scores.shape[-1])
        return torch.where(ranks < first[..., None], top, refined)

    def _value_norms(self, layer: int, value: Tensor) -> Tensor:
        """Return the L1 norms [B, H, T] of the projected values, averaged over a KV head's query heads."""
        heads, dim = value.shape[1], value.shape[-1]
        weight = self._weights[layer].t().unflatten(0, (heads, -1, dim))  # [H, G, d, hidden]
        weight = to_fp32(weight.to(value.device))
        parts = []
        for block in to_fp32(value).split(_BLOCK, 2):
            norms = torch.stack([(block @ weight[:, g]).abs().sum(-1) for g in range(weight.shape[1])])
            parts.append(norms.mean(0))
        return torch.cat(parts, -1)
