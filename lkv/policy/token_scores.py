"""LKV-T (Sec. 3.4): the score u of a token with key k and value v, the sum of the components that a policy has.

    u = output . silu(hidden^T ([k; v] - mean) / std + bias)           content, the paper's MLP: `content_formula`
      + weight log(|v| sum_g E[exp(q_g k scale - normaliser_g)])       expected attention: `expected_attention_formula`
      + start(log2(1 + position)) + end(log2(distance to the end))     position, piecewise linear: `interpolate_knots`

The last two go beyond the paper. q_g are the queries to come of the G query heads that share the KV head.

`TokenScores` has the learned weights and applies the formula to a prompt; for training by `scores_on_arrival` and
`scores_at_eviction`, which are differentiable.

Shapes: B rows, H KV heads, G query heads per KV head, T tokens, d the head's size, K knots, r columns of spread.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from lkv.hf.prompt_kv import LayerKV, to_fp32
from lkv.hf.rotation import Rotation
from lkv.kernels.selection import LARGEST_SCORED_DIM, ScoreWeights, kernels_for
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.utils.devices import full_precision

SPREAD = 16  # columns of the learned queries' covariance: measured as good as the whole of it
FUTURE = 512  # positions over which queries to come are expected, as in Expected Attention
_MIN_NORM = 1e-12


class ContentWeights(NamedTuple):
    """The MLP of Sec. 3.4 over [k; v]: `mean`, `std` [H, 2d], `hidden` [H, 2d, m], `bias`, `output` [H, m]."""

    mean: Tensor
    std: Tensor
    hidden: Tensor
    bias: Tensor
    output: Tensor


class ExpectedAttentionWeights(NamedTuple):
    """Queries to come, taken to be normal before rotation: `mean` [H, G, d] and covariance F F^T, `spread` F [H, d, r].

    `normaliser` [H, G] is the mean logarithm of the softmax's denominator per token; `weight` [H] scales the component.
    """

    weight: Tensor
    mean: Tensor
    spread: Tensor
    normaliser: Tensor


class PositionWeights(NamedTuple):
    """Piecewise linear in log2(1 + position), `start`, and in log2(distance to the end), `end`, both [H, K].

    Knot j lies at 2^j; beyond the last one the components are flat.
    """

    start: Tensor
    end: Tensor


class TokenScoreWeights(NamedTuple):
    """The components of one layer; `attention` and `position` are None where a policy has none."""

    content: ContentWeights
    attention: ExpectedAttentionWeights | None = None
    position: PositionWeights | None = None


def content_formula(
    key: Tensor, value: Tensor, mean: Tensor, std: Tensor, hidden: Tensor, bias: Tensor, output: Tensor
) -> Tensor:
    """The MLP over [k; v], normalised by mean and std: [B, H, T], in float32 or the precision of k if it is higher."""
    dtype = torch.promote_types(key.dtype, torch.float32)
    # The normalisation is folded into the first matrix, so that k and v are read once and never copied whole.
    weight = hidden.to(dtype) / std[..., None].to(dtype)
    inside = bias - (mean[..., None, :].to(dtype) @ weight).squeeze(-2)
    d = key.shape[-1]
    units = key.to(dtype) @ weight[:, :d] + value.to(dtype) @ weight[:, d:] + inside[:, None]
    return (silu(units) @ output[..., None].to(dtype)).squeeze(-1)


def expected_attention_formula(
    key: Tensor, value: Tensor, projection: Tensor, weight: Tensor, normaliser: Tensor
) -> Tensor:
    """Compute weight * log(sum over the group's heads of E[exp(q k scale)] / normaliser, times ||v||): [B, H, T].

    `projection` is `project_queries` of the same weights; the precision is that of it.
    """
    dtype, group = projection.dtype, normaliser.shape[1]
    # E[exp(q k)] of a normal q is exp(mean k + k cov k / 2); one product serves the means and the spread.
    products = projection @ key.to(dtype).transpose(-1, -2)
    logits = products[..., :group, :] + products[..., group:, :].square().sum(-2, keepdim=True) / 2
    norm = torch.linalg.vector_norm(value.to(dtype), dim=-1).clamp(min=_MIN_NORM)
    return weight[:, None] * ((logits - normaliser[..., None]).logsumexp(-2) + norm.log())


def project_queries(rotation: Tensor, scale: float, mean: Tensor, spread: Tensor) -> Tensor:
    """Return the projected query statistics [H, G + r, d]: means and spread under the mean `rotation` [d, d]."""
    mean, spread = mean.to(rotation.dtype), spread.to(rotation.dtype)
    return torch.cat([mean, spread.transpose(-1, -2)], -2) @ rotation * scale


def interpolate_knots(table: Tensor, places: Tensor) -> Tensor:
    """The piecewise linear functions `table` [H, K] of log2(places), places [T] >= 1: [H, T]."""
    knot = torch.arange(table.shape[-1], dtype=table.dtype, device=table.device)[:, None]
    x = places.to(table.dtype).log2().clamp(max=table.shape[-1] - 1)
    # What each knot weighs at each place; as a product its gradient needs no scattering.
    return table @ (1 - (x - knot).abs_()).clamp_(min=0)


def scores_on_arrival(weights: TokenScoreWeights, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
    """The part of the scores [B, H, T], in float32 or better, that is final when tokens arrive: content and `start`.

    `key` [B, H, T, d] is k as the content component reads it, `value` [B, H, T, d]; `positions` [T] are the tokens'.
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
) -> Tensor | None:
    """The part [B, H, T] that depends on where the text ends: expected attention, and the distance to `end`.

    None where the policy has neither. `key` [B, H, T, d] is k after RoPE, `value` [B, H, T, d]; `rotation` [d, d] is
    the mean rotation of the positions to come, by which rows are multiplied; `scale` is attention's.
    """
    scores = None
    if weights.attention is not None:
        assert rotation is not None
        scores = expected_attention_scores(weights.attention, key, value, rotation, scale)
    if weights.position is not None:
        with full_precision(key.device):
            recency = interpolate_knots(weights.position.end, end - positions).expand(*value.shape[:3])
        scores = recency if scores is None else scores + recency
    return scores


