"""What LKV-T computes for the tokens of one layer: the sum of the terms that its policy names.

Shapes: B rows, H KV heads, G query heads a KV head, T tokens, d the head's size, K knots, r columns of spread.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lkv.devices import full_precision
from lkv.ops.token_scores import fast, reference


@dataclass(frozen=True)
class Content:
    """The MLP of Sec. 3.4 over [k; v]: `mean`, `std` [H, 2d], `hidden` [H, 2d, m], `bias`, `output` [H, m]."""

    mean: Tensor
    std: Tensor
    hidden: Tensor
    bias: Tensor
    output: Tensor


@dataclass(frozen=True)
class Attention:
    """Queries to come, taken to be normal before rotation: `mean` [H, G, d] and covariance F F^T, `spread` F [H, d, r].

    `normaliser` [H, G] is the mean logarithm of the softmax's denominator a token; `weight` [H] scales the term.
    """

    weight: Tensor
    mean: Tensor
    spread: Tensor
    normaliser: Tensor


@dataclass(frozen=True)
class Position:
    """Piecewise linear in log2(1 + position), `start`, and in log2(distance to the end), `end`, both [H, K].

    Knot j lies at 2^j; beyond the last one the terms are flat.
    """

    start: Tensor
    end: Tensor


@dataclass(frozen=True)
class Scorer:
    """The terms of one layer; `attention` and `position` are None where a policy has none."""

    content: Content
    attention: Attention | None = None
    position: Position | None = None


def on_arrival(scorer: Scorer, key: Tensor, value: Tensor, places: Tensor) -> Tensor:
    """The part of the scores [B, H, T], in float32 or better, that is final when tokens arrive: content and `start`.

    `key` [B, H, T, d] is k as the content term reads it, `value` [B, H, T, d]; the tokens stand at `places` [T].
    """
    scores = content_scores(scorer.content, key, value)
    if scorer.position is not None:
        with full_precision(key.device):
            scores = scores + reference.knots(scorer.position.start, places + 1)
    return scores


def at_eviction(
    scorer: Scorer, key: Tensor, value: Tensor, places: Tensor, end: int, ahead: Tensor | None, scale: float
) -> Tensor | None:
    """The part [B, H, T] that depends on where the text ends: the attention to expect, and the distance to `end`. None
    where the scorer has no such terms.

    `key` [B, H, T, d] is k after RoPE, `value` [B, H, T, d]; `ahead` [d, d] is the mean rotation of the positions to
    come, by which rows are multiplied; `scale` is attention's. Raises ValueError where the attention term misses it.
    """
    scores = None
    if scorer.attention is not None:
        if ahead is None:
            raise ValueError("the attention term needs the mean rotation of the positions to come.")
        scores = attention_scores(scorer.attention, key, value, ahead, scale)
    if scorer.position is not None:
        with full_precision(key.device):
            recency = reference.knots(scorer.position.end, end - places).expand(*value.shape[:3])
        scores = recency if scores is None else scores + recency
    return scores


def content_scores(content: Content, key: Tensor, value: Tensor) -> Tensor:
    """The content term alone, [B, H, T], of `key` (as the content reads it) and `value` [B, H, T, d].

    Differentiable where the weights ask for gradients; otherwise computed in blocks, in bfloat16 where k and v are.
    """
    graph = torch.is_grad_enabled() and content.hidden.requires_grad
    backend = reference.content if graph else fast.content
    with full_precision(key.device):
        return backend(key, value, content.mean, content.std, content.hidden, content.bias, content.output)


def attention_scores(attention: Attention, key: Tensor, value: Tensor, ahead: Tensor, scale: float) -> Tensor:
    """The attention term alone, [B, H, T]; see `at_eviction`."""
    with full_precision(key.device):
        return reference.attention(
            key, value, ahead, scale, attention.weight, attention.mean, attention.spread, attention.normaliser
        )
