"""Random pools of the ragged cache, plain and in 8 or 4 bits, for the tests of its kernels."""

import torch

from lkv.cache.quantization import QuantizedPool
from lkv.cache.store import QuantizedStore, RaggedStore
from lkv.kernels.ragged_attention import append_and_attend, ragged_attention


def pool_of(lengths, slack, dim, value_dim, dtype):
    """Random spans in pools whose slack is NaN."""
    lens = torch.tensor(lengths, dtype=torch.int32)
    ends = (lens.flatten() + slack).cumsum(0)
    starts = (ends - lens.flatten() - slack).view_as(lens).int()
    pools = [torch.full((int(ends[-1]), size), torch.nan, dtype=dtype) for size in (dim, value_dim)]
    for start, length in zip(starts.flatten().tolist(), lens.flatten().tolist(), strict=True):
        for pool in pools:
            pool[start : start + length] = torch.randn(length, pool.shape[1]).to(dtype)
    return *pools, starts, lens


def quantised(lengths, room, dim, value_dim, dtype, bits, group=32, device="cpu"):
    """Random spans in `bits` bits, with room whose entries are NaN."""
    lens = torch.tensor(lengths, device="cpu")
    draw = [torch.randn(int(lens.sum()), size, device=device).to(dtype) for size in (dim, value_dim)]
    # Channels of k with outliers, as models have them.
    draw[0] *= torch.linspace(0.2, 5, dim, device=device).to(dtype)
    spans = RaggedStore(lens, room, *draw)
    spans.unpack(*draw)
    held = QuantizedStore.quantize(spans, bits)
    if group == held.key.group:
        return held
    key, value = (pool.unpack() for pool in (held.key, held.value))
    key = QuantizedPool.pack(key, bits, group, lens.flatten())
    return QuantizedStore(lens, key, QuantizedPool.pack(value, bits, group), held.appended)


def exact(held, query, new, scale):
    """Attention in float64 over what the codes stand for, the tails and the `new` k, v [B, H, n, .]."""
    whole = [pool.double() for pool in held.attention_view()[:2]]
    lens = held.lens + held.appended_tokens
    starts = (lens.flatten().cumsum(0) - lens.flatten()).view_as(lens)
    pools = []
    for side, entries in zip(whole, new, strict=True):
        rows = [
            torch.cat([side[int(starts[b, h]) : int(starts[b, h] + lens[b, h])], entries[b, h].double()])
            for b in range(lens.shape[0])
            for h in range(lens.shape[1])
        ]
        pools.append(torch.cat(rows))
    longer = lens + new[0].shape[2]
    begins = (longer.flatten().cumsum(0) - longer.flatten()).view_as(longer)
    return ragged_attention(query.double(), *pools, begins, longer, scale, "reference")


def assert_exact(held, group, rows, scale, backend):
    """One step of `extend` over the codes of `held` against `exact`; it counts what was appended."""
    dtype, device, (batch, heads) = held.dtype, held.appended.k.device, held.lens.shape
    query = torch.randn(batch, rows, heads * group, held.key.width, device=device).to(dtype).transpose(1, 2)
    new = [torch.randn(batch, rows, heads, n, device=device).to(dtype).transpose(1, 2) for n in
           (held.key.width, held.value.width)]  # fmt: skip
    right = exact(held, query, new, scale)
    (*pools, starts, lens), codes = held.append_view(), held.quantized_kv()
    before = lens.clone()
    out = append_and_attend(query, *new, *pools, starts, lens, scale, backend, quantized=codes)
    assert torch.equal(lens, before + rows)
    held.count_appended(rows)
    # Restored values are rounded to the dtype once more than the oracle's; bfloat16 is cut in the interpreter.
    allowed = 12 * torch.finfo(dtype).eps * right.abs().max().clamp(min=1)
    assert out.dtype == dtype and (out - right).abs().max() <= allowed
