"""Compensation: its least-squares problems against other solvers, its queries against the model, and the cache."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError, LkvError, UnsupportedModelError
from lkv.evaluation.comparison import MethodComparison, MethodGrid
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import LayerKV, read_prompt
from lkv.methods import compensation
from lkv.methods.base import TierBudget
from lkv.methods.budgets import PerHead
from lkv.methods.method import Method
from lkv.methods.registry import parse_method, register_method
from lkv.methods.selectors import SnapKV
from lkv.methods.targets import Precision
from tests.cache.helpers import RATIOS, OwnScores, head_entries, ids, padded, score
from tests.conftest import tiny_llama
from tests.families import SERVED, longrope_model

SCALE = 0.35
NORMED_LATE = ("HunYuanDenseV1", "HunYuanMoEV1")  # their norm of q comes after RoPE
METHOD = Method("own+compensation", PerHead(RATIOS), OwnScores(), compensation=True)
shapes = given(group=st.integers(1, 3), half=st.integers(1, 8), tokens=st.integers(2, 60), seed=st.integers(0, 999))


def layer(group: int, half: int, tokens: int, seed: int) -> tuple[LayerKV, Tensor, Tensor]:
    """A prompt of two rows and three heads, its reference queries, and how many of its first tokens each head keeps."""
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 3, group, 2 * half, 8, generator=draw, dtype=torch.float64)
    key, value = (torch.randn(2, 3, tokens, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    return LayerKV(key, value, SCALE), query, torch.randint(0, tokens + 1, (2, 3), generator=draw)


def restored(key: Tensor) -> Tensor:
    """k as a quantiser could restore it."""
    return (key * 4).round() / 4


def ridged(matrix: np.ndarray, right: np.ndarray, ridge: float) -> np.ndarray:
    """argmin |matrix x - right|^2 + ridge |x|^2, from the stacked problem."""
    below = np.sqrt(ridge) * np.eye(matrix.shape[1])
    stacked = np.concatenate([right, np.zeros((matrix.shape[1], *right.shape[1:]))])
    return np.linalg.lstsq(np.concatenate([matrix, below]), stacked, rcond=None)[0]


def attention_of(prompt: LayerKV, query: Tensor, key: Tensor, head: int) -> Tensor:
    """Attention weights [G, n, m] of queries [G, n, d] of one KV head; with a sink they sum to less than 1."""
    logits = query @ key.T * prompt.scale
    if prompt.softcap is not None:
        logits = prompt.softcap * torch.tanh(logits / prompt.softcap)
    weights = logits.exp()
    group = len(query)
    sinks = torch.zeros(group) if prompt.sinks is None else prompt.sinks[head * group : (head + 1) * group].exp()
    return weights / (weights.sum(-1, keepdim=True) + sinks[:, None, None])


def expected_change(
    prompt: LayerKV, row: int, head: int, query: Tensor, kept_key: Tensor, kept_value: Tensor
) -> np.ndarray:
    """The change of one head's values, from its queries [G, n, d] and the kept entries [m, d]."""
    full = attention_of(prompt, query, prompt.key[row, head], head) @ prompt.value[row, head]
    attention = attention_of(prompt, query, kept_key, head)
    missing = full - attention @ kept_value
    ridge = compensation.RIDGE * float(attention.square().sum()) / (query.shape[0] * query.shape[1])
    halves = [
        (weights.flatten(0, 1).numpy(), lacked.flatten(0, 1).numpy())
        for weights, lacked in zip(attention.chunk(2, 1), missing.chunk(2, 1), strict=True)
    ]
    changes = [ridged(*half, ridge) for half in halves]
    # The part of each half's change that leaves least of what the other half lacks.
    predicted = np.concatenate([(halves[1 - i][0] @ changes[i]).ravel() for i in (0, 1)])
    lacked = np.concatenate([halves[1 - i][1].ravel() for i in (0, 1)])
    part = np.linalg.lstsq(predicted[:, None], lacked, rcond=None)[0][0]
    change = min(1, max(0, part)) * (changes[0] + changes[1]) / 2
    norm, limit = np.linalg.norm(change, axis=1), compensation.LARGEST_CHANGE * np.linalg.norm(kept_value, axis=1)
    return change * np.minimum(1, limit / np.maximum(norm, 1e-30))[:, None]


