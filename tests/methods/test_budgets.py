"""The rivals' budget rules against plain references, and in the cache against the stock model with a -inf mask."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.errors import BudgetError, CacheError, DataError, LkvError, PromptError, RetentionError
from lkv.kernels import FP8
from lkv.kernels.ragged_attention.arguments import FP8_UNIT, LEVELS
from lkv.methods.budgets import (
    Ada,
    Duo,
    LearnedBudget,
    PerHead,
    Pyramid,
    Uniform,
    WaterFillingBudget,
    check_table,
    estimate_mean_pattern,
    estimate_pattern,
    read_pattern,
)
from lkv.methods.budgets.competitive import SQUARED_ERROR, squared_error
from lkv.methods.budgets.lkv_h import raise_to_least
from lkv.methods.targets import DEFAULT_TABLE, KVShape, MemoryTarget, RetentionTarget, TierTarget
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.families import build

RETENTIONS = st.floats(0.001, 1.0)


def column(budget, layers: int, tokens: int) -> list[int]:
    """What a head of each layer keeps."""
    rows = [budget.limits(layer, 2, tokens) for layer in range(layers)]
    assert all(first == second for first, second in rows)
    return [row[0] for row in rows]


@given(RETENTIONS, st.integers(1, 40), st.integers(1, 3000), st.integers(1, 30))
def test_a_pyramid_is_a_line_with_the_mean_asked_for(retention, layers, tokens, beta):
    counts = column(Pyramid(retention, layers, beta), layers, tokens)
    total = int(retention * layers * tokens + 1e-6)
    assert sum(counts) == total
    assert all(0 <= count <= tokens for count in counts)
    assert counts == sorted(counts, reverse=True)
    # Independent of the rule's own arithmetic: the line through its two ends.
    mean = total / layers
    last = max(mean / beta, 2 * mean - tokens)
    for layer, count in enumerate(counts):
        place = layer / (layers - 1) if layers > 1 else 0.5
        assert abs(count - ((2 * mean - last) * (1 - place) + last * place)) < 1 + 1e-6


def test_a_pyramid_needs_no_long_text_and_tilts_at_the_top():
    assert column(Pyramid(0.15, 5), 5, 1000) == [293, 221, 150, 79, 7]
    assert column(Pyramid(0.15, 3), 3, 200) == [59, 30, 1]
    assert column(Pyramid(0.8, 5), 5, 100) == [100, 90, 80, 70, 60]
    assert column(Pyramid(0.4, 4, beta=1), 4, 100) == [40] * 4
    assert column(Pyramid(RetentionTarget(tokens=10), 1), 1, 100) == [10]
    assert column(Pyramid(1.0, 3), 3, 50) == [50] * 3
    assert column(Pyramid(0.3, 3), 3, 0) == [0] * 3
    assert PerHead([[0.0, 1.0], [0.5, 0.15]]).counts(1, torch.empty(1, 2, 4000)) == [[2000, 600]]
    for layers, beta in ((0, 20), (3, 0)):
        with pytest.raises(BudgetError, match="both must be 1 or more"):
            Pyramid(0.3, layers, beta)
    with pytest.raises(RetentionError):
        Pyramid(0.0, 3)


@given(
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=40),
    st.floats(0.0, 1.0),
)
def test_no_head_is_left_without_tokens(ratios, least):
    """Against a search for the number that the ratios are multiplied by."""
    found = raise_to_least(torch.tensor([ratios], dtype=torch.float64), least)[0].tolist()
    least = min(least, 0.25 * sum(ratios) / len(ratios))
    low, high = 0.0, 1.0
    for _ in range(100):
        scale = (low + high) / 2
        is_too_much = sum(max(least, ratio * scale) for ratio in ratios) > sum(ratios)
        low, high = (low, scale) if is_too_much else (scale, high)
    assert found == pytest.approx([max(least, ratio * high) for ratio in ratios], abs=1e-9)


def test_learned_budgets_keep_some_tokens_in_every_head(policy):
    """However small a head's share; all budgets add up to what they were, and more memory is never less for a head."""
    with torch.no_grad():
        policy.heads.embeddings[0, 0] = -30 * policy.heads.embeddings[0, 0]
        policy.heads.output.weight.mul_(8)
    assert policy.inference_ratios(0.5).min() * 1000 < 1
    retentions = (0.01, 0.05, 0.15, 0.5)
    kept = [[LearnedBudget(policy, each).limits(layer, 2, 1000) for layer in range(3)] for each in retentions]
    smallest = [min(min(row) for row in layers) for layers in kept]
    assert smallest == [2, 5, 5, 5], kept
    for retention, layers in zip(retentions, kept, strict=True):
        assert 6000 * retention - 6 <= sum(map(sum, layers)) <= 6000 * retention
    assert all(
        fewer <= more
        for first, second in pairwise(kept)
        for one, other in zip(first, second, strict=True)
        for fewer, more in zip(one, other, strict=True)
    )
    # Each process of a split model sees its own heads alone.
    parts = [LearnedBudget(policy, 0.05, slice(head, head + 1)).limits(0, 1, 1000) for head in (0, 1)]
    assert [*parts[0], *parts[1]] == kept[1][0]


