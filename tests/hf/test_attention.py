"""Patching a model's attention: undone without a trace, safe after errors, and the same under PEFT."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    GenerationConfig,
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
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import CacheError, ContextFileError, UnsupportedModelError
from lkv.hf.attention import attention_patched, patch_attention, unpatch_attention
from lkv.hf.spec import inspect_model, unwrap_model
from lkv.hf.state import get_patch, has_waiting_layer
from tests.conftest import tiny_llama
from tests.context.test_compression import Words

IDS = torch.arange(3, 53)[None]
TEXT = " ".join(["one two three four five six"] * 10)
# peft 0.21 asks transformers 5.24 by a deprecated name.
peft_warns = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


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


class LoraLinear(nn.Module):
    """A linear layer with two adapters, as PEFT's tuners build it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = base, nn.ModuleDict(), nn.ModuleDict()
        self.active_adapters, self.disable_adapters, self.merged_adapters = ["first"], False, []
        self.scaling = {"first": 1.0, "second": 1.0}
        for seed, name in enumerate(("first", "second"), 1):
            torch.manual_seed(seed)
            self.lora_A[name] = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
            self.lora_B[name] = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        out = self.base_layer(x)
        for name in [] if self.disable_adapters else self.active_adapters:
            out = out + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return out


class Wrapper(nn.Module):
    """Hands on to the module named `inner` what it does not have itself."""

    inner: str

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(self.inner), name)


class LoraModel(Wrapper):
    """PEFT's tuner, which puts adapters into the model."""

    inner = "model"

    def __init__(self, model):
        super().__init__()
        self.model = model
        for layer in model.model.layers:
            layer.self_attn.k_proj = LoraLinear(layer.self_attn.k_proj)

    def forward(self, *args, **kwargs):
        return self.model.forward(*args, **kwargs)


class PeftModel(Wrapper):
    """What PEFT's wrapper does around a model: `generate` and `prepare_inputs_for_generation` are its own."""

    inner = "base_model"

    def __init__(self, model):
        super().__init__()
        self.base_model = LoraModel(model)
        self.base_model_prepare_inputs_for_generation = self.base_model.prepare_inputs_for_generation

    def set_adapters(self, **changes) -> None:
        for module in self.modules():
            if isinstance(module, LoraLinear):
                vars(module).update(changes)

    @contextmanager
    def disable_adapter(self):
        self.set_adapters(disable_adapters=True)
        yield
        self.set_adapters(disable_adapters=False)

    def get_base_model(self):
        return self.base_model.model

    def forward(self, *args, **kwargs):
        return self.get_base_model()(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args, task_ids=None, **kwargs):
        return self.base_model_prepare_inputs_for_generation(*args, **kwargs)

    def generate(self, *args, **kwargs):
        self.base_model.prepare_inputs_for_generation = self.prepare_inputs_for_generation
        try:
            return self.base_model.generate(*args, **kwargs)
        finally:
            self.base_model.prepare_inputs_for_generation = self.base_model_prepare_inputs_for_generation


@pytest.mark.parametrize("patched_first", [False, True])
def test_peft_models_check_what_a_used_cache_is_given(policy, patched_first):
    base = tiny_llama()
    if patched_first:
        patch_attention(base)
    model = PeftModel(base)
    assert unwrap_model(model) is base
    cache = RaggedCache(model, policy=policy, retention=0.5)
    how = {"max_new_tokens": 3, "do_sample": False, "past_key_values": cache}
    out = model.generate(IDS, **how)
    assert torch.equal(out, generated(base, policy))
    with pytest.raises(CacheError, match="do not begin with those that this cache has read"):
        model.generate(torch.cat([IDS + 1, IDS], 1), **how)
    with pytest.raises(CacheError, match="use_cache=False"):
        model.generate(torch.cat([out, IDS], 1), use_cache=False, **how)
    model.generate(torch.cat([out, IDS[:, :5]], 1), **how)


def test_adapters_do_not_hide_the_base_model():
    plain, model = tiny_llama(), PeftModel(tiny_llama())
    assert inspect_model(unwrap_model(model)) == inspect_model(plain)


