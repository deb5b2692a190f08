"""What LKV-T computes for the tokens of one layer: the sum of the terms that its policy names.

Shapes: B rows, H KV heads, G query heads a KV head, T tokens, d the head's size, K knots, r columns of spread.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lkv.kernels.token_scores import fast, reference
from lkv.utils.devices import full_precision


@dataclass(frozen=True)
class ContentWeights:
    """The MLP of Sec. 3.4 over [k; v]: `mean`, `std` [H, 2d], `hidden` [H, 2d, m], `bias`, `output` [H, m]."""

    mean: Tensor
    std: Tensor
    hidden: Tensor
    bias: Tensor
    output: Tensor


@dataclass(frozen=True)
class ExpectedAttentionWeights:
    """Queries to come, taken to be normal before rotation: `mean` [H, G, d] and covariance F F^T, `spread` F [H, d, r].

    `normaliser` [H, G] is the mean logarithm of the softmax's denominator a token; `weight` [H] scales the term.
    """

    weight: Tensor
    mean: Tensor
    spread: Tensor
    normaliser: Tensor


@dataclass(frozen=True)
class PositionWeights:
    """Piecewise linear in log2(1 + position), `start`, and in log2(distance to the end), `end`, both [H, K].

    Knot j lies at 2^j; beyond the last one the terms are flat.
    """

    start: Tensor
    end: Tensor


@dataclass(frozen=True)
class TokenScoreWeights:
    """The terms of one layer; `attention` and `position` are None where a policy has none."""

    content: ContentWeights
    attention: ExpectedAttentionWeights | None = None
    position: PositionWeights | None = None


def scores_on_arrival(scorer: TokenScoreWeights, key: Tensor, value: Tensor, places: Tensor) -> Tensor:
    """The part of the scores [B, H, T], in float32 or better, that is final when tokens arrive: content and `start`.

    `key` [B, H, T, d] is k as the content term reads it, `value` [B, H, T, d]; the tokens stand at `places` [T].
    """
    scores = content_scores(scorer.content, key, value)
    if scorer.position is not None:
        with full_precision(key.device):
            scores = scores + reference.knots(scorer.position.start, places + 1)
    return scores


def scores_at_eviction(
    scorer: TokenScoreWeights, key: Tensor, value: Tensor, places: Tensor, end: int, ahead: Tensor | None, scale: float
) -> Tensor | None:
    """The part [B, H, T] that depends on where the text ends: the attention to expect, and the distance to `end`. None
    where the scorer has no such terms.

    `key` [B, H, T, d] is k after RoPE, `value` [B, H, T, d]; `ahead` [d, d] is the mean rotation of the positions to
    come, by which rows are multiplied; `scale` is attention's. Raises ValueError where the attention term misses it.
    """
    scores = None
    if scorer.attention is not None:
        scores = expected_attention_scores(scorer.attention, key, value, _known(ahead), scale)
    if scorer.position is not None:
        with full_precision(key.device):
            recency = reference.knots(scorer.position.end, end - places).expand(*value.shape[:3])
        scores = recency if scores is None else scores + recency
    return scores


@torch.no_grad()
def scores_in_blocks(
    scorer: TokenScoreWeights,
    content_key: Callable[[slice], Tensor],
    key: Tensor,
    value: Tensor,
    places: Tensor,
    end: int,
    ahead: Tensor | None,
    scale: float,
) -> Tensor:
    """`on_arrival` and `at_eviction` together, [B, H, T], for inference: a block of tokens goes through all terms.

    `content_key` gives k of a block as the content term reads it; the rest is as there.
    """
    scores = torch.empty(*value.shape[:3], device=value.device)
    with full_precision(value.device):
        of_content, attention = _content_of_blocks(scorer.content, value), scorer.attention
        if attention is not None:
            rows = reference.attention_rows(_known(ahead), scale, attention.mean, attention.spread)
        for block in fast.blocks(value.shape[2], value.device):
            v = value[:, :, block]
            scores[:, :, block] = of_content(content_key(block), v)
            if attention is not None:
                k = key[:, :, block]
                scores[:, :, block] += reference.attention_of(k, v, rows, attention.weight, attention.normaliser)
        if scorer.position is not None:
            scores += reference.knots(scorer.position.start, places + 1)
            scores += reference.knots(scorer.position.end, end - places)
    return scores


def content_scores(content: ContentWeights, key: Tensor, value: Tensor) -> Tensor:
    """The content term alone, [B, H, T], of `key` (as the content reads it) and `value` [B, H, T, d].

    Differentiable where the weights ask for gradients; otherwise computed in blocks, in bfloat16 where k and v are.
    """
    with full_precision(key.device):
        if torch.is_grad_enabled() and content.hidden.requires_grad:
            return reference.content(
                key, value, content.mean, content.std, content.hidden, content.bias, content.output
            )
        with torch.no_grad():
            of_block = _content_of_blocks(content, value)
            blocks = fast.blocks(value.shape[2], value.device)
            return torch.cat([of_block(key[:, :, block], value[:, :, block]) for block in blocks], -1)


def expected_attention_scores(
    attention: ExpectedAttentionWeights, key: Tensor, value: Tensor, ahead: Tensor, scale: float
) -> Tensor:
    """The attention term alone, [B, H, T]; see `scores_at_eviction`."""
    with full_precision(key.device):
        return reference.attention(
            key, value, ahead, scale, attention.weight, attention.mean, attention.spread, attention.normaliser
        )


def _content_of_blocks(content: ContentWeights, like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return fast.content(like, content.mean, content.std, content.hidden, content.bias, content.output)


def _known(ahead: Tensor | None) -> Tensor:
    if ahead is None:
        raise ValueError("the attention term needs the mean rotation of the positions to come.")
    return ahead