def content_scores(content: ContentWeights, key: Tensor, value: Tensor) -> Tensor:
    """The content component alone, [B, H, T], of `key` (as the content reads it) and `value` [B, H, T, d].

    Differentiable where the weights ask for gradients; otherwise computed in blocks, in bfloat16 where k and v are.
    """
    with full_precision(key.device):
        if torch.is_grad_enabled() and content.hidden.requires_grad:
            return content_formula(key, value, *content)
        with torch.no_grad():
            score_block = _content_of_blocks(content, value)
            blocks = split_blocks(value.shape[2], value.device)
            return torch.cat([score_block(key[:, :, block], value[:, :, block]) for block in blocks], -1)


def expected_attention_scores(
    attention: ExpectedAttentionWeights, key: Tensor, value: Tensor, rotation: Tensor, scale: float
) -> Tensor:
    """The expected attention alone, [B, H, T]; see `scores_at_eviction`."""
    with full_precision(key.device):
        rotation = rotation.to(torch.promote_types(key.dtype, torch.float32))
        projection = project_queries(rotation, scale, attention.mean, attention.spread)
        return expected_attention_formula(key, value, projection, attention.weight, attention.normaliser)


@torch.no_grad()
def fold_weights(weights: TokenScoreWeights, like: torch.dtype) -> ScoreWeights:
    """`weights` of one layer as the kernel takes them, for k and v in the dtype `like`."""
    folded = ScoreWeights(*(x.contiguous() for x in _fold_normalisation(weights.content, like)))
    if (attention := weights.attention) is not None:
        queries = torch.cat([attention.mean, attention.spread.transpose(-1, -2)], -2).float().contiguous()
        normaliser, factor = attention.normaliser.float().contiguous(), attention.weight.float().contiguous()
        folded = folded._replace(queries=queries, normaliser=normaliser, attention=factor)
    if (position := weights.position) is not None:
        folded = folded._replace(start=position.start.float().contiguous(), end=position.end.float().contiguous())
    return folded


