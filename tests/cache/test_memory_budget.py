"""A memory budget in bytes, realised: never exceeded, hardly anything left of it, and the best entries in most bits."""

import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress, compress_ids
from lkv.context.context import Context
from lkv.errors import BudgetError, LkvError, PromptError, RetentionError
from lkv.hf.prompt_kv import LayerKV
from lkv.hf.spec import inspect_model
from lkv.methods.request import CompressionRequest
from lkv.methods.selectors import Knorm
from lkv.methods.targets import UNQUANTIZED, KVShape, MemoryTarget, Precision, TierTable
from tests.cache.helpers import head_entries, ids
from tests.conftest import tiny_llama, uneven_policy
from tests.context.test_compression import TEXT, Words
from tests.families import build as build_family
from tests.requests import resolve_method

MODELS = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "wide": {"dtype": torch.float32, "head_dim": 40, "num_key_value_heads": 4, "num_hidden_layers": 2},
    "one head": {"dtype": torch.float32, "head_dim": 64, "num_key_value_heads": 1},
}
METHODS = ("knorm", "rdkv", "lkv", "lkv-t", "snapkv", "pyramidkv", "adakv-snapkv", "ada+knorm", "kvzip", "lkv-h+kvzip")


def build(name: str):
    return tiny_llama(max_position_embeddings=2048, **MODELS[name])


def compressed(model, tokens: int, method: str, seed: int = 0, **options) -> Context:
    policy = uneven_policy(model) if method.startswith("lkv") else None
    return compress_ids(
        model, Words(), ids(1, tokens, seed)[0].tolist(), CompressionRequest(method=method, policy=policy, **options)
    )


def full_nbytes(model, tokens: int) -> int:
    spec = inspect_model(model)
    return spec.layers * spec.kv_heads * tokens * 2 * spec.head_dim * 2