def places(lens: Tensor) -> list[tuple[int, int, int]]:
    """Row, head and number of kept entries of each head that keeps some."""
    return [(row, head, int(lens[row, head])) for row in range(2) for head in range(3) if lens[row, head]]


@pytest.mark.parametrize(("sink", "softcap"), [(None, None), (1.0, None), (None, 0.7), (1.0, 0.7)])
@shapes
def test_v_moves_by_what_one_half_of_the_queries_finds_and_the_other_confirms(sink, softcap, group, half, tokens, seed):
    prompt, query, lens = layer(group, half, tokens, seed)
    sinks = None if sink is None else sink * torch.linspace(-1, 3, 3 * group, dtype=torch.float64)
    prompt = replace(prompt, sinks=sinks, softcap=softcap)
    new = compensation.fit_values(prompt, query, restored(prompt.key), prompt.value, lens)
    for row, head, kept in places(lens):
        key, value = restored(prompt.key)[row, head, :kept], prompt.value[row, head, :kept]
        change = expected_change(prompt, row, head, query[row, head], key, value)
        np.testing.assert_allclose((new[row, head, :kept] - value).numpy(), change, atol=1e-6)


@shapes
def test_heads_do_not_depend_on_each_other_or_on_what_follows_their_entries(group, half, tokens, seed):
    prompt, query, lens = layer(group, half, tokens, seed)
    key, value = restored(prompt.key), prompt.value
    new = compensation.fit_values(prompt, query, key, value, lens)
    for row, head, kept in places(lens):
        one = slice(row, row + 1), slice(head, head + 1)
        alone = LayerKV(prompt.key[one], prompt.value[one], SCALE)
        found = compensation.fit_values(alone, query[one], key[one][:, :, :kept], value[one][:, :, :kept], lens[one])
        torch.testing.assert_close(found[0, 0], new[row, head, :kept], atol=1e-8, rtol=0)


@shapes
def test_what_is_whole_stays_as_it_is(group, half, tokens, seed):
    prompt, query, lens = layer(group, half, tokens, seed)
    new = compensation.fit_values(prompt, query, prompt.key, prompt.value, torch.full_like(lens, tokens))
    torch.testing.assert_close(new, prompt.value, atol=1e-9, rtol=0)


