"""Eviction: select the kept entries of each head and gather them into a store."""

import math
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lkv.cache.cache_config import LayerContext
from lkv.cache.ragged_store import KVStore, RaggedStore, packed_starts, slot_indices
from lkv.cache.tiered_store import TieredStore
from lkv.cache.tiers import count_tiers
from lkv.errors import CacheError
from lkv.hf.prompt_kv import LayerKV, to_fp32
from lkv.kernels.selection import RecentTokens, kernels_for, ranking_for
from lkv.methods import compensation
from lkv.methods.base import check_shape, contains_nan, tier_counts
from lkv.methods.budgets import Budget, FixedBudget, drop_tokens
from lkv.methods.stored_entries import StoredEntries
from lkv.utils.devices import copy_to_device, stack_to_device


def evict_prompt(context: LayerContext, prompt: LayerKV, padding: list[int] | None) -> KVStore:
    """Keep the best tokens of each head of a whole prompt (Sec. 3.4, inference).

    `padding`: the left padding of each row in tokens. Raises PromptError if nothing would be kept, and CacheError for
    invalid scores.
    """
    config, index, (batch, heads, tokens, _) = context.config, context.index, prompt.key.shape
    selector, protected, skipped = config.method.selector, config.method.protected, padding or [0] * batch
    shared, device = context.shared, prompt.key.device
    # The kernel that selects entries also looks for NaN among the scores.
    is_checked_late = kernels_for(prompt.key, prompt.value) is not None
    # Rows without padding are scored together, others one by one, with positions from 0.
    is_by_row = any(skipped) or (prompt.rotation is not None and prompt.rotation.has_row_positions)
    groups = [slice(row, row + 1) for row in range(batch)] if is_by_row else [slice(0, batch)]
    tables: list[Tensor] = []
    arrival_tables: list[Tensor] = []
    counts: list[list[list[list[int]]]] = []  # per group, [tiers][B][H]
    for rows in groups:
        first = skipped[rows.start]
        config.method.check_length(tokens - first)
        part = prompt.select(rows, slice(first, None))
        scores = check_shape(selector, selector.scores(index, part), part.key)
        if not is_checked_late:
            shared.pending_nan_checks.append(contains_nan(scores))
        contested = drop_tokens(scores, protected)

        def count(budget: Budget, scores: Tensor = contested) -> list[list[int]]:
            return _check_counts(context, budget, budget.counts(index, scores), scores)

        part_counts = tier_counts(config.tiers, contested.shape[-1], heads, len(scores), count, len(protected))
        scores = check_shape(selector, selector.refine(index, part, scores, part_counts[-1]), part.key)
        tables.append(_pad_scores(_rank_first(scores, protected), first))
        counts.append(part_counts)
        if config.request.decode_eviction:
            arrival_tables.append(pad(selector.score_on_arrival(index, part), (first, 0)))
    if device.type == "cpu":
        shared.check_scores(index, selector, device)
    lens = torch.cat([torch.tensor(part, device="cpu") for part in counts], 1)
    free_slots = config.initial_slots(index, lens[-1], device, [tokens - first for first in skipped])
    arrival_scores = _concatenate(arrival_tables) if arrival_tables else None
    table = _concatenate(tables)
    # Without quantised entries no tiers are needed.
    is_tiered = config.tiers[0].precision.is_quantized or not torch.equal(lens[0], lens[-1])
    lens, slots = (lens, 0) if is_tiered else (lens[-1:], free_slots)
    has_nan = shared.nan_flag(device) if is_checked_late else None
    store, order = gather_best(prompt.key, prompt.value, table, lens, slots, arrival_scores, has_nan)
    is_compensated = config.method.compensates(batch)
    single_rows = [slice(row, row + 1) for row in range(batch) if is_compensated[row]]
    compensated = groups if all(is_compensated) else single_rows
    fit = partial(_fit_values, prompt, compensated, skipped, store.lens) if compensated else None
    kept: KVStore = store
    if is_tiered:
        split, is_centred = config.split(lens, order), context.softmax_options.softcap is None
        checks = shared.pending_norm_checks
        kept = TieredStore.from_ragged(store, split, free_slots, checks, None, is_centred, fit)
    elif fit is not None:
        store.fill(None, fit(*store.pack()))
    shared.check_scores(index, selector, device)
    return kept


