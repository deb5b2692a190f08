"""Random pools of the ragged cache, plain and with quantised tiers, for the tests of its kernels."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lkv.cache.ragged_store import RaggedStore, slot_indices
from lkv.cache.tiered_store import TieredStore
from lkv.cache.tiers import TierSplit, code_width, dequantize, rotation
from lkv.kernels import FP8
from lkv.kernels.ragged_attention import Basis, QuantizedKV, RaggedKV, api, append_and_attend, ragged_attention
from lkv.methods.base import TierBudget
from lkv.methods.budgets import PerHead
from lkv.methods.targets import UNQUANTIZED, Precision

# (key_bits, value_bits) of each tier.
TIERS = (((8, 8), (4, 4)), ((8, 4), (4, 3)), ((3, 3),), ((3, 8), (8, 3)), ((FP8, FP8), (4, FP8)))


def poison_buffers(monkeypatch):
    """Fill every new buffer that a kernel asks for with NaN."""
    plain = torch.Tensor.new_empty

    def new_empty(self, *args, **kwargs):
        made = plain(self, *args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


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
        """Attention over the entries as the model knows them, and the `new` ones [B, H, n, .] behind each span's."""
        lens = self.kv.lens.long()
        sides = [list(side.split(lens.flatten().tolist())) for side in (self.key, self.value)]
        if self.kv.basis is not None:
            mean, factor = (x.double().flatten(0, 1) for x in self.kv.basis[:2])
            k_rotation, v_rotation = (x.double().mT for x in self.kv.basis[2:])
            sides[0] = [k @ k_rotation * factor[span] + mean[span] for span, k in enumerate(sides[0])]
            sides[1] = [v @ v_rotation for v in sides[1]]
        if new is not None:
            ends = ((*x.flatten(0, 1).double(),) for x in new)
            sides = [[torch.cat(pair) for pair in zip(*both, strict=True)] for both in zip(sides, ends, strict=True)]
            lens = lens + new[0].shape[2]
        starts = (lens.flatten().cumsum(0) - lens.flatten()).view_as(lens)
        packed = RaggedKV(*(torch.cat(side) for side in sides), starts, lens)
        return ragged_attention(query.double(), packed, scale, "reference", **options)


def random_basis(lens, dim, value_dim):
    """Coordinates for the heads of `lens` [B, H]."""
    rotations = (rotation(n, torch.float32, lens.device) for n in (dim, value_dim))
    return Basis(torch.randn(*lens.shape, dim), torch.rand(*lens.shape, dim) * 2 + 0.3, *rotations)


def coded_pools(lens, bits, slack, dim, value_dim, dtype, around=1, has_basis=False, value_spread=1.0):
    """Random codes and entries: `lens` [tiers + 1, B, H] of each tier of `bits`, then of those that are not quantised.

    Norms of v are between 1 / `value_spread` and `value_spread`, about; those of single entries are 0.

    The slack of the pools is NaN, and so are the norms of entries of no span, of which `around` lie before and behind
    those of every tier.
    """
    lens = torch.as_tensor(lens)
    *pools, starts, _ = pool_of(lens[-1].tolist(), slack, dim, value_dim, dtype)[:4]
    # k and v in float64, [tiers + 1][spans] of each.
    sides, quantized = ([], []), []
    for counts, pair in zip(lens, bits, strict=False):
        flat, entries = counts.flatten(), int(counts.sum()) + 2 * around
        tables = torch.stack([counts, (flat.cumsum(0) - flat).view_as(counts) + around]).int()
        tensors = []
        for side, size, number in zip(sides, (dim, value_dim), pair, strict=True):
            norms = torch.rand(entries) + 0.5
            if value_spread > 1 and side is sides[1]:
                norms *= value_spread ** (2 * torch.rand(entries) - 1) * (torch.rand(entries) < 0.9)
            norms[:around] = norms[entries - around :] = torch.nan
            codes = torch.randint(256, (entries, code_width(number, size)), dtype=torch.uint8)
            tensors += [codes, norms.bfloat16()]
            restored = dequantize(*tensors[-2:], number, torch.float64)
            side.append(restored[around : entries - around].split(flat.tolist()))
        quantized.append(QuantizedKV(*tensors, tables, *pair))
    places = list(zip(starts.flatten().tolist(), lens[-1].flatten().tolist(), strict=True))
    for side, pool in zip(sides, pools, strict=True):
        side.append([pool[start : start + count].double() for start, count in places])
    key, value = (torch.cat([part for span in zip(*side, strict=True) for part in span]) for side in sides)
    starts, total = starts - lens[:-1].sum(0).int(), lens.sum(0).int()
    basis = random_basis(total, dim, value_dim) if has_basis else None
    return TieredPools(RaggedKV(*pools, starts, total, tuple(quantized), basis), key, value)


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
    split = TierSplit((UNQUANTIZED, *(Precision(*pair) for pair in bits)), counts, numbers.argsort(stable=True))
    return TieredStore.from_ragged(store, split, slack, [])


