"""What LKV-T computes for the tokens of one layer: the sum of the terms that its policy names.

Shapes: B rows, H KV heads, G query heads a KV head, T tokens, d the head's size, K knots, r columns of spread.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Queries to come, taken to be normal before rotation: `mean` [H, G, d] and covariance `spread` spread^T, [H, d, r].

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


def token_scores(
    scorer: Scorer,
    key: Tensor,
    value: Tensor,
    *,
    cached_key: Tensor | None = None,
    ahead: Tensor | None = None,
    scale: float = 1.0,
    start: int = 0,
    length: int | None = None,
) -> Tensor:
    """Scores [B, H, T] in float32 or better of `key`, `value` [B, H, T, d], tokens `start` to `start + T - 1` of a text.

    `key` is k as the content term reads it; `cached_key` is k after RoPE where that is another. `ahead` [d, d] is the
    mean rotation of the positions to come, by which rows are multiplied; `scale` is attention's. `length` is the text's
    (start + T unless given). Differentiable in the scorer's tensors where these ask for gradients; otherwise the content
    is computed in blocks, in bfloat16 where k and v are. Raises ValueError where a term misses its input.
    """
    graph = torch.is_grad_enabled() and scorer.content.hidden.requires_grad
    content = reference.content if graph or key.dtype == torch.float64 else fast.content
    c = scorer.content
    scores = content(key, value, c.mean, c.std, c.hidden, c.bias, c.output)
    if scorer.attention is not None:
        if ahead is None:
            raise ValueError("the attention term needs the mean rotation of the positions to come.")
        scores = scores + attention_scores(
            scorer.attention, key if cached_key is None else cached_key, value, ahead, scale
        )
    if scorer.position is not None:
        p, tokens = scorer.position, key.shape[2]
        places = torch.arange(start, start + tokens, device=key.device)
        distance = (start + tokens if length is None else length) - places
        scores = scores + reference.knots(p.start, places + 1) + reference.knots(p.end, distance)
    return scores


def attention_scores(attention: Attention, key: Tensor, value: Tensor, ahead: Tensor, scale: float) -> Tensor:
    """The attention term alone, [B, H, T], of `key` (after RoPE) and `value` [B, H, T, d]; see `token_scores`."""
    return reference.attention(
        key, value, ahead, scale, attention.weight, attention.mean, attention.spread, attention.normaliser
    )
