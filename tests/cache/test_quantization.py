"""Quantised pools against a float64 reference, and caches of them against plain ones of the values they stand for."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from lkv.cache.layer import RaggedLayer
from lkv.cache.quantization import BITS, QuantizedPool
from lkv.cache.ragged_cache import RaggedCache
from lkv.cache.store import QuantizedStore, RaggedStore
from lkv.context.context import Context, compress
from lkv.errors import CacheError, LkvError
from tests.cache.helpers import METHOD, ids
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words

pytest.importorskip("torchao")

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LENS = st.none() | st.lists(st.integers(0, 40), max_size=3)


def random_pool(entries: int, width: int, dtype=torch.float32, seed: int = 0, size: float = 1.0, offset: float = 0.0):
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(entries, width, generator=made, dtype=torch.float64) * size + offset).to(dtype)


def group_members(entries: int, width: int, group: int, lens):
    """(row of `step`, column of `step`, entries, channels) of each group, counted out one by one."""
    if lens is None:
        for p in range(entries):
            for n, begin in enumerate(range(0, width, group)):
                yield p, n, slice(p, p + 1), slice(begin, min(begin + group, width))
    else:
        row = begin = 0
        for length in lens:
            for low in range(begin, begin + length, group):
                for c in range(width):
                    yield row, c, slice(low, min(low + group, begin + length)), slice(c, c + 1)
                row += 1
            begin += length


@given(
    seed=st.integers(0, 99),
    entries=st.integers(0, 20),
    width=st.sampled_from([1, 2, 7, 12]),
    group=st.sampled_from([2, 5, 8, 32]),
    lens=LENS,
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([0.0, 1e-6, 1.0, 300.0]),
    offset=st.sampled_from([0.0, -3.0, 1000.0]),
)
def test_no_value_is_off_by_more_than_half_a_step(seed, entries, width, group, lens, bits, dtype, size, offset):
    entries = entries if lens is None else sum(lens)
    pool = random_pool(entries, width, dtype, seed, size, offset)
    packed = QuantizedPool.pack(pool, bits, group, lens)
    back = packed.unpack()
    assert back.dtype == dtype and back.shape == pool.shape
    exact, error = pool.double(), (back.double() - pool.double()).abs()
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    smallest = torch.finfo(torch.float16 if dtype == torch.float16 else torch.float32).smallest_normal
    seen = torch.zeros(pool.shape)
    for row, column, rows, columns in group_members(entries, width, group, lens):
        values = exact[rows, columns]
        step, least = float(packed.scale[row, column]), float(packed.minimum[row, column])
        low, high, largest = float(values.min()), float(values.max()), float(values.abs().max())
        slack = 0.0 if dtype in (torch.float16, torch.bfloat16) else abs(low) / 128
        assert least <= low + rounding * largest
        assert step <= 1.01 * (high - low + slack) / (2**bits - 1) + smallest
        assert float(error[rows, columns].max()) <= 0.5001 * step + rounding * (largest + step) + smallest
        seen[rows, columns] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [64, 37])
def test_bytes_are_exactly_those_predicted(bits, width, dtype):
    codes = width if bits == 8 else (width + 1) // 2
    pool = random_pool(70, width, dtype)
    assert QuantizedPool.pack(pool, bits).nbytes() == 70 * (codes + 2 * 4)
    assert QuantizedPool.pack(pool[:1], bits).nbytes() == codes + 2 * 4
    # Heads of 33, 0 and 37 entries: two groups, none and two.
    by_channel = QuantizedPool.pack(pool, bits, lens=[33, 0, 37])
    assert by_channel.nbytes() == 70 * codes + 4 * 4 * width
    assert by_channel.take_heads([0]).nbytes() == 33 * codes + 2 * 4 * width


def same(one: QuantizedPool, other: QuantizedPool) -> bool:
    ones, others = one.tensors(), other.tensors()
    return ones.keys() == others.keys() and all(
        ones[name].dtype == others[name].dtype and torch.equal(ones[name], others[name]) for name in ones
    )


@given(bits=st.sampled_from(BITS), index=st.lists(st.integers(0, 19), max_size=30))
def test_taking_entries_is_packing_the_taken(bits, index):
    pool, chosen = random_pool(20, 9), torch.tensor(index, dtype=torch.long)
    assert same(QuantizedPool.pack(pool, bits, 4).take(chosen), QuantizedPool.pack(pool[chosen], bits, 4))


@given(bits=st.sampled_from(BITS), index=st.lists(st.integers(0, 3), max_size=6))
def test_taking_spans_is_packing_the_taken(bits, index):
    lens = [5, 0, 17, 8]
    pool = random_pool(30, 9)
    chosen = torch.cat([pool[:0], *(pool.split(lens)[i] for i in index)])
    expected = QuantizedPool.pack(chosen, bits, 8, [lens[i] for i in index])
    assert same(QuantizedPool.pack(pool, bits, 8, lens).take_heads(torch.tensor(index, dtype=torch.long)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("lens", [None, [20, 13], [0]])
def test_saved_and_restored_bit_for_bit(bits, dtype, lens):
    packed = QuantizedPool.pack(random_pool(33 if lens != [0] else 0, 12, dtype), bits, 8, lens)
    restored = QuantizedPool.from_tensors(load(save(packed.tensors())))
    assert same(packed, restored) and restored.dtype == dtype and restored.lens == packed.lens
    assert torch.equal(restored.unpack(), packed.unpack())


@pytest.mark.parametrize("change", ["layout", "codes", "step", "least", "lens"])
def test_tensors_that_do_not_fit_are_refused(change):
    tensors = QuantizedPool.pack(random_pool(33, 12), 4, 8, [20, 13]).tensors()
    with pytest.raises(CacheError, match="no quantised pool"):
        QuantizedPool.from_tensors({**tensors, change: tensors[change][1:]})
    if change != "lens":
        del tensors[change]
        with pytest.raises(CacheError, match="no quantised pool"):
            QuantizedPool.from_tensors(tensors)


@pytest.mark.parametrize("lens", [None, [3, 1]])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float16, 65504.0), (torch.bfloat16, 9.9e37), (torch.float32, 1e38)]
)
def test_huge_values_stay_finite(dtype, largest, bits, lens):
    pool = torch.tensor([[largest, -largest, 1.0], [largest] * 3, [-largest] * 3, [0.0, 1e-7, -1e-7]], dtype=dtype)
    back = QuantizedPool.pack(pool, bits, lens=lens).unpack()
    assert bool(back.isfinite().all())
    step = 2.02 * largest / (2**bits - 1)
    assert float((back.double() - pool.double()).abs().max()) <= 0.51 * step


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, -0.7, 1000.0, 65504.0])
@pytest.mark.parametrize("lens", [None, [5, 4]])
def test_constant_groups_of_16_bit_pools_are_exact(dtype, value, lens):
    pool = torch.full((9, 40), value, dtype=dtype)
    for bits in BITS:
        assert torch.equal(QuantizedPool.pack(pool, bits, lens=lens).unpack(), pool)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2e38])
def test_values_that_cannot_be_stored_are_refused(bad):
    pool = random_pool(5, 8)
    pool[3, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        QuantizedPool.pack(pool, 8)


def test_arguments_that_cannot_be_served_are_refused():
    pool = random_pool(5, 8)
    for bits in (2, 16):
        with pytest.raises(ValueError, match="bits"):
            QuantizedPool.pack(pool, bits)
    for group in (0, 1):
        with pytest.raises(ValueError, match="group"):
            QuantizedPool.pack(pool, 8, group)
    for bad in (pool[0], pool[:, :0], pool.long()):
        with pytest.raises(ValueError, match="the pool is"):
            QuantizedPool.pack(bad, 8)
    for lens in ([5, 1], [7, -2], []):
        with pytest.raises(ValueError, match="lens"):
            QuantizedPool.pack(pool, 8, lens=lens)
    packed = QuantizedPool.pack(pool, 8)
    with pytest.raises(ValueError, match="use take"):
        packed.take_heads([0])
    with pytest.raises(ValueError, match="use take_heads"):
        QuantizedPool.pack(pool, 8, lens=[5]).take(torch.tensor([0]))


def test_outliers_of_one_channel_cost_the_others_nothing_by_channel():
    pool = random_pool(64, 32)
    pool[:, 3] += 50
    by_entry, by_channel = (QuantizedPool.pack(pool, 4, lens=lens).unpack() for lens in (None, [64]))
    assert (by_channel - pool).norm() < 0.15 * (by_entry - pool).norm()


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(LkvError, match=r"needs .*torchao.*pip install .*\[quantization\]"):
        QuantizedPool.pack(random_pool(5, 8), 8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [64, 33])
def test_products_with_codes_are_those_with_the_entries_they_stand_for(bits, width):
    torch.manual_seed(width)
    lens = (0, 5, 32, 71)
    pool = torch.randn(sum(lens), width)
    key, value = QuantizedPool.pack(pool, bits, lens=lens), QuantizedPool.pack(pool, bits)
    queries = [torch.randn(3, width) for _ in lens]
    begin = 0
    for query, found, n in zip(queries, key.dot_products(queries), lens, strict=True):
        torch.testing.assert_close(found, query @ key.unpack()[begin : begin + n].T, atol=1e-4, rtol=1e-4)
        shares = torch.rand(3, n)
        own = value.weighted_sum(shares, begin, begin + n)
        torch.testing.assert_close(own, shares @ value.unpack()[begin : begin + n], atol=1e-4, rtol=1e-4)
        begin += n


def plain_twin(cache: RaggedCache) -> RaggedCache:
    """The same cache with its settled entries restored."""
    twin = cache.fork()
    for layer in twin.ragged_layers:
        held = layer.store
        assert isinstance(held, QuantizedStore)
        key, value = held.key.unpack(), held.value.unpack()
        layer.store = RaggedStore(held.lens, 64, key, value)
        layer.store.unpack(key, value)
    return twin


@settings(max_examples=12)
@given(st.sampled_from([8, 4]), st.integers(0, 5), st.integers(0, 9), st.booleans())
def test_it_equals_a_cache_of_the_values_it_stands_for(bits, slack, seed, streaming):
    model, text = tiny_llama(dtype=torch.float32), ids(2, 40, seed)
    cache = RaggedCache(model, method=METHOD, slack=slack, bits=bits, prompt_tokens=30, streaming=streaming)
    with torch.no_grad():
        model(text[:, :30], past_key_values=cache, use_cache=True)
        twin = plain_twin(cache)
        for change in (
            lambda c: None,
            lambda c: c.reorder_cache(torch.tensor([1, 0])),
            lambda c: c.crop(-2),
            lambda c: c.batch_select_indices(torch.tensor([1])),
            lambda c: c.batch_repeat_interleave(3),
            lambda c: c.rewind(),
        ):
            change(cache), change(twin)
            new = text[:1, 30:34].expand(len(cache.ragged_layers[0].kept_counts), -1)
            outs = [model(new, past_key_values=c, use_cache=True).logits for c in (cache, twin)]
            torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)
            assert cache.get_seq_length() == twin.get_seq_length()


def test_a_quantised_context_is_saved_as_it_is(tmp_path):
    model = tiny_llama(dtype=torch.float32)
    context = compress(model, Words(), TEXT, method=METHOD, bits=4)
    answer = context.ask("what is one ?", max_new_tokens=8)
    context.save(tmp_path / "context.kv")
    again = Context.load(tmp_path / "context.kv", model, Words())
    assert again.ask("what is one ?", max_new_tokens=8) == answer
    assert again.metadata["bits"] == 4 and again.nbytes() == context.nbytes()
    layers: list[RaggedLayer] = again.cache.ragged_layers
    for mine, theirs in zip(layers, context.cache.ragged_layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.state().values(), theirs.state().values(), strict=True))


def test_a_quantised_context_is_loaded_in_another_dtype(tmp_path):
    model = tiny_llama(dtype=torch.float32)
    context = compress(model, Words(), TEXT, method=METHOD, bits=8)
    expected, _ = context.predict("what is one ?", "it is so")
    context.save(tmp_path / "context.kv")
    for dtype, close in ((torch.float64, 1e-4), (torch.bfloat16, 0.5)):
        again = Context.load(tmp_path / "context.kv", tiny_llama(dtype=dtype), Words())
        found, _ = again.predict("what is one ?", "it is so")
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, atol=close, rtol=close)


def test_bad_widths_are_named(model):
    with pytest.raises(CacheError, match=r"bits is 3, but it must be one of \(8, 4\)"):
        RaggedCache(model, method=METHOD, bits=3)
    with pytest.raises(CacheError, match="decode eviction works without it"):
        RaggedCache(model, method=METHOD, bits=8, decode_eviction=True)
