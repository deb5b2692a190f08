"""Random pools of the ragged cache, plain and with quantised tiers, for the tests of its kernels."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lkv.cache.quantization import code_width, dequantize
from lkv.cache.ragged_store import RaggedStore, slot_indices
from lkv.cache.tiered_store import TieredStore
from lkv.cache.tiers import TierSplit
from lkv.kernels.ragged_attention import QuantizedKV, RaggedKV, api, append_and_attend, ragged_attention
from lkv.methods.base import TierBudget
from lkv.methods.budgets import PerHead
from lkv.methods.targets import UNQUANTIZED, Precision

# (key_bits, value_bits) of each tier.
TIERS = (((8, 8), (4, 4)), ((8, 4), (4, 3)), ((3, 3),), ((3, 8), (8, 3)), ((4, 8),))


def pool_of(lengths, slack, dim, value_dim, dtype):
    """`RaggedKV` of random spans in pools whose slack is NaN."""
    lens = torch.tensor(lengths, dtype=torch.int32)
    ends = (lens.flatten() + slack).cumsum(0)
    starts = (ends - lens.flatten() - slack).view_as(lens).int()
    pools = [torch.full((int(ends[-1]), size), torch.nan, dtype=dtype) for size in (dim, value_dim)]
    for start, length in zip(starts.flatten().tolist(), lens.flatten().tolist(), strict=True):
        for pool in pools:
            pool[start : start + length] = torch.randn(length, pool.shape[1]).to(dtype)
    return RaggedKV(*pools, starts, lens)


class TieredPools(NamedTuple):
    """Entries in tiers, and those of all spans in float64, one span after another."""

    kv: RaggedKV
    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, store):
        """The compressed entries of a ragged store."""
        key, value = store.pack()
        return cls(store.compressed_view(), key.double(), value.double())

    def reference(self, query, scale, new=None, **options):
        """Attention over `key` and `value`, and the `new` ones [B, H, n, .] behind those of each span."""
        lens = self.kv.lens.long()
        sides = [self.key, self.value]
        if new is not None:
            counts = lens.flatten().tolist()
            for index, (side, entries) in enumerate(zip(sides, new, strict=True)):
                spans = zip(side.split(counts), entries.flatten(0, 1).double(), strict=True)
                sides[index] = torch.cat([part for span in spans for part in span])
            lens = lens + new[0].shape[2]
        starts = (lens.flatten().cumsum(0) - lens.flatten()).view_as(lens)
        return ragged_attention(query.double(), RaggedKV(*sides, starts, lens), scale, "reference", **options)


def coded_pools(lens, bits, slack, dim, value_dim, dtype, around=1):
    """Random codes and entries: `lens` [tiers + 1, B, H] of each tier of `bits`, then of those that are not quantised.

    The slack of the pools is NaN, and so are the norms of entries of no span, of which `around` lie before and behind
    those of every tier.
    """
    lens = torch.as_tensor(lens)
    *pools, starts, _ = pool_of(lens[-1].tolist(), slack, dim, value_dim, dtype)[:4]
    spans, quantized = [[] for _ in range(lens[0].numel())], []
    for counts, (key_bits, value_bits) in zip(lens, bits, strict=False):
        flat, entries = counts.flatten(), int(counts.sum()) + 2 * around
        tables = torch.stack([counts, (flat.cumsum(0) - flat).view_as(counts) + around]).int()
        tensors = []
        for size, number in ((dim, key_bits), (value_dim, value_bits)):
            norms = torch.rand(entries) + 0.5
            norms[:around] = norms[entries - around :] = torch.nan
            codes = torch.randint(256, (entries, code_width(number, size)), dtype=torch.uint8)
            tensors += [codes, norms.bfloat16()]
        sides = [
            dequantize(*tensors[at : at + 2], number, torch.float64) for at, number in ((0, key_bits), (2, value_bits))
        ]
        for span, parts in zip(
            spans, zip(*(x[around : entries - around].split(flat.tolist()) for x in sides), strict=True), strict=True
        ):
            span.append(parts)
        quantized.append(QuantizedKV(*tensors, tables, key_bits, value_bits))
    for span, start, count in zip(spans, starts.flatten().tolist(), lens[-1].flatten().tolist(), strict=True):
        span.append([pool[start : start + count].double() for pool in pools])
    key, value = (torch.cat([parts[side] for span in spans for parts in span]) for side in (0, 1))
    starts, total = starts - lens[:-1].sum(0).int(), lens.sum(0).int()
    return TieredPools(RaggedKV(*pools, starts, total, tuple(quantized)), key, value)


def split_randomly(lengths, tiers):
    """Counts [tiers + 1, B, H] that add up to `lengths`; some of them are 0."""
    lengths = torch.as_tensor(lengths)
    weights = torch.rand(tiers + 1, *lengths.shape) * torch.randint(3, (tiers + 1, *lengths.shape)).clamp(max=1)
    counts = (weights / weights.sum(0).clamp(min=1e-6) * lengths).long()
    counts[-1] += lengths - counts.sum(0)
    return counts


def tiered_store(lengths, slack, dim, value_dim, dtype, bits, device="cpu"):
    """A store of random entries in tiers of `bits`, and some that are not quantised."""
    lens = torch.tensor(lengths, device="cpu")
    with torch.device("cpu"):
        counts = split_randomly(lens, len(bits))
    sides = [torch.randn(int(lens.sum()), size, device=device).to(dtype) for size in (dim, value_dim)]
    # Channels of k with outliers and a mean, as models have them.
    sides[0] = (sides[0] * torch.linspace(0.2, 5, dim, device=device) + 1).to(dtype)
    store = RaggedStore(lens, 0, *sides)
    store.fill(*sides)
    order = [len(bits), *range(len(bits))]  # those that are not quantised are the best ones
    counts, tiers = counts[order], torch.arange(len(order), device="cpu")
    numbers = torch.cat([tiers.repeat_interleave(span) for span in counts.flatten(1).T]).to(device)
    split = TierSplit((UNQUANTIZED, *(Precision(*pair) for pair in bits)), counts, numbers)
    return TieredStore.from_ragged(store, split, slack)


def in_tiers(method, *precisions):
    """The method with its entries in tiers of `precisions` (16: not quantised), equally many in each."""
    shares = torch.tensor(method.budget._ratios)
    tiers = [
        TierBudget(Precision(*bits), PerHead((shares * (at + 1) / len(precisions)).tolist()))
        for at, bits in enumerate(precisions)
    ]
    return replace(method, tiers=tuple(tiers))


def attend_without_restoring(backend, call):
    """`call()`, which must not restore entries, on a backend that is chosen as "auto" would choose it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_chosen", lambda *args: backend)
        patch.setattr(TieredStore, "restore", None)
        return call()


