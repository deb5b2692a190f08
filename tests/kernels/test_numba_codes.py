"""The compiled attention on a CPU over codes of 8 and 4 bits against attention in float64 over the restored values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lkv.errors import BackendError
from lkv.kernels.ragged_attention import append_and_attend
from tests.kernels.codes import assert_exact, exact, quantised

pytest.importorskip("torchao")
pytest.importorskip("numba")
from lkv.kernels.ragged_attention import numba as compiled

if reason := compiled.refusal(torch.device("cpu"), torch.float32, 64, 64):
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(params=[1, 2])
def threads(request, monkeypatch):
    """So many of PyTorch's threads, which share out whatever is there."""
    before = torch.get_num_threads()
    monkeypatch.setattr(compiled, "_LEAST_SHARED", 0)
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3).flatmap(
        lambda heads: st.lists(st.lists(st.integers(0, 150), min_size=heads, max_size=heads), min_size=1, max_size=2)
    ),
    st.sampled_from([8, 4]), st.sampled_from([16, 32, 64, 128]), st.integers(1, 3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([(32, 64), (64, 64), (96, 32), (160, 128)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 99),
)  # fmt: skip
def test_attention_over_codes_equals_that_over_what_they_stand_for(
    lengths, bits, group, heads, steps, dims, dtype, seed
):
    """Several steps of one and more tokens, so that there are tails as well; groups that end in the middle of a byte's
    half or go beyond the channels; spans without entries; two threads, so that slices begin within a group."""
    torch.manual_seed(seed)
    held = quantised(lengths, sum(steps), *dims, dtype, bits, group)
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_LEAST_SHARED", 0)
        torch.set_num_threads(1 + seed % 2)
        for rows in steps:
            assert_exact(held, heads, rows, dims[0] ** -0.5, "numba")
    torch.set_num_threads(before)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_spans_of_a_cache_take_it(bits, rows, threads, monkeypatch):
    """And restore nothing."""
    torch.manual_seed(bits)
    held = quantised([[70, 0], [1, 300]], 2 * rows, 64, 64, torch.float32, bits)
    for _ in range(2):
        query, key, value = (torch.randn(2, heads, rows, 64) for heads in (6, 2, 2))
        right = exact(held, query, (key, value), 0.125)
        with monkeypatch.context() as patch:
            patch.setattr(type(held), "attention_view", None)
            patch.setattr(type(held), "_attend_to_codes", None)
            out = held.extend(query, key, value, 0.125)
        torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)
    assert held.appended_tokens == 2 * rows


@pytest.mark.parametrize(
    ("field", "number"), [(0, -1), (0, 9), (1, -1), (1, 1), (2, -1), (2, 1)], ids=lambda number: str(number)
)
def test_tables_that_point_beyond_the_codes_are_refused(field, number):
    held = quantised([[8]], 1, 64, 64, torch.float32, 8)
    (*pools, starts, lens), codes = held.append_view(), held.quantized_kv()
    tables = codes.tables.clone()
    tables[field] = number
    new = [torch.zeros(1, 1, 1, 64)] * 2
    with pytest.raises(ValueError, match="beyond"):
        append_and_attend(new[0], *new, *pools, starts, lens, 1.0, "numba", quantized=codes._replace(tables=tables))


@pytest.mark.parametrize(
    ("bits", "dim", "change", "reason"),
    [
        (4, 3 * compiled.kernels.LANES, {}, "head sizes of .* at 4 bits"),
        (8, 64, {"group": 12}, "groups must be"),
        (8, 64, {"key_scale": torch.ones(1, 64)}, "bfloat16"),
        (8, 64, {"value_minimum": torch.zeros(8, 2, dtype=torch.float16)}, "of one dtype"),
        (8, 64, {"key": torch.zeros(64, 8, dtype=torch.uint8).t()}, "contiguous"),
    ],
)
def test_codes_that_it_cannot_read_are_named(bits, dim, change, reason):
    new = [torch.zeros(1, 1, 1, dim)] * 2
    held = quantised([[8]], 1, dim, dim, torch.float32, bits)
    (*pools, starts, lens), codes = held.append_view(), held.quantized_kv()
    with pytest.raises(BackendError, match=reason):
        append_and_attend(new[0], *new, *pools, starts, lens, 1.0, "numba", quantized=codes._replace(**change))
