"""LKV-T (Sec. 3.4): a score for every token, by which a head's best tokens are kept.

Where its parts are:

* the formula: `lkv.policy.token_score_formula`;
* the learned weights, and the formula applied to a prompt: `TokenScores`, here;
* the statistics measured before training: `lkv.training.warm_start`;
* the selector that a cache uses: `lkv.methods.selectors.lkv_t.LearnedScores`.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from lkv.config import ScorerInputs
from lkv.integrations.transformers.prefill import LayerKV, to_fp32
from lkv.policy.token_score_formula import (
    ContentWeights,
    ExpectedAttentionWeights,
    PositionWeights,
    TokenScoreWeights,
    content_scores,
    scores_at_eviction,
    scores_in_blocks,
    scores_on_arrival,
)

SPREAD = 16  # columns of the learned queries' covariance: measured as good as the whole of it
FUTURE = 512  # positions over which queries to come are expected, as in Expected Attention


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
        weights = self.weights(layer, heads, prompt.key.device)
        key, value, positions, rotation = (
            prompt.key,
            prompt.value,
            self._positions(prompt),
            self._future_rotation(prompt),
        )
        if not torch.is_grad_enabled():
            return scores_in_blocks(
                weights, partial(self.read_key, prompt), key, value, positions, prompt.end, rotation, prompt.scale
            )
        final = scores_on_arrival(weights, self.read_key(prompt), value, positions)
        rest = scores_at_eviction(weights, key, value, positions, prompt.end, rotation, prompt.scale)
        return final if rest is None else final + rest

    def score_on_arrival(self, prompt: LayerKV, layer: int, heads: slice = slice(None)) -> Tensor:
        """The part of `forward` that does not depend on where the text ends."""
        weights = self.weights(layer, heads, prompt.key.device)
        return scores_on_arrival(weights, self.read_key(prompt), prompt.value, self._positions(prompt))

    def score_at_eviction(self, prompt: LayerKV, layer: int, heads: slice, positions: Tensor) -> Tensor | None:
        """The rest [n] of `forward` for entries of one head that were read at `positions` [n]; None where none is."""
        weights = self.weights(layer, heads, prompt.key.device)
        rotation = self._future_rotation(prompt)
        rest = scores_at_eviction(weights, prompt.key, prompt.value, positions, prompt.end, rotation, prompt.scale)
        return None if rest is None else rest.flatten()

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

    def content(self, prompt: LayerKV, layer: int, tokens: Tensor) -> Tensor:
        """The content component alone for the `tokens` [n] (indices) of one layer: [B, H, n]."""
        device = prompt.key.device
        content, tokens = self.weights(layer, device=device).content, tokens.to(device)
        return content_scores(content, self.read_key(prompt)[:, :, tokens], prompt.value[:, :, tokens])
