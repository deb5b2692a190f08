"""Codes restored as a GPU restores them, by PTX in the interpreter, against the levels of the format."""

# ruff: noqa: N803 (constants are in capitals)
import pytest
import torch

from lkv.cache.tiers import _join
from lkv.kernels import FP8, QUANTIZED_BITS
from tests import dense

triton_helpers = pytest.importorskip("lkv.kernels.triton_helpers")
if not triton_helpers.is_interpreted():
    pytest.skip("the PTX is emulated in the interpreter alone", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from lkv.kernels.ragged_attention import tier_kernels  # noqa: E402
from lkv.kernels.ragged_attention.restore_ptx import CODES, FACTORS  # noqa: E402
from tests.kernels import ptx  # noqa: E402


@triton.jit
def restoring_kernel(
    codes, out, DIM: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr, ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store what codes are restored to, at their channels."""
    entry, element = tl.arange(0, ENTRIES)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (element < DIM // 8) & (entry >= 0)
    restored = tier_kernels._restore(codes, entry, element, inside, 0, DIM, BITS, TYPE, PTX)
    for part in tl.static_range(8):
        at = out + entry * DIM + tier_kernels._channels(element, part, DIM, BITS)
        tl.store(at, restored[part].to(tl.float32), mask=inside)


@pytest.mark.parametrize("bits", QUANTIZED_BITS)
@pytest.mark.parametrize("dim", [16, 80, 96])
@pytest.mark.parametrize("uses_ptx", [True, False])
def test_every_code_at_every_channel(bits, dim, uses_ptx):
    """Each entry has other codes in its channels, so that all codes come to all of them."""
    count = 2 ** abs(bits)
    codes = (torch.arange(count)[:, None] + torch.arange(dim)) % count
    packed, out = _join(codes.to(torch.uint8), bits), torch.full(codes.shape, torch.nan)
    type_ = tl.float16 if uses_ptx else tl.float32
    block = triton.next_power_of_2(dim // 8)
    restoring_kernel[(1,)](packed, out, dim, bits, type_, uses_ptx, len(codes), block)
    levels = dense.levels_of(bits)[codes]
    found = out.double() * (FACTORS[bits] if uses_ptx else 1.0)
    # Three roundings of a level, and one of the ratio of its coefficients; none of numbers in FP8.
    eps = 0.0 if bits == FP8 else torch.finfo(torch.float16 if uses_ptx else torch.float32).eps
    assert ((found - levels).abs() <= 2 * eps * levels.abs()).all()


def test_instructions_that_are_not_known_are_refused():
    """Else the emulation could pass over what a GPU executes."""
    words = [torch.arange(4).numpy().astype("uint32")] * 2
    assert len(ptx.run(CODES[4], words, 8)) == 8
    with pytest.raises(ValueError, match="xor"):
        ptx.run("{ xor.b32 $0, $8, $9; }", words, 8)
