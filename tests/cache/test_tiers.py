"""Codes and the coordinates of keys against a float64 oracle."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lkv.cache.tiers import KeyBasis, _join, _levels, _split, are_invalid, check_norms, dequantize, quantize, rotation
from lkv.errors import CacheError
from lkv.kernels import FP8, QUANTIZED_BITS
from tests import dense

BITS = QUANTIZED_BITS
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Mean squared errors for a standard normal variable: ours, and the least that so many levels allow.
ERRORS = {8: (5.1e-5, 4.1e-5), FP8: (7.05e-4, 4.1e-5), 4: (0.00969, 0.00950), 3: (0.0346, 0.0345)}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layout_of(codes: list[int], bits: int) -> bytes:
    """The bytes of one entry, bit by bit as the file format has them."""
    d = len(codes)
    if abs(bits) == 8:
        return bytes(codes)
    if bits == 4:
        return bytes(codes[j] + 16 * codes[j + d // 2] for j in range(d // 2))
    words = [sum(codes[j + part * d // 4] << 3 * part for part in range(4)) for j in range(d // 4)]
    return bytes(
        [word % 256 for word in words] + [words[j] // 256 + 16 * (words[j + d // 8] // 256) for j in range(d // 8)]
    )


@pytest.mark.parametrize("bits", BITS)
def test_the_layout_of_codes_is_that_of_the_file_format(bits):
    codes = torch.randint(2 ** abs(bits), (5, 40), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    assert [bytes(row.tolist()) for row in _join(codes, bits)] == [layout_of(row.tolist(), bits) for row in codes]


@pytest.mark.parametrize("bits", BITS)
def test_the_errors_of_levels_are_those_stated(bits):
    """Integrated over the density of a normal variable; the least possible ones by Lloyd's iteration."""
    x = torch.linspace(-7, 7, 40_001, dtype=torch.float64)
    weight = torch.exp(-(x**2) / 2)
    weight /= weight.sum()

    def error(levels: torch.Tensor) -> float:
        cells = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
        return float((weight * (x - levels[cells]) ** 2).sum())

    stated, least = ERRORS[bits]
    levels = dense.levels_of(bits).sort().values
    assert error(levels) == pytest.approx(stated, rel=0.02)
    if abs(bits) < 8:
        for _ in range(200):
            cells = torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)
            mass = torch.zeros_like(levels).index_add(0, cells, weight)
            levels = torch.zeros_like(levels).index_add(0, cells, weight * x) / mass
        assert error(levels) == pytest.approx(least, rel=0.01)


@pytest.mark.parametrize("bits", BITS)
def test_every_code_stands_for_its_level(bits):
    levels = dense.levels_of(bits)
    torch.testing.assert_close(_levels(bits, torch.device("cpu")).double(), levels, rtol=1e-6, atol=0)
    if bits == FP8:
        numbers = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
        assert torch.equal(numbers.isnan().nonzero()[:, 0], torch.tensor([127, 255]))
        assert torch.equal(numbers.nan_to_num(480.0)[:255] / 16, levels[:255])


def test_fp8_rounds_as_pytorch_does():
    """Largest values too: one channel alone has the norm of all."""
    values = normal(200, 256, dtype=torch.float32)
    values[0, 1:], values[1, ::2] = 0, 0
    codes, _ = quantize(values, FP8)
    expected = (values / values.square().mean(-1, keepdim=True).sqrt() * 16).to(torch.float8_e4m3fn)
    # Ties are rounded to even there.
    assert (codes != expected.view(torch.uint8)).sum() <= 3 and codes[0, 0].item() in (0x78, 0xF8)


@given(
    seed=st.integers(0, 999),
    bits=st.sampled_from(BITS),
    width=st.sampled_from([8, 24, 64]),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
)
def test_each_value_takes_its_nearest_level_and_each_entry_its_norm(seed, bits, width, dtype, size):
    values = (normal(12, width, seed=seed) * size).to(dtype)
    codes, norms = quantize(values, bits)
    expected, nearest, right_norms, gap = dense.in_bits(values, bits)
    if gap < 1e-5:  # float32 may decide otherwise
        return
    assert torch.equal(_split(codes, bits).long(), nearest)
    off = (norms.double() - right_norms.double()).abs() / right_norms.double()
    assert float(off.max()) <= 2**-7 and int((off > 0).sum()) <= 1  # one norm between two bfloat16 at most
    back = dequantize(codes, norms, bits, dtype)
    assert back.dtype == dtype
    levels = expected / right_norms.double()[:, None]
    resolution = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(
        back.double(), levels * norms.double()[:, None], rtol=resolution, atol=1e-6 * size + 6e-8
    )


