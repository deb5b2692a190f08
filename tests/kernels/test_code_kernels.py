"""The Triton kernel over codes of 8 and 4 bits against attention in float64 over the restored values.

In Triton's interpreter on the CPU, or on a GPU where TRITON_INTERPRET=0 is set.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lkv.cache.quantization import QuantizedPool
from lkv.cache.quantized_store import QuantizedStore
from lkv.errors import BackendError
from lkv.kernels.ragged_attention import append_and_attend
from tests.kernels import codes as cases
from tests.kernels.codes import exact

pytest.importorskip("torchao")
launch = pytest.importorskip("lkv.kernels.ragged_attention.triton")
if not launch.interpreted() and not torch.cuda.is_available():
    pytest.skip("TRITON_INTERPRET=0 was set, and there is no GPU", allow_module_level=True)
DEVICE = "cpu" if launch.interpreted() else "cuda"
quantised = partial(cases.quantised, device=DEVICE)
assert_exact = partial(cases.assert_exact, backend="triton")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Every buffer that the kernels ask for comes full of NaN."""
    plain = torch.Tensor.new_empty

    def new_empty(self, *args, **kwargs):
        made = plain(self, *args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@settings(max_examples=25)
@given(
    st.integers(1, 3).flatmap(
        lambda heads: st.lists(st.lists(st.integers(0, 150), min_size=heads, max_size=heads), min_size=1, max_size=2)
    ),
    st.sampled_from([8, 4]), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from([(8, 8), (24, 40), (64, 64), (33, 7)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 99),
)  # fmt: skip
def test_attention_over_codes_equals_that_over_what_they_stand_for(lengths, bits, group, steps, dims, dtype, seed):
    """Several steps of one and more tokens, so that there are tails as well."""
    torch.manual_seed(seed)
    held = quantised(lengths, sum(steps), *dims, dtype, bits)
    for rows in steps:
        assert_exact(held, group, rows, dims[0] ** -0.5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_sizes(bits, dim):
    torch.manual_seed(dim)
    held = quantised([[1, 200]], 3, dim, dim, torch.bfloat16, bits)
    assert_exact(held, 2, 1, dim**-0.5)
    assert_exact(held, 2, 2, dim**-0.5)


@pytest.mark.parametrize("bits", [8, 4])
def test_slices_that_begin_within_a_group(bits, monkeypatch):
    torch.manual_seed(bits)
    monkeypatch.setattr(launch, "_PROGRAMS_WITHOUT_GPU", 40)
    monkeypatch.setattr(launch, "_MIN_SLICE", 2)
    launch._launch.cache_clear()
    held = quantised([[150, 20], [0, 97]], 9, 16, 8, torch.float32, bits)
    for rows in (1, 3, 5):
        assert_exact(held, 2, rows, 1.0)
    launch._launch.cache_clear()


def test_a_backend_without_codes_says_so():
    held = quantised([[5]], 1, 8, 8, torch.float32, 8)
    (*pools, starts, lens), codes = held.append_view(), held.quantized_kv()
    new = [torch.zeros(1, 1, 1, 8, device=DEVICE)] * 2
    with pytest.raises(BackendError, match="'loop' cannot run: it reads no codes"):
        append_and_attend(new[0], *new, *pools, starts, lens, 1.0, "loop", quantized=codes)


@pytest.mark.parametrize("groups", [(32, 16), (24, 24)])
def test_groups_that_the_kernel_cannot_take_are_restored(groups, monkeypatch):
    """As a file may hold them."""
    torch.manual_seed(0)
    held = quantised([[40, 3]], 2, 8, 8, torch.float32, 8)
    pools = [pool.unpack() for pool in (held.key, held.value)]
    key = QuantizedPool.pack(pools[0], 8, groups[0], [40, 3])
    held = QuantizedStore(held.lens, key, QuantizedPool.pack(pools[1], 8, groups[1]), held.appended)
    monkeypatch.setattr("lkv.cache.quantized_store.can_attend_quantized", lambda *args: True)
    query, *new = (torch.randn(1, 2, 2, 8, device=DEVICE) for _ in range(3))
    right = exact(held, query, new, 0.3)
    torch.testing.assert_close(held.extend(query, *new, 0.3).double(), right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("group", [16, 64])
def test_other_groups(group):
    """Blocks are at most groups of k."""
    torch.manual_seed(group)
    held = quantised([[70, 33], [0, 150]], 3, 24, 40, torch.float32, 4, group)
    assert_exact(held, 2, 1, 0.4)
    assert_exact(held, 2, 2, 0.4)
