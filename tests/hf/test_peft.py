"""Models with adapters of PEFT: caches and contexts are used with the adapters that their text was read with."""

import pytest
import torch
from transformers import GenerationConfig

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import CacheError, ContextFileError, UnsupportedModelError
from lkv.hf.attention import patch_attention
from lkv.hf.spec import inspect_model, unwrap_model
from tests.conftest import tiny_llama
from tests.context.test_compression import Words

peft = pytest.importorskip("peft")
# peft 0.21 asks transformers 5.24 by a deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
IDS = torch.arange(3, 53)[None]
TEXT = " ".join(["one two three four five six"] * 10)


def adapted(base=None):
    """A model with two LoRA adapters, of which the first is active."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["k_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(base or tiny_llama(), config).eval()
    model.add_adapter("second", config)
    return model


@pytest.mark.parametrize("patched_first", [False, True])
def test_a_used_cache_checks_what_it_is_given(policy, patched_first):
    base = tiny_llama()
    if patched_first:
        patch_attention(base)
    model = adapted(base)
    assert unwrap_model(model) is base
    cache, plain = (RaggedCache(model, policy=policy, retention=0.5) for _ in range(2))
    how = {"max_new_tokens": 3, "do_sample": False}
    out = model.generate(IDS, past_key_values=cache, **how)
    assert torch.equal(out, base.generate(IDS, past_key_values=plain, **how))
    with pytest.raises(CacheError, match="do not begin with those that this cache has read"):
        model.generate(torch.cat([IDS + 1, IDS], 1), past_key_values=cache, **how)
    with pytest.raises(CacheError, match="use_cache=False"):
        model.generate(torch.cat([out, IDS], 1), past_key_values=cache, use_cache=False, **how)
    model.generate(torch.cat([out, IDS[:, :5]], 1), past_key_values=cache, **how)


def test_adapters_do_not_hide_the_base_model():
    assert inspect_model(unwrap_model(adapted())) == inspect_model(tiny_llama())


def test_a_saved_context_needs_the_adapters_it_was_read_with(policy, tmp_path):
    model, path = adapted(), tmp_path / "text.kv"
    context = compress(model, Words(), TEXT, retention=0.6, policy=policy)
    answer = context.ask("who?", 4)
    assert context.ask("who?", generation_config=GenerationConfig(max_new_tokens=4)) == answer
    assert context.ask("who?", 4, stream=True) == "".join(context.stream("who?", 4)).strip() == answer
    context.save(path)
    assert Context.load(path, model, Words()).ask("who?", 4) == answer
    with model.disable_adapter(), pytest.raises(ContextFileError, match="other adapters"):
        Context.load(path, model, Words())
    with model.disable_adapter(), pytest.raises(CacheError, match="compressed with other adapters"):
        context.ask("who?", 4)
    assert context.ask("who?", 4) == answer
    model.set_adapter("second")
    with pytest.raises(ContextFileError, match="other adapters"):
        Context.load(path, model, Words())
    with model.disable_adapter():
        compress(model, Words(), TEXT, retention=0.6, policy=policy).save(path)
    with pytest.raises(ContextFileError, match="other adapters"):
        Context.load(path, model, Words())
    Context.load(path, tiny_llama(), Words())


def set_scale(model, scale: float) -> None:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] = scale


# What is changed, and how it is undone.
CHANGES = {
    "active": (lambda model: model.set_adapter("second"), lambda model: model.set_adapter("default")),
    "merged": (lambda model: model.merge_adapter(["second"]), lambda model: model.unmerge_adapter()),
    "scale": (lambda model: set_scale(model, 0.5), lambda model: set_scale(model, 4.0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_adapters_that_change_after_a_text_was_read_are_noticed(policy, change):
    model, (apply, undo) = adapted(), CHANGES[change]
    kept = compress(model, Words(), TEXT, retention=0.6, policy=policy)
    full = compress(model, Words(), TEXT, method="full")
    cache, unread = (RaggedCache(model, retention=0.6, policy=policy) for _ in range(2))
    how = {"max_new_tokens": 3, "do_sample": False}
    out = model.generate(IDS, past_key_values=cache, **how)
    apply(model)
    for use in (
        lambda: kept.ask("who?", 4),
        lambda: full.ask("who?", 4),
        lambda: model.generate(torch.cat([out, IDS[:, :5]], 1), past_key_values=cache, **how),
    ):
        with pytest.raises(CacheError, match="compressed with other adapters"):
            use()
    # A cache has the adapters that it reads its text with.
    model.generate(IDS, past_key_values=unread, **how)
    undo(model)
    with pytest.raises(CacheError, match="compressed with other adapters"):
        model.generate(torch.cat([IDS, IDS], 1), past_key_values=unread, **how)
    assert kept.ask("who?", 4) is not None and full.ask("who?", 4) is not None


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_learned_prompts_are_refused_unless_they_are_switched_off(kind):
    model = peft.get_peft_model(tiny_llama(), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5))
    for make in (lambda: RaggedCache(model, method="knorm"), lambda: compress(model, Words(), TEXT, method="knorm")):
        with pytest.raises(UnsupportedModelError, match="puts learned tokens before every text"):
            make()
    with model.disable_adapter():
        assert compress(model, Words(), TEXT, method="knorm").ask("who?", 4)


@pytest.mark.parametrize("method", ["full", "knorm", "kvzip"])
def test_compression_computes_no_logits_of_a_peft_model(method):
    model = adapted()

    def fail(*_):
        raise AssertionError("the output head was computed")

    unwrap_model(model).lm_head.register_forward_pre_hook(fail)
    compress(model, Words(), TEXT, method=method, **({} if method == "full" else {"retention": 0.5}))
