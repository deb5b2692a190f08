"""Selectors that read the model, Expected Attention and CriticalKV, against their definitions in float64."""

import math
import sys

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lkv.errors import CacheError, LkvError, UnsupportedModelError
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import LayerKV, read_prompt
from lkv.hf.spec import output_projections
from lkv.methods.selectors import (
    H2O,
    CriticalKV,
    ExpectedAttention,
    Knorm,
    Random,
)
from tests.cache.helpers import ids
from tests.conftest import tiny_llama
from tests.families import FAMILIES, build, tiny_gpt2
from tests.methods.test_selectors import SCALE, mean_of_groups, prompt_of, softmaxes, tensors


def rotation(position: int, dim: int, theta: float = 10000.0) -> Tensor:
    """Llama's rotation of coordinates i and i + d / 2 as a matrix [d, d]."""
    matrix, half = torch.zeros(dim, dim, dtype=torch.float64), dim // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / dim)
        matrix[i, i] = matrix[i + half, i + half] = math.cos(angle)
        matrix[i, i + half], matrix[i + half, i] = -math.sin(angle), math.sin(angle)
    return matrix


def expected_exp(mean: Tensor, variance: Tensor, softcap: float | None) -> Tensor:
    """E[exp(x)] of a normal x, capped if there is a cap: then over a fine grid."""
    if softcap is None:
        return (mean + variance / 2).exp()
    x = torch.linspace(-8, 8, 2001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2)
    return ((softcap * torch.tanh((mean + variance.sqrt() * x) / softcap)).exp() * density).sum() / density.sum()


@softmaxes
@settings(max_examples=10)
@given(st.integers(1, 2), st.integers(8, 40), st.integers(1, 30), st.integers(0, 5), st.booleans(), st.integers(0, 9))
def test_expected_attention(softmax, batch, tokens, future, sinks, value_norm, seed):
    query, key, value = tensors(batch, 2, 2, tokens, seed)
    ahead = torch.stack([rotation(t, 8) for t in range(tokens, tokens + future)]).mean(0)
    expected = torch.zeros(batch, 4, tokens - sinks, dtype=torch.float64)
    for b in range(batch):
        for head in range(4):
            plain = torch.stack([rotation(t, 8).T @ query[b, head, t] for t in range(sinks, tokens)])
            mean, spread = ahead @ plain.mean(0), ahead @ plain.T.cov(correction=0) @ ahead.T
            moments = [(SCALE * k @ mean, SCALE**2 * k @ spread @ k) for k in key[b, head // 2, sinks:]]
            weights = torch.stack([expected_exp(*pair, softmax.get("softcap")) for pair in moments])
            expected[b, head] = weights / (weights.sum() + (math.exp(2.0 * head) if "sinks" in softmax else 0.0))
    expected = mean_of_groups(expected, 2)
    if value_norm:
        expected = expected * value[:, :, sinks:].norm(dim=-1)
    selector = ExpectedAttention(tiny_llama(), future, sinks, value_norm)
    found = selector.scores(0, prompt_of(query, key, value, softmax))
    # The model's own cosines are computed in float32.
    torch.testing.assert_close(found[..., sinks:], expected, atol=1e-5, rtol=1e-4)
    if sinks:
        assert float(found[..., :sinks].min()) > float(found[..., sinks:].max())


ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        *((family, None) for family in [*FAMILIES, "Cohere"]),
        ("Phi3", ROPE | {"partial_rotary_factor": 0.5}),
        ("Llama", ROPE | {"rope_type": "yarn", "factor": 4.0}),
        ("Llama", ROPE | {"rope_type": "dynamic", "factor": 4.0}),
    ],
)
def test_queries_are_rotated_back_in_every_family(family, rope):
    """The first layer's queries, which depend on the token alone: at their places, and each read at position 0."""
    model = build(family) if rope is None else build(family, rope_parameters=rope)
    selector, text = ExpectedAttention(model), ids(1, 12)

    def rotated(text: Tensor) -> Tensor:
        return read_prompt(model, text, queries=True)[0].query

    alone = torch.cat([rotated(text[:, t : t + 1]) for t in range(12)], 2)
    # YaRN scales the rotated queries, at position 0 too.
    plain = alone / getattr(model.model.rotary_emb, "attention_scaling", 1.0)
    torch.testing.assert_close(selector._rotations[0].unrotate(rotated(text)), plain, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_asking_about_later_positions_leaves_the_model_as_it_was():
    """Dynamic RoPE changes with the longest position that it is asked about."""
    model = build("Llama", max_position_embeddings=32, rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 4.0})
    text, selector = ids(1, 40), ExpectedAttention(model)
    before = model(text).logits
    frequencies = model.model.rotary_emb.inv_freq.clone()
    layer = read_prompt(model, text, queries=True)[0]
    selector.scores(0, layer)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert torch.equal(model(text).logits, before)