def in_tiers(method, *precisions):
    """The method with its entries in tiers of `precisions`, best first, equally many in each."""
    shares = torch.tensor(method.budget._ratios)
    tiers = [
        TierBudget(precision, PerHead((shares * (at + 1) / len(precisions)).tolist()))
        for at, precision in enumerate(precisions)
    ]
    return replace(method, tiers=tuple(tiers))


def attend_without_restoring(backend, call):
    """`call()`, which must not restore entries, on a backend that is chosen as "auto" would choose it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_available_backend", lambda *args: backend)
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


def assert_attention(q, kv, scale, backend="triton", causal=True, **options):
    """Attention over pools alone, with and without its log-sum-exp."""
    wide = kv._replace(k_pool=kv.k_pool.double(), v_pool=kv.v_pool.double())
    exact, exact_lse = ragged_attention(q.double(), wide, scale, "reference", causal=causal, lse=True, **options)
    out, lse = ragged_attention(q, kv, scale, backend, causal=causal, lse=True, **options)
    seen = exact_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen) and not out[~seen].any()
    assert_near(lse[seen], exact_lse[seen], q.dtype, 32)
    for found in (out, ragged_attention(q, kv, scale, backend, causal=causal, **options)):
        assert found.dtype == q.dtype
        assert_near(found, exact, q.dtype, 32 if q.dtype == torch.float32 else 4)


def assert_equals_reference(pools, group, rows, scale, backend="triton", **options):
    """Attention over tiers, causal and not, with its log-sum-exp, and a step that appends."""
    kv, (batch, heads), dtype = pools.kv, pools.kv.lens.shape, pools.kv.k_pool.dtype
    # As models give them: heads behind tokens.
    query, key, value = (
        torch.randn(batch, rows, *shape).to(dtype).transpose(1, 2)
        for shape in ((group * heads, kv.k_pool.shape[1]), (heads, kv.k_pool.shape[1]), (heads, kv.v_pool.shape[1]))
    )
    for causal in (False, True) if int(kv.lens.min()) >= rows else (False,):
        out, lse = ragged_attention(query, kv, scale, backend, causal=causal, lse=True, **options)
        exact, exact_lse = pools.reference(query, scale, causal=causal, lse=True, **options)
        seen = exact_lse > -torch.inf
        assert out.dtype == dtype and torch.equal(lse > -torch.inf, seen) and not out[~seen].any()
        assert_near(out, exact, dtype)
        assert_near(lse[seen], exact_lse[seen], dtype)
    exact, longer = pools.reference(query, scale, (key, value), **options), kv.lens + rows
    ends = (kv.starts.long() + kv.lens).cpu()
    out = append_and_attend(query, key, value, kv, scale, backend, **options)
    assert_near(out, exact, dtype)
    assert torch.equal(kv.lens, longer)
    places = slot_indices(ends, torch.full_like(ends, rows), kv.lens.device)
    stored = (key, value) if kv.basis is None else kv.basis.enter_entries(key.double(), value.double())
    for pool, new in zip(kv[:2], stored, strict=True):
        if kv.basis is None:
            assert torch.equal(pool[places], new.flatten(0, 2))
        else:
            assert_near(pool[places], new.flatten(0, 2), dtype)


def assert_near(ours, exact, dtype, factor=16):
    """Within some roundings of the largest output, or of 1."""
    exact = torch.nan_to_num(exact, nan=0.0)  # of spans without entries
    allowed = factor * torch.finfo(dtype).eps * max(1.0, float(exact.abs().max())) if exact.numel() else 0.0
    error = float((ours - exact).abs().max()) if exact.numel() else 0.0
    assert error <= allowed, (error, allowed)