def test_nothing_changes_if_the_other_half_contradicts():
    """Each half of the queries attends to an evicted token of its own; the only kept one has other values."""
    query = torch.ones(1, 1, 1, 10, 8, dtype=torch.float64)
    query[:, :, :, 5:] = -1
    key, value = (torch.zeros(1, 1, 3, 8, dtype=torch.float64) for _ in range(2))
    key[:, :, 1], key[:, :, 2] = 1, -1
    prompt, kept = LayerKV(key, value, SCALE), (key[:, :, :1], value[:, :, :1], torch.tensor([[1]]))
    value[..., 0, :] = torch.tensor([9.0, -9.0] * 4)
    value[..., 1, :], value[..., 2, :] = value[..., 0, :] + 1, value[..., 0, :] - 1
    assert torch.equal(compensation.fit_values(prompt, query, *kept), kept[1])
    # Now both lack the same: the ridge alone shrinks the change, and then the limit.
    share = float((query[0, 0, 0] @ key[0, 0].T * SCALE).softmax(-1)[0, 1:].sum())
    for difference in (1, 100):
        value[..., 1:, :] = value[..., :1, :] + difference
        expected = min(difference * share * 5 / (5 + compensation.RIDGE), 9 * compensation.LARGEST_CHANGE)
        change = compensation.fit_values(prompt, query, *kept) - kept[1]
        torch.testing.assert_close(change, torch.full_like(change, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_heads_stay_numbers(dtype):
    # Kept tokens that no query looks at, equal tokens, zeros, far outliers, and a sink that takes all attention.
    query, key, value = torch.randn(3, 1, 1, 30, 8).to(dtype)
    cases = [(query * 0, key, value), (query, key * 0, value), (query * 50, key, value), (query, key, value * 0)]
    outliers = key[:, :, :15] + 40 * query.mean(2, keepdim=True)
    cases.append((query, torch.cat([outliers, key[:, :, 15:]], 2), value * 1000))
    for (q, k, v), sinks in product(cases, (None, torch.tensor([200.0]))):
        prompt = LayerKV(k, v, SCALE, sinks=sinks)
        new = compensation.fit_values(prompt, q.float()[:, :, None], k[:, :, 20:], v[:, :, 20:], torch.tensor([[10]]))
        assert new.dtype == torch.float32 and bool(new.isfinite().all())


@pytest.mark.parametrize(
    "family", [f for f in SERVED if not f.missing and f.rotation != "none: k as cached"], ids=lambda f: f.name
)
@torch.no_grad()
def test_references_are_the_models_own_queries_rotated_behind_the_text(family):
    model, text = family.build(), ids(1, 20)
    for weight in model.parameters():  # norms of q and k, for one, that no rotation goes past
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, 0.2, 2.2)
    if family.name in NORMED_LATE:
        with pytest.raises(UnsupportedModelError, match=r"a way that \+compensation cannot undo"):
            RaggedCache(model, method="knorm+compensation")
        return
    prompt = read_prompt(model, text, queries=True)
    # Hidden states depend on distances alone. Token 10 + i of the second half is turned to 20 + i.
    elsewhere = read_at(model, text, 10)[0].query[:, :, 10:]
    found = compensation.reference_queries(prompt[0])
    expected = elsewhere.unflatten(1, (prompt[0].key.shape[1], -1))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def read_at(model, text: Tensor, start: int):
    """The layers of `text` read at positions from `start` on."""
    decoder = model.get_decoder()
    places = start + torch.arange(text.shape[1])[None]
    handle = decoder.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"position_ids": places}), with_kwargs=True
    )
    try:
        return read_prompt(model, text, queries=True)
    finally:
        handle.remove()


@torch.no_grad()
def test_the_cache_holds_the_compensated_entries():
    model, text = tiny_llama(), ids(1, 40)
    plain, cache = (
        RaggedCache(model, method=method) for method in (Method("own", PerHead(RATIOS), OwnScores()), METHOD)
    )
    for either in (plain, cache):
        model(text, past_key_values=either)
    prompt = read_prompt(model, text, queries=True)
    for number, (before, after) in enumerate(zip(plain.ragged_layers, cache.ragged_layers, strict=True)):
        assert torch.equal(before.lens, after.lens)
        for head in range(2):
            k, v = head_entries(before.store, 0, head)
            new_k, new_v = head_entries(after.store, 0, head)
            assert torch.equal(new_k, k)
            if 0 < len(k) < 40:
                change = change_of(prompt[number], head, k, v)
                np.testing.assert_allclose((new_v - v).numpy(), change, atol=1e-9)
    assert cache.nbytes() == plain.nbytes()


def change_of(prompt: LayerKV, head: int, kept_key: Tensor, kept_value: Tensor) -> np.ndarray:
    queries = compensation.reference_queries(prompt)[0, head]
    return expected_change(prompt, 0, head, queries, kept_key, kept_value)


