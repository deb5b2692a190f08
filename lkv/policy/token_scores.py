"""LKV-T (Sec. 3.4): the learned weights of `lkv.policy.score_formula`, applied to a prompt."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lkv.hf.prompt_kv import LayerKV, to_fp32
from lkv.hf.rotation import Rotation
from lkv.kernels.selection import LARGEST_SCORED_DIM, ScoreWeights, kernels_for
from lkv.policy.score_formula import (
    ContentWeights,
    ExpectedAttentionWeights,
    PositionWeights,
    TokenScoreWeights,
    content_of_blocks,
    expected_attention_formula,
    fold_weights,
    interpolate_knots,
    project_queries,
    scores_at_eviction,
    scores_on_arrival,
    split_blocks,
)
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.utils.devices import full_precision

SPREAD = 16  # rank of the learned queries' covariance: measured as good as full rank
FUTURE = 512  # number of future positions, as in Expected Attention


def tensor_versions(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return what differs once a parameter or buffer of `module` was changed or replaced."""
    tensors = (*module.parameters(), *module.buffers())
    return tuple((x.data_ptr(), -1 if x.is_inference() else x._version) for x in tensors)


class TokenScores(nn.Module):
    """LKV-T: the weights of its formula for every KV head of the model, and the scores of a prompt (Sec. 3.4).

    Content: a separate MLP 2d -> d -> 1 for each head over [k; v]; `mean` and `std` [L, H, 2d] normalise its input.
    `inputs` selects the form of k and the optional components, expected attention and position. `mean`, `std`,
    `query_*` and `normaliser` are measured on training text (`lkv.training.warm_start`); the rest is learned.
    """

    mean: Tensor
    std: Tensor
    normaliser: Tensor

    def __init__(self, layers: int, heads: int, kv_heads: int, head_dim: int, inputs: ScorerInputs | None = None):
        super().__init__()
        self.inputs = inputs or ScorerInputs()
        # Keyed by layer, heads, device and dtype; with the versions of the source weights.
        self._folded: tuple[dict[Any, ScoreWeights], Any] = {}, None
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
        """Return the weights of the KV heads `heads` of one layer, in float32 or better, on `device` if given."""

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
        """Return the scores u [B, H, T] in float32 of the tokens of one layer, for its KV heads `heads`.

        Raises UnsupportedModelError if the model's rotation must be undone and cannot be.
        """
        if (scores := self._score_by_kernel(prompt, layer, heads)) is not None:
            return scores
        if not torch.is_grad_enabled():
            return self._score_in_blocks(prompt, layer, heads)
        final = self.score_on_arrival(prompt, layer, heads)
        rest = self.score_at_eviction(prompt, layer, heads, self._positions(prompt))
        return final if rest is None else final + rest

    def score_on_arrival(self, prompt: LayerKV, layer: int, heads: slice = slice(None)) -> Tensor:
        """Return the part of `forward` that does not depend on the end of the text."""
        if (scores := self._score_by_kernel(prompt, layer, heads, eviction=False)) is not None:
            return scores
        weights = self.weights(layer, heads, prompt.key.device)
        return scores_on_arrival(weights, self.read_key(prompt), prompt.value, self._positions(prompt))

    def score_at_eviction(self, prompt: LayerKV, layer: int, heads: slice, positions: Tensor) -> Tensor | None:
        """Return the part of `forward` that depends on the end of the text; None if there is none.

        Args:
            prompt: The entries.
            layer: The layer's index.
            heads: Their KV heads.
            positions: Their original positions, [T].
        """
        weights, rotation = self.weights(layer, heads, prompt.key.device), self._future_rotation(prompt)
        key, value, end = prompt.key, prompt.value, prompt.end
        return scores_at_eviction(weights, key, value, positions, end, rotation, prompt.scale, prompt.softcap)

    def _score_by_kernel(self, prompt: LayerKV, layer: int, heads: slice, eviction: bool = True) -> Tensor | None:
        """Compute `forward` (without `eviction`, `score_on_arrival`) in one launch; None if the kernel cannot run."""
        key, kernels = prompt.key, kernels_for(prompt.key, prompt.value)
        if kernels is None or torch.is_grad_enabled() or prompt.softcap is not None:
            return None
        tables = self.kernel_tables(prompt.rotation, key, prompt.start, key.shape[2], prompt.end)
        if tables is None or key.shape != prompt.value.shape:
            return None
        entries, weights = kernels.Entries.of_prompt(key, prompt.value), self.folded_weights(layer, heads, key)
        return kernels.score(entries, weights, *tables, prompt.start, prompt.end, prompt.scale, eviction=eviction)

    @torch.no_grad()
    def _score_in_blocks(self, prompt: LayerKV, layer: int, heads: slice) -> Tensor:
        """Compute `forward` for inference, in blocks of tokens over all components.

        A block stays in the CPU caches, and only the scores take memory in proportion to the text.
        """
        key, value = prompt.key, prompt.value
        weights, rotation = self.weights(layer, heads, key.device), self._future_rotation(prompt)
        scores = torch.empty(*value.shape[:3], dtype=torch.float32, device=value.device)
        with full_precision(value.device):
            score_block, attention = content_of_blocks(weights.content, value), weights.attention
            if attention is not None:
                assert rotation is not None
                projection = project_queries(attention, rotation, prompt.scale)
            for block in split_blocks(value.shape[2], value.device):
                v = value[:, :, block]
                scores[:, :, block] = score_block(self.read_key(prompt, block), v)
                if attention is not None:
                    scores[:, :, block] += expected_attention_formula(
                        key[:, :, block], v, projection, attention, prompt.softcap
                    )
            if weights.position is not None:
                positions = self._positions(prompt)
                scores += interpolate_knots(weights.position.start, positions + 1)
                scores += interpolate_knots(weights.position.end, prompt.end - positions)
        return scores

    def kernel_tables(
        self, rotation: Rotation | None, like: Tensor, start: int, tokens: int, end: int
    ) -> tuple[Any, Any] | None:
        """Compute the tables of a rotation that the kernel of scores reads.

        Args:
            rotation: The layer's RoPE.
            like: A tensor [., d] of the dtype and device of k.
            start: The first position at which k is rotated back.
            tokens: The number of such positions.
            end: The position after the text.

        Returns:
            Tables to rotate k back, and of the mean rotation after `end`, each None if no component uses it; None if
            the kernel cannot run.
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
        """Return the weights of one layer in the kernel's format, for k and v as `like`; cached until they change."""
        versions = tensor_versions(self)
        folded, folded_from = self._folded
        if folded_from != versions:
            folded = {}
            self._folded = folded, versions  # in one assignment, because other threads may read them
        key = layer, heads.start, heads.stop, like.device, like.dtype
        if (weights := folded.get(key)) is None:
            weights = folded[key] = fold_weights(self.weights(layer, heads, like.device), like.dtype)
        return weights

    def _positions(self, prompt: LayerKV) -> Tensor:
        """Return the positions [T] of the tokens; empty if no component uses them."""
        tokens = prompt.key.shape[2] if self.inputs.knots else 0
        return torch.arange(prompt.start, prompt.start + tokens, device=prompt.key.device)

    def _future_rotation(self, prompt: LayerKV) -> Tensor | None:
        """Return the mean rotation [d, d] of the `FUTURE` positions after the text."""
        if self.inputs.attention == "none":
            return None
        return prompt.required_rotation.mean_rotation(to_fp32(prompt.key[:, :1, :1]), prompt.end, prompt.end + FUTURE)

    def read_key(self, prompt: LayerKV, part: slice = slice(None)) -> Tensor:
        """Return the k [B, H, n, d] of the tokens `part` as the content component reads it."""
        if self.inputs.key == "cached":
            return prompt.key[:, :, part]
        return prompt.required_rotation.unrotate(prompt.key, prompt.start, part)
