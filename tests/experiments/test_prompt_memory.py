"""The benchmark of prompts in a GPU's memory: its allocator by hand, its trace against bytes counted on a CPU."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from experiments.profile.memory import LiveBytes
from experiments.prompt_memory import CachingAllocator, Event, FullError, Trace, _attend, fits, most, peak
from tests.conftest import tiny_llama

MIB = 2**20


def test_segments_are_cut_merged_and_given_back_only_when_the_device_is_full():
    device = CachingAllocator(100 * MIB)
    first, second = device.take(40 * MIB), device.take(40 * MIB)
    assert (device.held, device.reserved) == (80 * MIB, 80 * MIB)
    device.give(first)
    part = device.take(10 * MIB)  # of the first segment, whose rest stays free
    assert (device.held, device.reserved) == (50 * MIB, 80 * MIB)
    rest = device.take(30 * MIB)
    assert device.reserved == 80 * MIB
    device.give(second)
    with pytest.raises(FullError):
        device.take(61 * MIB)
    assert device.reserved == 40 * MIB  # the second segment went back, and was not enough
    large = device.take(60 * MIB)
    assert device.reserved == 100 * MIB and device.held == 100 * MIB
    device.give(part)
    device.give(rest)  # merged with its neighbour: one block again
    assert device.take(40 * MIB).nbytes == 40 * MIB
    device.give(large)
    assert device.held == 40 * MIB


def test_the_smallest_block_that_fits_is_taken_and_small_segments_have_20_mib():
    device = CachingAllocator(1000 * MIB)
    blocks = [device.take(size * MIB) for size in (50, 30, 70)]
    for block in blocks:
        device.give(block)
    assert device.take(29 * MIB) is blocks[1] and device.take(60 * MIB) is blocks[2]
    before = device.reserved
    device.take(49 * MIB)
    device.take(3 * MIB)  # the rest of the third
    device.take(9 * MIB)
    assert device.reserved == before + 20 * MIB
    device.take(21 * MIB - 5)
    assert device.reserved == before + 42 * MIB


def test_what_fits_is_found():
    events = [Event(1, 30 * MIB), Event(2, 30 * MIB), Event(1, 0), Event(3, 40 * MIB), Event(2, 0)]
    assert peak(events) == 70 * MIB
    # The released 30 cannot hold 40, and goes back.
    assert fits(events, 70 * MIB) and not fits(events, 69 * MIB)
    # Half of the first segment is in use when 40 are asked for.
    kept = [Event(1, 30 * MIB), Event(1, 0), Event(2, 10 * MIB), Event(3, 40 * MIB)]
    assert peak(kept) == 50 * MIB and not fits(kept, 69 * MIB) and fits(kept, 70 * MIB)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="no forward pass on the meta device")
def test_the_trace_counts_what_a_forward_pass_on_a_cpu_holds():
    config = tiny_llama(hidden_size=64, intermediate_size=160, max_position_embeddings=4096, vocab_size=1000).config
    trace = Trace(config)
    torch.manual_seed(0)
    model = type(trace._model)(config).to(torch.bfloat16).eval()
    for tokens in (700, 1900):
        events = trace.events(tokens)
        weights = sum(nbytes for storage, nbytes in events if storage < 0)
        assert weights == sum(p.numel() * 2 for p in model.parameters())
        ids, places = torch.zeros((1, tokens), dtype=torch.long), torch.arange(tokens)[None]
        with torch.no_grad(), LiveBytes() as live:
            model(ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1, position_ids=places)
        assert peak(events) - weights == pytest.approx(live.peak, rel=0.01)
    everything = Trace(config, all_logits=True).events(1900)
    kv, logits = 3 * 2 * 2 * 8 * 1900 * 2, 1000 * 1900 * 2
    assert peak(everything) - weights >= kv + logits > peak(trace.events(1900)) - weights
    limit = peak(trace.events(2048))
    assert most(trace, limit, allocated=False) == 2048
    assert limit - kv * 2048 / 1900 < peak(Trace(config, retention=0.15).events(2048)) < limit
    wide = Trace(tiny_llama(hidden_size=512, intermediate_size=2048, vocab_size=1000).config)
    assert 0 < most(wide, peak(wide.events(4096)), allocated=True) <= 4096
    assert _attend(None, *[torch.zeros(1, 4, 3, 8)] * 3, None)[0].shape == (1, 3, 4, 8)
