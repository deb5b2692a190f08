"""Stores in tiers against a float64 oracle, and caches of codes against plain ones of the values they stand for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lkv.cache.ragged_cache import RaggedCache
from lkv.cache.ragged_store import RaggedStore, slot_indices
from lkv.cache.tiered_store import TieredStore
from lkv.cache.tiers import TierSplit, check_width, quantize, rotation
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import CacheError
from lkv.kernels import BITS_BY_NAME, FP8
from lkv.methods.targets import UNQUANTIZED, MemoryTarget, Precision
from tests import dense
from tests.cache.helpers import METHOD, head_entries, ids, tier_numbers
from tests.cache.test_tiers import DTYPES, normal
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.kernels.pools import in_tiers

TIERS = (UNQUANTIZED, Precision(8, 4), Precision(4, 3))


def ragged(lens: torch.Tensor, width: int, dtype: torch.dtype, seed: int = 0, has_scores: bool = False) -> RaggedStore:
    count = int(lens.sum())
    store = RaggedStore(lens, 0, torch.empty(0, width, dtype=dtype), torch.empty(0, width, dtype=dtype), has_scores)
    key = normal(count, width, seed=seed) * torch.linspace(0.2, 3, width) + 1
    extras = (normal(count, seed=seed + 2).float(), torch.arange(count).int()) if has_scores else ()
    store.fill(key.to(dtype), normal(count, width, seed=seed + 1).to(dtype), *extras)
    return store


def split_of(lens: torch.Tensor, precisions=TIERS, seed: int = 0) -> TierSplit:
    """A random tier for each of `lens` entries."""
    numbers = torch.randint(len(precisions), (int(lens.sum()),), generator=torch.Generator().manual_seed(seed))
    parts = numbers.split(lens.flatten().tolist())
    counts = torch.stack([torch.stack([(part == tier).sum() for part in parts]) for tier in range(len(precisions))])
    return TierSplit(tuple(precisions), counts.view(len(precisions), *lens.shape), numbers.argsort(stable=True))


def by_head(values: torch.Tensor, lens: torch.Tensor) -> list[torch.Tensor]:
    return list(values.split(lens.flatten().tolist()))


LENS = torch.tensor([[7, 0, 20], [1, 12, 3]])
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "precisions",
    [TIERS, (Precision(8, 8),), (Precision(3, 3),), (Precision(FP8, FP8),), (Precision(8, FP8), Precision(4, 4))],
)
@pytest.mark.parametrize("width", [8, 40])
def test_what_is_restored_equals_the_oracle(dtype, precisions, width):
    """Entries of each tier by the oracle, in the order of the tiers; those of 16 bits come last in a head."""
    store, split = ragged(LENS, width, dtype), split_of(LENS, precisions)
    restored = TieredStore.from_ragged(store, split, 3, []).restore()
    assert torch.equal(restored.lens, LENS) and restored.k.dtype == dtype
    order = sorted(range(len(precisions)), key=lambda tier: (not precisions[tier].is_quantized, tier))
    sources = zip(*(by_head(x, LENS) for x in (*store.pack(), tier_numbers(split), *restored.pack())), strict=True)
    for key, value, numbers, found_key, found_value in sources:
        bits = [(precisions[n].key_bits, precisions[n].value_bits) for n in numbers.tolist()]
        expected_key, expected_value, gap = dense.stored_in_bits(key, value, bits, dense.basis_of(key, dtype))
        places = torch.cat([(numbers == tier).nonzero()[:, 0] for tier in order])
        if gap < 1e-6:
            continue
        for found, expected in ((found_key, expected_key), (found_value, expected_value)):
            torch.testing.assert_close(found, expected[places], atol=max(2e-3, CLOSE[dtype]) * 3, rtol=2e-3)


def test_heads_that_cannot_be_quantised_are_named():
    check_width(8, 64)
    with pytest.raises(CacheError, match=r"heads of 12 and 20 channels cannot be quantised.* multiple of 8"):
        check_width(20, 12)
    model = tiny_llama(head_dim=12, hidden_size=48)
    for options in ({"bits": 4}, {"memory": 0.5, "method": "knorm"}):
        with pytest.raises(CacheError, match="heads of 12 channels cannot be quantised"):
            RaggedCache(model, **({"method": METHOD} | options))
    RaggedCache(model, method=METHOD)


def test_entries_that_stay_in_their_tier_keep_their_codes():
    """Random entries are dropped, and some of the others moved to a worse tier."""
    for seed in range(6):
        store = ragged(LENS, 16, torch.float32, seed, has_scores=True)
        before = TieredStore.from_ragged(store, split_of(LENS, seed=seed), 2, [])
        draw = torch.Generator().manual_seed(seed)
        tail = normal(2, 3, 2, 16, seed=seed, dtype=torch.float32)
        for row in range(2):
            before.append(row, tail[row : row + 1], tail[row : row + 1])
        before.count_appended(2)
        entries = before.restore()
        tiers = torch.cat([
            torch.cat([torch.full((n,), tier) for tier, n in zip((1, 2, 0), counts, strict=True)])
            for counts in zip(*(x.flatten().tolist() for x in (*[t.lens for t in before.tiers], before._rest.counts)),
                              strict=True)
        ])  # fmt: skip
        origin = (torch.rand(len(tiers), generator=draw) < 0.7).nonzero()[:, 0]
        moved = (tiers[origin] + (torch.rand(len(origin), generator=draw) < 0.3)).clamp(max=2)
        owners = torch.arange(6).repeat_interleave(entries.counts.flatten())[origin]
        lens = torch.bincount(owners, minlength=6).view(2, 3)
        kept = RaggedStore(lens, 0, entries.k, entries.v, has_scores=True)
        kept.copy_from(entries, slot_indices(entries.starts, entries.counts, entries.k.device)[origin])
        counts = torch.stack([torch.bincount(owners[moved == tier], minlength=6).view(2, 3) for tier in range(3)])
        after = before.requantize(kept, origin, TierSplit(TIERS, counts, moved.argsort(stable=True)), 4, [])
        assert after.basis is before.basis and torch.equal(after.lens, lens) and after.free_slots == 4
        for number, (old, new) in enumerate(zip(before.tiers, after.tiers, strict=True), start=1):
            # The place of each entry among those of the old tier, in order of heads.
            place = torch.full((len(tiers),), -1)
            place[tiers == number] = torch.arange(int((tiers == number).sum()))
            mine = place[origin[moved == number]]
            for codes, others in zip(new.tensors, old.tensors, strict=True):
                assert torch.equal(codes[mine >= 0], others[mine[mine >= 0]])
            # Scores of appended tokens are computed when they are needed: until then they are whatever memory held.
            torch.testing.assert_close(
                new.scores, entries.scores[origin][moved == number], rtol=0, atol=0, equal_nan=True
            )
            assert torch.equal(new.positions, entries.positions[origin][moved == number])
        # Those that moved are quantised anew, from what they stood for.
        for number, tier in enumerate(after.tiers, start=1):
            came = (moved == number) & (tiers[origin] != number)
            key, value = kept.pack()
            rotated = value[came] @ rotation(16, torch.float32, value.device)
            inside, bits = before.basis.enter(key[came], owners[came]), tier.precision
            expected = *quantize(inside, bits.key_bits), *quantize(rotated, bits.value_bits)
            here = came[moved == number]
            for codes, anew in zip(tier.tensors, expected, strict=True):
                assert torch.equal(codes[here], anew)
        slots = slot_indices(after._rest.starts, after._rest.lens, kept.k.device)
        old = slot_indices(before._rest.starts, before._rest.counts, kept.k.device)
        place = torch.full((len(tiers),), -1)
        place[tiers == 0] = old
        assert torch.equal(after._rest.k[slots], before._rest.k[place[origin[moved == 0]]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precisions", [TIERS, (Precision(8, 8),), (Precision(3, 3),), (Precision(FP8, FP8),)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_attention_over_codes_is_attention_over_what_they_stand_for(dtype, precisions, tokens):
    width, scale = 16, 0.25
    tiered = TieredStore.from_ragged(ragged(LENS + 1, width, dtype), split_of(LENS + 1, precisions), 9, [])
    query = normal(2, 6, tokens, width, seed=5).to(dtype)
    restored = tiered.restore(with_appended=False)
    out, lse = tiered.attend_compressed(query, scale)
    close = 3e-2 if dtype == torch.bfloat16 else 1e-4

    def expect(store: RaggedStore, causal: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = list(zip(*(by_head(x, store.lens) for x in store.pack()), strict=True))
        outs, sums = torch.empty_like(query).double(), torch.empty(query.shape[:3]).double()
        for row in range(2):
            for head in range(6):
                key, value = (x.double() for x in parts[3 * row + head // 2])
                scores = query[row, head].double() @ key.T * scale
                if causal:
                    n = len(key) - tokens
                    scores[:, n:] = scores[:, n:].masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -math.inf)
                sums[row, head] = scores.logsumexp(-1)
                outs[row, head] = scores.softmax(-1) @ value
        return outs, sums

    expected, sums = expect(restored, 0)
    torch.testing.assert_close(out.double(), expected, atol=close, rtol=close)
    torch.testing.assert_close(lse.double(), sums, atol=close, rtol=close)
    key, value = (normal(2, 3, tokens, width, seed=seed).to(dtype) for seed in (6, 7))
    out = tiered.extend(query, key, value, scale)
    assert tiered.appended_tokens == tokens and tiered.counts.tolist() == (LENS + 1 + tokens).tolist()
    full = tiered.restore()
    torch.testing.assert_close(out.double(), expect(full, 1)[0], atol=close, rtol=close)
    for row in range(2):
        for head in range(3):
            torch.testing.assert_close(
                head_entries(full, row, head)[0][-tokens:], key[row, head], atol=close, rtol=close
            )
            torch.testing.assert_close(
                head_entries(full, row, head)[1][-tokens:], value[row, head], atol=close, rtol=close
            )


def plain_twin(cache: RaggedCache) -> RaggedCache:
    """The same cache with its compressed entries restored."""
    twin = cache.fork()
    for layer in twin.ragged_layers:
        store = layer.store
        assert isinstance(store, TieredStore) and not store.appended_tokens
        restored = store.restore()
        layer.store = restored.reallocate(64)
    return twin


STORAGE = st.sampled_from([*({"bits": bits} for bits in BITS_BY_NAME), {"tiers": TIERS}, {"tiers": TIERS[1:]}])


def cache_of(model, storage, **options) -> RaggedCache:
    method = in_tiers(METHOD, *storage["tiers"]) if "tiers" in storage else METHOD
    return RaggedCache(model, method=method, bits=storage.get("bits"), **options)


@pytest.mark.slow
@settings(max_examples=12)
@given(storage=STORAGE, slack=st.integers(0, 5), seed=st.integers(0, 9), streaming=st.booleans())
def test_it_equals_a_cache_of_the_values_it_stands_for(storage, slack, seed, streaming):
    model, text = tiny_llama(dtype=torch.float32), ids(2, 40, seed)
    cache = cache_of(model, storage, slack=slack, prompt_tokens=30, streaming=streaming)
    with torch.no_grad():
        if streaming:
            model(text[:, :11], past_key_values=cache, use_cache=True)
        model(text[:, 11 * streaming : 30], past_key_values=cache, use_cache=True)
        twin = plain_twin(cache)
        for change in (
            lambda c: None,
            lambda c: c.reorder_cache(torch.tensor([1, 0])),
            lambda c: c.crop(-2),
            lambda c: c.batch_select_indices(torch.tensor([1])),
            lambda c: c.batch_repeat_interleave(3),
            lambda c: c.rewind(),
            lambda c: c.batch_select_indices(torch.tensor([2, 0])),
        ):
            change(cache), change(twin)
            for each in (lambda c: c, lambda c: c.fork()):
                caches = each(cache), each(twin)
                new = text[:1, 30:34].expand(len(cache.ragged_layers[0].lens), -1)
                outs = [model(new, past_key_values=c, use_cache=True).logits for c in caches]
                torch.testing.assert_close(*outs, atol=2e-4, rtol=2e-4)
                assert caches[0].get_seq_length() == caches[1].get_seq_length()


@settings(max_examples=10)
@given(storage=STORAGE, seed=st.integers(0, 9), width=st.integers(1, 4))
def test_padding_after_the_prompt_is_dropped_as_from_a_plain_cache(storage, seed, width):
    model, text = tiny_llama(dtype=torch.float32), ids(2, 40, seed)
    cache = cache_of(model, storage, slack=3)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model(text[:, :30], past_key_values=cache, use_cache=True)
        twin, mask = plain_twin(cache), torch.ones(2, 30, dtype=torch.long)
        for start in (30, 30 + width):
            real = torch.rand(2, width, generator=draw) < 0.6
            real[:, -1] = True
            mask = torch.cat([mask, real.long()], 1)
            places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -width:]
            tokens = text[:, start : start + width]
            outs = [
                model(tokens, attention_mask=mask, position_ids=places, past_key_values=c).logits for c in (cache, twin)
            ]
            torch.testing.assert_close(outs[0][real], outs[1][real], atol=2e-4, rtol=2e-4)
        # What was read as text is padding now: it is dropped.
        mask[0, 31] = 0
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -1:]
        outs = [model(text[:, -1:], attention_mask=mask, position_ids=places, past_key_values=c).logits
                for c in (cache, twin)]  # fmt: skip
        torch.testing.assert_close(*outs, atol=2e-4, rtol=2e-4)


SAVED = [
    {"bits": 8},
    {"bits": "fp8"},
    {"bits": 3},
    {"tiers": TIERS},
    {"memory": 0.3},
    {"memory": "5000"},
    {"memory": "90%"},
]


@pytest.mark.parametrize("storage", SAVED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_context_is_saved_bit_for_bit(storage, dtype, tmp_path):
    model, memory = tiny_llama(dtype=dtype), storage.get("memory")
    options = {"method": in_tiers(METHOD, *TIERS)} if "tiers" in storage else storage
    context = compress(model, Words(), TEXT, **{"method": "knorm" if memory else METHOD} | options)
    answer = context.ask("what is one ?", max_new_tokens=8)
    assert context.metadata["bits"] == storage.get("bits")
    assert context.metadata["memory"] == (memory and str(MemoryTarget.parse(memory)))
    assert context.metadata["retention"] is context.metadata["budget_tokens"] is None
    context.save(tmp_path / "context.kv")
    again = Context.load(tmp_path / "context.kv", model, Words())
    assert again.ask("what is one ?", max_new_tokens=8) == answer and again.metadata == context.metadata
    for mine, theirs in zip(again.cache.ragged_layers, context.cache.ragged_layers, strict=True):
        one, other = mine.state(), theirs.state()
        assert isinstance(mine.store, TieredStore) and one.keys() == other.keys()
        assert all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


def test_a_quantised_context_is_loaded_in_another_dtype(tmp_path):
    model = tiny_llama(dtype=torch.float32)
    context = compress(model, Words(), TEXT, method=METHOD, bits=8)
    expected, _ = context.predict("what is one ?", "it is so")
    context.save(tmp_path / "context.kv")
    for dtype, close in ((torch.float64, 1e-4), (torch.bfloat16, 0.5)):
        again = Context.load(tmp_path / "context.kv", tiny_llama(dtype=dtype), Words())
        found, _ = again.predict("what is one ?", "it is so")
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, atol=close, rtol=close)
