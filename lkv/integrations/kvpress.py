"""LKV as presses of kvpress (NVIDIA), for its pipeline, its evaluation and its leaderboard.

    with LKVHeadBudgetPress(policy, LKVScorerPress(policy, compression_ratio=0.85))(model):
        model.model(input_ids=prompt, past_key_values=cache)

kvpress only masks what head-wise budgets evict: the memory is not freed. `RaggedCache` frees it. kvpress 0.5.5 works
with transformers before 5.3.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lkv.errors import IntegrationError, UnsupportedModelError
from lkv.hf.prompt_kv import LayerKV
from lkv.hf.rotation import Rotation, layer_rotations
from lkv.hf.spec import inspect_model, sliding_windows
from lkv.methods.budgets import LearnedBudget
from lkv.methods.selectors import LearnedScores
from lkv.policy.policy import Policy
from lkv.utils.extras import optional_import

with optional_import("kvpress", "lkv.integrations.kvpress"):
    from kvpress import BasePress, ScorerPress


class _PolicyLayers:
    """A policy, and the index of its layers by those of the model."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.rotations: tuple[Rotation | None, ...] = ()
        self._index: dict[int, int] = {}

    def attach_model(self, model: PreTrainedModel) -> None:
        """Take the layers of `model`. Raises PolicyMismatchError unless the policy was trained for it."""
        self.policy.check_model(inspect_model(model))
        self.rotations = layer_rotations(model)
        self.policy = self.policy.on(model.device)
        full = [number for number, window in enumerate(sliding_windows(model)) if window is None]
        self._index = {number: index for index, number in enumerate(full)}

    def __contains__(self, module: Any) -> bool:
        return module.layer_idx in self._index

    def index(self, module: Any) -> int:
        """The index of the policy's layer of an attention module."""
        if module not in self:
            raise UnsupportedModelError(
                f"the policy has no layer {module.layer_idx}: it is a sliding layer, or the press was used outside "
                "`with press(model):`; use LKV's presses there, on a model whose layers have full attention."
            )
        return self._index[module.layer_idx]


class LKVScorerPress(ScorerPress):
    """LKV-T: the policy scores the tokens, and every head keeps int(T (1 - `compression_ratio`)), as kvpress does.

    Sliding layers are not compressed.
    """

    def __init__(self, policy: Policy, compression_ratio: float = 0.0):
        """Create a press.

        Entering it with a model raises PolicyMismatchError or UnsupportedModelError if `policy` does not fit it.
        """
        super().__init__(compression_ratio=compression_ratio)
        self._layers, self._selector = _PolicyLayers(policy), LearnedScores(policy)

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Check the policy against the model that the press is entered with."""
        self._layers.attach_model(model)
        self._selector = LearnedScores(self._layers.policy)

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> Tensor:
        """Scores [B, H, T] for `keys` and `values` [B, H, T, d] after RoPE."""
        scale = getattr(module, "scaling", keys.shape[-1] ** -0.5)
        layer = self._layers.index(module)
        prompt = LayerKV(keys, values, scale, rotation=self._layers.rotations[layer])
        return self._selector.scores(layer, prompt)

    def compress(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Evict entries of `keys` and `values` [B, H, T, d]."""
        if module not in self._layers:
            return keys, values
        return super().compress(module, hidden_states, keys, values, attentions, kwargs)


class LKVHeadBudgetPress(BasePress):
    """LKV-H: each head keeps floor(r T) tokens, for the policy's ratio r, by the scores of another press.

    With an `LKVScorerPress` this is LKV, with any other scorer press its selection under learned budgets. Evicted
    entries are masked during decoding. Sliding layers are not compressed.
    """

    def __init__(self, policy: Policy, press: Any):
        """Create a press from a kvpress ScorerPress, whose `compression_ratio` is this one's too.

        Entering it with a model raises PolicyMismatchError or UnsupportedModelError if `policy` does not fit it.
        Raises IntegrationError if `press` is not a ScorerPress.
        """
        if not isinstance(press, ScorerPress):
            raise IntegrationError(
                f"{type(press).__name__} does not score tokens; give a ScorerPress, such as LKVScorerPress."
            )
        self.press = press
        self._layers = _PolicyLayers(policy)
        self._budget: tuple[float, LearnedBudget] | None = None

    @property
    def compression_ratio(self) -> float:
        """The share of the KV entries to evict, over all heads of the model."""
        return self.press.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        self.press.compression_ratio = value

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Check the policy against the model that the press is entered with."""
        # The functions that kvpress patches to mask keys do not include a model's own eager attention.
        if (model.config._attn_implementation or "eager").endswith("eager"):
            raise UnsupportedModelError(
                "kvpress cannot mask single heads in eager attention; load the model with attn_implementation='sdpa'."
            )
        self._layers.attach_model(model)
        self.press.post_init_from_model(model)

    def compress(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Mask the evicted entries of `keys` and `values` [B, H, T, d]."""
        if self.compression_ratio == 0 or module not in self._layers:
            return keys, values
        scores = self.press.score(module, hidden_states, keys, values, attentions, kwargs)
        _, heads, tokens = scores.shape
        if self._budget is None or self._budget[0] != self.compression_ratio:
            self._budget = (self.compression_ratio, LearnedBudget(self._layers.policy, 1 - self.compression_ratio))
        evicted = torch.ones_like(scores, dtype=torch.bool)
        for head, count in enumerate(self._budget[1].limits(self._layers.index(module), heads, tokens)):
            evicted[:, head].scatter_(-1, scores[:, head].topk(count, sorted=False).indices, False)
        module.masked_key_indices = torch.nonzero(evicted, as_tuple=True)  # type: ignore[assignment]
        return keys, values


__all__ = ["LKVHeadBudgetPress", "LKVScorerPress"]
