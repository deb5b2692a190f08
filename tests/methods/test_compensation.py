"""Compensation: its least-squares problems against other solvers, its queries against the model, and the cache."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError, LkvError, UnsupportedModelError
from lkv.evaluation.comparison import MethodComparison, MethodGrid
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import read_prompt
from lkv.methods import compensation
from lkv.methods.budgets import PerHead
from lkv.methods.method import Method
from lkv.methods.registry import parse_method, register_method
from lkv.methods.selectors import SnapKV
from tests.cache.helpers import RATIOS, OwnScores, ids, padded
from tests.conftest import tiny_llama
from tests.families import SERVED, longrope_model

SCALE = 0.35
NORMED_LATE = ("HunYuanDenseV1", "HunYuanMoEV1")  # their norm of q comes after RoPE
METHOD = Method("own+compensation", PerHead(RATIOS), OwnScores(), compensation=True)
heads = given(
    rows=st.integers(1, 40), tokens=st.integers(2, 60), share=st.floats(0.05, 0.95), seed=st.integers(0, 999)
)  # fmt: skip


def head(rows: int, tokens: int, share: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries with a mean, k and v of one head, and which of them are kept (one at least)."""
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, 8, generator=draw, dtype=torch.float64) + torch.linspace(-2, 2, 8, dtype=torch.float64)
    key, value = (torch.randn(tokens, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    kept = torch.randperm(tokens, generator=draw)[: max(1, int(share * tokens))].sort().values
    return query, key, value, kept


def attention_of(query: Tensor, key: Tensor, sinks: Tensor | None = None, softcap: float | None = None) -> Tensor:
    """Attention weights [n, T] of one head; with a sink for each query they sum to less than 1."""
    logits = query @ key.T * SCALE
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return logits.softmax(-1) if sinks is None else torch.cat([logits, sinks[:, None]], 1).softmax(-1)[:, :-1]


def ridged(matrix: np.ndarray, right: np.ndarray, ridge: float) -> np.ndarray:
    """argmin |matrix x - right|^2 + ridge |x|^2, from the stacked problem."""
    below = np.sqrt(ridge) * np.eye(matrix.shape[1])
    stacked = np.concatenate([right, np.zeros((matrix.shape[1], *right.shape[1:]))])
    return np.linalg.lstsq(np.concatenate([matrix, below]), stacked, rcond=None)[0]


@pytest.mark.parametrize(("sink", "softcap"), [(None, None), (1.0, None), (None, 0.7), (1.0, 0.7)])
@heads
def test_v_moves_to_the_full_output_by_ridge_regression(sink, softcap, rows, tokens, share, seed):
    query, key, value, kept = head(rows, tokens, share, seed)
    softmax = None if sink is None else sink * torch.linspace(-1, 3, rows, dtype=torch.float64), softcap
    new_key, new_value = compensation.compensate(query, key, value, key[kept], value[kept], SCALE, *softmax)
    full = attention_of(query, key, *softmax) @ value
    attention = attention_of(query, new_key, *softmax)
    missing = (full - attention @ value[kept]).numpy()
    ridge = 0.1 * float(attention.square().sum()) / rows
    change = ridged(attention.numpy(), missing, ridge)
    np.testing.assert_allclose((new_value - value[kept]).numpy(), change, atol=1e-8)
    # What these queries get is nearer to the full cache's than with v as it was.
    assert np.square(full.numpy() - (attention @ new_value).numpy()).sum() <= np.square(missing).sum() + 1e-12


@heads
def test_weights_make_up_for_the_evicted_attention(rows, tokens, share, seed):
    query, key, _, kept = head(rows, tokens, share, seed)
    sinks = torch.linspace(-1, 3, rows, dtype=torch.float64)
    attention = attention_of(query, key, sinks)
    shares, whole = attention[:, kept].numpy(), attention.sum(-1)
    ridge = 0.1 * np.square(shares).sum(0).mean()
    stacked = np.concatenate([shares, np.sqrt(ridge) * np.eye(len(kept))])
    right = np.concatenate([whole.numpy(), np.full(len(kept), np.sqrt(ridge))])
    best = optimize.lsq_linear(stacked, right, bounds=(0.01, np.inf), tol=1e-12).x

    def loss(weights: np.ndarray) -> float:
        return float(np.square(stacked @ weights - right).sum())

    found = compensation._entry_weights(torch.tensor(shares), whole).numpy()
    assert found.min() >= 0.01
    start = loss(np.ones(len(kept)))
    assert loss(found) - loss(best) <= 0.02 * (start - loss(best)) + 1e-9


@heads
def test_k_moves_along_one_direction_by_the_logarithms_of_the_weights(rows, tokens, share, seed):
    query, key, value, kept = head(rows, tokens, share, seed)
    new_key, _ = compensation.compensate(query, key, value, key[kept], value[kept], SCALE)
    scaled = query.numpy() * SCALE
    spread = scaled.T @ scaled / rows
    direction = np.linalg.solve(spread + 0.01 * np.diag(spread).mean() * np.eye(8), scaled.mean(0))
    shares = (query @ key.T * SCALE).softmax(-1)[:, kept]
    moved = compensation._entry_weights(shares).log()[:, None].numpy() * direction
    np.testing.assert_allclose((new_key - key[kept]).numpy(), moved, atol=1e-9)


@heads
def test_what_is_whole_stays_as_it_is(rows, tokens, share, seed):
    query, key, value, _ = head(rows, tokens, share, seed)
    new_key, new_value = compensation.compensate(query, key, value, key, value, SCALE)
    torch.testing.assert_close(new_key, key, atol=1e-9, rtol=0)
    torch.testing.assert_close(new_value, value, atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_heads_stay_numbers(dtype):
    # Kept tokens that no query looks at, equal tokens, zeros, and far outliers.
    query, key, value = torch.randn(3, 30, 8).to(dtype)
    cases = [(query * 0, key, value), (query, key * 0, value), (query * 50, key, value), (query, key, value * 0)]
    cases.append((query, torch.cat([key[:15] + 40 * query.mean(0), key[15:]]), value * 1000))
    for q, k, v in cases:
        new_key, new_value = compensation.compensate(q, k, v, k[20:], v[20:], SCALE)
        assert new_key.dtype == new_value.dtype == dtype
        assert bool(new_key.isfinite().all()) and bool(new_value.isfinite().all())


@pytest.mark.parametrize(
    "family", [f for f in SERVED if not f.missing and f.rotation != "none: k as cached"], ids=lambda f: f.name
)
@torch.no_grad()
def test_references_are_the_models_own_queries_rotated_behind_the_text(family):
    model, text = family.build(), ids(1, 21)
    for weight in model.parameters():  # norms of q and k, for one, that no rotation goes past
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, 0.2, 2.2)
    if family.name in NORMED_LATE:
        with pytest.raises(UnsupportedModelError, match=r"a way that \+compensation cannot undo"):
            RaggedCache(model, method="knorm+compensation")
        return
    prompt = read_prompt(model, text, queries=True)
    # Hidden states depend on distances alone. Token 10 + i of the second half is turned to 21 + i.
    elsewhere = read_at(model, text, 11)[0].query[:, :, 10:]
    found = compensation.reference_queries(prompt[0])
    expected = elsewhere.unflatten(1, (prompt[0].key.shape[1], -1)).flatten(2, 3)
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
    for layer, (before, after) in enumerate(zip(plain.ragged_layers, cache.ragged_layers, strict=True)):
        assert torch.equal(before.lens, after.lens)
        queries = compensation.reference_queries(prompt[layer])[0]
        for number in range(2):
            k, v = before.store.head_entries(0, number)
            if 0 < len(k) < 40:
                whole = prompt[layer].key[0, number], prompt[layer].value[0, number]
                k, v = compensation.compensate(queries[number], *whole, k, v, prompt[layer].scale)
            for mine, expected in zip(after.store.head_entries(0, number), (k, v), strict=True):
                torch.testing.assert_close(mine, expected, atol=1e-9, rtol=0)
    assert cache.nbytes() == plain.nbytes()


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
    turned = rotation.rerotate(rotation.rotate(x, 20), torch.arange(20, 40), rotation.future_start(60, 20))
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