def entry_limits(context: LayerContext, heads: int, lengths: Sequence[int]) -> Tensor:
    """Return how many entries each of `heads` heads may have in rows of `lengths` tokens, [tiers, B, H] on the CPU.

    They are cumulative over the tiers from the best on. The budgets depend on lengths alone.
    """

    def limits(tokens: int, budget: Budget) -> list[list[int]]:
        assert isinstance(budget, FixedBudget)
        return [budget.limits(context.index, heads, tokens)]

    rows = [tier_counts(context.config.tiers, tokens, heads, 1, partial(limits, tokens)) for tokens in lengths]
    return torch.cat([torch.tensor(row, device="cpu") for row in rows], 1)


class NewEntries(NamedTuple):
    """The entries appended since the last eviction.

    `padding` is the left padding of each row in tokens, `scale` that of attention scores, and `queries` [B, Hq, n, d]
    are the last ones, if the method reads them.
    """

    number: int
    first_position: int
    padding: list[int]
    scale: float
    queries: Tensor | None = None


def evict_entries(context: LayerContext, store: KVStore, new: NewEntries, limits: Tensor, free_slots: int) -> KVStore:
    """Make a store of the best entries of `store`, the `new` ones included; raises CacheError for NaN scores.

    Args:
        context: The layer's context.
        store: The entries.
        new: The appended ones.
        limits: The maximum number of entries of each row and head, cumulative over the tiers from the best on,
            [tiers, B, H].
        free_slots: As in `gather_best`.
    """
    entries = store.restore()
    counts, device = entries.counts, entries.k.device
    lens = torch.minimum(limits, counts)
    table = _score_entries(context, new, entries)
    shared, is_tiered, selector = context.shared, context.config.is_tiered, context.config.method.selector
    window = selector.recent_window if context.config.request.decode_eviction else 0
    recent = RecentTokens(new.first_position + new.number, window) if window else None
    check_scores = partial(shared.check_scores, context.index, selector, device)
    if not is_tiered and (kernels := kernels_for(entries.k, entries.v)) is not None:
        kept_entries = RaggedStore(lens[-1], free_slots, entries.k, entries.v, has_scores=True)
        every = kernels.Entries.of_pools(*entries.attention_view()[:4], table.shape[1])
        extras = entries.scores, entries.positions
        _move_best(kernels, every, table, kept_entries, lens, *extras, has_nan=shared.nan_flag(device), recent=recent)
        check_scores()
        return kept_entries
    if table.numel():
        shared.pending_nan_checks.append(contains_nan(table))
    if device.type == "cpu":
        check_scores()
    assert entries.positions is not None
    (present,) = stack_to_device(device, counts.flatten())
    is_best, numbers = _rank(table, lens, recent, entries.positions, *entries.attention_view()[2:4])
    is_entry = torch.arange(table.shape[1], device=device) < present[:, None]
    kept_entries = RaggedStore(lens[-1], 0 if is_tiered else free_slots, entries.k, entries.v, has_scores=True)
    origin = is_best[is_entry].nonzero()[:, 0]
    kept_entries.copy_from(entries, slot_indices(entries.starts, counts, device)[origin])
    kept: KVStore = kept_entries
    if is_tiered:
        order = None if numbers is None else numbers[is_entry][origin].argsort(stable=True)
        split, checks = context.config.split(lens, order), shared.pending_norm_checks
        if isinstance(store, TieredStore):
            kept = store.requantize(kept_entries, origin, split, free_slots, checks)
        else:
            is_centred = context.softmax_options.softcap is None
            kept = TieredStore.from_ragged(kept_entries, split, free_slots, checks, None, is_centred)
    check_scores()
    return kept


