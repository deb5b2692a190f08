"""Attention over tiers in memory that ends where the tensors do: any read or write beyond them ends the process.

python -m tests.kernels.guarded cpp|triton    (prints "ok"; without a GPU, with TRITON_INTERPRET=1 for triton)
"""

import ctypes
import itertools
import mmap
import sys
from contextlib import nullcontext

import torch
from torch import Tensor

from lkv.kernels.ragged_attention import QuantizedKV, RaggedKV, append_and_attend, ragged_attention
from tests.kernels.pools import TIERS, assert_near, coded_pools, split_randomly
from tests.kernels.ptx import ptx_interpreted

_MAPS = []


def guarded(x: Tensor, at_end: bool) -> Tensor:
    """A copy of `x` that ends, or begins, at a page that cannot be read."""
    page, size = mmap.PAGESIZE, x.numel() * x.itemsize
    pages = -(-size // page)
    area = mmap.mmap(-1, (pages + 2) * page)
    _MAPS.append(area)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    for guard in (address, address + (pages + 1) * page):
        assert libc.mprotect(ctypes.c_void_p(guard), page, 0) == 0
    offset = page + (pages * page - size if at_end else 0)
    if not size:
        return x
    return torch.frombuffer(area, dtype=torch.uint8, count=size, offset=offset).view(x.dtype).view(x.shape).copy_(x)


def check_codes_of_every_width() -> None:
    """The compiled kernel, over codes alone: each number of bits, head sizes, and few or many entries and rows."""
    for dim, bits, entries in itertools.product((8, 32, 64, 80, 96, 128, 192, 256), (8, 4, 3), (1, 7, 65)):
        codes = guarded(torch.randint(256, (entries, dim * bits // 8), dtype=torch.uint8), at_end=True)
        norms = guarded(torch.ones(entries, dtype=torch.bfloat16), at_end=True)
        tables = torch.tensor([[[entries]], [[0]]], dtype=torch.int32)
        part = QuantizedKV(codes, norms, codes, norms, tables, bits, bits)
        pool, lens = torch.zeros(0, dim), torch.full((1, 1), entries, dtype=torch.int32)
        kv = RaggedKV(pool, pool, lens * 0, lens, [part])
        for rows in (1, 3, 6):
            q = torch.randn(1, rows, 1, dim)
            out = ragged_attention(q, kv, 0.1, "cpp", causal=False)
            assert out.isfinite().all()


def main(backend: str) -> None:
    torch.manual_seed(0)
    shapes = itertools.cycle([(8, 8), (96, 40), (64, 128)])
    for (tiers, dtype), at_end in itertools.product(
        itertools.product(TIERS, (torch.float32, torch.bfloat16)), (True, False)
    ):
        dim, value_dim = next(shapes)
        pools = coded_pools(split_randomly([[70, 3]], len(tiers)), tiers, 1, dim, value_dim, dtype, around=0)
        query, key, value = (torch.randn(1, heads, 1, n) for heads, n in ((4, dim), (2, dim), (2, value_dim)))
        new = [guarded(x.to(dtype), at_end) for x in (query, key, value)]
        quantized = [type(t)(*(guarded(x, at_end) for x in t[:5]), *t[5:]) for t in pools.kv.quantized]
        kv = RaggedKV(*(guarded(x, at_end) for x in pools.kv[:4]), quantized)
        out = ragged_attention(new[0], kv, 0.2, backend, causal=False)
        assert_near(out, pools.reference(new[0], 0.2, causal=False), dtype)
        out = append_and_attend(*new, kv, 0.2, backend)
        assert_near(out, pools.reference(new[0], 0.2, new[1:]), dtype)
    if backend == "cpp":
        check_codes_of_every_width()
    print("ok")


if __name__ == "__main__":
    with ptx_interpreted() if sys.argv[1] == "triton" else nullcontext():
        main(sys.argv[1])
