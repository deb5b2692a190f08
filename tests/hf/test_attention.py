"""Patching a model's attention: undone without a trace, and safe after errors."""

import threading

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)  # fmt: skip

import lkv
from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError, UnsupportedModelError
from lkv.hf.attention import attention_patched, patch_attention, unpatch_attention
from lkv.hf.state import get_patch, has_waiting_layer
from tests.conftest import tiny_llama

IDS = torch.arange(3, 53)[None]


def generated(model, policy):
    cache = RaggedCache(model, policy=policy, retention=0.5)
    return model.generate(IDS, past_key_values=cache, max_new_tokens=3, do_sample=False)


def test_a_multimodal_model_keeps_its_vision_tower():
    shape = {"intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}
    text = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=67, initializer_range=0.3, max_position_embeddings=99)
    config = LlavaConfig(vision_config=CLIPVisionConfig(**shape, image_size=28, patch_size=14), text_config=text)
    config.image_token_index = config.image_token_id = 66
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).double().eval()
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    inputs = {
        "input_ids": torch.cat([torch.full((1, 4), 66), IDS], 1), "max_new_tokens": 4, "do_sample": False,
        "pixel_values": torch.randn(1, 3, 28, 28, dtype=torch.float64),
    }  # fmt: skip
    expected = model.generate(**inputs)
    with attention_patched(model):
        for retention in (1.0, 0.5):
            cache = RaggedCache(model, method="knorm", retention=retention)
            out = model.generate(**inputs, past_key_values=cache)
            assert cache.realised_retention() == pytest.approx(retention)
            assert retention < 1 or torch.equal(out, expected)
    assert torch.equal(model.generate(**inputs), expected)


def test_a_block_patches_and_nested_blocks_stay_patched(policy):
    model = tiny_llama()
    with lkv.attention_patched(model) as patched:
        with attention_patched(model):
            pass
        assert patched.spec.layers == 3
        out = generated(model, policy)
    assert get_patch(model) is None
    assert torch.equal(out, generated(model, policy))


def test_a_cache_of_an_unpatched_model_is_refused(policy):
    model = tiny_llama()
    cache = RaggedCache(model, policy=policy, retention=0.5)
    unpatch_attention(model)
    with pytest.raises(CacheError, match=r"without LKV; call lkv\.patch_attention\(model\)"):
        model(IDS, past_key_values=cache)
    cache.reset()
    patch_attention(model)
    model(IDS, past_key_values=cache)
    assert cache.realised_retention() < 0.6


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["update", "attention"])
def test_a_pass_that_failed_leaves_nothing_to_other_caches(policy, monkeypatch, error, where):
    """Between the cache's update and its attention, or within the attention."""
    model = tiny_llama()
    cache = RaggedCache(model, policy=policy, retention=0.5)
    expected = model(IDS, past_key_values=DynamicCache()).logits

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        layer = cache.ragged_layers[1]
        if where == "attention":
            patch.setattr(layer, "attend", fail)
        else:
            update = cache.update

            def updated(key, value, index, *args, **kwargs):
                update(key, value, index, *args, **kwargs)
                return fail() if index == 1 else (key, value)

            patch.setattr(cache, "update", updated)
        with pytest.raises(error):
            model(IDS, past_key_values=cache)
    assert has_waiting_layer() == (where == "update")
    assert torch.equal(model(IDS, past_key_values=DynamicCache()).logits, expected)
    assert torch.equal(model(IDS, use_cache=False).logits, expected)
    assert not has_waiting_layer()


def test_threads_do_not_see_each_other(policy):
    """Each thread with a cache of its own, or transformers' own."""
    model, expected = tiny_llama(), {}

    def run(number: int, results: dict) -> None:
        cache = RaggedCache(model, policy=policy, retention=0.5) if number % 2 else DynamicCache()
        text = IDS + number
        with torch.no_grad():
            model(text, past_key_values=cache)
            results[number] = [model(text[:, [i]], past_key_values=cache).logits for i in range(4)]

    for number in range(4):
        run(number, expected)
    found: dict = {}
    threads = [threading.Thread(target=run, args=(number, found)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for number in range(4) for a, b in zip(found[number], expected[number], strict=True))


def test_unsupported_architectures_are_refused():
    """Beside the families of tests/families.py."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 20}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    flex = tiny_llama()
    flex.set_attn_implementation("flex_attention")
    upcast = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, reorder_and_upcast_attn=True))
    upcast.set_attn_implementation("eager")
    for reason, model in {
        r"kind \['sliding_attention'\]": MistralForCausalLM(MistralConfig(**small, **heads, sliding_window=8)),
        "no per-head key-value cache": MambaForCausalLM(
            MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=20, state_size=4)
        ),
        "encoder-decoder": T5ForConditionalGeneration(
            T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=20)
        ),
        "'flex_attention' yet": flex,
        "own, which LKV cannot reach.*or this one with attn_implementation='sdpa'": upcast,
        "not a causal language model of transformers": nn.Linear(2, 2),
    }.items():
        with pytest.raises(UnsupportedModelError, match=reason):
            patch_attention(model)
