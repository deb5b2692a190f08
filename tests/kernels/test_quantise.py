"""The kernels that quantise entries into tiers against PyTorch's operators and float64, in Triton's interpreter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
import lkv.cache.tier_writer as tier_writer
import lkv.kernels.selection.triton as selection
from lkv.cache.ragged_store import RaggedStore
from lkv.cache.tier_writer import TierWriter, head_numbers
from lkv.cache.tiers import KeyBasis, TierSplit, _levels, _split, rotation
from lkv.kernels import FP8, triton_helpers
from lkv.methods.targets import UNQUANTIZED, Precision
from tests import dense

if not triton_helpers.is_interpreted() and not torch.cuda.is_available():
    pytest.skip("TRITON_INTERPRET=0 was set, and there is no GPU", allow_module_level=True)
DEVICE = "cpu" if triton_helpers.is_interpreted() else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TIERS = [
    (UNQUANTIZED, Precision(8, 4), Precision(4, 3)),
    (Precision(8, 8), Precision(4, 4)),
    (Precision(FP8, 3),),
    (UNQUANTIZED, Precision(3, FP8)),
]
# Between two levels, float32 may decide otherwise: in units of an entry's norm.
GAP = 3e-6


def random_split(lens, precisions, seed):
    """A random tier for each entry, and the order of entries by tier."""
    draw = torch.Generator().manual_seed(seed)
    tiers = torch.randint(len(precisions), (int(lens.sum()),), generator=draw)
    counts = [torch.bincount(part, minlength=len(precisions)) for part in tiers.split(lens.flatten().tolist())]
    counts = torch.stack(counts, 1).view(len(precisions), *lens.shape)
    order = tiers.argsort(stable=True).int().to(DEVICE) if len(precisions) > 1 else None
    return TierSplit(tuple(precisions), counts, order).without_empty()


def write(key, value, lens, split, free_slots, has_kernels, basis=None, is_centred=True):
    """What is written: the basis, codes of k and v, the pools of other entries, and whether a norm is invalid."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_writer, "kernels_for", lambda *_: selection if has_kernels else None)
        rest_lens = split.lens[0] if UNQUANTIZED in split.precisions else torch.zeros_like(lens)
        rest = RaggedStore(rest_lens, free_slots, key, value)
        writer = TierWriter(split, lens, rest)
        basis, codes = writer.write_keys(key, basis, is_centred)
        return basis, codes, writer.write_values(value), rest, bool(writer.is_invalid())


def assert_codes(found, expected, exact, bits):
    """Codes and norms of a tier as PyTorch's operators write them, but where `exact` [n, d] is between two levels."""
    (codes, norms), (right_codes, right_norms) = found, expected
    scaled = exact / exact.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-300)
    levels = _levels(bits, codes.device).double().sort().values
    edges = (levels[1:] + levels[:-1]) / 2
    distance = (scaled[..., None] - edges).abs().amin(-1)
    is_other = _split(codes, bits) != _split(right_codes, bits)
    assert float(distance[is_other].max() if bool(is_other.any()) else 0) < GAP
    # A norm moves with a code; the interpreter cuts bfloat16 off.
    steps = (norms.view(torch.int16) - right_norms.view(torch.int16)).abs()
    assert int(steps.max()) <= 1 + 2 * int(is_other.any())


def assert_written(key, value, lens, split, free_slots=2, is_centred=True):
    """By kernels as by PyTorch's operators: the basis to a rounding, and in the kernels' basis equal codes."""
    basis, *found = write(key, value, lens, split, free_slots, True, None, is_centred)
    heads = head_numbers(lens, key.device)
    right = KeyBasis.of(key, heads, lens.shape, is_centred)
    assert basis.tensor.dtype == right.tensor.dtype
    precise = 2**-10 if basis.tensor.dtype == torch.float16 else 2**-7
    spread = right.tensor[1].double().square().amax() if right.tensor.numel() else 0.0
    torch.testing.assert_close(basis.tensor.double(), right.tensor.double(), rtol=precise, atol=1e-5 * float(spread))
    _, *expected = write(key, value, lens, split, free_slots, False, basis)
    exact = [basis.enter(key.double(), heads), value.double() @ rotation(value.shape[1], torch.float64, value.device)]
    for side, rotated in enumerate(exact):
        assert found[side].keys() == expected[side].keys()
        for number, entries in enumerate(split.entries()):
            precision = split.precisions[number]
            bits = (precision.key_bits, precision.value_bits)[side]
            if number in found[side]:
                assert_codes(found[side][number], expected[side][number], rotated[entries], bits)
    for pool, other in zip(found[2].pack(), expected[2].pack(), strict=True):
        # The interpreter cuts bfloat16 off.
        most = float(other.abs().amax()) if other.numel() else 0.0
        torch.testing.assert_close(pool, other, rtol=2 * torch.finfo(pool.dtype).eps, atol=1e-6 * most)
    assert found[3] == expected[3]
    return found


