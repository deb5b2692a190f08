"""Exact weights: a saved context is refused for every model whose weights differ from those that computed it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import ContextFileError, PolicyMismatchError
from lkv.hf.attention import patch_attention, unpatch_attention
from lkv.hf.weight_digests import WeightDigests
from tests import families
from tests.conftest import present, tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.hf.test_quantized_models import KINDS

REFUSED = "saved by a model with other weights"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A context of `tiny_llama(dtype=torch.float32)`."""
    path = tmp_path_factory.mktemp("context") / "text.kv"
    compress(tiny_llama(dtype=torch.float32), Words(), TEXT, method="knorm", retention=0.4).save(path)
    return path


def tensors_of(model) -> dict:
    """All that `save_pretrained` would write, without names that share memory."""
    return {tensor.data_ptr(): (name, tensor) for name, tensor in model.state_dict(keep_vars=True).items()}.values()


@pytest.mark.parametrize("through_data", [False, True])
def test_each_tensor_that_changes_a_little_is_refused_until_it_is_put_back(path, through_data):
    model = tiny_llama(dtype=torch.float32)
    Context.load(path, model, Words())
    for _, weight in tensors_of(model):
        before = weight.detach().clone()
        for change in (before * 1.01, before + 1e-6 * before.abs().amax()):
            with torch.no_grad():
                (weight.data if through_data else weight).copy_(change)
            with pytest.raises(ContextFileError, match=REFUSED):
                Context.load(path, model, Words())
        weight.data = before
    Context.load(path, model, Words())


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("Llama", "rms_norm_eps", 1e-2),
        ("Llama", "rms_norm_eps", 9.9999997e-07),  # 1e-6 as a GGUF file has it
        ("Llama", "hidden_act", "gelu"),
        ("Llama", "max_position_embeddings", 400),
        ("Llama", "initializer_range", 0.5),
        ("Llama", "attention_dropout", 0.1),
        ("Granite", "attention_multiplier", 0.05),
        ("Granite", "residual_multiplier", 0.3),
        ("Granite", "embedding_multiplier", 3.0),
        ("Granite", "logits_scaling", 4.0),
        ("Cohere", "logit_scale", 1.0),
        ("Qwen3Moe", "num_experts_per_tok", 1),
        ("Qwen3Moe", "norm_topk_prob", True),
        ("Gemma2", "query_pre_attn_scalar", 64),
        ("Gemma2", "attn_logit_softcapping", 5.0),
        ("Gemma2", "final_logit_softcapping", 0.1),
        ("Gemma2", "sliding_window", 5),
        ("Llama4", "attention_chunk_size", 7),
        ("SmolLM3", "no_rope_layers", [1, 0, 1, 0]),
    ],
)
def test_other_settings_are_refused_where_they_change_the_logits(tmp_path, family, name, value):
    """Of the same weights; the stock model decides whether they do."""
    family = present(next(each for each in families.SERVED if each.name == family))
    model = family.build(torch.float64)
    other = replace(family, changes=family.changes | {name: value}).build(torch.float64)
    other.load_state_dict(model.state_dict())
    path, ids = tmp_path / "text.kv", torch.tensor([Words()(TEXT)["input_ids"]])
    compress(model, Words(), TEXT, method="knorm", retention=0.4).save(path)
    unpatch_attention(model)
    with torch.no_grad():
        changes_logits = (model(ids).logits - other(ids).logits).abs().max() > 1e-4
    if changes_logits:
        with pytest.raises(ContextFileError, match=f"saved by a model with config.json: {name} .*but the model given"):
            Context.load(path, other, Words())
    else:
        Context.load(path, other, Words())


@pytest.mark.parametrize("family", ["Qwen2", "GptOss", "Qwen3Moe", "Qwen3_5"])
def test_no_tensor_of_a_family_is_left_out(family):
    found = next(each for each in [*families.SERVED, *families.HYBRIDS] if each.name == family)
    model = present(found).build(torch.bfloat16)
    for name, tensor in tensors_of(model):
        before = WeightDigests(model)
        seen = before.read(model)
        with torch.no_grad():
            tensor.copy_(tensor * 1.01 + 0.01)
        now = WeightDigests(model).read(model)
        assert now != seen and now.keys() == seen.keys() and not before.are_of(model), name