@pytest.mark.parametrize("bits", BITS)
def test_entries_are_coded_by_themselves(bits):
    values = normal(30, 64, dtype=torch.float32)
    values[7], values[8] = 0.0, 1e-25
    codes, norms = quantize(values, bits)
    chosen = torch.tensor([8, 3, 3, 29, 7])
    for whole, part in zip((codes, norms), quantize(values[chosen], bits), strict=True):
        assert torch.equal(whole[chosen], part)
    back = dequantize(codes, norms, bits, torch.float32)
    assert not back[7].any() and float(back[8].abs().max()) < 1e-20


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float16, 65504.0), (torch.bfloat16, 9e17), (torch.float32, 9e17)]
)
def test_huge_values_stay_finite(bits, dtype, largest):
    values = torch.full((3, 8), largest, dtype=dtype)
    values[1, ::2] *= -1
    values[2, 1:] = 0
    back = dequantize(*quantize(values, bits), bits, dtype)
    assert bool(back.isfinite().all())
    torch.testing.assert_close(back[:2].float(), values[:2].float(), rtol=0.01, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e19])
def test_values_that_cannot_be_stored_are_refused(bad):
    values = normal(5, 8, dtype=torch.float32)
    values[3, 2] = bad
    with pytest.raises(CacheError, match="not finite or too large: they cannot be quantised"):
        check_norms([are_invalid(quantize(values, 8)[1], torch.ones(2).bfloat16())])


@pytest.mark.parametrize("width", [8, 16, 24, 40, 64, 80, 96, 128, 256])
def test_the_rotation_is_orthogonal_and_mixes_all_channels(width):
    matrix = rotation(width, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(matrix, dense.rotation(width), atol=1e-12, rtol=0)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width, dtype=torch.float64), atol=1e-12, rtol=0)
    # One channel's outlier is spread over all of them but for the odd factor of the width.
    assert float(matrix.abs().max()) <= math.sqrt(2 / width) + 1e-12


@given(
    seed=st.integers(0, 99),
    width=st.sampled_from([8, 40]),
    lens=st.lists(st.integers(0, 9), min_size=2, max_size=2),
    dtype=st.sampled_from(DTYPES),
)
def test_the_basis_of_keys_is_left_as_it_was_entered(seed, width, lens, dtype):
    key = (normal(sum(lens), width, seed=seed) * torch.linspace(0.01, 9, width) + 3).to(dtype)
    heads = torch.arange(2).repeat_interleave(torch.tensor(lens))
    basis = KeyBasis.of(key, heads, torch.Size((1, 2)))
    wide = torch.float64
    inside = basis.enter(key.to(wide), heads)
    torch.testing.assert_close(basis.leave(inside, heads), key.to(wide), atol=1e-9, rtol=1e-9)
    for head, part in enumerate(key.split(lens)):
        mean, scale = dense.basis_of(part, dtype)
        torch.testing.assert_close(basis.tensor[0, 0, head].to(wide), mean, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(basis.tensor[1, 0, head].to(wide), scale, atol=1e-2, rtol=1e-2)
        # q k = q' k' + q mean, with q' = q scale R: what attention over codes relies on.
        mean, scale = basis.tensor[:, 0, head].to(wide)
        query = normal(3, width, seed=seed + 1)
        products = (query * scale) @ dense.rotation(width) @ inside[heads == head].T + (query @ mean)[:, None]
        torch.testing.assert_close(products, query @ part.to(wide).T, atol=1e-7, rtol=1e-7)


def test_a_channel_that_never_changes_is_kept_exactly():
    key = normal(50, 8)
    key[:, 3], key[:, 5] = 2.0, 0.0
    heads = torch.zeros(50, dtype=torch.long)
    basis = KeyBasis.of(key, heads, torch.Size((1, 1)))
    assert bool(basis.tensor.isfinite().all()) and float(basis.tensor[1].min()) > 0
    back = basis.leave(basis.enter(key, heads), heads)
    torch.testing.assert_close(back, key, atol=1e-9, rtol=0)
