"""LKV-T (Sec. 3.4)."""

import warnings
from functools import partial

import torch
from torch import Tensor

from lkv.hf.prompt_kv import LayerKV
from lkv.kernels.selection import kernels_for
from lkv.methods.base import Selector
from lkv.methods.registry import register_selector
from lkv.methods.stored_entries import ArrivedEntries, StoredEntries
from lkv.policy.policy import Policy

_LENGTH_FACTOR = 1.2  # times the training length: measured limit up to which the paper's scorer does not degrade


@register_selector("lkv-t", label="LKV-T", description="learned scores of k and v (LKV-T)")
class LearnedScores(Selector):
    """LKV-T: the policy's scores of k, v and position; no query is read (Sec. 3.4, `lkv.policy.token_scores`).

    Components that depend on the end of the text (expected attention and the distance to the end) are added at
    eviction, so that a prompt may be read in chunks. Warns if k is read as cached and a text is much longer than the
    training texts: RoPE ties these scores to the positions seen in training.
    """

    required_inputs = ("policy", "heads")
    is_local = True
    # The policy was trained with all tokens after the prompt in the cache, so it gives up too many of them.
    recent_window = 32

    def __init__(self, policy: Policy, heads: slice = slice(None)):
        """`heads`: the KV heads of this process."""
        self._tokens, self._heads = policy.tokens, heads
        self._trained_tokens = policy.trained_tokens if policy.inputs.key == "cached" else None

    @torch.no_grad()
    def scores(self, layer: int, prompt: LayerKV) -> Tensor:
        """Return the complete scores."""
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
        """Return the components that are final on arrival."""
        return self._tokens.score_on_arrival(prompt, layer, self._heads)

    @torch.no_grad()
    def score_at_eviction(self, layer: int, head: int, entries: ArrivedEntries) -> Tensor:
        """Return the scores, including the components that depend on the end of the text."""
        first = (self._heads.start or 0) + head
        heads = slice(first, first + 1)
        rest = self._tokens.score_at_eviction(entries.kv, layer, heads, entries.positions)
        return entries.scores if rest is None else entries.scores + rest.flatten()

    @torch.no_grad()
    def score_stored(self, layer: int, entries: StoredEntries) -> Tensor:
        """As in `Selector`; on a GPU in two launches for all heads, of each row where some have padding."""
        key, value, batch = entries.key, entries.value, len(entries.pool_starts)
        kernels = kernels_for(key, value)
        if kernels is None or key.shape != value.shape or entries.softcap is not None:
            return super().score_stored(layer, entries)
        width = max(count for _, count in entries.spans)
        scores: list[Tensor] = []
        for rows in [slice(row, row + 1) for row in range(batch)] if any(entries.padding) else [slice(0, batch)]:
            # Positions do not count the row's padding, as in the rotation of keys.
            padding = entries.padding[rows.start]
            start, end = entries.first_new_position - padding, entries.end - padding
            tables = self._tokens.kernel_tables(entries.rotation, key, start, entries.num_new, end)
            if tables is None:
                return super().score_stored(layer, entries)
            weights, (key_tables, mean_tables) = self._tokens.folded_weights(layer, self._heads, key), tables
            pools = key, value, entries.pool_starts[rows], entries.counts[rows]
            score = partial(
                kernels.score,
                end=entries.end,
                scale=entries.scale,
                padding=padding,
                scores=entries.scores,
                positions=entries.positions,
            )
            if entries.num_new:
                appended_entries = kernels.Entries.of_pools(*pools, entries.num_new)
                score(appended_entries, weights, key_tables, None, entries.first_new_position, eviction=False)
            every = kernels.Entries.of_pools(*pools, width)
            scores.append(score(every, weights, None, mean_tables, 0, arrival=False))
        return (scores[0] if len(scores) == 1 else torch.cat(scores)).flatten(0, 1)
