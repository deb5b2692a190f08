"""Every selector against its definition written out in float64, and its eviction against the masked stock model."""

import math
import sys
from unittest import mock

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError, LkvError, PromptError, UnsupportedModelError
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import LayerKV, read_prompt
from lkv.hf.spec import output_projections
from lkv.methods.budgets import Uniform
from lkv.methods.method import Method
from lkv.methods.selectors import (
    H2O,
    RKV,
    TOVA,
    CriticalKV,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    Random,
    Selector,
    SnapKV,
    StreamingLLM,
)
from tests.cache.helpers import ids, padded
from tests.conftest import tiny_llama
from tests.families import FAMILIES, build, tiny_gpt2
from tests.requests import resolve_method

SCALE = 0.3
shapes = given(
    batch=st.integers(1, 3), heads=st.integers(1, 3), groups=st.integers(1, 3), tokens=st.integers(6, 40),
    seed=st.integers(0, 99),
)  # fmt: skip


def tensors(batch: int, heads: int, groups: int, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = [batch, heads * groups, tokens, 8]
    query = torch.randn(shape, generator=draw, dtype=torch.float64)
    shape[1] = heads
    key, value = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    return query, key, value


softmaxes = pytest.mark.parametrize("softmax", [{}, {"sinks": 2.0}, {"softcap": 1.5}], ids=str)


def prompt_of(query: Tensor, key: Tensor, value: Tensor, softmax: dict[str, float]) -> LayerKV:
    """`softmax` has the sink of each query head, times its number, or the cap."""
    sinks = softmax["sinks"] * torch.arange(query.shape[1], dtype=torch.float64) if "sinks" in softmax else None
    return LayerKV(key, value, SCALE, query, sinks=sinks, softcap=softmax.get("softcap"))


def attention(
    query: Tensor, key: Tensor, scale: float = SCALE, sinks: float | None = None, softcap: float | None = None
) -> Tensor:
    """All of it: [B, Hq, T, T]; `sinks` and `softcap` as in `prompt_of`."""
    tokens = key.shape[2]
    logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    future = torch.arange(tokens)[:, None] < torch.arange(tokens)
    weights = logits.masked_fill(future, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks * torch.arange(query.shape[1], dtype=torch.float64)).exp()[:, None, None]
    return weights / total


def mean_of_groups(x: Tensor, heads: int) -> Tensor:
    """[B, Hq, ...] to [B, H, ...]: query heads 0 to G - 1 read KV head 0, and so on."""
    groups = x.shape[1] // heads
    return torch.stack([x[:, h * groups : (h + 1) * groups].mean(1) for h in range(heads)], 1)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=1e-10, rtol=1e-10)


@softmaxes
@shapes
def test_tova(softmax, batch, heads, groups, tokens, seed):
    query, key, value = tensors(batch, heads, groups, tokens, seed)
    last = attention(query, key, **softmax)[:, :, -1].mean(1)
    close(TOVA().scores(0, prompt_of(query, key, value, softmax)), torch.stack([last] * heads, 1))


@softmaxes
@shapes
def test_h2o(softmax, batch, heads, groups, tokens, seed):
    query, key, value = tensors(batch, heads, groups, tokens, seed)
    received = mean_of_groups(attention(query, key, **softmax), heads).sum(-2)
    close(H2O().scores(0, prompt_of(query, key, value, softmax)), received)
    observers = torch.tensor([tokens - t for t in range(tokens)])
    close(H2O(average=True).scores(0, prompt_of(query, key, value, softmax)), received / observers)


def test_h2o_of_several_blocks_never_holds_the_whole_attention():
    query, key, value = tensors(1, 1, 1, 2048, 0)
    with torch.profiler.profile(profile_memory=True) as profile:
        found = H2O().scores(0, LayerKV(key, value, SCALE, query))
    assert max(event.self_cpu_memory_usage for event in profile.events()) <= 256 * 2048 * 8 * 2 < 2048 * 2048 * 8
    close(found, mean_of_groups(attention(query, key), 1).sum(-2))