@torch.no_grad()
def test_layers_without_rope_are_taken_as_they_are():
    config = transformers.SmolLM3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=67, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        no_rope_layers=[1, 1, 1, 0],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.SmolLM3ForCausalLM(config).eval()
    prompt = read_prompt(model, ids(1, 20), queries=True)
    turned = [not torch.equal(layer.required_rotation.unrotate(layer.key), layer.key) for layer in prompt]
    assert turned == [True, True, True, False]
    # Nothing is to be turned ahead either: what is expected are the queries as they are.
    query = prompt[3].query[:, :, 4:].unflatten(1, (2, 2))
    mean = query.mean(3, keepdim=True)
    spread = (query - mean).transpose(-1, -2) @ (query - mean) / query.shape[3]
    key, scale = prompt[3].key[:, :, None, 4:], prompt[3].scale
    logits = (key @ mean.transpose(-1, -2))[..., 0] * scale + ((key @ spread) * key).sum(-1) * scale**2 / 2
    expected = torch.softmax(logits, -1).mean(2) * prompt[3].value[:, :, 4:].norm(dim=-1)
    torch.testing.assert_close(ExpectedAttention(model).scores(3, prompt[3])[..., 4:], expected)


def test_a_model_whose_queries_are_turned_in_another_way_is_refused(monkeypatch):
    model = build("Llama")
    module = sys.modules[type(model).__module__]
    turn = module.apply_rotary_pos_emb
    patch_attention(model)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: turn(q, k, cos, -sin))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM rotates the queries of some layers"):
        ExpectedAttention(model)


@settings(max_examples=15)
@given(st.integers(1, 2), st.integers(6, 40), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(0, 9))
def test_criticalkv_keeps_what_its_two_stages_choose(batch, tokens, share, seed):
    model = tiny_llama()
    query, key, value = tensors(batch, 2, 2, tokens, seed)
    inner = H2O()
    ours, prompt = CriticalKV(model, inner, first_stage=share), LayerKV(key, value, SCALE, query)
    scores = ours.scores(1, prompt)
    plain = inner.scores(1, LayerKV(key, value, SCALE, query))
    weight = model.model.layers[1].self_attn.o_proj.weight
    norms = torch.stack(
        [(value[:, h // 2] @ weight[:, 8 * h : 8 * h + 8].T).abs().sum(-1) for h in range(4)], 1
    ).detach()
    refined = (plain + 1e-4) * mean_of_groups(norms, 2)
    for count in range(tokens + 1):
        ranking = ours.refine(1, prompt, scores, [[count] * 2] * batch)
        assert bool(ranking.isfinite().all())
        for b in range(batch):
            for h in range(2):
                first = sorted(range(tokens), key=lambda t: -float(plain[b, h, t]))[: int(share * count)]
                rest = sorted((t for t in range(tokens) if t not in first), key=lambda t: -float(refined[b, h, t]))
                # In order: of those kept, the better tiers of a memory budget take the best.
                assert ranking[b, h].topk(count).indices.tolist() == [*first, *rest[: count - len(first)]]


def test_output_projections_of_gpt2_are_transposed_back():
    model = tiny_gpt2()
    x = torch.randn(5, model.config.hidden_size, dtype=model.dtype)
    expected = [block.attn.c_proj for block in model.transformer.h]
    for weight, projection in zip(output_projections(model), expected, strict=True):
        with torch.no_grad():
            assert torch.allclose(x @ weight.T + projection.bias, projection(x), rtol=1e-12)


def test_output_projections_are_those_of_the_layers_that_are_evicted_from():
    model = build("Gemma3")
    expected = [model.model.layers[index].self_attn.o_proj.weight for index in (0, 2, 4)]
    assert all(map(torch.equal, output_projections(model), expected))
    model.model.layers[0].self_attn.o_proj.weight = torch.nn.Parameter(expected[0].to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="quantised output projection"):
        CriticalKV(model, H2O())
    del model.model.layers[2].self_attn.o_proj
    with pytest.raises(UnsupportedModelError, match="without an output projection that LKV knows"):
        CriticalKV(model, H2O())


def test_criticalkv_names_an_inner_selector_that_does_not_fit():
    model = tiny_llama()
    with pytest.raises(CacheError, match="Knorm gives scores below 0"):
        CriticalKV(model, Knorm()).scores(0, LayerKV(*tensors(1, 2, 2, 9, 0)[1:], SCALE))
    with pytest.raises(LkvError, match="first_stage is 2"):
        CriticalKV(model, H2O(), first_stage=2)
    assert CriticalKV(model, H2O()).reads_queries and not CriticalKV(model, Random()).reads_queries
