"""A small random model of each supported family, against the stock model and against the masked one."""

import pytest
import torch
import transformers
from transformers import DynamicCache

from lkv.cache.ragged import RaggedCache
from lkv.context import compress
from lkv.errors import CacheError, UnsupportedModelError
from lkv.host.attention import ALL_ATTENTION_FUNCTIONS, attach
from lkv.host.spec import layer_windows
from lkv.policy import Policy
from lkv.prefill import read_prompt
from tests.cache.test_generation import METHOD, ids, padded, score
from tests.test_compression import TEXT, Words

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 67, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
    "Phi3": {"resid_pdrop": 0.0},
    "Gemma3": {
        "num_hidden_layers": 5, "query_pre_attn_scalar": 8, "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
}  # fmt: skip


def build(family: str, dtype: torch.dtype = torch.float64, **changes):
    names = (
        ("Gemma3TextConfig", "Gemma3ForCausalLM") if family == "Gemma3" else (f"{family}Config", f"{family}ForCausalLM")
    )
    config, model = (getattr(transformers, name) for name in names)
    torch.manual_seed(0)
    return model(config(**(SHAPE | FAMILIES.get(family, {}) | changes))).to(dtype).eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
@torch.no_grad()
def test_full_retention_equals_the_stock_model(family, dtype, tolerance):
    model, batch = build(family, dtype), padded([ids(1, 40), ids(1, 33, 1)])
    policy = Policy(attach(model).spec).requires_grad_(False)
    outs = [
        model.generate(
            **batch, past_key_values=cache, max_new_tokens=8, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )
        for cache in (DynamicCache(config=model.config), RaggedCache(model, policy, retention=1.0, slack=3))
    ]  # fmt: skip
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    for stock, ours in zip(outs[0].logits, outs[1].logits, strict=True):
        torch.testing.assert_close(ours, stock, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_eviction_equals_the_stock_model_with_a_mask(family, monkeypatch):
    """The stock attention itself is given the mask: its own scale, norms and sliding windows stay in force."""
    model, text, prompt = build(family), ids(2, 46), 40
    cache = RaggedCache(model, method=METHOD)
    model(text[:, :prompt], past_key_values=cache, use_cache=True)
    mine = model(text[:, prompt:], past_key_values=cache, use_cache=True).logits
    full = [index for index, window in enumerate(layer_windows(model)) if window is None]
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def masked(module, query, key, value, mask, **kwargs):
        if module.layer_idx in full:
            gone = torch.ones(key.shape[:3], dtype=torch.bool)
            gone[..., prompt:] = False
            table = score(key[:, :, :prompt], value[:, :, :prompt])
            for h, ratio in enumerate(METHOD.budget.ratios(full.index(module.layer_idx), 2, prompt)):
                best = table[:, h].argsort(-1, descending=True)[:, : int(ratio * prompt + 1e-6)]
                gone[:, h].scatter_(1, best, False)
            rows = torch.arange(text.shape[1])
            hidden = (rows[:, None] < rows) | (gone[:, :, None] & (rows[:, None] >= prompt))
            groups = query.shape[1] // key.shape[1]
            mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, -torch.inf)
            mask = mask.repeat_interleave(groups, 1)
        return original(module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", masked)
    expected = model(text, use_cache=False).logits[:, prompt:]
    torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_sliding_layers_hold_their_window_and_answers_start_afresh():
    model = build("Gemma3")
    policy = Policy(attach(model).spec).requires_grad_(False)
    assert policy.spec.layers == 3
    context = compress(model, Words(), TEXT, retention=0.3, policy=policy)
    first = context.ask("what is one ?", max_new_tokens=20, eos_token_id=None)
    assert context.ask("what is one ?", max_new_tokens=20, eos_token_id=None) == first
    held = sum(layer.nbytes() for layer in context.cache.ragged)
    assert context.nbytes() - held == 2 * 2 * 2 * 11 * 8 * 8  # 2 layers, k and v, 2 heads, the window but one token
    with pytest.raises(CacheError, match="go on with a fork"):
        context.cache.rewind()
    with pytest.raises(CacheError, match="sliding layers cannot be saved yet"):
        context.save("nowhere.kv")
    with pytest.raises(UnsupportedModelError, match="has sliding layers: training"):
        read_prompt(model, ids(1, 20))


def test_what_would_be_computed_wrongly_is_refused():
    refused = [
        build("GptOss", num_local_experts=2, num_experts_per_tok=1, sliding_window=8),
        build("Gemma2", query_pre_attn_scalar=8, sliding_window=12),
    ]
    for model in refused:
        with pytest.raises(UnsupportedModelError, match="attention sinks or capped attention logits"):
            attach(model)