def _score_entries(context: LayerContext, new: NewEntries, entries: RaggedStore) -> Tensor:
    """Return the current scores [B * H, n] of all `entries`, -inf beyond a head's last; the `new` ones get theirs."""
    assert entries.scores is not None and entries.positions is not None
    key, value, starts, counts, *_ = entries.attention_view()
    places = zip(entries.starts.flatten().tolist(), entries.counts.flatten().tolist(), strict=True)
    stored = StoredEntries(
        key, value, entries.scores, entries.positions, starts, counts, list(places), new.number, new.first_position,
        new.padding, new.scale, context.prompt_rotation, context.softmax_options.softcap, context.softmax_options.sinks,
        new.queries,
    )  # fmt: skip
    return context.config.method.selector.score_stored(context.index, stored)


def gather_best(
    key: Tensor, value: Tensor, scores: Tensor, lens: Tensor, free_slots: int, arrival_scores: Tensor | None = None,
    has_nan: Tensor | None = None,
) -> tuple[RaggedStore, Tensor | None]:  # fmt: skip
    """Return a store of the best tokens of each head, ordered by position, and their order by tier.

    Args:
        key: [B, H, T, d], in any memory layout.
        value: [B, H, T, dv].
        scores: The scores, [B, H, T].
        lens: The number of tokens to keep, cumulative over the tiers from the best on, int64 [tiers, B, H] on the CPU.
        free_slots: Free slots for each row and head; 0 for more than one tier.
        arrival_scores: Scores [B, H, T] to store with the entries, for later evictions.
        has_nan: A `SharedState.nan_flag` on a GPU whose kernels can run, set if one of the scores is NaN.

    Returns:
        The store, and `TierSplit.order`.
    """
    if (kernels := kernels_for(key, value)) is not None:
        store = RaggedStore(lens[-1], free_slots, key, value, arrival_scores is not None)
        arrivals = None if arrival_scores is None else arrival_scores.float().contiguous()
        order = None if len(lens) == 1 else key.new_empty(len(store.k), dtype=torch.int32)
        entries = kernels.Entries.of_prompt(key, value)
        _move_best(kernels, entries, scores, store, lens, arrivals, order=order, has_nan=has_nan)
        return store, order
    # Ranked first, so that its temporary memory is freed before the pools are allocated.
    is_best, numbers = _rank(scores.flatten(0, 1), lens)
    counted = is_best.flatten().cumsum(0, dtype=torch.int32)
    del is_best
    tables = [x for x in (arrival_scores, None if numbers is None else numbers.view_as(scores)) if x is not None]
    sources = [EntryRows.of(x) for x in (key, value, *(x[..., None] for x in tables))]
    rows = best_rows(counted, lens[-1], free_slots, *sources)
    del counted
    store = RaggedStore(lens[-1], free_slots, key, value, arrival_scores is not None)
    for pool, source, index in zip((store.k, store.v), sources, rows, strict=False):
        torch.index_select(source.matrix, 0, index, out=pool)
    if store.scores is not None and store.positions is not None:
        store.scores.copy_(sources[2].matrix[rows[2], 0])
        torch.remainder(rows[2], scores.shape[-1], out=store.positions)
    return store, None if numbers is None else sources[-1].matrix[rows[-1], 0].argsort(stable=True)


def _move_best(
    kernels: ModuleType, entries: Any, scores: Tensor, store: RaggedStore, lens: Tensor,
    arrival_scores: Tensor | None = None, positions: Tensor | None = None, order: Tensor | None = None,
    has_nan: Tensor | None = None, recent: RecentTokens | None = None,
) -> None:  # fmt: skip
    """Fill `store` with the best `lens` `entries` by `scores`, with arrival scores and positions, in one launch."""
    k_pool, v_pool, starts, kept, *_ = store.compressed_view()
    keep, order_starts = kept[None], None
    if len(lens) > 1:
        tables = stack_to_device(scores.device, *lens, *packed_starts(count_tiers(lens)))
        keep, order_starts = tables.unflatten(0, (2, -1))
    extra = None if store.scores is None or store.positions is None else (store.scores, store.positions)
    pools = k_pool, v_pool, starts
    by_tier = None if order is None else (order, order_starts)
    kernels.move(entries, pools, scores, keep, arrival_scores, positions, extra, None, by_tier, has_nan, recent)


