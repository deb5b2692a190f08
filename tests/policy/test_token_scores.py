"""LKV-T's terms against formulas written out in float64, their gradients, and texts that come in parts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import UnsupportedModelError
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import LayerKV, read_prompt
from lkv.policy.policy import Policy
from lkv.policy.score_formula import (
    ContentWeights,
    ExpectedAttentionWeights,
    PositionWeights,
    TokenScoreWeights,
    content_scores,
    expected_attention_scores,
    scores_at_eviction,
    scores_on_arrival,
)
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.policy.token_scores import FUTURE
from tests.conftest import tiny_llama
from tests.methods.test_model_selectors import rotation

EVERYTHING = ScorerInputs("unrotated", "learned", 5)


def draw(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def filled(spec, inputs=EVERYTHING, seed=0) -> Policy:
    """A policy whose every number is drawn."""
    torch.manual_seed(seed)
    policy = Policy(spec, inputs=inputs)
    with torch.no_grad():
        for name, tensor in policy.tokens.state_dict().items():
            tensor.copy_(torch.rand_like(tensor) + 0.5 if name == "std" else torch.randn_like(tensor) * 0.7)
    return policy.requires_grad_(False)


def by_hand(policy: Policy, layer: int, head: int, token: int, part: LayerKV, base: float) -> float:
    """The score of one token of a prompt that starts at 0, term by term."""
    w = {name: tensor.double() for name, tensor in policy.tokens.state_dict().items()}
    at = (layer, head)
    key, value = part.key[0, head, token].double(), part.value[0, head, token].double()
    dim, end = len(key), part.key.shape[2]
    plain = key @ rotation(token, dim, base)
    x = (torch.cat([plain, value]) - w["mean"][at]) / w["std"][at]
    score = silu(x @ w["hidden"][at] + w["bias"][at]) @ w["output"][at]
    ahead = sum(rotation(p, dim, base) for p in range(end, end + FUTURE)).T / FUTURE
    expected = 0.0
    for group in range(w["query_mean"].shape[2]):
        mean = w["query_mean"][at][group] @ ahead
        covariance = ahead.T @ w["query_spread"][at] @ w["query_spread"][at].T @ ahead
        logit = float(key @ mean) * part.scale + float(key @ covariance @ key) * part.scale**2 / 2
        expected += math.exp(logit - float(w["normaliser"][at][group]))
    score += w["attention_weight"][at] * (math.log(expected) + math.log(float(value.norm())))
    for name, place in (("start", token + 1), ("end", end - token)):
        table = w[name][at].tolist()
        x = min(math.log2(place), len(table) - 1)
        left = min(int(x), len(table) - 2)
        score += table[left] + (table[left + 1] - table[left]) * (x - left)
    return float(score)


@pytest.mark.slow
def test_every_term_equals_its_formula_token_by_token():
    model = tiny_llama(dtype=torch.float64)
    attached = patch_attention(model)
    policy = filled(attached.spec)
    base = model.config.rope_parameters["rope_theta"]
    prompt = read_prompt(model, torch.arange(3, 40)[None])
    for layer, part in enumerate(prompt):
        scores = policy.tokens(part, layer)
        for head in range(attached.spec.kv_heads):
            for token in (0, 1, 2, 17, 35, 36):
                assert float(scores[0, head, token]) == pytest.approx(
                    by_hand(policy, layer, head, token, part, base), rel=2e-5, abs=2e-5
                )


@given(st.integers(1, 60), st.integers(0, 10_000), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_position_terms_are_piecewise_linear_and_flat_beyond_the_last_knot(tokens, start, knots):
    tables = PositionWeights(draw(2, knots, seed=1), draw(2, knots, seed=2))
    places = torch.arange(start, start + tokens)
    scorer = TokenScoreWeights(zero_content(), None, tables)
    value = draw(1, 2, tokens, 4)
    found = scores_on_arrival(scorer, value, value, places) + scores_at_eviction(
        scorer, value, value, places, start + tokens, None, 1.0
    )
    for t, place in enumerate(places.tolist()):
        for head in range(2):
            expected = 0.0
            for table, x in ((tables.start, place + 1), (tables.end, start + tokens - place)):
                log = min(math.log2(x), knots - 1)
                left, right = math.floor(log), math.ceil(log)
                a, b = float(table[head, left]), float(table[head, right])
                expected += a + (b - a) * (log - left)
            assert float(found[0, head, t]) == pytest.approx(expected, abs=1e-5)


def zero_content(dim: int = 4) -> ContentWeights:
    return ContentWeights(
        torch.zeros(2, 2 * dim), torch.ones(2, 2 * dim), torch.zeros(2, 2 * dim, dim), torch.zeros(2, dim),
        torch.zeros(2, dim),
    )  # fmt: skip


def test_gradients_reach_every_learned_number():
    """Against finite differences in float64."""
    dim, group, rank, knots, tokens = 4, 2, 3, 4, 6
    key, value = draw(1, 2, tokens, dim), draw(1, 2, tokens, dim, seed=1)
    ahead, places = draw(dim, dim, seed=2), torch.arange(tokens)

    def scores(hidden, bias, output, weight, mean, spread, start, end):
        content = ContentWeights(draw(2, 2 * dim, seed=3), draw(2, 2 * dim, seed=4).abs() + 0.5, hidden, bias, output)
        scorer = TokenScoreWeights(
            content, ExpectedAttentionWeights(weight, mean, spread, draw(2, group, seed=5)), PositionWeights(start, end)
        )
        return scores_on_arrival(scorer, key, value, places) + scores_at_eviction(
            scorer, key, value, places, tokens, ahead, 0.5
        )

    shapes = [
        (2, 2 * dim, dim), (2, dim), (2, dim), (2,), (2, group, dim), (2, dim, rank), (2, knots), (2, knots),
    ]  # fmt: skip
    inputs = [draw(*shape, seed=10 + i).requires_grad_() for i, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(scores, inputs)


def test_the_attention_term_misses_no_rotation_in_silence():
    model = tiny_llama()
    policy = filled(patch_attention(model).spec)
    key = torch.randn(1, 2, 5, 8)
    with pytest.raises(UnsupportedModelError, match="undoes the model's rotary embedding"):
        policy.tokens(LayerKV(key, key, 1.0), 0)
    term = policy.tokens.weights(0).attention
    assert expected_attention_scores(term, key, key, torch.eye(8), 1.0).shape == (1, 2, 5)


def test_content_in_blocks_equals_content_with_gradients():
    policy = filled(patch_attention(tiny_llama()).spec)
    content = policy.tokens.weights(0).content
    key, value = torch.randn(2, 2, 4500, 8), torch.randn(2, 2, 4500, 8)
    blocks = content_scores(content, key, value)
    weights = (content.mean, content.std, content.hidden, content.bias, content.output)
    learning = ContentWeights(*(x.clone().requires_grad_() for x in weights))
    torch.testing.assert_close(blocks, content_scores(learning, key, value).detach(), atol=1e-4, rtol=1e-4)


def test_all_terms_in_blocks_equal_the_terms_of_the_whole_text():
    """The prompt is not a multiple of a block; one block's attention is not another's."""
    model = tiny_llama(dtype=torch.float32)
    policy = filled(patch_attention(model).spec).float()
    key, value = torch.randn(2, 2, 4500, 8), torch.randn(2, 2, 4500, 8)
    part = LayerKV(key, value, 0.4, start=7, length=5000, rotation=patch_attention(model).rotations[0])
    with torch.no_grad():
        blocks = policy.tokens(part, 1)
    torch.testing.assert_close(blocks, policy.tokens(part, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16])
def test_autocast_rounds_no_score(rounded):
    model = tiny_llama(dtype=torch.float32)
    policy = filled(patch_attention(model).spec).float()
    part = read_prompt(model, torch.arange(3, 43)[None])[0]
    exact = policy.tokens(part, 0)
    with torch.autocast("cpu", rounded):
        assert torch.equal(policy.tokens(part, 0), exact)


def test_completed_scores_are_the_scores_of_the_whole_text():
    model = tiny_llama(dtype=torch.float64)
    attached = patch_attention(model)
    policy = filled(attached.spec)
    part = read_prompt(model, torch.arange(3, 40)[None])[1]
    tokens = part.key.shape[2]
    whole = policy.tokens(part, 1)
    for first in (0, 9):
        late = LayerKV(part.key[:, :, first:], part.value[:, :, first:], part.scale, None, first, None, part.rotation)
        arrived = policy.tokens.score_on_arrival(late, 1)
        for head in range(2):
            entries = LayerKV(
                part.key[:, head : head + 1, first:], part.value[:, head : head + 1, first:], part.scale,
                length=tokens, rotation=part.rotation,
            )  # fmt: skip
            rest = policy.tokens.score_at_eviction(entries, 1, slice(head, head + 1), torch.arange(first, tokens))
            torch.testing.assert_close(arrived[0, head] + rest.flatten(), whole[0, head, first:], atol=1e-5, rtol=1e-5)


def test_decode_eviction_gives_up_generated_tokens_too():
    """Positions stay with the entries: a token's recency fades as the text goes on."""
    model = tiny_llama()
    policy = filled(patch_attention(model).spec, seed=3)
    with torch.no_grad():
        policy.tokens.end.copy_(-torch.arange(5.0))  # recent ones foremost
        policy.tokens.start.zero_()
        for name in ("output", "attention_weight"):
            getattr(policy.tokens, name).zero_()
    cache = RaggedCache(model, policy=policy, retention=0.5, decode_eviction=True, slack=4)
    model(torch.arange(3, 23)[None], past_key_values=cache, use_cache=True)
    for token in range(30, 46):
        model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
    for layer in cache.ragged_layers:
        for head in range(2):
            start, count = int(layer.store.starts[0, head]), int(layer.store.lens[0, head])
            positions = layer.store.positions[start : start + count].tolist()
            # Beyond the last knot (16 tokens back) the term is flat; nearer ones are all there.
            newest = [p for p in range(layer.base_length) if layer.base_length - p < 16]
            assert set(newest[-min(count, len(newest)) :]) <= set(positions)


