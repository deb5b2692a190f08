"""Selectors by attention: observed (SnapKV, H2O, TOVA), expected, and weighed by the projected values (CriticalKV)."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, normalize

from lkv.errors import CacheError, LkvError, PromptError
from lkv.hf.prompt_kv import LayerKV, query_rotations, to_fp32
from lkv.hf.spec import output_projections
from lkv.kernels.softcap import log_expected_exp
from lkv.methods.base import MethodInputs, Selector, attention_blocks, check_sinks
from lkv.methods.registry import register_selector

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 256  # that CriticalKV projects, and R-KV compares with all others, at a time


@register_selector("snapkv", label="SnapKV", description="attention from the last 64 tokens, smoothed")
class SnapKV(Selector):
    """SnapKV (Li et al. 2024): attention received from the prompt's last `window` tokens, smoothed over positions.

    The window itself is always kept.
    """

    reads_queries = scores_entries = True

    def __init__(self, window: int = 64, kernel: int = 5):
        self._window, self._kernel = window, kernel
        self.last_queries = window

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Score by smoothed attention, with the window first. Raises PromptError for a prompt within the window."""
        key = prompt.key
        batch, heads, tokens, _ = key.shape
        window = min(self._window, prompt.query.shape[2])
        if tokens <= window:
            raise PromptError(
                f"the prompt has {tokens} tokens, but {type(self).__name__} observes the last {self._window} and needs "
                "more than that; give a longer prompt or another method."
            )
        recent = prompt.query[:, :, -window:].reshape(batch, heads, -1, key.shape[-1])
        logits = prompt.logits(recent, key).view(batch, heads, -1, window, tokens)
        future = torch.ones(window, tokens, dtype=torch.bool, device=key.device).triu(tokens - window + 1)
        attention = prompt.softmax(logits.masked_fill(future, -torch.inf).float())[..., :-window]
        older = self._rank(attention.mean(-2), key[:, :, :-window])
        # The most recent tokens rank first, for budgets smaller than the window.
        recency = torch.linspace(1, 2, window, dtype=older.dtype, device=key.device)
        return torch.cat([older, (older.max() + recency).expand(batch, heads, window)], -1)

    def _rank(self, attention: Tensor, key: Tensor) -> Tensor:
        """Score the tokens [B, H, n] before the window by the attention [B, H, G, n] that they get and their k."""
        smooth = avg_pool1d(attention.flatten(0, 1), self._kernel, padding=self._kernel // 2, stride=1)
        return smooth.view(attention.shape).mean(2)


@register_selector("r-kv", label="R-KV", description="attention from the last 8 tokens, less the keys' redundancy")
class RKV(SnapKV):
    """R-KV (Cai et al. 2025): the attention from the last `window` tokens minus the redundancy of the keys.

    Attention is max-pooled over `kernel` positions. A key is redundant by its mean cosine to the keys of its head; each
    of these leaves out the most recent key to which its cosine is above `threshold`. Attention has the weight `share`,
    the softmax of redundancy 1 - `share`. The window itself is always kept.
    """

    def __init__(self, window: int = 8, kernel: int = 7, share: float = 0.1, threshold: float = 0.5):
        super().__init__(window, kernel)
        self._share, self._threshold = share, threshold

    def _rank(self, attention: Tensor, key: Tensor) -> Tensor:
        pooled = max_pool1d(attention.flatten(0, 1), self._kernel, padding=self._kernel // 2, stride=1)
        redundancy = torch.stack([self._redundancy(own) for own in normalize(to_fp32(key), dim=-1).flatten(0, 1)])
        return self._share * pooled.view(attention.shape).mean(2) - (1 - self._share) * redundancy.view(key.shape[:3])

    def _redundancy(self, directions: Tensor) -> Tensor:
        """Return the redundancy [n] of the keys of a head, from their directions [n, d]."""
        total = directions.new_zeros(len(directions))
        for start in range(0, len(directions), _TOKENS):
            cosines = directions[start : start + _TOKENS] @ directions.T
            cosines.diagonal(start).zero_()
            latest = (cosines > self._threshold).int().cumsum(1).argmax(1, keepdim=True)
            nearest = cosines.gather(1, latest)
            total += cosines.scatter_(1, latest, nearest.where(nearest <= self._threshold, 0)).sum(0)
        return (total / len(directions)).softmax(-1)


@register_selector(
    "h2o",
    label="H2O",
    description="attention received from all tokens",
    variant="H2O without its window of recent tokens",
)
@register_selector(
    "observed",
    label="Observed Attention",
    description="attention received, divided by how many tokens saw it",
    average=True,
)
class H2O(Selector):
    """Heavy hitters (H2O; Zhang et al. 2023): the attention that a token receives from all tokens of the prompt.

    It is averaged over the query heads that share its KV head. `average` divides the sum by the number of tokens that
    attend to the token, which removes the advantage of early ones. No tokens are protected, whereas the paper's H2O
    reserves half of the budget for the most recent tokens.
    """

    reads_queries = True

    def __init__(self, average: bool = False):
        self._average = average

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return the sum or mean of the attention received."""
        key = prompt.key
        batch, heads, tokens, _ = key.shape
        received = to_fp32(key.new_zeros(batch, heads, tokens))
        for _, attention in attention_blocks(prompt):
            received[..., : attention.shape[-1]] += attention.sum(3).mean(2)
            del attention  # before the next block takes memory
        if self._average:
            received /= torch.arange(tokens, 0, -1, device=key.device)
        return received


@register_selector("tova", label="TOVA", description="attention from the last token")
class TOVA(Selector):
    """TOVA (Oren et al. 2024, "Transformers are Multi-State RNNs"): the attention of the prompt's last token.

    It is averaged over all heads of the layer, so that every head keeps the same tokens. No tokens are protected, and
    the last token is scored by its attention to itself. Under tensor parallelism the average is over the heads of one
    process.
    """

    reads_queries = scores_entries = True
    last_queries = 1

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return the attention of the last token, the same for all heads."""
        key = prompt.key
        logits = prompt.logits(prompt.grouped_query[..., -1:, :], key[:, :, None])
        return prompt.softmax(to_fp32(logits)).mean((1, 2, 3))[:, None].expand(key.shape[:3])


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
    uses_counts = True

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
        for block in to_fp32(value).split(_TOKENS, 2):
            norms = torch.stack([(block @ weight[:, g]).abs().sum(-1) for g in range(weight.shape[1])])
            parts.append(norms.mean(0))
        return torch.cat(parts, -1)