def fine_tuned(model):
    model.train()(torch.arange(3, 40)[None], labels=torch.arange(3, 40)[None]).loss.backward()
    torch.optim.SGD(model.parameters(), 1e-4).step()
    return model.eval()


def with_more_tokens(model):
    model = fine_tuned(model)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    return model


def merged(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).merge_and_unload()


def loaded_in_place(model):
    model.load_state_dict(fine_tuned(tiny_llama(dtype=torch.float32)).state_dict())
    return model


def replaced(model):
    norm = model.model.layers[1].input_layernorm
    norm.weight = nn.Parameter(norm.weight * 1.01)
    return model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("change", [fine_tuned, with_more_tokens, merged, loaded_in_place, replaced])
@pytest.mark.parametrize("used_before", [False, True])
def test_other_weights_of_the_same_model_are_refused(path, change, used_before):
    model = tiny_llama(dtype=torch.float32)
    if used_before:
        Context.load(path, model, Words())
    with pytest.raises(ContextFileError, match=REFUSED):
        Context.load(path, change(model), Words())


def test_embeddings_of_other_sizes_go_on_or_are_named(path):
    model, ids = tiny_llama(dtype=torch.float32), Context.load(path, tiny_llama(dtype=torch.float32), Words()).ids
    answer = Context.load(path, model, Words()).ask("what is one ?", 4)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    assert Context.load(path, model, Words()).ask("what is one ?", 4) == answer
    model.resize_token_embeddings(max(ids))
    problem = rf"token number {max(ids)}, but the model has embeddings of {max(ids)} tokens; if they have changed since"
    with pytest.raises(ContextFileError, match=problem):
        Context.load(path, model, Words())


def test_a_model_that_gets_the_weights_of_another_one_is_that_one(path, tmp_path):
    model, other = tiny_llama(dtype=torch.float32), tiny_llama(3, dtype=torch.float32)
    spec = patch_attention(other).spec
    other.load_state_dict(model.state_dict())
    Context.load(path, other, Words())
    assert patch_attention(other).spec == patch_attention(model).spec != spec
    compress(other, Words(), TEXT, method="knorm", retention=0.4).save(tmp_path / "other.kv")
    Context.load(tmp_path / "other.kv", model, Words())


def test_a_policy_is_refused_once_its_model_has_other_weights(policy):
    model = tiny_llama()
    RaggedCache(model, policy=policy)
    model.load_state_dict(tiny_llama(3).state_dict())
    with pytest.raises(PolicyMismatchError, match="other weights"):
        RaggedCache(model, policy=policy)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_same_weights_in_another_dtype_are_accepted(path, dtype):
    assert Context.load(path, tiny_llama(dtype=torch.float32).to(dtype), Words())
    if dtype != torch.float16:
        changed = tiny_llama(dtype=torch.float32)
        changed.model.layers[1].mlp.up_proj.weight.data *= 1.01
        with pytest.raises(ContextFileError, match=REFUSED):
            Context.load(path, changed.to(dtype), Words())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torchao int8", "torchao int4"])
def test_quantised_copies_are_accepted_and_their_changes_seen(kind, tmp_path):
    plain, model = tiny_llama(hidden_size=128, intermediate_size=128, head_dim=32, dtype=torch.float32), KINDS[kind]()
    compress(plain, Words(), TEXT, method="knorm", retention=0.4).save(tmp_path / "plain.kv")
    Context.load(tmp_path / "plain.kv", model, Words())
    compress(model, Words(), TEXT, method="knorm", retention=0.4).save(tmp_path / "own.kv")
    Context.load(tmp_path / "own.kv", KINDS[kind](), Words())
    model.model.layers[1].input_layernorm.weight.data *= 1.01
    with pytest.raises(ContextFileError, match=REFUSED):
        Context.load(tmp_path / "own.kv", model, Words())
