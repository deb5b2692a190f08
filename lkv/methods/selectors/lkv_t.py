"""LKV-T (Sec. 3.4)."""

import warnings

import torch
from torch import Tensor

from lkv.integrations.transformers.prefill import LayerKV
from lkv.kernels.selection import kernels_for
from lkv.methods.registry import register_selector
from lkv.methods.selectors.base import ArrivedEntries, Selector, StoredEntries
from lkv.policy.policy import Policy

_LENGTH_FACTOR = 1.2  # over the lengths of the training: up to there the paper's scorer chooses as well, as measured


@register_selector("lkv-t", label="LKV-T", description="learned scores of k and v (LKV-T)")
class LearnedScores(Selector):
    """LKV-T: the policy's scores of k, v and position; no query is read (Sec. 3.4, `lkv.policy.token_scores`).

    What depends on the end of the text (expected attention and the distance to the end) is added when entries are
    evicted, so that a prompt may be read in chunks. Warns where k is read as cached and a text is much longer than
    those of the training: RoPE ties such scores to the positions that were learned.
    """

    required_inputs = ("policy", "heads")
    is_local = True

    def __init__(self, policy: Policy, heads: slice = slice(None)):
        """`heads`: the KV heads that this process computes."""
        self._tokens, self._heads = policy.tokens, heads
        self._trained_tokens = policy.trained_tokens if policy.inputs.key == "cached" else None

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """All components of the score."""
        if layer == 0 and self._trained_tokens is not None and prompt.end > _LENGTH_FACTOR * self._trained_tokens:
            warnings.warn(
                f"this policy was trained on texts of up to {self._trained_tokens:,} tokens and may keep the wrong "
                "tokens of a much longer one; use a policy that reads un-rotated k or another method, or train on "
                "longer texts.",
                stacklevel=2,
            )
        return self._tokens(prompt, layer, self._heads)

    @torch.no_grad()
    def score_on_arrival(self, layer: int, prompt: LayerKV) -> Tensor:
        """The components that are final when tokens arrive."""
        return self._tokens.score_on_arrival(prompt, layer, self._heads)

    @torch.no_grad()
    def score_at_eviction(self, layer: int, head: int, entries: ArrivedEntries) -> Tensor:
        """The scores, with the components that depend on where the text ends."""
        first = (self._heads.start or 0) + head
        heads = slice(first, first + 1)
        rest = self._tokens.score_at_eviction(entries.prompt, layer, heads, entries.positions)
        return entries.scores if rest is None else entries.scores + rest.flatten()

    @torch.no_grad()
    def score_stored(self, layer: int, entries: StoredEntries) -> Tensor:
        """As in `Selector`; on a GPU in two launches for all heads."""
        key, value = entries.key, entries.value
        kernels, tables = kernels_for(key, value), None
        if kernels is not None and key.shape == value.shape and not any(entries.padding):
            tables = self._tokens.kernel_tables(entries.rotation, key, entries.start, entries.new, entries.end)
        if tables is None:
            return super().score_stored(layer, entries)
        pools = key, value, entries.starts, entries.counts
        stored = {"scores": entries.scores, "positions": entries.positions}
        weights, (key_tables, mean_tables) = self._tokens.folded_weights(layer, self._heads, key), tables
        end, scale = entries.end, entries.scale
        if entries.new:
            late = kernels.Entries.of_pools(*pools, entries.new)
            kernels.score(late, weights, key_tables, None, entries.start, end, scale, eviction=False, **stored)
        every = kernels.Entries.of_pools(*pools, max(count for _, count in entries.places))
        scores: Tensor = kernels.score(every, weights, None, mean_tables, 0, end, scale, arrival=False, **stored)
        return scores.flatten(0, 1)
