"""A patched model is, but for LKV's caches, the model that it was: in what it computes, says of itself and saves."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError
from lkv.hf.attention import attention_patched, patch_attention, unpatch_attention
from lkv.hf.cache_argument import cache_argument
from tests.conftest import tiny_llama
from tests.families import SERVED

IDS = torch.arange(3, 53)[None]
IMPLEMENTATIONS = ("sdpa", "eager", "flash_attention_2")
NAMES = (
    "Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Gemma3", "Cohere2", "GPT2", "GPTNeoX", "OPT", "Mixtral", "GptOss",
)  # fmt: skip
FAMILIES = [family for family in SERVED if family.name in NAMES]
GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}


def build(family, implementation):
    model = family.build(torch.float32)
    model.config._attn_implementation = implementation  # without a check whether flash attention is installed
    return model


def stock(model):
    """Ids and logits of two rows, one of them padded, and the attention weights where the model returns some."""
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, :7] = 0
    has_weights = model.config._attn_implementation == "eager"
    out = model.generate(
        IDS.repeat(2, 1), attention_mask=mask, **GREEDY, return_dict_in_generate=True, output_logits=True,
        output_attentions=has_weights,
    )  # fmt: skip
    weights = [layer for step in out.attentions for layer in step] if has_weights else []
    return [out.sequences, *out.logits, *weights]


def read_state(model):
    """What a model says of itself, with its attributes, hooks and parts."""
    return json.dumps(model.config.to_dict(), default=str), [
        (type(module), vars(module).keys(), len(module._forward_hooks) + len(module._forward_pre_hooks))
        for module in model.modules()
    ]


def read_with_lkv(model, **options):
    cache = RaggedCache(model, method="knorm", retention=0.5)
    return model.generate(IDS, **cache_argument(cache), **GREEDY, **options), cache


@pytest.mark.sweep(9)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_stock_generation_is_the_same_before_patched_and_after(family, implementation, flash_attention):
    if family.missing or (family.name in ("GptOss", "GPT2") and implementation == "flash_attention_2"):
        pytest.skip(family.missing or "needs another flash attention than this stand-in")
    model = build(family, implementation)
    expected = stock(model)
    state = read_state(model)

    def check():
        assert model.config._attn_implementation == model.base_model.config._attn_implementation == implementation
        assert read_state(model) == state
        for found, right in zip(stock(model), expected, strict=True):
            assert torch.equal(found, right)

    patch_attention(model)
    check()
    _, cache = read_with_lkv(model)
    assert cache.realised_retention() == pytest.approx(0.5)
    check()
    unpatch_attention(model)
    check()
    with attention_patched(model):
        check()
    check()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_continuous_batching(implementation):
    model = tiny_llama(dtype=torch.float32)
    model.set_attn_implementation(implementation)
    small, options = {"num_blocks": 8, "max_batch_tokens": 64}, {}
    if hasattr(transformers, "ContinuousBatchingConfig"):
        options["continuous_batching_config"] = transformers.ContinuousBatchingConfig(**small, page_size=32)
        small = {}
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=2, **small)

    def generate():
        inputs = [IDS[0].tolist(), IDS[0, :9].tolist()]
        outputs = model.generate_batch(inputs, generation_config=config, progress_bar=False, **options)
        model.set_attn_implementation(implementation)  # transformers 5.2 leaves another one
        return [output.generated_tokens for output in outputs.values()]

    expected = generate()
    patch_attention(model)
    assert generate() == expected
    reference = read_with_lkv(model)[0]
    assert generate() == expected
    assert torch.equal(read_with_lkv(model)[0], reference)


LOAD = """
import sys

sys.modules["lkv"] = None  # any import of it fails
import torch

model = torch.load(sys.argv[1], weights_only=False)
total = model(torch.arange(3, 53)[None]).logits.double().sum().item()
print(total, model.config._attn_implementation, sorted(vars(model)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_saved_model_needs_no_lkv(tmp_path, implementation):
    model = tiny_llama(dtype=torch.float32)
    model.set_attn_implementation(implementation)
    total, attributes = model(IDS).logits.double().sum().item(), sorted(vars(model))
    read_with_lkv(model)
    torch.save(model, tmp_path / "model.pt")
    shown = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "model.pt")], capture_output=True, text=True, cwd=tmp_path
    )
    assert shown.stdout.splitlines()[-1:] == [f"{total} {implementation} {attributes}"], shown.stderr
    assert b"lkv" not in pickle.dumps(model)
    model.save_pretrained(tmp_path / "folder")
    assert "lkv" not in (tmp_path / "folder" / "config.json").read_text()
    loaded = type(model).from_pretrained(tmp_path / "folder", attn_implementation=implementation)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_a_copy_of_a_patched_model_works_and_refuses_the_originals_cache():
    model = tiny_llama()
    expected, _ = read_with_lkv(model)
    twin = copy.deepcopy(model)
    with pytest.raises(CacheError, match="made for another model"):
        twin(IDS, **cache_argument(RaggedCache(model, method="knorm", retention=0.5)))
    assert torch.equal(read_with_lkv(twin)[0], expected)
    unpatch_attention(twin)
    assert torch.equal(read_with_lkv(model)[0], expected)


@torch.no_grad()
def test_eager_attention_of_a_subclassed_module_is_that_of_its_base():
    """A class of one's own may be in a file without `eager_attention_forward`."""
    model = tiny_llama()
    model.set_attn_implementation("eager")
    expected, (with_lkv, _) = model.generate(IDS, **GREEDY), read_with_lkv(model)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Own", (type(layer.self_attn),), {"__module__": "__main__"})
    assert torch.equal(model.generate(IDS, **GREEDY), expected)
    assert torch.equal(read_with_lkv(model)[0], with_lkv)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_attention_weights_are_those_of_the_model_or_refused(name):
    family = next(family for family in SERVED if family.name == name)
    model = build(family, "eager")
    expected = model(IDS, output_attentions=True).attentions
    patch_attention(model)
    with pytest.raises(CacheError, match="return no attention weights; leave output_attentions out"):
        read_with_lkv(model, output_attentions=True)
    if name == "Llama":  # before transformers 5.4 GPT-2 tells its layers nothing of the request
        with pytest.raises(CacheError, match="return no attention weights"):
            model(IDS, output_attentions=True, **cache_argument(RaggedCache(model, method="knorm")))
    model.config.output_attentions = True
    found = model(IDS, **cache_argument(DynamicCache())).attentions
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(CacheError, match="return no attention weights"):
        read_with_lkv(model)
    model.config.output_attentions = False
    read_with_lkv(model)


def test_an_implementation_set_after_patching_is_used():
    model = tiny_llama()
    expected, cache = read_with_lkv(model)
    model.set_attn_implementation("eager")
    assert torch.equal(read_with_lkv(model)[0], expected)
    cache.rewind()
    model(IDS[:, :3], **cache_argument(cache))
