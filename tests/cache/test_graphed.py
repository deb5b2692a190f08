"""Decode steps that are captured and replayed; on a CPU a recording of PyTorch's operators stands for a CUDA graph."""

import logging

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError
from lkv.hf.cache_argument import pass_arguments
from lkv.kernels.ragged_attention import cpp
from lkv.utils import devices
from lkv.utils.cpp_compiler import find_compiler
from tests.cache.helpers import ids
from tests.conftest import tiny_llama
from tests.vision import VISION, picture

if find_compiler() is None:
    pytest.skip("there is no C++ compiler for attention that appends by itself", allow_module_level=True)
STEPS = 12


@torch.library.custom_op("lkv_tests::append_and_attend", mutates_args=("k_pool", "v_pool", "lens"))
def append_and_attend(
    q: Tensor, key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, starts: Tensor, lens: Tensor, scale: float,
    codes: list[Tensor], bits: list[int], basis: list[Tensor], softcap: float | None,
) -> Tensor:  # fmt: skip
    """The operator of the backend as one that a recording sees."""
    given = (q, k_pool, v_pool, starts, lens, scale, True, False, key, value, codes, bits, basis, softcap)
    return torch.ops.lkv.ragged_attention(*given)[0]


def append_by_operator(q, key, value, kv, scale, buffers, softcap=None):
    return append_and_attend(q, key, value, *kv[:4], scale, *cpp._lists(kv), softcap)


@pytest.fixture
def replays(monkeypatch):
    """Let steps on a CPU be captured; the list gets an item a replay."""
    made = []

    def capture(step, device):
        for _ in range(devices.STEPS_OF_CAPTURE - 1):
            step()
        outputs = []

        def recorded():
            outputs.append(step())
            return outputs[0].logits

        graph, output = make_fx(recorded)(), outputs[0]

        def replay():
            made.append(output.logits.copy_(graph()))

        return replay, output

    monkeypatch.setattr(devices, "can_capture", lambda device: True)
    monkeypatch.setattr(devices, "capture", capture)
    monkeypatch.setattr(cpp, "append_and_attend", append_by_operator)
    return made


def generate(model, cache, text, **options):
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None, "output_logits": True} | options
    given = torch.ones_like(text) if "attention_mask" not in options else options.pop("attention_mask")
    out = model.generate(text, attention_mask=given, past_key_values=cache, return_dict_in_generate=True, **options)
    return torch.stack(out.logits, 1)