def entries_of(lens, dim, value_dim, dtype, seed):
    """k with a mean and channels of unequal spread, and v, one head after another."""
    draw = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(int(lens.sum()), size, generator=draw) for size in (dim, value_dim))
    return (key * torch.linspace(0.1, 4, dim) + 3).to(DEVICE, dtype), value.to(DEVICE, dtype)


SHAPES = [(64, 64), (80, 96), (128, 128), (96, 80), (256, 24), (8, 256)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("precisions", TIERS, ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_pytorch(precisions, dim, value_dim, dtype, monkeypatch):
    """Of heads without entries, with one, and with more than two programs take at once."""
    monkeypatch.setattr(selection, "_MULTIPROCESSORS_WITHOUT_GPU", 12 * len(precisions))
    lens = torch.tensor([[0, 1, 2 * 4096 // max(dim, value_dim) + 9], [7, 2, 0]])
    key, value = entries_of(lens, dim, value_dim, dtype, 0)
    assert_written(key, value, lens, random_split(lens, precisions, 0))


@pytest.mark.slow
@settings(max_examples=12)
@given(
    seed=st.integers(0, 999),
    lens=st.lists(st.integers(0, 20), min_size=2, max_size=2),
    dim=st.sampled_from([8, 24, 40]),
    dtype=st.sampled_from(DTYPES),
    precisions=st.sampled_from(TIERS),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
    is_centred=st.booleans(),
)
def test_any_entries_are_written_as_by_pytorch(seed, lens, dim, dtype, precisions, size, is_centred):
    lens = torch.tensor([lens])
    key, value = (x * size for x in entries_of(lens, dim, dim, dtype, seed))
    if len(key):
        key[0], value[-1] = 0.0, 0.0
        assert_written(key, value, lens, random_split(lens, precisions, seed), seed % 3, is_centred)


@pytest.mark.parametrize("bits", [8, FP8, 4, 3])
def test_every_edge_between_two_levels_is_decided_as_by_pytorch(bits):
    """A hair below and above each edge: entries of two channels whose norm is 1."""
    levels = dense.levels_of(bits).sort().values
    edges = (levels[1:] + levels[:-1]) / 2
    width = 256 if bits == FP8 else 64
    for shift in (-1e-5, 1e-5):
        x = torch.zeros(len(edges), width, dtype=torch.float64, device="cpu")
        x[:, 0] = edges + shift
        x[:, 1] = (width - x[:, 0] ** 2).clamp(min=0).sqrt()
        # The kernel rotates it to `x`.
        value = (x @ rotation(width, torch.float64, x.device).mT).float().to(DEVICE)
        lens, split = torch.tensor([[len(x)]]), TierSplit((Precision(bits, bits),), torch.tensor([[[len(x)]]]))
        _, _, codes, _, _ = write(value, value, lens, split, 0, True)
        is_inside = x[:, 0].abs() < math.sqrt(width)
        found = _levels(bits, torch.device("cpu")).double()[_split(codes[0][0].cpu(), bits)[:, 0].long()]
        expected = levels[:-1] if shift < 0 else levels[1:]
        torch.testing.assert_close(found[is_inside], expected[is_inside], rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # by NumPy
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e19])
@pytest.mark.parametrize("side", [0, 1])
def test_values_that_cannot_be_stored_set_the_flag(bad, side):
    lens = torch.tensor([[9, 40]])
    split, pair = random_split(lens, TIERS[1], 0), list(entries_of(lens, 64, 64, torch.float32, 0))
    assert not write(*pair, lens, split, 0, True)[-1]
    pair[side][20, 3] = bad
    found, expected = (write(*pair, lens, split, 0, has_kernels)[-1] for has_kernels in (True, False))
    # The scale of k's channel makes 1e19 small enough.
    assert found == expected == ((side, bad) != (0, 1e19))


@pytest.mark.skipif(not triton_helpers.is_interpreted(), reason="TRITON_INTERPRET=0 was set")
def test_programs_neither_race_nor_stray(monkeypatch):
    from tests.kernels.interpreter import watched

    monkeypatch.setattr(selection, "_MULTIPROCESSORS_WITHOUT_GPU", 24)
    lens = torch.tensor([[0, 1, 300]])
    key, value = entries_of(lens, 40, 80, torch.bfloat16, 0)
    with watched(1) as traffic:
        write(key, value, lens, random_split(lens, TIERS[0], 0), 2, True)
    assert traffic.launches == ["measure_kernel", "quantise_kernel", "quantise_kernel"]
