"""The kernels of eviction against float64 and against PyTorch's sort.

They run in Triton's interpreter on the CPU, and on a GPU where TRITON_INTERPRET=0 is set.
"""

import math

import pytest
import torch
from torch.nn.functional import silu

pytest.importorskip("triton")
import lkv.kernels.selection.triton as selection
from lkv.cache.ragged_store import packed_starts
from lkv.kernels import triton_helpers
from lkv.kernels.selection import ScoreWeights
from lkv.kernels.selection.triton import Entries

if not triton_helpers.is_interpreted() and not torch.cuda.is_available():
    pytest.skip("TRITON_INTERPRET=0 was set, and there is no GPU", allow_module_level=True)
DEVICE = "cpu" if triton_helpers.is_interpreted() else "cuda"


@pytest.fixture(autouse=True)
def _on_device():
    with torch.device(DEVICE):
        yield


def ranked(scores: torch.Tensor, keep: int, count: int) -> list[int]:
    """The numbers of the `keep` highest of the first `count` of `scores` [T], of equal ones the earlier, in order."""
    order = sorted(range(count), key=lambda entry: (-float(scores[entry]), entry))
    return sorted(order[:keep])


@pytest.mark.parametrize("kind", ["normal", "ties", "infinities", "tiny", "large", "bfloat16", "long"])
def test_the_highest_are_kept_and_of_equal_ones_the_earlier(kind, monkeypatch):
    """In the first tier, and in all three; also of spans that are longer than what a program has in registers."""
    torch.manual_seed(1)
    scores = torch.randn(1, 4, 700)
    if kind == "long":
        monkeypatch.setattr(selection, "_LARGEST_BLOCK", 256)
        scores = (scores * 9).round()
    if kind == "ties":
        scores = (scores * 2).round().where(scores > 0, -0.0)
        scores[0, 0, ::3] = 0.0
    elif kind == "infinities":
        scores[..., :300], scores[..., 300:305] = -math.inf, math.inf
    elif kind in ("tiny", "large"):
        scores *= 1e-39 if kind == "tiny" else 1e37
    elif kind == "bfloat16":
        scores = scores.bfloat16()
    counts = torch.tensor([[700, 0, 513, 512]], dtype=torch.int32)
    last = torch.tensor([[700, 0, 257, 1]], dtype=torch.int32)
    keep = torch.stack([last // 9, last // 2, last])
    tiers = selection.rank(scores, keep, counts=counts)
    for head, count in enumerate(counts[0].tolist()):
        for number, own in enumerate(keep[:, 0, head].tolist()):
            found = (tiers[0, head, :count] <= number).nonzero()[:, 0].tolist()
            assert found == ranked(scores[0, head], own, count)
    if kind == "normal":
        full = selection.rank(scores, last.clamp(max=9)[None])
        assert [int((row == 0).sum()) for row in full[0]] == [9, 0, 9, 1]


@pytest.mark.parametrize("place", [0, 2047, 2048, 2499, 2500])
def test_ranking_notes_what_is_no_number(place):
    """Of the entries that a span has, and no others."""
    scores, keep = torch.zeros(1, 2, 2600), torch.tensor([[[700, 0]]], dtype=torch.int32)
    scores[0, 0, 3:9] = torch.tensor([-math.inf, math.inf] * 3)
    scores[0, 1, place] = math.nan
    has_nan = torch.zeros(1, dtype=torch.uint8)
    selection.rank(scores[:, :1], keep[..., :1], has_nan=has_nan)
    assert not has_nan.any()
    selection.rank(scores, keep, has_nan, counts=torch.full((1, 2), 2500, dtype=torch.int32))
    assert int(has_nan) == (place < 2500)


@pytest.mark.parametrize("block", [256, 2**15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_tokens_come_first_the_newest_foremost(block, dtype, monkeypatch):
    """At most a third of a head's entries, in any order of positions; also in PyTorch's operators."""
    monkeypatch.setattr(selection, "_LARGEST_BLOCK", block)
    torch.manual_seed(7)
    counts = torch.tensor([[400, 30, 0], [9, 2, 300]], dtype=torch.int32)
    starts, end, window = counts.cumsum(1).int() - counts + torch.tensor([[3], [450]], dtype=torch.int32), 900, 32
    positions, scores = torch.zeros(800, dtype=torch.int32), (torch.randn(2, 3, 400) * 1e4).round().to(dtype)
    keep = torch.stack([counts // 20 + 1, counts // 2]).clamp(max=counts)
    own = []
    for start, count in zip(starts.flatten().tolist(), counts.flatten().tolist(), strict=True):
        own.append((900 - 1 - torch.randperm(500)[:count]).tolist())
        positions[start : start + count] = torch.tensor(own[-1], dtype=torch.int32)
    recent = selection.RecentTokens(end, window)
    found = selection.rank(scores, keep, None, recent, positions, starts, counts)
    first = recent.rank_first(scores.flatten(0, 1), positions, starts, counts)
    by_operators = selection.rank(first.view_as(scores), keep, counts=counts)
    for head, places in enumerate(own):
        row, column = divmod(head, 3)
        limit = min(window, len(places) // 3)
        by_age = sorted((e for e, place in enumerate(places) if end - place <= limit), key=lambda e: -places[e])
        table = [math.inf if e in by_age else float(scores[row, column, e]) for e in range(len(places))]
        order = by_age + [e for e in sorted(range(len(places)), key=lambda e: (-table[e], e)) if e not in by_age]
        for tier, number in enumerate(keep[:, row, column].tolist()):
            for tiers in (found, by_operators):
                assert (tiers[row, column, : len(places)] <= tier).nonzero()[:, 0].tolist() == sorted(order[:number])


def spans_of(lens: list[list[int]], *dims: int):
    """Empty pools with four free slots a span, pools of scores and positions, and where spans begin."""
    sizes = torch.tensor(lens).flatten() + 4
    starts = (sizes.cumsum(0) - sizes).int().view(len(lens), -1)
    pools = [torch.full((int(sizes.sum()), d), math.nan) for d in dims]
    extra = torch.full((len(pools[0]),), math.nan), torch.full((len(pools[0]),), -7, dtype=torch.int32)
    return pools, extra, starts


@pytest.mark.parametrize(
    ("layout", "dim", "value_dim", "is_ranked"),
    [("heads first", 8, 8, True), ("tokens first", 80, 96, True), ("pools", 96, 80, True), ("pools", 8, 16, False)],
)
def test_the_best_entries_move_in_order_and_nothing_else(layout, dim, value_dim, is_ranked):
    torch.manual_seed(2)
    tokens, lens = 300, [[0, 5, 300], [177, 1, 2]]
    if layout == "heads first":
        key, value = torch.randn(2, 3, tokens, dim), torch.randn(2, 3, tokens, value_dim)
    else:
        key, value = (torch.randn(2, tokens, 3, d).transpose(1, 2) for d in (dim, value_dim))
    scores, positions = torch.randn(2, 3, tokens), torch.randint(0, 999, (2, 3, tokens), dtype=torch.int32)
    lens = lens if is_ranked else [[tokens] * 3] * 2
    pools, extra, starts = spans_of(lens, dim, value_dim)
    given = {"scores": scores, "positions": positions}
    entries = Entries.of_prompt(key, value)
    if layout == "pools":
        flat = [x.flatten(0, 2) for x in (key, value)]
        begins = torch.arange(0, 6 * tokens, tokens, dtype=torch.int32).view(2, 3)
        counts = torch.full((2, 3), tokens, dtype=torch.int32)
        entries = Entries.of_pools(*flat, begins, counts, tokens)
        given = {name: x.flatten() for name, x in given.items()}
    table, keep = torch.randint(0, 40, (2, 3, tokens)).float(), torch.tensor(lens, dtype=torch.int32)
    order, counts = torch.full((int(keep.sum()),), -1, dtype=torch.int32), torch.stack([keep // 3, keep - keep // 3])
    order_starts = packed_starts(counts).int()
    if is_ranked:
        given |= {"ranked": table, "keep": torch.stack([keep // 3, keep]), "order": (order, order_starts)}
    selection.move(entries, (*pools, starts), extra=extra, **given)
    for row in range(2):
        for head in range(3):
            start, count = int(starts[row, head]), lens[row][head]
            own, end = ranked(table[row, head], count, tokens), start + count
            for pool, source in zip((*pools, *extra), (key, value, scores, positions), strict=True):
                assert torch.equal(pool[start:end], source[row, head, own])
            if is_ranked:
                best = set(ranked(table[row, head], count // 3, tokens))
                for tier in (0, 1):
                    begin, number = int(order_starts[tier, row, head]), int(counts[tier, row, head])
                    places = [start + place for place, entry in enumerate(own) if (entry not in best) == tier]
                    assert order[begin : begin + number].tolist() == places
    written = sum(map(sum, lens))
    assert int(pools[0][:, 0].isfinite().sum()) == int(pools[1][:, -1].isfinite().sum()) == written
    assert int((extra[1] != -7).sum()) == written and int((order >= 0).sum()) == written * is_ranked


def random_weights(heads, dim, group, knots, dtype):
    torch.manual_seed(3)
    rows, normal = group + 5, torch.randn
    return ScoreWeights(
        (normal(heads, 2 * dim, dim) / math.sqrt(2 * dim)).to(dtype), normal(heads, dim), normal(heads, dim),
        normal(heads, rows, dim), normal(heads, group), normal(heads), normal(heads, knots), normal(heads, knots),
    )  # fmt: skip


def turned(x, cos, sin):
    """Halves of the channels, rotated as Llama's are."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def knots_at(table, places):
    """[H, K] at [..., T] places: [..., H, T] by linear interpolation in float64."""
    x = places.double().log2().clamp(max=table.shape[1] - 1)
    low = x.floor().long().clamp(max=table.shape[1] - 2)
    share = x - low
    return table.double()[:, low] * (1 - share) + table.double()[:, low + 1] * share


def reference(key, value, weights, tables, mean_tables, positions, end, scale):
    """The two parts of the scores [H, T] of one row in float64: on arrival, and at eviction."""
    k, v = key.double(), value.double()
    w = weights._replace(**{name: x.double() for name, x in weights._asdict().items()})
    read = turned(k, *(x.double() for x in tables)) if tables else k
    units = torch.cat([read, v], -1) @ w.weight + w.bias[:, None]
    arrival = (silu(units) * w.output[:, None]).sum(-1) + knots_at(weights.start, positions + 1)
    queries = turned(w.queries, *(x.double() for x in mean_tables)) * scale
    products, group = k @ queries.mT, w.normaliser.shape[1]
    logits = products[..., :group] + products[..., group:].square().sum(-1, keepdim=True) / 2
    expected = (logits - w.normaliser[:, None]).logsumexp(-1) + v.norm(dim=-1).clamp(min=1e-12).log()
    return arrival, w.attention[:, None] * expected + knots_at(weights.end, end - positions)


SHAPES = [(8, 2, torch.float32), (64, 4, torch.bfloat16), (80, 3, torch.float16)]


def tables_for(tokens, dim):
    torch.manual_seed(4)
    angle = torch.randn(tokens, dim // 2).repeat(1, 2)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize(("dim", "group", "dtype"), SHAPES, ids=["float32", "bfloat16", "float16"])
def test_scores_of_a_prompt_equal_those_in_float64(dim, group, dtype):
    torch.manual_seed(5)
    key, value = (torch.randn(2, 90, 3, dim, dtype=dtype).transpose(1, 2) for _ in range(2))
    weights = random_weights(3, dim, group, 7, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    tables, mean_tables = tables_for(90, dim), tuple(x[0] for x in tables_for(1, dim))
    found = selection.score(Entries.of_prompt(key, value), weights, tables, mean_tables, 11, 150, 0.3)
    places = torch.arange(11, 101)
    for row in range(2):
        exact = sum(reference(key[row], value[row], weights, tables, mean_tables, places, 150, 0.3))
        # The interpreter multiplies what a GPU rounds to bfloat16.
        allowed = 1e-3 if dtype != torch.bfloat16 else 0.1 if DEVICE == "cpu" else 0.3
        torch.testing.assert_close(found[row].double(), exact, atol=allowed, rtol=1e-3)


@pytest.mark.parametrize("padding", [0, 37])
def test_scores_in_pools_are_written_on_arrival_and_completed_at_eviction(padding):
    """Of a text that begins after `padding` positions."""
    torch.manual_seed(6)
    dim, counts = 16, torch.tensor([[70, 9], [33, 150]], dtype=torch.int32)
    starts = torch.tensor([[5, 80], [95, 130]], dtype=torch.int32)
    key, value = torch.full((290, dim), math.nan), torch.full((290, dim), math.nan)
    scores, positions = torch.full((290,), math.nan), torch.full((290,), -1, dtype=torch.int32)
    new, begin, end = 9, 400, 409
    for start, count in zip(starts.flatten().tolist(), counts.flatten().tolist(), strict=True):
        spans = slice(start, start + count)
        key[spans], value[spans] = torch.randn(count, dim), torch.randn(count, dim)
        old = slice(start, start + count - new)
        scores[old] = torch.randn(count - new)
        positions[old] = padding + torch.randperm(400 - padding)[: count - new].int().sort().values
    before, weights = scores.clone(), random_weights(2, dim, 2, 7, torch.float32)
    tables, mean_tables = tables_for(new, dim), tuple(x[0] for x in tables_for(1, dim))
    options = {"scores": scores, "positions": positions, "padding": padding}
    late = Entries.of_pools(key, value, starts, counts, new)
    assert selection.score(late, weights, tables, None, begin, end, 0.3, eviction=False, **options) is None
    everything = Entries.of_pools(key, value, starts, counts, 150)
    found = selection.score(everything, weights, None, mean_tables, 0, end, 0.3, arrival=False, **options)
    for row in range(2):
        for head in range(2):
            start, count = int(starts[row, head]), int(counts[row, head])
            own, old = slice(start, start + count), slice(start, start + count - new)
            late = slice(start + count - new, start + count)
            assert positions[late].tolist() == list(range(begin, end)) and torch.equal(scores[old], before[old])
            one = weights._replace(**{name: x[head : head + 1] for name, x in weights._asdict().items()})
            arrival, _ = reference(
                key[None, late], value[None, late], one, tables, mean_tables, positions[late] - padding, end, 0.3
            )
            torch.testing.assert_close(scores[late].double(), arrival[0], atol=1e-4, rtol=1e-4)
            _, rest = reference(key[None, own], value[None, own], one, None, mean_tables, positions[own], end, 0.3)
            torch.testing.assert_close(
                found[row, head, :count].double(), scores[own].double() + rest[0], atol=1e-4, rtol=1e-4
            )
            assert bool((found[row, head, count:] == -math.inf).all())
    assert int(scores.isfinite().sum()) == int(counts.sum())
