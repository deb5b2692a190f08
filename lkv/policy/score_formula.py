"""LKV-T (Sec. 3.4): the score u of a token with key k and value v, the sum of the policy's components.

    u = output . silu(hidden^T ([k; v] - mean) / std + bias)           content, the paper's MLP: `content_formula`
      + weight log(|v| sum_g E[exp(q_g k scale - normaliser_g)])       expected attention: `expected_attention_formula`
      + start(log2(1 + position)) + end(log2(distance to the end))     position, piecewise linear: `interpolate_knots`

The last two components go beyond the paper. q_g are the future queries of the G query heads that share the KV head.

`scores_on_arrival` and `scores_at_eviction` are differentiable, for training; `content_of_blocks` is for inference.

Shapes: B rows, H KV heads, G query heads per KV head, T tokens, d the head's size, K knots, r columns of spread.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from lkv.kernels.selection import ScoreWeights
from lkv.kernels.softcap import log_expected_exp
from lkv.utils.devices import full_precision

_MIN_NORM = 1e-12


class ContentWeights(NamedTuple):
    """The MLP of Sec. 3.4 over [k; v]: `mean`, `std` [H, 2d], `hidden` [H, 2d, m], `bias`, `output` [H, m]."""

    mean: Tensor
    std: Tensor
    hidden: Tensor
    bias: Tensor
    output: Tensor


class ExpectedAttentionWeights(NamedTuple):
    """Future queries, modelled as normal before rotation: `mean` [H, G, d] and covariance F F^T, `spread` F [H, d, r].

    `normaliser` [H, G] is the log of the mean softmax denominator per token; `weight` [H] scales the component.
    """

    weight: Tensor
    mean: Tensor
    spread: Tensor
    normaliser: Tensor


class PositionWeights(NamedTuple):
    """Piecewise linear in log2(1 + position), `start`, and in log2(distance to the end), `end`, both [H, K].

    Knot j lies at 2^j; beyond the last knot the components are constant.
    """

    start: Tensor
    end: Tensor


class TokenScoreWeights(NamedTuple):
    """The components of one layer; `attention` and `position` are None if the policy lacks them."""

    content: ContentWeights
    attention: ExpectedAttentionWeights | None = None
    position: PositionWeights | None = None


def content_formula(key: Tensor, value: Tensor, content: ContentWeights) -> Tensor:
    """Apply the MLP to [k; v], normalised by mean and std: [B, H, T], in float32 or k's higher precision."""
    mean, std, hidden, bias, output = content
    dtype = torch.promote_types(key.dtype, torch.float32)
    # The normalisation is folded into the first matrix, so that k and v are read once and not copied.
    weight = hidden.to(dtype) / std[..., None].to(dtype)
    inside = bias - (mean[..., None, :].to(dtype) @ weight).squeeze(-2)
    d = key.shape[-1]
    units = key.to(dtype) @ weight[:, :d] + value.to(dtype) @ weight[:, d:] + inside[:, None]
    return (silu(units) @ output[..., None].to(dtype)).squeeze(-1)


def expected_attention_formula(
    key: Tensor, value: Tensor, projection: Tensor, attention: ExpectedAttentionWeights, softcap: float | None = None
) -> Tensor:
    """Compute weight * log(sum over the group's heads of E[exp(q k scale)] / normaliser, times ||v||): [B, H, T].

    Args:
        key: k after RoPE, [B, H, T, d].
        value: v, [B, H, T, d].
        projection: `project_queries` of the same weights, [H, G + r, d]; its dtype sets the precision.
        attention: The layer's weights of this component.
        softcap: The cap of q k scale; None without one.
    """
    dtype, group = projection.dtype, attention.normaliser.shape[1]
    # q k of a normal q is normal, of mean `mean k` and variance `k cov k`; one product computes both.
    products = projection @ key.to(dtype).transpose(-1, -2)
    variance = products[..., group:, :].square().sum(-2, keepdim=True)
    logits = log_expected_exp(products[..., :group, :], variance, softcap)
    norm = torch.linalg.vector_norm(value.to(dtype), dim=-1).clamp(min=_MIN_NORM)
    return attention.weight[:, None] * ((logits - attention.normaliser[..., None]).logsumexp(-2) + norm.log())


def project_queries(attention: ExpectedAttentionWeights, rotation: Tensor, scale: float) -> Tensor:
    """Return the projected query statistics [H, G + r, d]: means and spread under the mean `rotation` [d, d]."""
    mean, spread = attention.mean.to(rotation.dtype), attention.spread.to(rotation.dtype)
    return torch.cat([mean, spread.transpose(-1, -2)], -2) @ rotation * scale


def interpolate_knots(table: Tensor, distances: Tensor) -> Tensor:
    """Evaluate the piecewise linear functions `table` [H, K] at log2(distances), distances [T] >= 1: [H, T]."""
    knot = torch.arange(table.shape[-1], dtype=table.dtype, device=table.device)[:, None]
    x = distances.to(table.dtype).log2().clamp(max=table.shape[-1] - 1)
    # The weight of each knot at each distance; with a matrix product the gradient needs no scatter.
    return table @ (1 - (x - knot).abs_()).clamp_(min=0)