def test_a_saved_context_needs_the_adapters_it_was_read_with(policy, tmp_path):
    model = PeftModel(tiny_llama())
    path = tmp_path / "text.kv"
    context = compress(model, Words(), TEXT, retention=0.6, policy=policy)
    answer = context.ask("who?", 4)
    context.save(path)
    assert Context.load(path, model, Words()).ask("who?", 4) == answer
    with model.disable_adapter(), pytest.raises(ContextFileError, match="other adapters"):
        Context.load(path, model, Words())
    with model.disable_adapter(), pytest.raises(CacheError, match="compressed with other adapters"):
        context.ask("who?", 4)
    assert context.ask("who?", 4) == answer
    model.set_adapters(active_adapters=["second"])
    with pytest.raises(ContextFileError, match="other adapters"):
        Context.load(path, model, Words())
    with model.disable_adapter():
        compress(model, Words(), TEXT, retention=0.6, policy=policy).save(path)
    with pytest.raises(ContextFileError, match="other adapters"):
        Context.load(path, model, Words())
    Context.load(path, tiny_llama(), Words())


CHANGES = {"active_adapters": ["second"], "merged_adapters": ["second"], "scaling": {"first": 0.5, "second": 1.0}}


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_that_change_after_a_text_was_read_are_noticed(policy, change):
    model = PeftModel(tiny_llama())
    kept = compress(model, Words(), TEXT, retention=0.6, policy=policy)
    full = compress(model, Words(), TEXT, method="full")
    cache, unread = (RaggedCache(model, retention=0.6, policy=policy) for _ in range(2))
    how = {"max_new_tokens": 3, "do_sample": False}
    out = model.generate(IDS, past_key_values=cache, **how)
    (layer, *_) = (module for module in model.modules() if isinstance(module, LoraLinear))
    before = getattr(layer, change)
    model.set_adapters(**{change: CHANGES[change]})
    for use in (
        lambda: kept.ask("who?", 4),
        lambda: full.ask("who?", 4),
        lambda: model.generate(torch.cat([out, IDS[:, :5]], 1), past_key_values=cache, **how),
    ):
        with pytest.raises(CacheError, match="compressed with other adapters"):
            use()
    # A cache has the adapters that it reads its text with.
    model.generate(IDS, past_key_values=unread, **how)
    model.set_adapters(**{change: before})
    with pytest.raises(CacheError, match="compressed with other adapters"):
        model.generate(torch.cat([IDS, IDS], 1), past_key_values=unread, **how)
    assert kept.ask("who?", 4) is not None and full.ask("who?", 4) is not None


def test_learned_prompts_are_refused_unless_they_are_switched_off(policy):
    model = PeftModel(tiny_llama())
    vars(model)["active_peft_config"] = SimpleNamespace(is_prompt_learning=True)
    for make in (lambda: RaggedCache(model, policy=policy), lambda: compress(model, Words(), TEXT, policy=policy)):
        with pytest.raises(UnsupportedModelError, match="puts learned tokens before every text"):
            make()
    vars(model)["_adapters_disabled"] = True
    assert compress(model, Words(), TEXT, policy=policy).ask("who?", 4)


@peft_warns
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_learned_prompts_of_peft_itself(kind):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_llama(), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5))
    with pytest.raises(UnsupportedModelError, match="puts learned tokens before every text"):
        RaggedCache(model, method="knorm")
    with model.disable_adapter():
        RaggedCache(model, method="knorm")


@peft_warns
def test_adapters_of_peft_itself(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)
    model = peft.get_peft_model(tiny_llama(dtype=torch.float32), config).eval()
    context = compress(model, Words(), TEXT, method="knorm", retention=0.5)
    context.save(tmp_path / "text.kv")
    with model.disable_adapter():
        with pytest.raises(CacheError, match="compressed with other adapters"):
            context.ask("who ?", 4)
        with pytest.raises(ContextFileError, match="other adapters"):
            Context.load(tmp_path / "text.kv", model, Words())
    answer = context.ask("who ?", 4)
    assert Context.load(tmp_path / "text.kv", model, Words()).ask("who ?", 4) == answer
    assert context.ask("who ?", 4, stream=True) == answer
    assert "".join(context.stream("who ?", 4)).strip() == answer
    assert context.ask("who ?", generation_config=GenerationConfig(max_new_tokens=4)) == answer
    cache = RaggedCache(model, method="knorm", retention=0.5)
    model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False, past_key_values=cache)
    with pytest.raises(CacheError, match="do not begin with those that this cache has read"):
        model.generate(input_ids=torch.cat([IDS + 1, IDS], 1), max_new_tokens=3, past_key_values=cache)


@peft_warns
@pytest.mark.parametrize("method", ["full", "knorm", "kvzip"])
def test_compression_computes_no_logits_of_a_peft_model(method):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(task_type="CAUSAL_LM", r=4)).eval()

    def fail(*_):
        raise AssertionError("the output head was computed")

    unwrap_model(model).lm_head.register_forward_pre_hook(fail)
    compress(model, Words(), TEXT, method=method, **({} if method == "full" else {"retention": 0.5}))