def test_one_soft_topk_serves_all_layers_and_lengths(policy, monkeypatch):
    """Rows of a batch have other lengths, and a text grows while it is generated."""
    solved, solve = [], policy.ratios
    monkeypatch.setattr(policy, "ratios", lambda retention: solved.append(retention) or solve(retention))
    budget = LearnedBudget(policy, 0.3)
    kept = [[budget.limits(layer, 2, tokens) for tokens in (100, 70, 101)] for layer in range(3)]
    assert solved == [0.3]
    assert kept == [
        [LearnedBudget(policy, 0.3).limits(layer, 2, length) for length in (100, 70, 101)] for layer in range(3)
    ]
    assert solved == [0.3]  # other caches of the policy take it as it is, until its weights change
    torch.nn.init.normal_(policy.heads.embeddings)
    assert LearnedBudget(policy, 0.3).limits(0, 2, 100) != kept[0][0] and solved == [0.3, 0.3]


def competition(rows: list[list[float]], equal: int, alpha: Fraction) -> list[list[int]]:
    """The tokens that each head keeps under AdaKV's rule, one after the other (no two scores are equal)."""
    safe = max(1, int(equal * alpha)) if equal and alpha else 0
    best = [sorted(range(len(row)), key=lambda i, row=row: -row[i]) for row in rows]
    kept = [order[:safe] for order in best]
    others = [(rows[h][i], h, i) for h, order in enumerate(best) for i in order[safe:]]
    for _, h, i in sorted(others, reverse=True)[: len(rows) * (equal - safe)]:
        kept[h].append(i)
    return kept


