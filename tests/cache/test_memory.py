"""Live bytes against a plain account of what was made and dropped; and the peak of an eviction."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.profile.memory import LiveBytes, measure_peak
from experiments.profile.random_models import random_policy
from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import LayerKV
from lkv.utils.devices import is_out_of_memory
from tests.conftest import tiny_llama

CPU = torch.device("cpu")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("make"), st.integers(1, 50)),
            st.tuples(st.sampled_from(["drop", "view", "copy", "write"]), st.integers(0, 9)),
        ),
        max_size=25,
    )
)
def test_live_bytes_are_those_of_the_distinct_storages_alive(steps):
    before = torch.zeros(1000)
    held: list[tuple[torch.Tensor, int, int]] = []  # tensor, storage's number, storage's bytes
    most, made = 0, 0
    with LiveBytes() as live:
        for step, number in steps:
            if step == "make":
                held.append((torch.zeros(number), made, number * 4))
                made += 1
            elif held:
                tensor, storage, size = held[number % len(held)]
                if step == "drop":
                    held.pop(number % len(held))
                elif step == "view":
                    held.append((tensor[:1].view(1, 1), storage, size))
                elif step == "copy":
                    held.append((tensor.clone(), made, tensor.numel() * 4))
                    made += 1
                else:
                    tensor.add_(before[0])  # a view of what was there before, and no new storage
                del tensor
            expected = sum({storage: size for _, storage, size in held}.values())
            most = max(most, expected)
            assert live.current == expected
    assert live.peak == most
    held.clear()
    assert live.current == 0


def test_what_was_there_before_does_not_count():
    weight = torch.randn(20, 30)
    with LiveBytes() as live:
        out = torch.nn.functional.linear(torch.ones(1, 30), weight)
    assert live.current == out.numel() * 4 and live.peak == (30 + 20) * 4


def test_a_limit_ends_the_block():
    with measure_peak(CPU, limit=1000) as peak:
        torch.zeros(250)
    assert peak.nbytes == 1000
    with pytest.raises(MemoryError, match="out of memory") as caught, measure_peak(CPU, limit=1000):
        torch.zeros(251)
    assert is_out_of_memory(caught.value)


def test_out_of_memory_is_known_by_its_kind_its_words_or_its_cause():
    caused = ValueError("something else")
    assert not is_out_of_memory(caused)
    caused.__cause__ = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    assert is_out_of_memory(caused)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_an_eviction_of_a_long_prompt_takes_little_beside_what_it_keeps(dtype):
    """3 layers of 50,000 tokens, made one at a time: never more than one of them whole, what was kept, and a little."""
    tokens, heads, width = 50_000, 2, 8
    model = tiny_llama(dtype=dtype, max_position_embeddings=2 * tokens)
    cache = RaggedCache(model, policy=random_policy(patch_attention(model).spec), retention=0.15)
    whole = 2 * heads * tokens * width * dtype.itemsize
    peaks = []
    gc.collect()
    with LiveBytes() as total:
        for layer in cache.ragged_layers:
            key, value = (torch.zeros(1, heads, tokens, width, dtype=dtype) for _ in range(2))
            generator = torch.Generator().manual_seed(0)
            key.normal_(generator=generator)
            with LiveBytes() as own:
                layer.fill(LayerKV(key, value, 1.0, None))
            peaks.append(own.peak)
            del key, value
    for layer, peak in zip(cache.ragged_layers, peaks, strict=True):
        scores, block = heads * tokens * 4, 3 * heads * 2048 * 2 * width * 4
        # The best of one head: their scores, and their places unsorted and sorted with the order that sorts them.
        choice = int(layer.lens.max()) * (4 + 3 * 8)
        assert layer.nbytes() <= peak <= scores + max(block, layer.nbytes() + choice) + 1000
        assert choice < whole / 2
    kept = sum(layer.nbytes() for layer in cache.ragged_layers)
    assert kept == pytest.approx(0.15 * 3 * whole, rel=0.02)
    assert whole < total.peak <= whole + kept + scores + max(block, choice)
