"""What of a prompt is kept: against Python's own sorting, and by budget rules of a user's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from lkv.cache.cache_config import CacheConfig, LayerContext, SharedState
from lkv.cache.eviction import EntryRows, NewEntries, best_mask, evict_entries, gather_best
from lkv.cache.ragged_cache import RaggedCache
from lkv.cache.ragged_store import RaggedStore
from lkv.cache.tiers import TierSplit, count_tiers
from lkv.errors import CacheError
from lkv.methods.budgets import PerHead, Uniform
from lkv.methods.method import Method
from lkv.methods.request import CompressionRequest
from lkv.methods.selectors import Knorm
from lkv.methods.targets import UNQUANTIZED
from tests.cache.helpers import head_entries, tier_numbers
from tests.conftest import tiny_llama


def chosen(scores: list[float], count: int) -> list[int]:
    """The `count` highest, of equal ones the earliest, in rising order."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of `x` [B, H, T, d] in another order in memory."""
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "a part of wider rows":
        wide = torch.cat([torch.full_like(x, torch.nan), x, x], 3).transpose(1, 2).contiguous().transpose(1, 2)
        return wide[..., x.shape[3] : 2 * x.shape[3]]
    if layout == "from a later token on":
        return torch.cat([torch.full_like(x, torch.nan), x], 2)[:, :, x.shape[2] :]
    if layout == "channels apart":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    return x


LAYOUTS = st.sampled_from(["", "tokens first", "a part of wider rows", "from a later token on", "channels apart"])


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(0, 3), LAYOUTS, LAYOUTS)
def test_spans_hold_the_best_of_each_head(data, batch, heads, tokens, room, k_layout, v_layout):
    score = st.sampled_from([-torch.inf, -1.0, 0.0, 0.5, 2.0, torch.inf])
    table = data.draw(st.lists(score, min_size=batch * heads * tokens, max_size=batch * heads * tokens))
    scores = torch.tensor(table).view(batch, heads, tokens)
    counts = data.draw(st.lists(st.integers(0, tokens), min_size=batch * heads, max_size=batch * heads))
    lens = torch.tensor(counts).view(batch, heads)
    key, value = (torch.randn(batch, heads, tokens, size) for size in (4, 6))
    arrived = torch.randn(batch, heads, tokens)
    sources = laid_out(key, k_layout), laid_out(value, v_layout)
    spans, order = gather_best(*sources, scores, lens[None], room, arrived)
    assert order is None
    assert len(spans.k) == len(spans.v) == int(lens.sum()) + batch * heads * room
    for b in range(batch):
        for h in range(heads):
            right = chosen(scores[b, h].tolist(), int(lens[b, h]))
            own = slice(int(spans.starts[b, h]), int(spans.starts[b, h] + lens[b, h]))
            assert torch.equal(spans.k[own], key[b, h, right]) and torch.equal(spans.v[own], value[b, h, right])
            assert spans.positions[own].tolist() == right
            assert torch.equal(spans.scores[own], arrived[b, h, right])


@given(st.data(), st.integers(1, 2), st.integers(1, 3), st.integers(1, 9))
def test_better_tiers_have_the_better_entries(data, batch, heads, tokens):
    score = st.sampled_from([-1.0, 0.0, 0.5, 2.0])
    table = data.draw(st.lists(score, min_size=batch * heads * tokens, max_size=batch * heads * tokens))
    scores = torch.tensor(table).view(batch, heads, tokens)
    counts = st.lists(st.integers(0, tokens), min_size=3, max_size=3).map(sorted)
    limits = [data.draw(counts) for _ in range(batch * heads)]
    lens = torch.tensor(limits).T.reshape(3, batch, heads)
    key = torch.randn(batch, heads, tokens, 4)
    spans, order = gather_best(key, key, scores, lens, 0)
    numbers = tier_numbers(TierSplit((UNQUANTIZED,) * 3, count_tiers(lens), order))
    for b in range(batch):
        for h in range(heads):
            best = [set(chosen(scores[b, h].tolist(), int(count))) for count in lens[:, b, h]]
            own = slice(int(spans.starts[b, h]), int(spans.starts[b, h] + lens[-1, b, h]))
            assert torch.equal(spans.k[own], key[b, h, sorted(best[-1])])
            assert numbers[own].tolist() == [sum(t not in tier for tier in best) for t in sorted(best[-1])]