@pytest.mark.parametrize("memory", [None, "3KB"])
def test_decode_eviction_keeps_the_most_recent_tokens_whatever_their_scores(memory):
    """A third of a head's entries before the eviction at most, in tiers as well; knorm has no such window."""
    model = tiny_llama(head_dim=8)
    policy = filled(patch_attention(model).spec, seed=3)
    with torch.no_grad():
        policy.tokens.end.copy_(torch.arange(5.0) * 100)  # old ones foremost
    options = {"memory": memory} if memory else {"retention": 0.5}
    recent = {}
    for method in ("lkv-t", "knorm"):
        cache = RaggedCache(model, method=method, policy=policy, decode_eviction=True, slack=4, **options)
        model(torch.arange(3, 43)[None], past_key_values=cache, use_cache=True)
        for token in range(3, 15):
            model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        recent[method] = []
        for layer in cache.ragged_layers:
            store, end = layer.store.restore(), layer.base_length
            for start, count in zip(store.starts.flatten().tolist(), layer.store.lens.flatten().tolist(), strict=True):
                window = min(32, count // 3)
                positions = set(store.positions[start : start + store.counts.flatten()[0]].tolist())
                assert window >= 3
                recent[method].append(set(range(end - window, end)) <= positions)
    assert all(recent["lkv-t"]) and not all(recent["knorm"])