@softmaxes
@shapes
def test_snapkv(softmax, batch, heads, groups, tokens, seed):
    query, key, value = tensors(batch, heads, groups, tokens, seed)
    window, kernel = 4, 3
    received = attention(query, key, **softmax)[:, :, -window:, :-window].mean(2)
    padded = torch.nn.functional.pad(received, (1, 1))
    smooth = torch.stack([padded[..., t : t + kernel].sum(-1) / kernel for t in range(tokens - window)], -1)
    found = SnapKV(window, kernel).scores(0, prompt_of(query, key, value, softmax)).double()
    older = found[..., :-window]
    torch.testing.assert_close(older, mean_of_groups(smooth, heads), atol=1e-6, rtol=1e-5)
    assert float(found[..., -window:].min()) > float(older.max())


@softmaxes
@shapes
def test_r_kv(softmax, batch, heads, groups, tokens, seed):
    query, key, value = tensors(batch, heads, groups, tokens, seed)
    window, kernel, share, threshold = 3, 3, 0.3, 0.2
    received = attention(query, key, **softmax)[:, :, -window:, :-window].mean(2)
    older = tokens - window
    pooled = torch.stack([received[..., max(0, t - 1) : t + 2].amax(-1) for t in range(older)], -1)
    redundancy = torch.zeros(batch, heads, older, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            directions = key[b, h, :older] / key[b, h, :older].norm(dim=-1, keepdim=True)
            for i in range(older):
                cosines = [float(directions[i] @ directions[j]) * (i != j) for j in range(older)]
                similar = [j for j in range(older) if cosines[j] > threshold]
                for j in range(older):
                    redundancy[b, h, j] += cosines[j] * (j not in similar[-1:]) / older
    expected = share * mean_of_groups(pooled, heads) - (1 - share) * redundancy.softmax(-1)
    with mock.patch("lkv.methods.selectors.attention._TOKENS", 7):  # so that there are several blocks
        found = RKV(window, kernel, share, threshold).scores(0, prompt_of(query, key, value, softmax)).double()
    torch.testing.assert_close(found[..., :-window], expected, atol=1e-6, rtol=1e-5)
    assert float(found[..., -window:].min()) > float(found[..., :-window].max())


@shapes
def test_knorm(batch, heads, groups, tokens, seed):
    _, key, value = tensors(batch, heads, groups, tokens, seed)
    close(Knorm().scores(0, LayerKV(key, value, SCALE)), -((key**2).sum(-1) ** 0.5))


@shapes
def test_keydiff(batch, heads, groups, tokens, seed):
    _, key, value = tensors(batch, heads, groups, tokens, seed)
    expected = torch.empty(batch, heads, tokens, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            anchor = torch.stack([k / (k @ k).sqrt() for k in key[b, h]]).mean(0)
            for t, k in enumerate(key[b, h]):
                expected[b, h, t] = -(k @ anchor) / ((k @ k).sqrt() * (anchor @ anchor).sqrt())
    close(KeyDiff().scores(0, LayerKV(key, value, SCALE)), expected)


@shapes
def test_streaming_llm_keeps_the_sinks_and_then_the_most_recent(batch, heads, groups, tokens, seed):
    _, key, value = tensors(batch, heads, groups, tokens, seed)
    scores = StreamingLLM(sinks=4).scores(0, LayerKV(key, value, SCALE))
    assert scores.shape == (batch, heads, tokens)
    for count in range(1, tokens + 1):
        recent = range(tokens - max(0, count - 4), tokens)
        expected = sorted([*range(min(count, 4)), *recent])
        assert scores.topk(count).indices.sort().values.tolist() == [[expected] * heads] * batch


@shapes
def test_random_depends_on_seed_and_layer_alone(batch, heads, groups, tokens, seed):
    _, key, value = tensors(batch, heads, groups, tokens, seed)
    scores = Random(seed).scores(1, LayerKV(key, value, SCALE))
    assert torch.equal(scores, Random(seed).scores(1, LayerKV(-key, 2 * value, 0.1)))
    assert torch.equal(scores[:1], Random(seed).scores(1, LayerKV(key[:1], value[:1], SCALE)))
    others = [
        Random(seed).scores(2, LayerKV(key, value, SCALE)),
        Random(seed + 1).scores(1, LayerKV(key, value, SCALE)),
    ]
    assert not any(torch.equal(scores, other) for other in others)
    if heads > 1:
        assert not torch.equal(scores[:, 0], scores[:, 1])


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


def every(model) -> dict[str, Selector]:
    return {
        "streaming-llm": StreamingLLM(),
        "tova": TOVA(),
        "h2o": H2O(),
        "observed": H2O(average=True),
        "knorm": Knorm(),
        "keydiff": KeyDiff(),
        "expected": ExpectedAttention(model),
        "critical-expected": CriticalKV(model, ExpectedAttention(model, value_norm=False)),
        "critical-snapkv": CriticalKV(model, SnapKV(window=4)),
        "random": Random(3),
        "snapkv": SnapKV(window=4),
        "r-kv": RKV(window=4),
    }


NAMES = list(every(tiny_llama()))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_padded_batch_equals_its_rows_alone(name):
    model = tiny_llama()
    method = Method(name, Uniform(0.4), every(model)[name])
    texts = [ids(1, 30), ids(1, 21, 1)]
    cache, batch = RaggedCache(model, method=method), padded(texts)
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    model(**batch, position_ids=positions, past_key_values=cache, use_cache=True)
    for row, text in enumerate(texts):
        alone = RaggedCache(model, method=method)
        model(text, past_key_values=alone, use_cache=True)
        for layer, own in zip(cache.ragged_layers, alone.ragged_layers, strict=True):
            for head in range(2):
                start, first, count = (
                    int(x) for x in (layer.store.starts[row, head], own.store.starts[0, head], own.store.lens[0, head])
                )
                held = layer.store.k[start : start + count]
                torch.testing.assert_close(held, own.store.k[first : first + count], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_selector_says_of_itself_is_true(name):
    """Its scores are the same without queries, and token by token, exactly where it says so."""
    selector = every(tiny_llama())[name]
    query, key, value = tensors(2, 2, 2, 12, 0)
    scores = selector.scores(0, LayerKV(key, value, SCALE, query))
    assert scores.shape == (2, 2, 12) and not scores.requires_grad and bool(scores.isfinite().all())
    half = LayerKV(key.bfloat16(), value.bfloat16(), SCALE, query.bfloat16())
    assert every(tiny_llama(dtype=torch.float32))[name].scores(0, half).dtype == torch.float32
    if selector.reads_queries:
        with pytest.raises(CacheError, match="declare reads_queries = True"):
            selector.scores(0, LayerKV(key, value, SCALE))
    else:
        assert torch.equal(scores, selector.scores(0, LayerKV(key, value, SCALE)))
    if selector.is_local:
        alone = [selector.scores(0, LayerKV(key[:, :, t : t + 1], value[:, :, t : t + 1], SCALE)) for t in range(12)]
        close(torch.cat(alone, -1), scores)
    assert selector.is_local == (name == "knorm")


def test_a_streaming_head_of_duo_keeps_its_two_windows():
    duo = resolve_method("duo", retention=0.9, pattern=[[0.1, 0.9]])
    scores = duo.selector.scores(0, LayerKV(torch.randn(1, 2, 500, 4), torch.randn(1, 2, 500, 4), SCALE))
    (counts,) = duo.budget.counts(0, scores)
    assert counts == [384, 500]
    kept = scores[0, 0].topk(counts[0]).indices.sort().values
    assert kept.tolist() == [*range(128), *range(244, 500)]
    short = torch.randn(1, 2, 100, 4)
    assert duo.selector.scores(0, LayerKV(short, short, SCALE)).shape == (1, 2, 100)


@pytest.mark.parametrize("name", ["streaming-llm", "expected", "snapkv", "r-kv"])
def test_prompts_with_nothing_to_choose_from_are_named(name):
    selector = every(tiny_llama())[name]
    query, key, value = tensors(1, 2, 2, 4, 0)
    with pytest.raises(PromptError, match=r"the prompt has 4 tokens, but .* more than that; give a longer prompt"):
        selector.scores(0, LayerKV(key, value, SCALE, query))


@pytest.mark.parametrize("selector", [SnapKV(window=4), RKV(window=4), H2O(), TOVA()])
def test_float16_scores_stay_numbers_where_attention_does(selector):
    """Products of q and k may exceed the largest float16 before they are scaled, and not after."""
    torch.manual_seed(0)
    key, query = torch.randn(1, 2, 40, 64), torch.randn(1, 4, 40, 64)
    key[..., 0], query[..., 0] = 300, 235
    prompt = LayerKV(key.half(), torch.randn(1, 2, 40, 64).half(), 64**-0.5, query.half())
    assert (prompt.query[0, 0] @ prompt.key[0, 0].T).isinf().any()
    assert selector.scores(0, prompt).isfinite().all()