@settings(max_examples=20)
@given(
    name=st.sampled_from(sorted(MODELS)),
    tokens=st.integers(80, 500),
    memory=st.one_of(st.floats(0.03, 1.0), st.sampled_from([0.05, 0.1, 0.25, 0.5, 0.9, 1.0])),
    in_bytes=st.booleans(),
    method=st.sampled_from(METHODS),
    seed=st.integers(0, 99),
)
def test_the_budget_is_used_and_never_exceeded(name, tokens, memory, in_bytes, method, seed):
    model = build(name)
    spec, full = inspect_model(model), full_nbytes(model, tokens)
    allowed, heads = int(memory * full), spec.layers * spec.kv_heads
    # The mean and the scale of each channel, then k, v and two norms of one entry in 8 and 4 bits; less is refused.
    assume(allowed > 1.1 * heads * (4 * spec.head_dim + 2 * (12 * spec.head_dim // 8 + 4) / 0.3))
    context = compressed(model, tokens, method, seed, memory=allowed if in_bytes else memory)
    used = sum(layer.store.nbytes() for layer in context.cache.ragged_layers)
    assert used == context.cache.nbytes() <= allowed
    assert context.cache.full_nbytes() == full * model.dtype.itemsize // 2
    kept = [count for layer in context.cache.kept_counts() for count in layer]
    # Beside a tenth of it, all that may be left is what one entry a head would take that is rounded off each tier.
    if sum(kept) > 8 * heads:
        assert used >= 0.9 * allowed - 2 * heads * (2 * spec.head_dim + 4)


def tiers_of(layer) -> list[tuple[Precision, torch.Tensor]]:
    """The precisions of a layer's store, best first, and how many entries of each head are in them."""
    store = layer.store
    own = [(tier.precision, tier.lens) for tier in store.tiers]
    return [(UNQUANTIZED, store._rest.lens), *own]


@settings(max_examples=12)
@given(
    tokens=st.integers(100, 500),
    memory=st.sampled_from([0.05, 0.1, 0.2, 0.3, 0.6, 0.9]),
    name=st.sampled_from(["float32", "bfloat16"]),
    method=st.sampled_from(["knorm", "lkv", "adakv-snapkv"]),
)
def test_better_entries_have_more_bits(tokens, memory, name, method):
    """What less memory keeps is kept by more, in no fewer bits where the precisions are the same."""
    model, text = build(name), ids(1, tokens)[0].tolist()
    policy = uneven_policy(model) if method == "lkv" else None
    options = {"method": method, "policy": policy}
    context = compress_ids(model, Words(), text, CompressionRequest(memory=memory, **options))
    chosen = resolve_method(method, model, memory=memory, policy=policy)
    last = chosen.tiers[-1].target
    shares = [tier.target.share(tokens) for tier in chosen.tiers]
    assert shares == sorted(shares) and 0 < shares[-1] <= 1
    assert last.share(tokens) == chosen.target.share(tokens)
    by_bits = sorted((tier.precision for tier in chosen.tiers), key=lambda p: -p.key_bits)
    assert [tier.precision for tier in chosen.tiers] == by_bits
    # One ranking: the tiers down to each one are what a method with that retention alone keeps.
    for number, share in enumerate(shares):
        if share * tokens < 1:
            continue
        alone = compress_ids(model, Words(), text, CompressionRequest(retention=share, **options))
        for layer, plain in zip(context.cache.ragged_layers, alone.cache.ragged_layers, strict=True):
            precisions = [tier.precision for tier in chosen.tiers[: number + 1]]
            counts = sum(lens for precision, lens in tiers_of(layer) if precision in precisions)
            assert (counts - plain.store.lens).abs().max() <= 1  # r t is rounded once more


@pytest.mark.parametrize(("tokens", "memory"), [(500, 0.4), (500, 1.0), (900, 0.24)])
def test_the_windows_of_duo_are_in_all_precisions(tokens, memory):
    """What a retention of all precisions together keeps, within the bytes, though the best one alone has less."""
    model, text = build("float32"), ids(1, tokens)[0].tolist()
    pattern = [[0.1, 0.9], [0.2, 0.8], [0.7, 0.3]]
    context = compress_ids(model, Words(), text, CompressionRequest(method="duo", pattern=pattern, memory=memory))
    assert context.cache.nbytes() <= memory * full_nbytes(model, tokens)
    chosen = resolve_method("duo", model, memory=memory, pattern=pattern)
    shares = [tier.target.share(tokens) for tier in chosen.tiers]
    whole = compress_ids(
        model, Words(), text, CompressionRequest(method="duo", pattern=pattern, retention=min(1.0, shares[-1] + 1e-9))
    )
    with pytest.raises(PromptError, match="smallest retention"):
        compress_ids(model, Words(), text, CompressionRequest(method="duo", pattern=pattern, retention=0.2))
    for layer, plain in zip(context.cache.ragged_layers, whole.cache.ragged_layers, strict=True):
        assert torch.equal(layer.store.lens, plain.store.lens)
        best = plain.store.lens - tiers_of(layer)[-1][1]
        share = max(share for share in shares if share < shares[-1])
        assert (best - (plain.store.lens * share / shares[-1])).abs().max() <= 1


def test_the_values_of_a_better_tier_are_nearer():
    model = build("float32")
    text = ids(1, 400)
    plain, tiered = RaggedCache(model, method="knorm", retention=1.0), RaggedCache(model, method="knorm", memory=0.24)
    for cache in (plain, tiered):
        model(text, past_key_values=cache, use_cache=True)
    for one, other in zip(plain.ragged_layers, tiered.ragged_layers, strict=True):
        restored = other.store.restore()
        for head in range(2):
            key, value = head_entries(one.store, 0, head)
            mine, own = head_entries(restored, 0, head)
            scores = Knorm().scores(0, LayerKV(key[None, None], value[None, None], 1.0))[0, 0]
            ranked = scores.argsort(descending=True, stable=True)
            done = 0
            for tier in other.store.tiers:
                count = int(tier.lens[0, head])
                best = ranked[done : done + count].sort().values
                error = (own[done : done + count] - value[best]).norm() / value[best].norm()
                assert error < {8: 0.012, 4: 0.13, 3: 0.25}[tier.precision.value_bits]
                error = (mine[done : done + count] - key[best]).norm() / key[best].norm()
                assert error < {8: 0.012, 4: 0.15, 3: 0.3}[tier.precision.key_bits]
                done += count
            assert done == int(other.store.lens[0, head]) - int(other.store._rest.lens[0, head])


@pytest.mark.parametrize("memory", [0.1, 0.4, 0.9])
@pytest.mark.parametrize(
    "options", [{"streaming": True}, {"decode_eviction": True}, {"streaming": True, "decode_eviction": True}], ids=str
)
def test_the_budget_holds_while_a_text_is_streamed_and_evicted_from(memory, options):
    model, steps = build("float32"), 20 if "decode_eviction" in options else 2
    text = ids(1, 600 + steps)
    cache = RaggedCache(model, method="knorm", memory=memory, prompt_tokens=600, **options)
    for start in range(0, 600, 200):
        model(text[:, start : start + 200], past_key_values=cache, use_cache=True)
    assert 0.85 * memory * full_nbytes(model, 600) <= cache.nbytes() <= memory * full_nbytes(model, 600)
    for place in range(600, 600 + steps):
        model(text[:, place : place + 1], past_key_values=cache, use_cache=True)
        if cache.config.request.decode_eviction:
            assert 0.85 * memory * full_nbytes(model, place) <= cache.nbytes()
            assert cache.nbytes() <= memory * full_nbytes(model, place + 1)
    assert cache.get_seq_length() == 600 + steps


@pytest.mark.slow
@settings(max_examples=15)
@given(
    dtype=st.sampled_from(["float32", "bfloat16"]), memory=st.sampled_from([0.05, 0.1, 0.3, 1.0, "6KB", "20KB"]),
    slack=st.sampled_from([None, 0, 2, 40]), rows=st.integers(1, 2), start=st.integers(60, 200),
    passes=st.lists(st.sampled_from([1, 1, 1, 2, 7, 40, 150]), min_size=3, max_size=9), seed=st.integers(0, 9),
)  # fmt: skip
def test_text_questions_and_answers_together_stay_within_the_budget(dtype, memory, slack, rows, start, passes, seed):
    model = build(dtype)
    cache = RaggedCache(model, method="knorm", memory=memory, slack=slack, decode_eviction=True)
    text, read = ids(rows, start + sum(passes), seed), 0
    for new in (start, *passes):
        model(text[:, read : read + new], past_key_values=cache, use_cache=True)
        read += new
        target = MemoryTarget.parse(memory)
        allowed = rows * (target.nbytes or memory * full_nbytes(model, read))
        smallest = rows * 6 * 4 * 8  # the mean and the scale of the keys of each head
        assert cache.nbytes() <= max(allowed, smallest) + 1e-6
        assert cache.get_seq_length() == read


@torch.no_grad()
@pytest.mark.parametrize(("name", "memory", "quantized"), [("float32", 0.4, 2), ("one head", "16KB", 4)])
def test_rows_of_unequal_length_have_budgets_of_their_own(name, memory, quantized):
    """By bytes, the longer row has fewer bits a value, and other precisions."""
    model = build(name)
    lengths = [120, 300]
    batch, mask = torch.zeros(2, 300, dtype=torch.long), torch.zeros(2, 301, dtype=torch.long)
    for row, length in enumerate(lengths):
        batch[row, 300 - length :], mask[row, 300 - length :] = ids(1, length, row)[0], 1
    together = RaggedCache(model, method="knorm", memory=memory)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model(
        batch, attention_mask=mask[:, :300], position_ids=positions[:, :300], past_key_values=together, use_cache=True
    )
    assert {len(layer.store.tiers) for layer in together.ragged_layers} == {quantized}
    caches = [RaggedCache(model, method="knorm", memory=memory) for _ in lengths]
    for row, (length, alone) in enumerate(zip(lengths, caches, strict=True)):
        model(ids(1, length, row), past_key_values=alone, use_cache=True)
        for layer, own in zip(together.ragged_layers, alone.ragged_layers, strict=True):
            assert torch.equal(layer.store.lens[row], own.store.lens[0])
            mine = {precision: lens[row] for precision, lens in tiers_of(layer)}
            for precision, lens in tiers_of(own):
                assert torch.equal(mine[precision], lens[0])
    next_ids = ids(2, 1, 7)
    logits = model(
        next_ids, attention_mask=mask, position_ids=positions[:, -1:], past_key_values=together, use_cache=True
    ).logits
    for row, alone in enumerate(caches):
        expected = model(next_ids[row : row + 1], past_key_values=alone, use_cache=True).logits
        assert torch.allclose(logits[row], expected[0], atol=1e-3)


def test_rows_slack_and_windows_come_on_top_of_a_budget():
    def read(model, rows=1, **options):
        cache = RaggedCache(model, method="knorm", **options)
        model(ids(rows, 300), past_key_values=cache)
        return cache

    model = build("float32")
    allowed = 2 * full_nbytes(model, 300) // 5
    one, four = read(model, memory=allowed), read(model, 4, memory=allowed)
    assert one.nbytes() <= allowed and 3 * allowed < four.nbytes() <= 4 * allowed
    assert read(model, memory=allowed, slack=10).nbytes() - one.nbytes() == 6 * 10 * 2 * 8 * 4
    mixed = read(build_family("Gemma3", torch.float32), memory=0.1)
    windows, used, full = mixed.other_nbytes(), mixed.nbytes(), mixed.full_nbytes()
    assert used - windows <= 0.05 * (full - windows) < 0.05 * full < used


@pytest.mark.parametrize(
    ("text", "share", "nbytes"),
    [(0.1, 0.1, None), ("10%", 0.1, None), (" 12.5 % ", 0.125, None), ("0.25", 0.25, None), (1, 1.0, None),
     (1.0, 1.0, None), ("100%", 1.0, None), (200_000_000, None, 200_000_000), ("200MB", None, 200_000_000),
     ("200 mb", None, 200_000_000), ("1.5GB", None, 1_500_000_000), ("1GiB", None, 2**30), ("64KiB", None, 65536),
     ("3k", None, 3000), ("2M", None, 2_000_000), ("500b", None, 500), ("4096", None, 4096)],
)  # fmt: skip
def test_budgets_are_read(text, share, nbytes):
    target = MemoryTarget.parse(text)
    assert target.share == (None if share is None else pytest.approx(share)) and target.nbytes == nbytes
    assert str(target) == (f"memory {share:.4g}" if share else f"memory {nbytes} bytes")


BAD = [
    0, -0.1, 1.5, 2.0, True, b"10%", [0.1], 2**80, float("nan"), float("inf"), "", "x", "10 %%", "1.2.3MB", "110%",
    "0%", "-5MB", "5TB", "1.5", "150.7", "0MB", "0.5MB%", "nan", "inf", "1" * 400, "200 M B", "\n", "\u0663%", "1e3",
    10, "10", 100, "100",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text)[:20])
def test_what_is_no_budget_is_named_in_one_sentence(model, text):
    for call in (MemoryTarget.parse, lambda value: compress(model, Words(), TEXT, method="knorm", memory=value),
                 lambda value: RaggedCache(model, method="knorm", memory=value)):  # fmt: skip
        with pytest.raises(RetentionError) as error:
            call(text)
        said = str(error.value)
        assert (
            said.startswith("memory is ") and "\n" not in said and said.endswith("such as '200MB'.") and len(said) < 700
        )


@pytest.mark.parametrize(
    ("method", "exact"),
    [
        ("duo-kvpress", "duo"),
        ("pyramidkv-kvpress", "pyramidkv"),
        ("pyramid-kvpress+knorm+compensation", "pyramid+knorm+compensation"),
    ],
)
def test_budgets_that_may_keep_more_are_refused(model, method, exact):
    pattern = [[0.1, 0.9], [0.2, 0.8], [0.7, 0.3]] if method.startswith("duo") else None
    with pytest.raises(BudgetError) as error:
        resolve_method(method, model, memory=0.05, pattern=pattern)
    assert str(error.value) == f"{method!r} may keep more than memory allows; use {exact!r}, or give a retention."
    assert resolve_method(exact, model, memory=0.05, pattern=pattern).tiers


def test_memory_needs_a_model():
    with pytest.raises(LkvError, match="the method needs 'model', which is missing; pass the model to resolve_method"):
        resolve_method("knorm", memory=0.1)


@pytest.mark.parametrize(("memory", "is_share"), [(1e-4, True), ("0.01%", True), ("1 B", False), (140, False)])
def test_too_little_memory_is_named(model, memory, is_share):
    for chunk in (None, 20):
        with pytest.raises(PromptError) as error:
            compress(model, Words(), TEXT, method="knorm", memory=memory, chunk=chunk)
        said = str(error.value)
        assert "the prompt has 60 tokens: at memory" in said and "\n" not in said
        if is_share:
            assert "more memory, or a longer prompt" in said


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["knorm", "kvzip"])
def test_the_least_bytes_are_named_before_a_text_is_read(name, method):
    model, read = build(name), []
    compressed(model, 60, method, memory=0.5)  # the model is inspected at its first use
    model.model.register_forward_pre_hook(lambda *_: read.append(1))
    for tokens in (60, 900):
        with pytest.raises(PromptError) as error:
            compressed(model, tokens, method, memory=140)
        (least,) = re.findall(r"nothing of it would be kept. Give at least ([\d,]+) bytes.$", str(error.value))
        with pytest.raises(PromptError, match=f"at least {least} bytes"):
            compressed(model, tokens, method, memory=int(least.replace(",", "")) - 1)
        assert not read
        context = compressed(model, tokens, method, memory=int(least.replace(",", "")))
        heads = [count for layer in context.cache.kept_counts() for count in layer]
        assert 0 < sum(heads) <= 2 * len(heads) and read
        read.clear()


def test_all_of_the_memory_keeps_all_as_the_model_computes_it():
    model = build("bfloat16")
    plain, whole = RaggedCache(model, method="knorm", retention=1.0), RaggedCache(model, method="knorm", memory=1.0)
    text = ids(1, 60)
    found = []
    for cache in (plain, whole):
        model(text[:, :50], past_key_values=cache, use_cache=True)
        found.append(model(text[:, 50:], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-6)
    assert whole.realised_retention() == 1.0


@given(
    bits=st.floats(0.05, 16),
    width=st.sampled_from([8, 64, 128]),
    itemsize=st.sampled_from([2, 4]),
    tokens=st.integers(1, 100_000),
    table=st.sampled_from(
        [None, TierTable.single(Precision(8, 8)), TierTable.single(Precision(4, 4)), TierTable.single(Precision(3, 3))]
    ),
)
def test_shares_of_tiers_cost_what_is_allowed(bits, width, itemsize, tokens, table):
    """Over all lengths: the bits of the tiers add up to the budget, less the basis, or to the whole text."""
    from lkv.methods.targets import BASIS_BITS, DEFAULT_TABLE, TierTarget

    table, shape = table or DEFAULT_TABLE, KVShape(6, width, itemsize)
    memory = MemoryTarget(share=bits / 16)
    targets = TierTarget.of_table(memory, shape, table)
    shares = [target.share(tokens) for target in targets]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
    own = [after - before for before, after in zip([0.0, *shares], shares, strict=False)]
    assert sum(part > 0 for part, p in zip(own, table.precisions, strict=True) if p.is_quantized) <= 2
    spent = tokens * sum(part * shape.entry_bits(p) for part, p in zip(own, table.precisions, strict=True))
    allowed = memory.share * 16 * 2 * width * tokens
    if memory.share == 1 and itemsize == 2:
        assert shares[0] == 1
        return
    spent += BASIS_BITS * width if spent else 0
    assert spent <= allowed * (1 + 1e-9)
    cheapest = min(p.key_bits for p in table.precisions)
    if allowed > 4 * BASIS_BITS * width and (shares[-1] < 1 or cheapest < 16):
        assert spent >= 0.99 * allowed
