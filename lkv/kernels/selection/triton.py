"""Launches of the kernels of eviction. Shapes: B rows, H KV heads, T tokens, d channels, P entries of the pools."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

import lkv.kernels.selection.quantise_kernels as quantise_kernels
import lkv.kernels.selection.triton_kernels as kernels
from lkv.kernels import triton_helpers
from lkv.kernels.selection import RecentTokens, ScoreWeights
from lkv.kernels.triton_helpers import padded
from lkv.utils import devices

LARGEST_DIM = 256
_LARGEST_BLOCK = 32_768  # scores of a span that a program has in registers
_MULTIPROCESSORS_WITHOUT_GPU = 3
_MEASURED_CHANNELS = 16


class Entries(NamedTuple):
    """The location of entries: k and v [B, H, T, d] in any layout; or pools [P, d], their `starts` and `counts` [B, H].

    `counts` (int32, as `starts`) are at most `width`.
    """

    key: Tensor
    value: Tensor
    heads: int
    spans: int
    width: int
    starts: Tensor | None = None
    counts: Tensor | None = None

    @classmethod
    def of_prompt(cls, key: Tensor, value: Tensor) -> "Entries":
        """Return all entries of k and v [B, H, T, d]."""
        key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
        batch, heads, tokens, _ = key.shape
        return cls(key, value, heads, batch * heads, tokens)

    @classmethod
    def of_pools(cls, key: Tensor, value: Tensor, starts: Tensor, counts: Tensor, width: int) -> "Entries":
        """Return the entries of pools [P, d]."""
        return cls(key, value, starts.shape[1], starts.numel(), width, starts, counts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of a table with a number for each entry."""
        return self.spans // self.heads, self.heads, self.width

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The strides of k and v, as all kernels take them; 0 for pools."""
        return (0,) * 6 if self.starts is not None else (*self.key.stride()[:3], *self.value.stride()[:3])


def unsupported_reason(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> str | None:
    """Return why the kernels cannot run, in one sentence; None if they can."""
    if not 0 < max(dim, value_dim) <= LARGEST_DIM:
        return f"the head sizes are {dim} and {value_dim}, but the Triton kernels take 1 to {LARGEST_DIM}."
    return triton_helpers.unsupported_reason(device, dtype)


def rank(
    scores: Tensor, keep: Tensor, has_nan: Tensor | None = None, recent: RecentTokens | None = None,
    positions: Tensor | None = None, starts: Tensor | None = None, counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the tier index of each entry, int8 [B, H, T]; the number of tiers if it is evicted.

    Args:
        scores: [B, H, T]; the highest are kept, of equal ones the earlier.
        keep: The number of entries to keep, cumulative over the tiers from the best on, int32 [tiers, B, H].
        has_nan: uint8 [1], set to 1 if one of the scores is NaN.
        recent: The tokens that come first, the newest before all others, by their `positions` from `starts` on.
        positions: As in `recent.rank_first`, as the next one.
        starts: Where each span begins in it.
        counts: The entries of each span, int32 [B, H]; T by default.
    """
    numbers = scores.new_empty(scores.shape, dtype=torch.int8)
    none = scores.new_empty(1, 1, 1, 1)
    entries = Entries(none, none, 1, numbers[..., 0].numel(), scores.shape[-1], starts, counts)
    move(entries, None, scores, keep, positions=positions, numbers=numbers, has_nan=has_nan, recent=recent)
    return numbers