@torch.no_grad()
def test_the_fit_knows_keys_as_their_bits_restore_them():
    model, text = tiny_llama(), ids(1, 60)
    tiers = (
        TierBudget(Precision(8, 8), PerHead([[0.2, 0.1]] * 3)),
        TierBudget(Precision(3, 8), PerHead([[0.6, 0.4]] * 3)),
    )
    plain, cache = (
        RaggedCache(model, method=Method("own", tiers[-1].budget, OwnScores(), tiers=tiers, compensation=each))
        for each in (False, True)
    )
    for either in (plain, cache):
        model(text, past_key_values=either)
    prompt = read_prompt(model, text, queries=True)
    for number, (before, after) in enumerate(zip(plain.ragged_layers, cache.ragged_layers, strict=True)):
        for head in range(2):
            k, new_v = head_entries(after.store.restore(), 0, head)
            best = score(prompt[number].key, prompt[number].value)[0, head].argsort(descending=True)[: len(k)]
            parts = best.split([int(tier.lens[0, head]) for tier in before.store.tiers])
            tokens = torch.cat([part.sort().values for part in parts])
            exact_k, exact_v = prompt[number].key[0, head, tokens], prompt[number].value[0, head, tokens]
            change = (new_v - exact_v).numpy()
            found, unaware = (np.abs(change - change_of(prompt[number], head, x, exact_v)).max() for x in (k, exact_k))
            assert found < 0.05 * float(exact_v.abs().max()) and found < 0.5 * unaware


@torch.no_grad()
def test_padded_chunked_filled_and_compared_alike():
    model, texts = tiny_llama(), [ids(1, 40), ids(1, 29, 1)]
    question = ids(1, 5, 2)

    def logits(cache):
        return model(question.expand(len(cache.ragged_layers[0].lens), -1), past_key_values=cache).logits

    alone = []
    for text in texts:
        cache = RaggedCache(model, method=METHOD)
        model(text, past_key_values=cache)
        alone.append(logits(cache))
    batch, cache = padded(texts), RaggedCache(model, method=METHOD)
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 5, dtype=torch.long)], 1)
    places = mask.cumsum(1) - 1
    model(**batch, position_ids=places[:, :40].clamp(min=0), past_key_values=cache)
    together = model(
        question.expand(2, -1), attention_mask=mask, position_ids=places[:, 40:], past_key_values=cache
    ).logits
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-8, rtol=0)

    chunked = RaggedCache(model, method=METHOD, prompt_tokens=40)
    for part in texts[0].split(13, 1):
        model(part, past_key_values=chunked)
    torch.testing.assert_close(logits(chunked), alone[0], atol=1e-8, rtol=0)

    filled = RaggedCache(model, method=METHOD)
    prompt = read_prompt(model, texts[0], queries=True)
    filled.fill(prompt)
    torch.testing.assert_close(logits(filled), alone[0], atol=1e-8, rtol=0)

    plain = Method("own", PerHead(RATIOS), OwnScores())
    rows = MethodComparison(model, texts[0][0].tolist(), prompt, [plain, METHOD])
    uncompensated = RaggedCache(model, method=plain)
    model(texts[0], past_key_values=uncompensated)
    expected = torch.cat([logits(uncompensated), alone[0]])[:, :-1]
    found = rows.predict(question[0].tolist(), 1).logits
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=0)
    assert float((expected[0] - expected[1]).abs().max()) > 1e-3


@torch.no_grad()
def test_it_is_nearer_to_the_full_cache_over_many_texts(policy):
    model = tiny_llama()
    gains = []
    for seed in range(12):
        text, question = ids(1, 80, seed), ids(1, 8, 100 + seed)
        full = model(torch.cat([text, question], 1)).logits[:, -8:]
        errors = []
        for name in ("snapkv", "snapkv+compensation"):
            cache = RaggedCache(model, retention=0.2, method=name)
            model(text, past_key_values=cache)
            errors.append(float((model(question, past_key_values=cache).logits - full).square().mean()))
        gains.append(errors[1] - errors[0])
    assert np.mean(gains) < 0


def test_names_and_rows(policy):
    entry = parse_method("lkv+compensation@mine")
    assert entry.compensation and (entry.budget, entry.selector) == ("lkv-h", "lkv-t")
    assert entry.label == "LKV, compensated (mine)" and not parse_method("lkv").compensation
    assert "queries" in entry.needs and "compensated" in entry.description
    model = tiny_llama()
    grid = MethodGrid(model, None, ["lkv", "lkv+compensation"], [0.5], policy)
    assert grid.required_queries is True and not grid.select(frozenset({("lkv", 0.5)})).required_queries
    assert MethodGrid(model, None, ["snapkv"], [0.5]).required_queries == SnapKV().last_queries