def scores_on_arrival(weights: TokenScoreWeights, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    """Compute the part of the scores [B, H, T] that is final on arrival, in float32 or better: content and `start`.

    Args:
        weights: The layer's weights.
        key: k as the content component reads it, [B, H, T, d].
        value: v, [B, H, T, d].
        positions: The tokens' positions, [T].
    """
    scores = content_scores(weights.content, key, value)
    if weights.position is not None:
        with full_precision(key.device):
            scores = scores + interpolate_knots(weights.position.start, positions + 1)
    return scores


def scores_at_eviction(
    weights: TokenScoreWeights,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    end: int,
    rotation: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor | None:
    """Compute the part [B, H, T] that depends on the end of the text: expected attention, and the distance to `end`.

    Args:
        weights: The layer's weights.
        key: k after RoPE, [B, H, T, d].
        value: v, [B, H, T, d].
        positions: The tokens' positions, [T].
        end: The position after the text.
        rotation: The mean rotation of future positions, applied to row vectors, [d, d].
        scale: The attention scaling factor.
        softcap: The cap of attention scores; None without one.

    Returns:
        The scores; None if the policy has neither component.
    """
    scores = None
    if weights.attention is not None:
        assert rotation is not None
        scores = expected_attention_scores(weights.attention, key, value, rotation, scale, softcap)
    if weights.position is not None:
        with full_precision(key.device):
            recency = interpolate_knots(weights.position.end, end - positions).expand(*value.shape[:3])
        scores = recency if scores is None else scores + recency
    return scores


def content_scores(content: ContentWeights, key: Tensor, value: Tensor) -> Tensor:
    """Return the content component only, [B, H, T], of `key` (in the form it reads) and `value` [B, H, T, d].

    Differentiable if the weights require gradients; otherwise computed in blocks, in bfloat16 if k and v are.
    """
    with full_precision(key.device):
        if torch.is_grad_enabled() and content.hidden.requires_grad:
            return content_formula(key, value, content)
        with torch.no_grad():
            score_block = content_of_blocks(content, value)
            blocks = split_blocks(value.shape[2], value.device)
            return torch.cat([score_block(key[:, :, block], value[:, :, block]) for block in blocks], -1)


def expected_attention_scores(
    attention: ExpectedAttentionWeights,
    key: Tensor,
    value: Tensor,
    rotation: Tensor,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Return the expected attention component only, [B, H, T].

    Args:
        attention: The layer's weights of this component.
        key: As in `scores_at_eviction`, as are `value`, `rotation` and `scale`.
        value: v.
        rotation: The mean rotation.
        scale: The attention scaling factor.
        softcap: The cap of attention scores.
    """
    with full_precision(key.device):
        rotation = rotation.to(torch.promote_types(key.dtype, torch.float32))
        projection = project_queries(attention, rotation, scale)
        return expected_attention_formula(key, value, projection, attention, softcap)


@torch.no_grad()
def fold_weights(weights: TokenScoreWeights, like: torch.dtype) -> ScoreWeights:
    """Convert `weights` of one layer to the kernel's format, for k and v in the dtype `like`."""
    folded = ScoreWeights(*(x.contiguous() for x in _fold_normalisation(weights.content, like)))
    if (attention := weights.attention) is not None:
        queries = torch.cat([attention.mean, attention.spread.transpose(-1, -2)], -2).float().contiguous()
        normaliser, factor = attention.normaliser.float().contiguous(), attention.weight.float().contiguous()
        folded = folded._replace(queries=queries, normaliser=normaliser, attention=factor)
    if (position := weights.position) is not None:
        folded = folded._replace(start=position.start.float().contiguous(), end=position.end.float().contiguous())
    return folded


def split_blocks(tokens: int, device: torch.device) -> Iterator[slice]:
    """Yield the blocks of `tokens` tokens; larger on devices where every product is a kernel launch."""
    size = 2048 if device.type == "cpu" else 16_384
    return (slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size))


def _fold_normalisation(content: ContentWeights, like: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the MLP's first matrix [H, 2d, m], bias and output [H, m] for unnormalised k and v in the dtype `like`.

    The matrix is in bfloat16 if k and v are, else in float32: a weight divided by a small deviation may overflow
    float16. The rest is in float32.
    """
    mean, std, hidden, bias, output = (x.float() for x in content)
    weight = (hidden / std[..., None]).to(torch.bfloat16 if like == torch.bfloat16 else torch.float32)
    # The mean uses the rounded weight, so that rounding errors apply only to deviations from the mean.
    return weight, bias - (mean[..., None, :] @ weight.float()).squeeze(-2), output


def content_of_blocks(content: ContentWeights, like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `content_formula` as a function of one block's k and v [B, H, n, d], with dtype and device of `like`.

    Products are in the dtype of the folded weight; the rest is in float32.
    """
    weight, bias, output = _fold_normalisation(content, like.dtype)
    batch, dtype, bias = like.shape[0], weight.dtype, bias[:, None]
    # The bias is added within the product, which accumulates in float32; its rounding error is added afterwards.
    inside = bias.to(dtype)
    after = bias - inside.float()
    weight, inside = weight.repeat(batch, 1, 1), inside.repeat(batch, 1, 1)

    def score_block(key: Tensor, value: Tensor) -> Tensor:
        k, v = (x.to(dtype).flatten(0, 1) for x in (key, value))
        dim = k.shape[-1]
        if dtype == torch.float32:  # without a copy of k and v
            units = torch.baddbmm(inside, k, weight[:, :dim]).baddbmm_(v, weight[:, dim:])
            units = silu(units.unflatten(0, (batch, -1)), inplace=True)
        else:  # in one product, because a second one would round the intermediate sum
            units = torch.baddbmm(inside, torch.cat([k, v], -1), weight).unflatten(0, (batch, -1))
            units = silu(units.float().add_(after), inplace=True)
        # On a CPU multiply and sum is several times faster than a matrix product with one column.
        return units.mul_(output[:, None]).sum(-1)

    return score_block