WAYS = {
    "plain": {"retention": 0.4},
    "3 bits": {"retention": 0.4, "bits": 3},
    "tiers": {"memory": 0.2},
    "streaming": {"retention": 0.4, "streaming": True, "prompt_tokens": 60},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_replayed_steps_equal_the_model(replays, policy, options):
    model, text = tiny_llama(dtype=torch.float32), ids(2, 60)
    caches = [RaggedCache(model, policy=policy, **options) for _ in range(2)]
    expected = generate(model, caches[0], text)
    with caches[1].graphed(model, max_new_tokens=STEPS):
        found = generate(model, caches[1], text)
    assert len(replays) == STEPS - 1
    torch.testing.assert_close(found, expected)
    assert caches[1].get_seq_length() == caches[0].get_seq_length()
    assert torch.equal(caches[1].history.ids, caches[0].history.ids)


@torch.no_grad()
def test_replayed_steps_follow_the_positions_of_images(replays):
    """Also without positions from generate(): the model itself would take those of the images that it read last."""
    family = VISION[0]
    model, texts = family.build(torch.float32), (("A picture, then a text.", [picture()]), ("Other.", [picture(1, 64)]))
    inputs, other = (
        {name: x.float() if x.is_floating_point() else x for name, x in family.encode(*text).items()} for text in texts
    )
    caches, tokens = [RaggedCache(model, method="knorm", retention=0.4) for _ in range(2)], ids(1, STEPS).T[:, :, None]
    for cache in caches:
        model(**inputs, past_key_values=cache, use_cache=True)
    model(**other, use_cache=False)
    expected = [model(token, **pass_arguments(caches[0], token)).logits for token in tokens]
    with caches[1].graphed(model, max_new_tokens=STEPS):
        found = [model(token, past_key_values=caches[1]).logits for token in tokens]
    assert len(replays) == STEPS
    torch.testing.assert_close(torch.cat(found), torch.cat(expected))


@pytest.mark.slow
def test_replayed_steps_of_padded_rows_and_of_a_second_turn(replays, policy):
    model, text = tiny_llama(dtype=torch.float32), ids(2, 60)
    mask = torch.ones_like(text)
    mask[0, :7] = 0
    caches = [RaggedCache(model, policy=policy, retention=0.4) for _ in range(2)]
    more = torch.cat([text, ids(2, STEPS + 5, 1)], 1)
    more_mask = torch.cat([mask, torch.ones(2, STEPS + 5, dtype=torch.long)], 1)

    def turns(cache):
        first = generate(model, cache, text, attention_mask=mask)
        cache.rewind()
        return torch.cat([first, generate(model, cache, more, attention_mask=more_mask)], 1)

    expected = turns(caches[0])
    with caches[1].graphed(model):
        torch.testing.assert_close(turns(caches[1]), expected)
    assert len(replays) == 2 * (STEPS - 1)


def test_the_layer_with_the_fewest_free_slots_ends_the_replays(replays, policy):
    model, text, later = tiny_llama(dtype=torch.float32), ids(1, 60), ids(1, 12, 1)
    caches = [RaggedCache(model, policy=policy, retention=0.4, slack=1) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(text, past_key_values=cache, use_cache=True)
        caches[1].ragged_layers[0].reserve(50)
        expected = [model(token, past_key_values=caches[0], use_cache=True).logits for token in later.split(1, 1)]
        with caches[1].graphed(model, max_new_tokens=5):
            for token, logits in zip(later.split(1, 1), expected, strict=True):
                torch.testing.assert_close(model(token, past_key_values=caches[1], use_cache=True).logits, logits)
    assert len(replays) == 5


def test_the_model_serves_what_no_graph_can(replays, policy, caplog):
    """Tokens beyond the captured slots, steps with other arguments, other caches, and all of it after the block."""
    caplog.set_level(logging.INFO, "lkv")
    model, text = tiny_llama(dtype=torch.float32), ids(1, 60)
    caches = [RaggedCache(model, policy=policy, retention=0.4, slack=1) for _ in range(3)]
    expected = generate(model, caches[0], text)
    forward = model.forward
    with caches[1].graphed(model, max_new_tokens=5):
        torch.testing.assert_close(generate(model, caches[1], text), expected)
        torch.testing.assert_close(generate(model, caches[2], text), expected)
    assert len(replays) == 5 and "no slot that was captured is free" in caplog.text
    assert "a prompt is being read" in caplog.text and model.forward == forward
    caches[1].rewind()
    with caches[1].graphed(model), torch.no_grad():
        step = model(ids(1, 1), past_key_values=caches[1], output_hidden_states=True)
    assert (
        len(step.hidden_states) == 4 and "'output_hidden_states', which the captured step does not know" in caplog.text
    )
    assert len(replays) == 5


@pytest.mark.parametrize("options", [{}, {"decode_eviction": True}], ids=["failing", "decode eviction"])
def test_a_step_that_cannot_be_captured_is_computed(replays, policy, caplog, monkeypatch, options):
    caplog.set_level(logging.INFO, "lkv")
    model, text = tiny_llama(dtype=torch.float32), ids(1, 60)
    caches = [RaggedCache(model, policy=policy, retention=0.4, **options) for _ in range(2)]
    expected, plain = generate(model, caches[0], text), devices.capture

    def failing(step, device):
        plain(step, device)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(devices, "capture", failing)
    with caches[1].graphed(model):
        torch.testing.assert_close(generate(model, caches[1], text), expected)
    reason = (
        "decode_eviction chooses" if options else "RuntimeError: operation not permitted when stream is capturing)."
    )
    assert reason in caplog.text and not replays


def test_without_a_gpu_the_model_runs_as_it_does(policy, caplog):
    caplog.set_level(logging.INFO, "lkv")
    model, text = tiny_llama(dtype=torch.float32), ids(1, 60)
    caches = [RaggedCache(model, policy=policy, retention=0.4) for _ in range(2)]
    with caches[1].graphed(model):
        found = generate(model, caches[1], text)
    assert torch.equal(found, generate(model, caches[0], text))
    assert [record.message for record in caplog.records if "CUDA graph" in record.message] == [
        "A step runs without a CUDA graph: the model is on 'cpu', but CUDA graphs need a CUDA device."
    ]
    with (
        pytest.raises(CacheError, match="max_new_tokens is 0, but it is a number of tokens"),
        caches[1].graphed(model, 0),
    ):
        pass