def move(
    entries: Entries,
    pools: tuple[Tensor, Tensor, Tensor] | None,
    ranked: Tensor | None = None,
    keep: Tensor | None = None,
    scores: Tensor | None = None,
    positions: Tensor | None = None,
    extra: tuple[Tensor, Tensor] | None = None,
    numbers: Tensor | None = None,
    order: tuple[Tensor, Tensor] | None = None,
    has_nan: Tensor | None = None,
    recent: RecentTokens | None = None,
) -> None:
    """Copy the best entries, in order, to the pools of k and v: one launch of as many programs as a GPU runs at once.

    Args:
        entries: The entries.
        pools: k [P, d], v [P, dv], and `starts` [B, H] of each span; None to find their tiers alone.
        ranked: The scores to rank by, [B, H, T], as in `rank`; None to copy all entries.
        keep: As in `rank`.
        scores: Scores of the entries, in their layout, to copy to `extra`.
        positions: Positions of the entries, likewise; their indices by default.
        extra: Pools of scores and positions [P].
        numbers: A table for tier indices, as `rank` returns it; without `pools` alone.
        order: Gets the places of the entries in the pools by tier, int32 [sum of kept]; and where those of each tier
            and span begin in it, int32 [tiers, B, H].
        has_nan: As in `rank`.
        recent: As in `rank`, for entries in pools, with `positions`.
    """
    key, value, width, spans = entries.key, entries.value, entries.width, entries.spans
    dim, value_dim = key.shape[-1], value.shape[-1]
    new_key, new_value, new_starts = pools or (None, None, None)
    new_scores, new_positions = extra or (None, None)
    end, window = recent or (0, 0)
    if ranked is not None:
        ranked = (ranked.float() if ranked.dtype == torch.float64 else ranked).contiguous()
    tiers = 1 if keep is None else len(keep)
    block = 1 if ranked is None else min(_LARGEST_BLOCK, max(256, triton.next_power_of_2(width)))
    # More warps take longer to count together; more programs a multiprocessor find thresholds more often.
    warps = min(32, max(4, block // 512))
    blocks = {"BLOCK_D": triton.next_power_of_2(dim), "BLOCK_V": triton.next_power_of_2(value_dim)}
    moved = max(16, min(256, 4096 * warps // (max(blocks.values()) * key.element_size())))
    is_compiled = triton_helpers.is_compiled_for(key.device)
    multiprocessors = triton_helpers.multiprocessors(key.device) if is_compiled else _MULTIPROCESSORS_WITHOUT_GPU
    programs = max(1, max(1, 16 // warps) * multiprocessors // spans)
    share = max(1, -(-width // (programs * moved))) * moved
    with devices.device_guard(key.device):
        kernels.select_kernel[(max(1, -(-width // share)), spans)](
            ranked, keep, entries.counts, has_nan, numbers, *(order or (None, None)), width, share,
            entries.heads, key, value, scores, positions, entries.starts, end, *entries.arguments, new_key,
            new_value, new_scores, new_positions, new_starts, RECENT=window, TIERS=tiers, BLOCK=block,
            MOVED=moved, BLOCK_T=triton.next_power_of_2(tiers), DIM=dim, VALUE_DIM=value_dim, **blocks, num_warps=warps,
        )  # fmt: skip


def score(
    entries: Entries,
    weights: ScoreWeights,
    tables: tuple[Tensor, Tensor] | None,
    mean_tables: tuple[Tensor, Tensor] | None,
    start: int,
    end: int,
    scale: float,
    arrival: bool = True,
    eviction: bool = True,
    scores: Tensor | None = None,
    positions: Tensor | None = None,
    padding: int = 0,
) -> Tensor | None:
    """Compute LKV-T in one launch, see `score_kernel`; nothing waits for the device.

    Args:
        entries: k and v of d channels, an even number up to `LARGEST_SCORED_DIM`. In pools, with `arrival`, the last
            `width` entries of each span are meant.
        weights: Those of the layer.
        tables: cos and sin [T, d] by which k is rotated back; None for k as it is.
        mean_tables: cos and sin [d] of the mean rotation of future positions; None without expected attention.
        start: The position of the first entry.
        end: The position after the text.
        scale: The attention scaling factor.
        arrival: Whether to compute the part that is final on arrival.
        eviction: Whether to compute the part that depends on the end of the text.
        scores: Pools of scores, float32 [P], for entries in pools: written with `arrival`, else added to.
        positions: Pools of positions, int32 [P]: written with `arrival`, else read.
        padding: The number of positions before `start` that are padding.

    Returns:
        float32 [B, H, T]; None where `scores` were written.
    """
    key = entries.key
    dim = key.shape[-1]
    in_place = entries.starts is not None and arrival
    out = None if in_place else key.new_empty(entries.shape, dtype=torch.float32)
    cos, sin = tables or (None, None)
    mean_cos, mean_sin = mean_tables or (None, None)
    queries = None if mean_tables is None else weights.queries
    group = 0 if weights.normaliser is None else weights.normaliser.shape[1]
    rows = 0 if weights.queries is None else weights.queries.shape[1]
    knots = 0 if weights.start is None else weights.start.shape[1]
    # Products of the MLP in float32 take registers, and larger tiles spill them.
    is_float32 = weights.weight.dtype == torch.float32
    block, warps = (16, 8 if dim > 64 else 4) if is_float32 else (64, 4)
    with devices.device_guard(key.device):
        kernels.score_kernel[(-(-entries.width // block), entries.spans)](
            key, entries.value, entries.starts, entries.counts, *entries.arguments, scores, positions, out, cos, sin,
            weights.weight, weights.bias, weights.output, queries, mean_cos, mean_sin, weights.normaliser,
            weights.attention, weights.start, weights.end, entries.heads, entries.width, start, end, padding, scale,
            ARRIVAL=arrival, EVICTION=eviction, GROUP=group, ROWS=rows, KNOTS=knots, DIM=dim,
            PRECISION=devices.exact_products(weights.weight.dtype), BLOCK=block,
            BLOCK_H=padded(dim // 2), BLOCK_U=min(32, padded(dim)), BLOCK_R=padded(rows), BLOCK_K=padded(knots),
            num_warps=warps,
        )  # fmt: skip
    return out


def measure(key: Tensor, tables: Tensor) -> Tensor:
    """Return mean and standard deviation of each channel of packed k [N, d] of each span, float32 [2, spans, d].

    `tables`: as in `quantise`.
    """
    dim, spans = key.shape[1], tables.shape[1]
    measured = key.new_empty((2, spans, dim), dtype=torch.float32)
    with devices.device_guard(key.device):
        # Few channels a program, as there are few spans; a row of them is a sector of memory.
        quantise_kernels.measure_kernel[(-(-dim // _MEASURED_CHANNELS), spans)](
            key, tables, measured, spans, DIM=dim, CHANNELS=_MEASURED_CHANNELS, BLOCK=1024, num_warps=8
        )
    return measured


def quantise(
    values: Tensor,
    order: Tensor | None,
    tables: Tensor,
    rotation: Tensor,
    outputs: list[tuple[Tensor, Tensor | None]],
    bits: tuple[int, ...],
    invalid: Tensor,
    basis: Tensor | None = None,
    measured: Tensor | None = None,
    is_centred: bool = True,
) -> None:
    """Quantise packed entries into tiers in one launch.

    Args:
        values: k or v [N, d], the entries of a span after those of the span before.
        order: The entries by tier, int32 [N]; None for one tier.
        tables: int32 [2 + 3 tiers, spans], see `quantise_kernels`.
        rotation: float32 [d, d].
        outputs: Codes and norms of each tier; a pool and None for one that is not quantised.
        bits: Those of each tier, 16 for one that is not quantised.
        invalid: uint8 [1], set to 1 if a norm is not finite or too large.
        basis: Mean and scale of k [2, B, H, d]; None for v.
        measured: The result of `measure`, of which `basis` is made and written; None to read it.
        is_centred: Whether the mean is that of the entries, otherwise 0.
    """
    dim, spans, tiers = values.shape[1], tables.shape[1], len(bits)
    block = triton.next_power_of_2(dim)
    rows = 4096 // block
    programs = _MULTIPROCESSORS_WITHOUT_GPU
    if triton_helpers.is_compiled_for(values.device):
        programs = 4 * triton_helpers.multiprocessors(values.device)
    programs = max(1, min(programs // (spans * tiers), -(-len(values) // (spans * tiers * rows))))
    tensors = [x for pair in outputs for x in pair] + [None] * (6 - 2 * tiers)
    with devices.device_guard(values.device):
        quantise_kernels.quantise_kernel[(programs, spans, tiers)](
            values, order, tables, spans, rotation, basis, measured, invalid, *tensors, BITS=bits, CENTRED=is_centred,
            DIM=dim, ROWS=rows, BLOCK_D=max(16, block),
        )  # fmt: skip
