"""Eviction from a prompt that has been read whole (Sec. 3.4, inference)."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from lkv.cache.config import Layer
from lkv.cache.entries import Entries
from lkv.cache.store import RaggedStore
from lkv.errors import CacheError
from lkv.integrations.transformers.prefill import LayerKV, to_fp32
from lkv.methods.compensation import compensate, reference_queries
from lkv.methods.selectors import check_shape, not_numbers


def evicted(layer: Layer, whole: LayerKV, padding: list[int] | None) -> Entries:
    """The best tokens of each head, the rest dropped. `padding`: tokens to skip at each row's beginning.

    Raises PromptError where nothing would be kept, and CacheError for scores that rank nothing.
    """
    plan, (batch, _, tokens, _) = layer.plan, whole.key.shape
    selector, firsts = plan.method.selector, padding or [0] * batch
    # Rows without padding are scored together, others one by one, as if each had been read alone.
    groups = [slice(b, b + 1) for b in range(batch)] if any(firsts) else [slice(0, batch)]
    tables: list[Tensor] = []
    arrived: list[Tensor] = []
    counts: list[list[int]] = []
    for rows in groups:
        first = firsts[rows.start]
        plan.check_length(tokens - first)
        part = whole.select(rows, slice(first, None))
        scores = check_shape(selector, selector.scores(layer.index, part), part.key)
        layer.shared.doubts.append(not_numbers(scores))
        part_counts = _checked(layer, plan.method.budget.counts(layer.index, scores), scores)
        scores = check_shape(selector, selector.refine(layer.index, part, scores, part_counts), part.key)
        tables.append(_behind_padding(scores, first))
        counts += part_counts
        if plan.decode_eviction:
            arrived.append(pad(selector.score_on_arrival(layer.index, part), (first, 0)))
    layer.shared.check_doubts(layer.index, selector, whole.key.device)
    kept = torch.tensor(counts, device="cpu")
    room = plan.first_room(layer.index, kept, whole.key.device)
    spans = RaggedStore.of(whole.key, whole.value, _joined(tables), kept, room, _joined(arrived) if arrived else None)
    for row, wanted in enumerate(plan.method.compensates(batch)):
        if wanted:
            _refit(spans, row, whole.select(slice(row, row + 1), slice(firsts[row], None)))
    return Entries.compressed(layer, spans, tokens, firsts)


def _checked(layer: Layer, counts: list[list[int]], scores: Tensor) -> list[list[int]]:
    """`counts` [B][H] that a budget rule gave for `scores` [B, H, T]. Raises CacheError where they cannot be kept."""
    batch, heads, tokens = scores.shape
    try:
        table = torch.as_tensor(counts, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise CacheError(_bad_counts(layer, f"{counts!r}", scores)) from error
    whole = not table.is_floating_point() and not table.is_complex() and table.dtype != torch.bool
    if table.shape != (batch, heads) or not whole or not ((table >= 0) & (table <= tokens)).all():
        raise CacheError(_bad_counts(layer, f"{table.tolist()}", scores))
    return table.tolist()


def _bad_counts(layer: Layer, given: str, scores: Tensor) -> str:
    batch, heads, tokens = scores.shape
    return (
        f"the budget rule {type(layer.plan.method.budget).__name__} gives layer {layer.index} the counts {given}; its "
        f"counts() has to return whole numbers from 0 to {tokens}, [{batch}][{heads}] of them."
    )


def _refit(spans: RaggedStore, row: int, prompt: LayerKV) -> None:
    """Refit what the heads of one row keep of `prompt` (k, v, q of that row alone)."""
    queries, tokens = reference_queries(prompt)[0], prompt.key.shape[2]
    for head, query in enumerate(queries):
        key, value = spans.settled_of(row, head)
        if 0 < len(key) < tokens:
            new_key, new_value = compensate(query, prompt.key[0, head], prompt.value[0, head], key, value, prompt.scale)
            key.copy_(new_key)
            value.copy_(new_value)


def _joined(tables: list[Tensor]) -> Tensor:
    """The rows of `tables` [., H, T] in one."""
    return tables[0] if len(tables) == 1 else torch.cat(tables)


def _behind_padding(scores: Tensor, first: int) -> Tensor:
    """`scores` [B, H, n] of the tokens after `first` ones of padding, which are to be chosen after everything else."""
    if not first:
        return scores
    scores = to_fp32(scores)
    return pad(scores.clamp(min=torch.finfo(scores.dtype).min), (first, 0), value=-math.inf)