def test_what_it_cannot_do_is_said(policy):
    model = tiny_llama()
    for options in ({"streaming": True, "prompt_tokens": 20}, {"decode_eviction": True}):
        with pytest.raises(
            CacheError,
            match=r"compensated entries cannot be evicted from again; use the method without '\+compensation'",
        ):
            RaggedCache(model, policy=policy, method="lkv+compensation", **options)
    (unturned,) = [family for family in SERVED if family.name == "OPT"]
    model = unturned.build()
    with pytest.raises(UnsupportedModelError, match="no rotary embedding that LKV can undo"):
        RaggedCache(model, method="knorm+compensation")
    with pytest.raises(UnsupportedModelError, match="no rotary embedding that LKV can undo"):
        MethodGrid(model, None, ["knorm", "knorm+compensation"], [0.5])
    model = tiny_llama()
    with pytest.raises(CacheError, match="call read_prompt with queries=True"):
        RaggedCache(model, retention=0.5, method="knorm+compensation").fill(read_prompt(model, ids(1, 20)))
    with pytest.raises(LkvError, match="taken"):
        register_method("compensation", "knorm")


def test_longrope_near_its_change_keeps_the_frequencies_of_the_text():
    rotation = patch_attention(longrope_model()).rotations[0]
    assert rotation is not None
    assert [rotation.future_start(end, 20) for end in (30, 60, 64, 65)] == [30, 44, 44, 65]
    x = torch.randn(1, 1, 20, 8, dtype=torch.float64)
    turned = rotation.rerotate(rotation.rotate(x, 20), range(20, 40), rotation.future_start(60, 20))
    factor = math.sqrt(1 + math.log(512 / 64) / math.log(64))  # that LongRoPE has q and k multiplied by
    torch.testing.assert_close(turned, factor * by_short_factors(x, 44), atol=1e-5, rtol=0)
    # So has the attention to expect of the tokens that follow.
    row = x[:, :, :1]
    expected = sum(factor * by_short_factors(row, place) for place in range(44, 64)) / 20
    torch.testing.assert_close(row @ rotation.mean_rotation(row, 60, 80), expected, atol=1e-5, rtol=0)


def test_longrope_drops_no_cache():
    """Phi-3 would go on without a cache where its frequencies change."""
    model = longrope_model()
    cache = RaggedCache(model, method="knorm", retention=0.5)
    model.generate(ids(1, 80), past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.get_seq_length() == 81
    cache = RaggedCache(model, method="knorm", retention=0.5)
    with pytest.raises(CacheError, match="with 65 tokens this model's rotary embedding changes"):
        model.generate(ids(1, 60), past_key_values=cache, max_new_tokens=10, do_sample=False)
    # A fused projection is not kept whole by the v that it holds.
    for part in read_prompt(model, ids(1, 20)):
        assert part.value.untyped_storage().nbytes() == part.value.nbytes


def by_short_factors(x: Tensor, start: int) -> Tensor:
    """x [1, 1, n, 8] rotated at `start` and on by Llama's definition."""
    angles = torch.arange(start, start + x.shape[2])[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    cos, sin = angles.double().cos(), angles.double().sin()
    first, second = x[..., :4], x[..., 4:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize("kept", [{"memory": "1GB"}, {"retention": 1.0, "slack": 0}], ids=str)
def test_a_budget_for_the_whole_text_changes_no_value(kept):
    model, whole = tiny_llama(), ids(1, 46)
    cache = RaggedCache(model, method="knorm+compensation", **kept)
    with torch.no_grad():
        model(whole[:, :40], past_key_values=cache)
        found = model(whole[:, 40:], past_key_values=cache).logits
        torch.testing.assert_close(found, model(whole).logits[:, 40:], rtol=0, atol=1e-5)