@given(st.data(), st.integers(1, 2), st.integers(1, 3), st.integers(0, 3))
def test_entries_are_evicted_by_their_scores(data, batch, heads, appended):
    """Appended entries compete with the compressed ones; of equal scores the earlier entry stays."""
    counts = st.lists(st.integers(0, 6), min_size=batch * heads, max_size=batch * heads)
    lens, limits = (torch.tensor(data.draw(counts)).view(batch, heads) for _ in range(2))
    store = RaggedStore(lens, appended, torch.zeros(0, 4), torch.zeros(0, 3), has_scores=True)
    store.count_appended(appended)
    store.k.normal_(), store.v.normal_()
    score = st.sampled_from([-torch.inf, -1.0, 0.0, 2.0])
    table = {at: data.draw(st.lists(score, min_size=n, max_size=n)) for at, n in numbered(store.counts)}
    rows = pad_sequence([torch.tensor(row) for row in table.values()], batch_first=True, padding_value=-torch.inf)

    class Given(Knorm):
        def score_stored(self, layer, entries):
            return rows

    config = CacheConfig(Method("mine", Uniform(0.5), Given()), CompressionRequest())
    context = LayerContext(0, config, SharedState(0), None)
    new = evict_entries(context, store, NewEntries(appended, 0, [0] * batch, 1.0), limits[None], 1)
    assert torch.equal(new.lens, torch.minimum(limits, store.counts)) and new.appended_tokens == 0
    for (row, head), scores in table.items():
        start = int(store.starts[row, head])
        right = [start + place for place in chosen(scores, int(new.lens[row, head]))]
        key, value = head_entries(new, row, head)
        assert torch.equal(key, store.k[right]) and torch.equal(value, store.v[right])


def numbered(counts: torch.Tensor) -> list[tuple[tuple[int, int], int]]:
    return [((row, head), n) for row, own in enumerate(counts.tolist()) for head, n in enumerate(own)]


def test_a_prompt_repeated_for_many_rows_is_not_copied():
    """Evaluations give every row the same k and v."""
    key = torch.randn(1, 2, 5, 4).expand(3, -1, -1, -1)
    rows = EntryRows.of(key)
    assert rows.matrix.data_ptr() == key.data_ptr() and rows.matrix.shape == (10, 4) and rows.batch == 0
    spans = gather_best(key, key, torch.arange(30.0).view(3, 2, 5) % 7, torch.full((1, 3, 2), 2), 0)[0]
    expected = [key[b, h, chosen([(10 * b + 5 * h + t) % 7 for t in range(5)], 2)] for b in range(3) for h in range(2)]
    assert torch.equal(spans.k, torch.cat(expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scores_of_any_precision(dtype):
    scores = torch.tensor([[3, 1, 3, 2, 3, 0]], dtype=dtype)
    for count in range(7):
        found = best_mask(scores, torch.tensor([count], dtype=torch.int32), count)[0].nonzero()[:, 0].tolist()
        assert found == chosen(scores[0].tolist(), count)


def test_scores_that_are_no_numbers_read_nothing_outside():
    """On a GPU they are refused after the last layer alone."""
    key = torch.randn(2, 2, 4, 4)
    spans = gather_best(key, key, torch.full((2, 2, 4), torch.nan), torch.tensor([[[4, 0], [1, 3]]]), 1)[0]
    assert torch.isfinite(spans.k).all()


IDS = torch.arange(3, 53)[None]


class Given:
    """A rule that returns what it was given."""

    def __init__(self, counts):
        self._counts = counts

    def counts(self, layer, scores):
        return self._counts


@pytest.mark.parametrize(
    "counts", [[[10, -5]], [[10.5, 10.0]], [10, 10], [[10]], [[60, 10]], [[10, 10, 10]], [[10, None]], [[True, False]]]
)
def test_counts_that_cannot_be_kept_are_refused(counts):
    model = tiny_llama()
    cache = RaggedCache(model, method=Method("mine", Given(counts), Knorm()))
    with pytest.raises(CacheError, match=r"Given gives layer 0 the counts .*whole numbers from 0 to 50, \[1\]\[2\]"):
        model(IDS, past_key_values=cache)


@pytest.mark.parametrize("ratio", [-0.5, float("nan")])
def test_ratios_that_are_none_are_refused(ratio):
    model = tiny_llama()
    cache = RaggedCache(model, method=Method("mine", PerHead([[0.5, ratio]] * 3), Knorm()))
    with pytest.raises(CacheError, match="give numbers from 0 to 1"):
        model(IDS, past_key_values=cache)


def test_counts_as_a_tensor_serve():
    model = tiny_llama()
    cache = RaggedCache(model, method=Method("mine", Given(torch.tensor([[7, 0]])), Knorm()))
    model(IDS, past_key_values=cache)
    assert all(layer == [7, 0] for layer in cache.kept_counts())


@pytest.mark.parametrize("tokens", [48, 49, 98, 103])
def test_one_token_may_be_kept_of_any_number(tokens):
    model = tiny_llama()
    cache = RaggedCache(model, method="knorm", budget_tokens=1)
    model(torch.arange(tokens)[None] % 60 + 3, past_key_values=cache)
    assert all(layer == [1, 1] for layer in cache.kept_counts())
