"""LKV-T (Sec. 3.4)."""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lkv.integrations.transformers.prefill import LayerKV
from lkv.methods.registry import POLICY, register_selector
from lkv.methods.selectors.base import ArrivedEntries, Selector
from lkv.policy.policy import Policy

if TYPE_CHECKING:
    from lkv.methods.method import MethodInputs

_LONGER = 1.2  # than in training: up to there the paper's scorer chooses as well, as measured


@register_selector("lkv-t", label="LKV-T", description="learned scores of k and v (LKV-T)", needs=(POLICY,))
class LearnedScores(Selector):
    """LKV-T: what the policy's scorer gives for a token's k, v and position; no query is read (Sec. 3.4).

    What needs the end of the text (the attention to expect and the distance to the end) is added when entries are
    evicted, so that a text may come in parts. Warns where k is read as cached and a text is much longer than those of
    the training: RoPE ties such scores to the positions that were learned.
    """

    is_local = True

    def __init__(self, policy: Policy, heads: slice = slice(None)):
        """`heads`: the KV heads that this process computes."""
        self._tokens, self._heads = policy.tokens, heads
        self._known = policy.trained_tokens if policy.inputs.key == "cached" else None

    @classmethod
    def from_inputs(cls, inputs: "MethodInputs", **options: Any) -> "LearnedScores":
        return cls(inputs.require("policy"), inputs.heads, **options)

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        if layer == 0 and self._known is not None and prompt.end > _LONGER * self._known:
            warnings.warn(
                f"this policy was trained on texts of up to {self._known:,} tokens and may keep the wrong ones of a "
                "much longer one; use a policy that reads un-rotated k, another method, or train on longer texts.",
                stacklevel=2,
            )
        return self._tokens(prompt, layer, self._heads)

    @torch.no_grad()
    def score_on_arrival(self, layer: int, prompt: LayerKV) -> Tensor:
        return self._tokens.score_on_arrival(prompt, layer, self._heads)

    @torch.no_grad()
    def score_at_eviction(self, layer: int, head: int, entries: ArrivedEntries) -> Tensor:
        rest = self._tokens.score_at_eviction(entries.prompt, layer, self._local(head), entries.positions)
        return entries.scores if rest is None else entries.scores + rest

    def _local(self, head: int) -> slice:
        first = (self._heads.start or 0) + head
        return slice(first, first + 1)