def split_blocks(tokens: int, device: torch.device) -> Iterator[slice]:
    """The blocks of `tokens` tokens; larger where every product has to be launched."""
    size = 2048 if device.type == "cpu" else 16_384
    return (slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size))


def _fold_normalisation(content: ContentWeights, like: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """First matrix [H, 2d, m], bias and output [H, m] of the MLP over k and v as they are, in the dtype `like`.

    The matrix is in bfloat16 where k and v are, in float32 otherwise: divided by a small deviation a weight may be too
    large for float16. The rest is in float32.
    """
    mean, std, hidden, bias, output = (x.float() for x in content)
    weight = (hidden / std[..., None]).to(torch.bfloat16 if like == torch.bfloat16 else torch.float32)
    # The mean goes through the weight as it was rounded: however large it is, only what differs from it is rounded.
    return weight, bias - (mean[..., None, :] @ weight.float()).squeeze(-2), output


def _content_of_blocks(content: ContentWeights, like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """`content_formula` as a function of one block's k and v [B, H, n, d], which are as `like` [B, H, T, d] is.

    Products are in the dtype of the folded weight; the rest is in float32.
    """
    weight, bias, output = _fold_normalisation(content, like.dtype)
    batch, dtype, bias = like.shape[0], weight.dtype, bias[:, None]
    # The bias is added within the product, which adds up in float32; what rounding takes from it comes after.
    inside = bias.to(dtype)
    after = bias - inside.float()
    weight, inside = weight.repeat(batch, 1, 1), inside.repeat(batch, 1, 1)

    def score_block(key: Tensor, value: Tensor) -> Tensor:
        k, v = (x.to(dtype).flatten(0, 1) for x in (key, value))
        dim = k.shape[-1]
        if dtype == torch.float32:  # without a copy of k and v
            units = torch.baddbmm(inside, k, weight[:, :dim]).baddbmm_(v, weight[:, dim:])
            units = silu(units.unflatten(0, (batch, -1)), inplace=True)
        else:  # in one product: what is between two would be rounded
            units = torch.baddbmm(inside, torch.cat([k, v], -1), weight).unflatten(0, (batch, -1))
            units = silu(units.float().add_(after), inplace=True)
        # On a CPU a sum of products is several times faster than a product with one column.
        return units.mul_(output[:, None]).sum(-1)

    return score_block


class TokenScores(nn.Module):
    """LKV-T: the weights of its formula for every KV head of the model, and the scores of a prompt (Sec. 3.4).

    Content: an MLP 2d -> d -> 1 of its own for each head over [k; v]; `mean` and `std` [L, H, 2d] normalise its input.
    `inputs` says which form of k it reads, and whether the scores have the components of expected attention and
    position as well. `mean`, `std`, `query_*` and `normaliser` are measured on training text
    (`lkv.training.warm_start`); the rest is learned.
    """

    mean: Tensor
    std: Tensor
    normaliser: Tensor

    def __init__(self, layers: int, heads: int, kv_heads: int, head_dim: int, inputs: ScorerInputs | None = None):
        super().__init__()
        self.inputs = inputs or ScorerInputs()
        self._folded: tuple[dict[Any, ScoreWeights], Any] = {}, None  # by place, and the versions they are from
        shape = (layers, kv_heads)
        self.register_buffer("mean", torch.zeros(*shape, 2 * head_dim))
        self.register_buffer("std", torch.ones(*shape, 2 * head_dim))
        bound = 1 / math.sqrt(2 * head_dim)
        self.hidden = nn.Parameter(torch.empty(*shape, 2 * head_dim, head_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(*shape, head_dim))
        self.output = nn.Parameter(torch.randn(*shape, head_dim) / math.sqrt(head_dim))
        if self.inputs.attention == "learned":
            group = heads // kv_heads
            self.attention_weight = nn.Parameter(torch.ones(shape))
            self.query_mean = nn.Parameter(torch.zeros(*shape, group, head_dim))
            self.query_spread = nn.Parameter(torch.zeros(*shape, head_dim, min(SPREAD, head_dim)))
            self.register_buffer("normaliser", torch.zeros(*shape, group))
        if self.inputs.knots:
            self.start = nn.Parameter(torch.zeros(*shape, self.inputs.knots))
            self.end = nn.Parameter(torch.zeros(*shape, self.inputs.knots))

    def weights(self, layer: int, heads: slice = slice(None), device: torch.device | None = None) -> TokenScoreWeights:
        """The weights of the KV heads `heads` of one layer, in float32 or better, on `device` where it is given."""

        def of(*names: str) -> Iterator[Tensor]:
            return (to_fp32(getattr(self, name)[layer, heads]).to(device) for name in names)

        content = ContentWeights(*of("mean", "std", "hidden", "bias", "output"))
        attention = position = None
        if self.inputs.attention == "learned":
            attention = ExpectedAttentionWeights(*of("attention_weight", "query_mean", "query_spread", "normaliser"))
        if self.inputs.knots:
            position = PositionWeights(*of("start", "end"))
        return TokenScoreWeights(content, attention, position)

    def forward(self, prompt: LayerKV, layer: int, heads: slice = slice(None)) -> Tensor:
        """Scores u [B, H, T] in float32 of the tokens of one layer, for its KV heads `heads`.

        Raises UnsupportedModelError where the model's rotation is needed and cannot be undone.
        """
        if (scores := self._score_by_kernel(prompt, layer, heads)) is not None:
            return scores
        if not torch.is_grad_enabled():
            return self._score_in_blocks(prompt, layer, heads)
        final = self.score_on_arrival(prompt, layer, heads)
        rest = self.score_at_eviction(prompt, layer, heads, self._positions(prompt))
        return final if rest is None else final + rest

    def score_on_arrival(self, prompt: LayerKV, layer: int, heads: slice = slice(None)) -> Tensor:
        """The part of `forward` that does not depend on where the text ends."""
        if (scores := self._score_by_kernel(prompt, layer, heads, eviction=False)) is not None:
            return scores
        weights = self.weights(layer, heads, prompt.key.device)
        return scores_on_arrival(weights, self.read_key(prompt), prompt.value, self._positions(prompt))

    def score_at_eviction(self, prompt: LayerKV, layer: int, heads: slice, positions: Tensor) -> Tensor | None:
        """The rest of `forward` for entries that were read at `positions` [T]; None where there is none."""
        weights, rotation = self.weights(layer, heads, prompt.key.device), self._future_rotation(prompt)
        return scores_at_eviction(weights, prompt.key, prompt.value, positions, prompt.end, rotation, prompt.scale)

    def _score_by_kernel(self, prompt: LayerKV, layer: int, heads: slice, eviction: bool = True) -> Tensor | None:
        """`forward` (or, without `eviction`, `score_on_arrival`) in one launch; None where the kernel cannot do it."""
        key, kernels = prompt.key, kernels_for(prompt.key, prompt.value)
        if kernels is None or torch.is_grad_enabled():
            return None
        tables = self.kernel_tables(prompt.rotation, key, prompt.start, key.shape[2], prompt.end)
        if tables is None or key.shape != prompt.value.shape:
            return None
        entries, weights = kernels.Entries.of_prompt(key, prompt.value), self.folded_weights(layer, heads, key)
        return kernels.score(entries, weights, *tables, prompt.start, prompt.end, prompt.scale, eviction=eviction)

    @torch.no_grad()
    def _score_in_blocks(self, prompt: LayerKV, layer: int, heads: slice) -> Tensor:
        """`forward` for inference: a block of tokens goes through all components.

        It stays in the processor's caches, and no memory grows but that of the scores.
        """
        key, value = prompt.key, prompt.value
        weights, rotation = self.weights(layer, heads, key.device), self._future_rotation(prompt)
        scores = torch.empty(*value.shape[:3], dtype=torch.float32, device=value.device)
        with full_precision(value.device):
            score_block, attention = _content_of_blocks(weights.content, value), weights.attention
            if attention is not None:
                assert rotation is not None
                projection = project_queries(rotation, prompt.scale, attention.mean, attention.spread)
            for block in split_blocks(value.shape[2], value.device):
                v = value[:, :, block]
                scores[:, :, block] = score_block(self.read_key(prompt, block), v)
                if attention is not None:
                    scores[:, :, block] += expected_attention_formula(
                        key[:, :, block], v, projection, attention.weight, attention.normaliser
                    )
            if weights.position is not None:
                positions = self._positions(prompt)
                scores += interpolate_knots(weights.position.start, positions + 1)
                scores += interpolate_knots(weights.position.end, prompt.end - positions)
        return scores

    def kernel_tables(
        self, rotation: Rotation | None, like: Tensor, start: int, tokens: int, end: int
    ) -> tuple[Any, Any] | None:
        """What the kernel of scores needs of the rotation of `like` [., d]; None where that is not enough.

        Tables to rotate k back at `tokens` positions from `start` on, and those of the mean rotation after `end`; None
        each where no component reads them.
        """
        key_tables = mean_tables = None
        if like.shape[-1] % 2 or like.shape[-1] > LARGEST_SCORED_DIM:
            return None
        if self.inputs.key != "cached":
            key_tables = rotation and rotation.half_tables(like, start, start + tokens)
            if key_tables is None:
                return None
        if self.inputs.attention != "none":
            wide = like.new_empty((0, like.shape[-1]), dtype=torch.promote_types(like.dtype, torch.float32))
            mean_tables = rotation and rotation.mean_half_tables(wide, end, end + FUTURE)
            if mean_tables is None:
                return None
        return key_tables, mean_tables

    def folded_weights(self, layer: int, heads: slice, like: Tensor) -> ScoreWeights:
        """The weights of one layer as the kernel takes them, for k and v as `like`; kept until they change."""
        tensors = (*self.parameters(), *self.buffers())
        versions = tuple((x.data_ptr(), -1 if x.is_inference() else x._version) for x in tensors)
        folded, folded_from = self._folded
        if folded_from != versions:
            folded = {}
            self._folded = folded, versions  # at once, as other threads may read them
        place = layer, heads.start, heads.stop, like.device, like.dtype
        if (weights := folded.get(place)) is None:
            weights = folded[place] = fold_weights(self.weights(layer, heads, like.device), like.dtype)
        return weights

    def _positions(self, prompt: LayerKV) -> Tensor:
        """The positions [T] of the tokens, where a component reads them."""
        tokens = prompt.key.shape[2] if self.inputs.knots else 0
        return torch.arange(prompt.start, prompt.start + tokens, device=prompt.key.device)

    def _future_rotation(self, prompt: LayerKV) -> Tensor | None:
        """The mean rotation [d, d] of the `FUTURE` positions after the text."""
        if self.inputs.attention == "none":
            return None
        return prompt.required_rotation.mean_rotation(to_fp32(prompt.key[:, :1, :1]), prompt.end, prompt.end + FUTURE)

    def read_key(self, prompt: LayerKV, part: slice = slice(None)) -> Tensor:
        """The k [B, H, n, d] of the tokens `part` as the content component reads it."""
        if self.inputs.key == "cached":
            return prompt.key[:, :, part]
        return prompt.required_rotation.unrotate(prompt.key, prompt.start, part)
