"""What a policy measures on training text before it learns: input statistics, and the queries to expect."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lkv.integrations.transformers.prefill import LayerKV, read_prompt, to_fp32
from lkv.kernels.token_scores import expected_attention_scores
from lkv.policy.policy import FUTURE, Policy

_SINKS = 4  # the first tokens draw attention whatever they say: left out of the statistics of queries
_DEVIATION = 2.0  # of the attention term at the start, about the noise that training adds to scores


@torch.no_grad()
def calibrate(model: Any, policy: Policy, texts: Sequence[list[int]]) -> None:
    """Measure on `texts` (token ids) the mean and deviation of each head's k and v and, where the policy has a term for
    the attention to expect, the statistics of its queries; they are stored in the policy."""
    tokens = policy.tokens
    learned = tokens.inputs.attention == "learned"
    layers = policy.spec.layers
    inputs, queries = [_Moments() for _ in range(layers)], [_Moments() for _ in range(layers)]
    for prompt in _prompts(model, policy, texts, learned):
        for layer, part in enumerate(prompt):
            inputs[layer].add(torch.cat([tokens.read_key(part), part.value], -1)[0], square=False)
            if learned:
                queries[layer].add(part.required_rotation.unrotate(to_fp32(part.query))[0, :, _SINKS:], square=True)
    tokens.mean.copy_(torch.stack([moments.mean.to(tokens.mean) for moments in inputs]))
    tokens.std.copy_(torch.stack([moments.variance.clamp(min=1e-6).sqrt().to(tokens.std) for moments in inputs]))
    if learned:
        for layer, moments in enumerate(queries):
            group = (policy.spec.kv_heads, -1)
            tokens.query_mean[layer] = moments.mean.unflatten(0, group).to(tokens.query_mean)
            pooled = moments.covariance.unflatten(0, group).mean(1)
            tokens.query_spread[layer] = _factor(pooled, tokens.query_spread.shape[-1]).to(tokens.query_spread)
        _scale_attention(model, policy, texts[: len(texts) // 2 + 1])


class _Moments:
    """Sums of x and x^2 (or x x^T) over tokens, in float64; one layer of one prompt at a time is widened."""

    def __init__(self) -> None:
        self._count, self._sum, self._second = 0, torch.zeros((), device="cpu"), torch.zeros((), device="cpu")

    def add(self, x: Tensor, square: bool) -> None:
        """`x` [H, T, d]; `square` for whole matrices of second moments."""
        x = x.double()
        self._count += x.shape[1]
        self._sum = self._sum + x.sum(1)
        self._second = self._second + (x.transpose(-1, -2) @ x if square else x.square().sum(1))

    @property
    def mean(self) -> Tensor:
        return self._sum / self._count

    @property
    def variance(self) -> Tensor:
        return self._second / self._count - self.mean.square()

    @property
    def covariance(self) -> Tensor:
        return self._second / self._count - self.mean[..., None] * self.mean[..., None, :]


def _prompts(model: Any, policy: Policy, texts: Sequence[list[int]], queries: bool):
    device = policy.tokens.mean.device
    for ids in texts:
        yield read_prompt(model, torch.tensor([ids], device=device), queries=queries)


def _factor(covariance: Tensor, columns: int) -> Tensor:
    """F [H, d, r] with F F^T the best approximation of rank r to `covariance` [H, d, d]."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors[..., -columns:] * values[..., None, -columns:].clamp(min=0).sqrt()


def _scale_attention(model: Any, policy: Policy, texts: Sequence[list[int]]) -> None:
    """Set each query head's normaliser, then weights that give the attention term the deviation `_DEVIATION`."""
    tokens = policy.tokens
    tokens.attention_weight.fill_(1.0)
    sums, spreads = torch.zeros_like(tokens.normaliser), torch.zeros_like(tokens.attention_weight)
    for prompt in _prompts(model, policy, texts, False):
        for layer, part in enumerate(prompt):
            ahead = part.required_rotation.mean_rotation(to_fp32(part.key), part.end, part.end + FUTURE)
            sums[layer] += _log_denominators(policy, layer, part, ahead).to(sums) / len(texts)
    tokens.normaliser.copy_(sums)
    for prompt in _prompts(model, policy, texts, False):
        for layer, part in enumerate(prompt):
            term = tokens.scorer(layer, device=part.key.device).attention
            assert term is not None
            ahead = part.required_rotation.mean_rotation(to_fp32(part.key), part.end, part.end + FUTURE)
            scores = expected_attention_scores(term, part.key, part.value, ahead, part.scale)
            spreads[layer] += scores[0, :, _SINKS:].std(-1).to(spreads) / len(texts)
    tokens.attention_weight.copy_(_DEVIATION / spreads.clamp(min=1e-3))


def _log_denominators(policy: Policy, layer: int, part: LayerKV, ahead: Tensor) -> Tensor:
    """log of the mean over tokens of E[exp(q k)], [H, G]: the softmax's denominator a token."""
    term = policy.tokens.scorer(layer, device=part.key.device).attention
    assert term is not None
    mean = term.mean @ ahead * part.scale
    spread = ahead.T @ term.spread * part.scale
    key = to_fp32(part.key)[0, :, _SINKS:]
    logits = key @ mean.transpose(-1, -2) + (key @ spread).square().sum(-1, keepdim=True) / 2
    return logits.logsumexp(1) - math.log(key.shape[1])
