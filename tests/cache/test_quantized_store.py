"""A cache in 8 or 4 bits a value, against a plain cache that holds the values it stands for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lkv.cache.layer import RaggedLayer
from lkv.cache.ragged_cache import RaggedCache
from lkv.cache.store import QuantizedStore, RaggedStore
from lkv.context.context import Context, compress
from lkv.errors import CacheError
from tests.cache.helpers import METHOD, ids
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words

pytest.importorskip("torchao")


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