def unlike(batch: int, heads: int, tokens: int, seed: int) -> torch.Tensor:
    """Scores [B, H, T] without ties, much higher in some heads than in others."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.rand(batch, heads, tokens, generator=generator, dtype=torch.float64)
    return own + torch.rand(batch, heads, 1, generator=generator, dtype=torch.float64)


@given(
    RETENTIONS, st.integers(1, 3), st.integers(1, 5), st.integers(1, 60), st.sampled_from(["0", "0.2", "0.5", "1"]),
    st.integers(0, 99),
)  # fmt: skip
def test_heads_compete_for_exactly_their_layers_share(retention, batch, heads, tokens, alpha, seed):
    scores = unlike(batch, heads, tokens, seed)
    counts = Ada(retention, float(alpha)).counts(0, scores)
    equal = int(retention * tokens + 1e-6)
    for row, found in zip(scores.tolist(), counts, strict=True):
        assert found == [len(kept) for kept in competition(row, equal, Fraction(alpha))]
        assert sum(found) == heads * equal == sum(Uniform(retention).limits(0, heads, tokens))
        assert all(int(equal * Fraction(alpha)) <= count <= tokens for count in found)
    more = Ada(min(1.0, retention + 1 / tokens), float(alpha)).counts(0, scores)
    assert all(b >= a for old, new in zip(counts, more, strict=True) for a, b in zip(old, new, strict=True))


def test_infinite_scores_and_wrong_safeguards():
    scores = unlike(1, 2, 10, 0)
    scores[0, 0, :2] = torch.inf
    scores[0, 1, 3:] = -torch.inf
    assert Ada(0.5).counts(0, scores) == [[7, 3]]
    scores[0, 1, 1:] = -torch.inf
    assert Ada(0.5).counts(0, scores) == [[9, 1]]
    for alpha in (-0.1, 1.5, float("nan")):
        with pytest.raises(BudgetError, match=r"must lie in \[0, 1\]"):
            Ada(0.5, alpha)


@given(RETENTIONS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 90), st.integers(0, 9), st.integers(0, 9))
def test_duo_has_all_the_retrieval_heads_that_fit(retention, layers, heads, tokens, sinks, seed):
    recent = 8
    pattern = torch.rand(layers, heads, generator=torch.Generator().manual_seed(seed)).tolist()
    window_options = {"sinks": sinks, "recent": recent}
    rule = Duo(retention, pattern, **window_options)
    every, window = layers * heads, min(tokens, sinks + recent)
    total = int(retention * every * tokens + 1e-6)
    if every * window > total:
        with pytest.raises(PromptError, match="smallest retention that DuoAttention can reach") as error:
            rule.limits(0, heads, tokens)
        least = float(str(error.value).split("this length is ")[1].split(",")[0])
        assert least > retention and least - window / tokens < 1.001e-4
        assert Duo(least, pattern, **window_options).limits(0, heads, tokens)
        return
    fitting = [n for n in range(every + 1) if n * tokens + (every - n) * window <= total]
    best = sorted((alpha for row in pattern for alpha in row), reverse=True)[: max(fitting)]
    for layer in range(layers):
        expected = [tokens if alpha in best else window for alpha in pattern[layer]]
        assert rule.limits(layer, heads, tokens) == expected
        if heads == 3:
            assert Duo(retention, pattern, slice(1, 3), **window_options).limits(layer, 2, tokens) == expected[1:]


def test_duo_names_what_it_cannot_work_with():
    with pytest.raises(PromptError, match=r"has 1000 tokens, .* keeps 384 .* is 0\.384, but it"):
        Duo(0.15, [[0.5, 1.0]]).limits(0, 2, 1000)
    with pytest.raises(PromptError, match=r"smallest retention .* is 1\.0"):
        Duo(0.9, [[0.5, 1.0]]).limits(0, 2, 300)
    # Equal alphas: lower heads first.
    assert Duo(0.7, [[1.0, 1.0]]).limits(0, 2, 1000) == [1000, 384]
    with pytest.raises(BudgetError, match="is empty"):
        Duo(0.5, [])
    with pytest.raises(BudgetError, match="the pattern of retrieval heads has 2 rows of 1 or 2 numbers"):
        Duo(0.5, [[0.5], [0.5, 0.5]])
    with pytest.raises(BudgetError, match="cannot keep 0 sinks and 0 recent"):
        Duo(0.5, [[0.5]], sinks=0, recent=0)


@pytest.mark.parametrize("method", ["duo", "duo+kvzip"])
def test_a_pattern_of_another_shape_is_named(method):
    model, text = tiny_llama(max_position_embeddings=1024), " ".join(map(str, range(225)))
    for wrong in ([[0.1, 0.9]] * 4, [[0.1, 0.9, 0.5]] * 3):
        with pytest.raises(BudgetError, match="but the model has 3 layers of 2 KV heads"):
            compress(model, Words(), text, method=method, retention=0.95, pattern=wrong)


def test_patterns_are_read_as_they_are_published(tmp_path):
    path = tmp_path / "full_attention_heads.tsv"
    rows = torch.rand(32, 8).tolist()
    rows[3][2], rows[4][1] = -0.01, 1.02  # what training gives, before the clipping
    path.write_text("".join("\t".join(f"{x:.18e}" for x in row) + "\n" for row in rows))
    expected = [[min(1.0, max(0.0, x)) for x in row] for row in rows]
    assert read_pattern(path, 32, 8) == expected
    with pytest.raises(BudgetError, match="32 rows of 8 numbers, but the model has 30 layers of 3 KV heads; give 30"):
        read_pattern(path, 30, 3)
    problems = {"0.5 0.7\n": "tab-separated", "a\tb\n": "tab-separated", "nan\t0.1\n": "has nan for layer 0"}
    for text, problem in problems.items():
        path.write_text(text)
        with pytest.raises(BudgetError, match=problem):
            read_pattern(path, 1, 2)
    path.write_text("")
    with pytest.raises(BudgetError, match="0 rows of no numbers"):
        read_pattern(path, 1, 2)
    with pytest.raises(BudgetError, match=r"missing.tsv cannot be read .* give a text file"):
        read_pattern(tmp_path / "missing.tsv", 1, 2)


def test_tables_that_do_not_fit_are_named():
    assert check_table([[0.0, 1], [0.5, 0.15]], 2, 2, "the table") == [[0.0, 1.0], [0.5, 0.15]]
    for table, message in [
        ({"a": 1}, "is not a list of lists"), ([[0.5]], "has 1 rows of 1 numbers"),
        ([[0.5, True], [1, 1]], "has True for layer 0, head 1"), ([[0.5, 1], [1, 1.01]], "has 1.01 for layer 1"),
        ([[0.5, "1"], [1, 1]], "has '1' for"), ([[0.5, math.nan], [1, 1]], "has nan for layer 0, head 1"),
    ]:  # fmt: skip
        with pytest.raises(BudgetError, match=f"^the table .*{message}") as error:
            check_table(table, 2, 2, "the table")
        assert isinstance(error.value, LkvError)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_an_estimate_is_the_attention_outside_the_window(family):
    """Against the attention weights of the stock model; texts of unequal length weigh the same."""
    model = build(family)
    for name, weight in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            torch.nn.init.uniform_(weight, 0.2, 3.0)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 67, (length,), generator=generator).tolist() for length in (300, 31, 9)]
    sinks, recent = 4, 8
    found = estimate_pattern(model, texts, sinks, recent)
    model.set_attn_implementation("eager")
    expected = torch.zeros(3, 2)
    for ids in texts[:2]:  # the third is no longer than the window
        for layer, attention in enumerate(model(torch.tensor([ids]), output_attentions=True).attentions):
            outside = [attention[0, :, row, sinks : row - recent + 1].sum(-1) for row in range(12, len(ids))]
            expected[layer] += torch.stack(outside).mean(0).view(2, 2).mean(1).detach() / 2
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=1e-4, check_dtype=False)
    assert Duo(0.5, found, sinks=sinks, recent=recent).retrieval_heads(100) == 2
    with pytest.raises(DataError, match="none of the 1 texts is longer than the 4 sinks and 8 recent"):
        estimate_pattern(model, texts[2:], sinks, recent)
    with pytest.raises(BudgetError, match="no window"):
        estimate_pattern(model, texts, 4, 0)


@torch.no_grad()
def test_a_quick_estimate_takes_layers_without_rope_as_they_are():
    """Mean query and mean key see each other alike at all distances there, so that every token gets the same."""
    model, texts = build("SmolLM3", no_rope_layers=[1, 1, 0]), [list(range(3, 63))]
    *rotated, last = estimate_mean_pattern(model, texts, 50)
    assert last == pytest.approx([51 / 100] * 2)
    assert all(value != pytest.approx(51 / 100, abs=1e-4) for row in rotated for value in row)


@given(
    seed=st.integers(0, 1000),
    share=st.floats(0.03, 0.7),
    spread=st.floats(0.2, 3.0),
    zeros=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    shift=st.sampled_from([0.0, 5.0]),
)
@settings(max_examples=60)
def test_reverse_water_filling_has_the_least_distortion(seed, share, spread, zeros, shift):
    """Against every number of entries kept, the best of them in the better precision as the bits allow."""
    layers, heads, tokens, dim = 3, 2, 50, 16
    generator = torch.Generator().manual_seed(seed)
    table = (spread * torch.randn(layers, 1, heads, tokens, generator=generator, dtype=torch.float64)).exp()
    table[torch.rand(table.shape, generator=generator) < zeros] = 0
    table[0, 0, 0, 0] = 0  # where scores are negative, weights begin at the least
    shape = KVShape(layers * heads, dim, 2)
    targets = TierTarget.of_table(MemoryTarget(share=share), shape, DEFAULT_TABLE)
    used = [target for target, before in zip(targets, [None, *targets], strict=False)
            if target.share(tokens) > (before.share(tokens) if before else 0)]  # fmt: skip
    counts = [WaterFillingBudget(target)._with_counts(table - shift).prompt_counts.sum().item() for target in used]
    if len(used) < 2:
        assert counts == [int(target.share(tokens) * layers * heads * tokens + 1e-6) for target in used]
        return
    high, low = (shape.entry_bits(target.precision) for target in used)
    errors = [squared_error(target.precision) for target in used]
    shares = [used[0].share(tokens), used[1].share(tokens) - used[0].share(tokens)]
    bits = layers * heads * tokens * (shares[0] * high + shares[1] * low)
    squares = table.flatten().sort(descending=True).values.square()

    def distortion(better: int, kept: int) -> float:
        parts = squares[:better].sum() * errors[0], squares[better:kept].sum() * errors[1], squares[kept:].sum()
        return float(sum(parts))

    assert bits - high < counts[0] * high + (counts[1] - counts[0]) * low <= bits + 1e-6 or counts[0] == counts[1]
    rows = [(min(kept, int((bits - kept * low) // (high - low))), kept) for kept in range(1, len(squares) + 1)]
    least = min(distortion(better, kept) for better, kept in rows if better >= 0)
    assert distortion(*counts) <= least * 1.02 + float(squares[counts[1] - 1])  # entries are whole


def test_errors_of_precisions_are_those_of_their_levels():
    places = torch.linspace(-7, 7, 40001, dtype=torch.float64)
    weights = torch.softmax(-places.square() / 2, 0)
    for bits, (slope, cubic) in LEVELS.items():
        codes = torch.arange(2**bits, dtype=torch.float64) - (2**bits - 1) / 2
        levels = codes * (slope + cubic * codes.square())
        errors = (places[:, None] - levels).abs().amin(1).square()
        assert SQUARED_ERROR[bits] == pytest.approx(float(errors @ weights), rel=0.01)
    rounded = (places / FP8_UNIT).float().to(torch.float8_e4m3fn).double() * FP8_UNIT
    assert SQUARED_ERROR[FP8] == pytest.approx(float((places - rounded).square() @ weights), rel=0.01)


def test_rdkv_keeps_what_fits_and_without_a_memory_budget_the_best(model):
    full = compress(model, Words(), TEXT, method="full").full_nbytes()  # float64: a 16-bit cache has a quarter
    context = compress(model, Words(), TEXT, method="rdkv", memory=0.4)
    assert 0.3 * full / 4 < context.nbytes() <= 0.4 * full / 4
    same = [
        compress(model, Words(), TEXT, method=name, retention=0.4).cache.kept_counts()
        for name in ("rdkv", "global+expected")
    ]
    assert same[0] == same[1] and len({count for layer in same[0] for count in layer}) > 1
    with pytest.raises(CacheError, match="must see the whole text before the first layer is evicted from"):
        RaggedCache(model, method="rdkv")