def _rank(
    scores: Tensor, lens: Tensor, recent: RecentTokens | None = None, *places: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return a mask of the best `lens` [tiers, B, H] of `scores` [N, T] in each row, and the tier indices.

    The tier indices, int8 [N, T], are None for one tier. `places`: as in `recent.rank_first`.
    """
    limits = stack_to_device(scores.device, *lens.flatten(1))
    if scores.shape[1] and (kernels := ranking_for(scores)) is not None:
        tiers = kernels.rank(scores[None], limits[:, None], None, recent, *places)[0]
        return tiers < len(lens), None if len(lens) == 1 else tiers
    if recent is not None:
        scores = recent.rank_first(scores, *places)
    masks = [best_mask(scores, counts, int(most)) for counts, most in zip(limits, lens.flatten(1).amax(1), strict=True)]
    if len(masks) == 1:
        return masks[0], None
    return masks[-1], torch.stack(masks[:-1]).logical_not_().sum(0, dtype=torch.int8)


class EntryRows(NamedTuple):
    """All entries of a tensor [B, H, T, d] as rows of one matrix.

    Entry (b, h, t) is row b * batch + h * head + t * token of `matrix` [R, d], a view of the tensor.
    """

    matrix: Tensor
    batch: int
    head: int
    token: int

    @classmethod
    def of(cls, x: Tensor) -> "EntryRows":
        """Return a view of `x`, in any memory layout; a copy only if its last axis is not contiguous."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        step = math.gcd(x.shape[-1], *x.stride()[:3])
        strides = [stride // step for stride in x.stride()[:3]]
        last = sum((size - 1) * stride for size, stride in zip(x.shape[:3], strides, strict=True))
        return cls(x.as_strided((last + 1, x.shape[-1]), (step, 1)), *strides)


def best_mask(scores: Tensor, counts: Tensor, max_count: int) -> Tensor:
    """Return a mask of the `counts` [N] (at most `max_count`) highest `scores` [N, T] of each row.

    Ties go to the earlier token. The rows are independent.
    """
    if not scores.shape[1]:
        return scores.bool()
    places = (counts - 1).clamp(min=0).long()
    least = scores.topk(max(1, max_count)).values.gather(1, places[:, None])
    above, equal = scores > least, scores == least
    missing = counts - above.sum(1, dtype=torch.int32)
    return above | (equal & (equal.cumsum(1, dtype=torch.int32) <= missing[:, None]))


def best_rows(counted: Tensor, lens: Tensor, free_slots: int, *sources: EntryRows) -> list[Tensor]:
    """Return, for each of `sources`, the source row of each slot of the pools, int32 [P].

    In the pools every head has its `lens` [B, H] (on the CPU) kept entries, in order, then `free_slots` of arbitrary
    content. `counted` [B * H * T]: the cumulative number of kept entries.
    """
    heads, tokens = lens.shape[1], len(counted) // max(1, lens.numel())
    sizes = lens.flatten() + free_slots
    # Counted over all heads, slot p of head h takes the kept entry number p + 1 - h * free_slots.
    number = torch.arange(len(sizes), device="cpu")
    row, head = number // heads, number % heads
    shifts = [row * source.batch + head * source.head - number * tokens * source.token for source in sources]
    tables = stack_to_device(counted.device, sizes, 1 - number * free_slots, *shifts)
    size = int(sizes.sum())
    entries, *shifts = tables[1:].repeat_interleave(tables[0], 1, output_size=size).unbind()
    entries += torch.arange(size, dtype=torch.int32, device=counted.device)
    index = torch.searchsorted(counted, entries, out_int32=True)
    return [
        (index * source.token).add_(shift).clamp_(0, len(source.matrix) - 1)
        for source, shift in zip(sources, shifts, strict=True)
    ]


def _check_counts(context: LayerContext, budget: Budget, counts: list[list[int]], scores: Tensor) -> list[list[int]]:
    """Return the `counts` [B][H] of `budget` for `scores` [B, H, T]. Raises CacheError if they are invalid."""
    batch, heads, tokens = scores.shape
    try:
        table = torch.as_tensor(counts, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        table = torch.empty(0)
    is_whole = not table.is_floating_point() and not table.is_complex() and table.dtype != torch.bool
    if is_whole and table.shape == (batch, heads) and ((table >= 0) & (table <= tokens)).all():
        return table.tolist()
    raise CacheError(
        f"the budget rule {type(budget).__name__} gives layer {context.index} the counts "
        f"{counts!r}; its counts() has to return whole numbers from 0 to {tokens}, [{batch}][{heads}] of them."
    )


def _fit_values(
    prompt: LayerKV, groups: Sequence[slice], padding: Sequence[int], lens: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return the values of kept entries, those of some rows compensated (`lkv.methods.compensation`).

    Args:
        prompt: The whole prompt with its queries.
        groups: The rows to compensate; those of a group have the same padding.
        padding: The left padding of each row, in tokens.
        lens: The number of kept entries of each row and head, [B, H] on the CPU.
        key: k of the kept entries as attention will read it, packed as in `RaggedStore.pack`, [N, d].
        value: Their v, [N, dv].
    """
    fitted, starts, device = to_fp32(value).clone(), packed_starts(lens), value.device
    # A GPU takes all heads in one batch, padded to equal lengths. A CPU takes one after another, which are smaller.
    number = 1 if device.type == "cpu" else lens.shape[1]
    parts = [slice(head, head + number) for head in range(0, lens.shape[1], number)]
    for rows in groups:
        row = prompt.select(rows, slice(padding[rows.start], None))
        queries = compensation.reference_queries(row)
        for heads in parts if queries.shape[3] else ():
            counts, first = lens[rows, heads], starts[rows, heads]
            longest = int(counts.max())
            if not longest:
                continue
            begin, present = stack_to_device(device, first.flatten(), counts.flatten()).view(2, *counts.shape)
            entries = (begin[..., None] + torch.arange(longest, device=device)).clamp_(max=len(value) - 1)
            own = compensation.select_heads(row, heads), queries[:, heads]
            is_padded = int(counts.min()) < longest
            new = compensation.fit_values(*own, key[entries], value[entries], present if is_padded else None)
            padded_starts = torch.arange(counts.numel(), device="cpu").view_as(counts) * longest
            fitted[slot_indices(first, counts, device)] = new.flatten(0, 2)[slot_indices(padded_starts, counts, device)]
    return fitted


def _concatenate(tables: list[Tensor]) -> Tensor:
    """Return the rows of `tables` [., H, T] in one tensor."""
    return tables[0] if len(tables) == 1 else torch.cat(tables)


def _rank_first(scores: Tensor, protected: Sequence[int]) -> Tensor:
    """Return `scores` [B, H, T] with the `protected` tokens above all others."""
    if not protected:
        return scores
    scores = to_fp32(scores)
    positions = copy_to_device(torch.tensor(protected, device="cpu"), scores.device)
    return scores.clamp(max=torch.finfo(scores.dtype).max).index_fill(-1, positions, math.inf)


def _pad_scores(scores: Tensor, first: int) -> Tensor:
    """Prepend `first` padding tokens, ranked below all others, to `scores` [B, H, n]."""
    if not first:
        return scores
    scores = to_fp32(scores)
    return pad(scores.clamp(min=torch.finfo(scores.dtype).min), (first, 0), value=-math.inf)
