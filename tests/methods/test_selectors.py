"""Every selector against its definition written out in float64, and its eviction against the masked stock model."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError, PromptError
from lkv.hf.prompt_kv import LayerKV
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