def assert_steps(store, group, steps, backend):
    """Steps of one and more tokens over a tiered store, and its compressed entries alone, against restored ones."""
    dtype, device, (batch, heads) = store.dtype, store.restore().k.device, store.lens.shape
    width, value_width = (x.shape[1] for x in store.restore().pack())
    scale = width**-0.5
    for rows in steps:
        shapes = ((heads * group, width), (heads, width), (heads, value_width))
        # As models give them: heads behind tokens.
        query, key, value = (torch.randn(batch, rows, *x, device=device).to(dtype).transpose(1, 2) for x in shapes)
        before = TieredPools.of(store.restore())
        out = attend_without_restoring(backend, lambda new=(query, key, value): store.extend(*new, scale))
        assert_near(out, before.reference(query, scale, (key, value)), dtype)
        assert out.dtype == dtype
    out, lse = attend_without_restoring(backend, lambda: store.attend_compressed(query, scale))
    compressed = TieredPools.of(store.restore(with_appended=False))
    exact, exact_lse = compressed.reference(query, scale, causal=False, lse=True)
    assert_near(out, exact, dtype)
    seen = exact_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert_near(lse[seen], exact_lse[seen], dtype)


def assert_equals_reference(pools, group, rows, scale, backend="triton"):
    """Attention over tiers, causal and not, with its log-sum-exp, and a step that appends."""
    k_pool, v_pool, starts, lens, *_ = pools.kv
    (batch, heads), dtype = lens.shape, k_pool.dtype
    query, key, value = (
        torch.randn(batch, rows, *shape).to(dtype).transpose(1, 2)
        for shape in ((group * heads, k_pool.shape[1]), (heads, k_pool.shape[1]), (heads, v_pool.shape[1]))
    )
    for causal in (False, True) if int(lens.min()) >= rows else (False,):
        out, lse = ragged_attention(query, pools.kv, scale, backend, causal=causal, lse=True)
        exact, exact_lse = pools.reference(query, scale, causal=causal, lse=True)
        assert out.dtype == dtype
        assert_near(out, exact, dtype)
        seen = exact_lse > -torch.inf
        assert torch.equal(lse > -torch.inf, seen)
        assert_near(lse[seen], exact_lse[seen], dtype)
    exact = pools.reference(query, scale, (key, value))
    longer, (first, counts) = lens + rows, ((starts.long() + lens).cpu(), torch.full_like(lens, rows).long().cpu())
    places = slot_indices(first, counts, lens.device)
    out = append_and_attend(query, key, value, pools.kv, scale, backend)
    assert_near(out, exact, dtype)
    assert torch.equal(lens, longer)
    for pool, new in ((k_pool, key), (v_pool, value)):
        assert torch.equal(pool[places], new.flatten(0, 2))


def assert_near(ours, exact, dtype, factor=16):
    """Within some roundings of the largest output, or of 1."""
    exact = torch.nan_to_num(exact, nan=0.0)  # of spans without entries
    allowed = factor * torch.finfo(dtype).eps * max(1.0, float(exact.abs().max())) if exact.numel() else 0.0
    error = float((ours - exact).abs().max()) if exact.numel() else 0.0
    assert error <= allowed, (error, allowed)
