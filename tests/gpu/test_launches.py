"""What a fake GPU shows of decoding and eviction: launches, waits and allocations, and what is kept."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError
from lkv.methods.method import Method
from lkv.methods.selectors import Knorm, LearnedScores
from lkv.utils.cpp_compiler import find_compiler
from tests.gpu.methods import KNORM, SHALLOW_KNORM, SHALLOW_TIERED, TIERED, ids, policy_of

if find_compiler() is None:
    pytest.skip("there is no C++ compiler to build the fake GPU with", allow_module_level=True)
pytest.importorskip("triton")
from tests.fake_gpu.device import watched
from tests.fake_gpu.kernels import fake_gpus
from tests.kernels.conftest import round_to_bfloat16

pytestmark = pytest.mark.usefixtures("fake_gpu")
COMPENSATED = replace(KNORM, name="knorm+compensation", compensation=True)
LAYERS = 3


@torch.no_grad()
@pytest.mark.parametrize("options", [{"method": KNORM}, *TIERED.values()], ids=["16 bits", *TIERED])
def test_launches_and_allocations_of_a_decode_step_a_layer(on_fake, options):
    """One launch, which makes the output, also over tiers."""
    text = ids(70, 2).to("fake")
    cache = RaggedCache(on_fake, **options)
    on_fake(text[:, :60], past_key_values=cache)
    with fake_gpus(stubbed=True):
        on_fake(text[:, 60:61], past_key_values=cache)  # makes the buffers that later steps keep
        with watched() as log:
            on_fake(text[:, 61:62], past_key_values=cache)
    assert log.count("wait", "copy") == 0, log.summary("wait", "copy")
    assert log.count("launch") == LAYERS, log.summary("launch")
    assert log.count("alloc") == LAYERS, log.summary("alloc")


@pytest.mark.sweep(1)
@torch.no_grad()
@pytest.mark.parametrize(("tiers", "slack"), [("8 bits", 9), ("3 bits", 1), ("three tiers", 1)])
def test_decoding_over_tiers_equals_decoding_over_restored_entries(shallow_on_fake, tiers, slack):
    """Steps of one token and of more, and a step back; with a slack of 1 the tokens are moved to larger pools."""
    text = ids(66).to("fake")
    model, found = shallow_on_fake, []
    cache = RaggedCache(model, slack=slack, **SHALLOW_TIERED[tiers])
    model.base_model(text[:, :60], past_key_values=cache)
    for own, devices_are_gpus in ((cache.fork(), nullcontext), (cache, fake_gpus)):
        with devices_are_gpus():
            parts = [model(part, past_key_values=own).logits for part in text[:, 60:64].split([1, 3], 1)]
            own.crop(-2)
            parts.append(model(text[:, 64:65], past_key_values=own).logits)
        found.append(torch.cat(parts, 1).cpu())
    torch.testing.assert_close(*found, atol=2e-4, rtol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("learned", [False, True])
def test_reading_a_prompt_waits_once_for_all_layers(on_fake, learned):
    """For whether scores are numbers; the first time for a learned policy's budgets, twice.

    Reallocating waits for nothing.
    """
    options = {"policy": policy_of(on_fake).to("fake:0"), "retention": 0.4} if learned else {"method": KNORM}
    with fake_gpus(stubbed=True):
        text = ids(61, 2).to("fake")
        for waits in (3 if learned else 1, 1):
            cache = RaggedCache(on_fake, slack=0, **options)
            with watched() as log:
                on_fake(text[:, :60], past_key_values=cache)
            assert log.count("wait") == waits, log.summary("wait")
        with watched() as log:
            on_fake(text[:, 60:], past_key_values=cache)
        assert log.count("wait") == 0, log.summary("wait")


@torch.no_grad()
@pytest.mark.parametrize("tiers", ["8 bits", "three tiers"])
def test_quantising_a_prompt_waits_once_for_all_layers(shallow_on_fake, tiers):
    """For whether scores are numbers and norms are finite, in one."""
    with fake_gpus() as launches:
        cache = RaggedCache(shallow_on_fake, **SHALLOW_TIERED[tiers])
        with watched() as log:
            shallow_on_fake(ids(40).to("fake"), past_key_values=cache)
    assert log.count("wait") == 1, log.summary("wait")
    assert launches == ["select_kernel", "measure_kernel", "quantise_kernel", "quantise_kernel"] * 2


@torch.no_grad()
@pytest.mark.parametrize("options", TIERED.values(), ids=TIERED)
def test_launches_of_quantising_a_prompt_a_layer(on_fake, options):
    """The selection, k measured, k and v quantised, and four small tables and flags; a flag of all layers on top."""
    with fake_gpus(stubbed=True):
        cache = RaggedCache(on_fake, **options)
        with watched() as log:
            on_fake(ids(60, 2).to("fake"), past_key_values=cache)
    own = [event for event in log.ours("launch") if event.place.startswith(("cache/", "kernels/"))]
    assert len(own) == 8 * LAYERS + 1, log.summary("launch")


@torch.no_grad()
@pytest.mark.parametrize("ways", [{}, {"decode_eviction": True, "slack": 2}], ids=["prompt", "decode eviction"])
def test_tiers_have_on_a_gpu_what_they_have_on_a_cpu(shallow, shallow_on_fake, ways):
    """After a prompt and, with decode eviction, further evictions."""
    policy, text, stores = policy_of(shallow), ids(44), []
    for model, devices_are_gpus in ((shallow, nullcontext), (shallow_on_fake, fake_gpus)):
        with devices_are_gpus(), round_to_bfloat16():
            cache = RaggedCache(model, policy=policy, memory=0.3, **ways)
            for part in text.split([40, 2, 2], 1) if ways else text[:, :40].split(40, 1):
                model(part.to(model.device), past_key_values=cache)
        stores.append([layer.store for layer in cache.ragged_layers])
    for expected, found in zip(*stores, strict=True):
        assert found.precisions == expected.precisions and torch.equal(found.lens, expected.lens)
        for tier, right in zip(found.tiers, expected.tiers, strict=True):
            assert torch.equal(tier.lens, right.lens)
            if ways:
                assert torch.equal(tier.positions.cpu(), right.positions)
        for pool, right in zip(found.restore().pack(), expected.restore().pack(), strict=True):
            torch.testing.assert_close(pool.cpu(), right, atol=1e-4, rtol=1e-4)


def test_a_cache_compares_the_weights_once(on_fake):
    """With those known, in one wait; the first cache of a model reads them."""
    RaggedCache(on_fake, method=KNORM)
    with watched() as log:
        cache = RaggedCache(on_fake, method=KNORM)
    assert log.count("wait") == 1, log.summary("wait")
    assert cache.weights and cache.weights == RaggedCache(on_fake, method=KNORM).weights


WAYS = {"decode eviction": {"decode_eviction": True, "slack": 1}, "streaming": {"streaming": True, "prompt_tokens": 26}}


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "padding"),
    [
        (WAYS["decode eviction"], 0),
        pytest.param(WAYS["decode eviction"], 5, marks=pytest.mark.slow),
        pytest.param(WAYS["streaming"], 0, marks=pytest.mark.slow),
    ],
    ids=["decode eviction", "with padding", "streaming"],
)
def test_eviction_by_kernels_keeps_what_a_cpu_keeps(shallow, shallow_on_fake, monkeypatch, options, padding):
    """In two parts where the prompt streams in; then tokens one by one. One of two rows may begin with padding."""
    policy, text, found = policy_of(shallow), ids(29, 2 if padding else 1), []
    mask = torch.ones_like(text)
    mask[:1, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    sizes = [15, 11] if "streaming" in options else [26]
    for model, device, gpus in ((shallow, "cpu", nullcontext), (shallow_on_fake, "fake", fake_gpus)):
        if device == "fake":
            monkeypatch.setattr(LearnedScores, "score_at_eviction", None)  # of single heads, by operators
        with gpus():
            cache, parts, end = RaggedCache(model, policy=policy, retention=0.4, **options), [], 0
            for tokens in text.to(device).split(sizes + [1] * 3, 1):
                here = slice(end, end := end + tokens.shape[1])
                given = {"attention_mask": mask[:, :end].to(device), "position_ids": positions[:, here].to(device)}
                parts.append(model(tokens, past_key_values=cache, **given).logits.cpu())
        found.append((torch.cat(parts[len(sizes) :], 1), cache.kept_counts()))
    assert found[0][1] == found[1][1]
    torch.testing.assert_close(found[1][0], found[0][0], atol=2e-3, rtol=2e-3)


@torch.no_grad()
def test_launches_of_eviction_a_layer(on_fake):
    """Made once for all layers: tables of the rotation, and where NaN is noted; once a policy: its folded weights."""
    policy, text = policy_of(on_fake).to("fake"), ids(400).to("fake")

    def launches(cache, tokens):
        """A layer, and what all layers share; without the budgets and the model's own attention."""
        with watched() as log:
            on_fake(tokens, past_key_values=cache)
        own = [event.place for event in log.ours("launch")]
        shared = ("hf/rotation", "cache/cache_config")
        others = ("hf/", "policy/policy", "kernels/soft_topk", "methods/budgets", *shared)
        counts = (sum(place.startswith(places) for place in own) for places in (others, shared))
        return (len(own) - next(counts)) / LAYERS, next(counts)

    def cache(**options):
        return RaggedCache(on_fake, policy=policy, retention=0.4, **options)

    with fake_gpus(stubbed=True):
        launches(cache(), text[:, :100])
        prompt, shared = launches(cache(), text[:, :100])
        # Scores, the move of the best (and whether scores are numbers), and the table of the new pools.
        assert prompt == 3 and shared <= 21
        streamed = cache(streaming=True, prompt_tokens=300)
        launches(streamed, text[:, :100])
        chunk, shared = launches(streamed, text[:, 100:200])
        # Space, which is a move and a table; attention (2); scores on arrival; then as above.
        assert chunk == 8 and shared <= 20
        decoding = cache(decode_eviction=True, slack=16)
        launches(decoding, text[:, :101])
        launches(decoding, text[:, 101:102])  # which makes the buffers
        steps = [launches(decoding, token)[0] for token in text[:, 102:170].split(1, 1)]
    # Scores on arrival and at the eviction, the move of the best and its table; attention.
    assert set(steps) == {1, 5} and sum(steps) / len(steps) < 1.3


@torch.no_grad()
def test_launches_of_compensation_a_layer(on_fake):
    """For any number of rows and heads; the fake device takes SDPA, on a GPU one launch, apart into a dozen."""
    counted = []
    for rows in (1, 3):
        with fake_gpus(stubbed=True), watched() as log:
            on_fake(ids(100, rows).to("fake"), past_key_values=RaggedCache(on_fake, method=COMPENSATED))
        places = [event.place for event in log.ours("launch")]
        counted.append(sum(place.startswith("methods/compensation") for place in places) / LAYERS)
        assert sum(place.startswith("hf/rotation") for place in places) <= 6 * LAYERS + 60, log.summary("launch")
    assert max(counted) <= 44, log.summary("launch")


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"streaming": True, "prompt_tokens": 26}], ids=["prompt", "streaming"])
def test_scores_that_are_no_numbers_are_found_by_the_kernel_that_ranks_them(shallow_on_fake, options):
    """In any layer, head and place; the cache serves again once it is reset."""

    class Poisoned(Knorm):
        spoiled = True

        def scores(self, layer, prompt):
            scores = super().scores(layer, prompt)
            if self.spoiled and layer == 0:
                scores[0, 1, 11] = torch.nan
            return scores

    selector, text = Poisoned(), ids(26).to("fake")
    with fake_gpus():
        cache = RaggedCache(shallow_on_fake, method=Method("poisoned", SHALLOW_KNORM.budget, selector), **options)
        with pytest.raises(CacheError, match="scores of the selector Poisoned contain NaN"):
            shallow_on_fake(text, past_key_values=cache)
        cache.reset()
        selector.spoiled = False
        shallow_on_fake(text, past_key_values=cache)
    assert cache.get_seq_length() == 26


@torch.no_grad()
def test_ranking_takes_as_many_operations_for_many_rows_as_for_one(on_fake):
    counted = []
    for rows in (2, 8):
        cache = RaggedCache(on_fake, method=KNORM)
        with watched() as log:
            on_fake(ids(60, rows).to("fake"), past_key_values=cache)
        counted.append(sum(event.place.startswith("cache/") for event in log.ours("launch")))
    assert counted[0] == counted[1] <= 28 * LAYERS, log.summary("launch")


@torch.no_grad()
def test_left_padding_is_looked_at_once_for_all_layers(on_fake):
    padding = torch.ones(2, 60, dtype=torch.long)
    padding[0, :7] = 0
    text, padding = ids(60, 2).to("fake"), padding.to("fake")
    cache = RaggedCache(on_fake, method=KNORM)
    with fake_gpus(stubbed=True), watched() as log:
        on_fake(text, attention_mask=padding, past_key_values=cache)
    # Is a row hidden whole, is one padded on the right, where do the rows begin, and does any not at once; and are all
    # scores numbers.
    assert log.count("wait") <= 5, log.summary("wait")
    assert cache.ragged_layers[0].real_tokens == [53, 60]


@torch.no_grad()
def padded_turns(model, device):
    """Logits of the last tokens of two padded turns and a step after a compressed batch."""
    cache = RaggedCache(model, method=SHALLOW_KNORM, slack=2)
    text, mask = ids(46, 2).to(device), torch.ones(2, 46, dtype=torch.long)
    mask[0, 40:42] = mask[1, 43] = 0
    mask, last = mask.to(device), []
    for begin, end in pairwise((0, 40, 43, 45, 46)):
        given = mask[:, :end]
        positions = (given.cumsum(-1) - 1)[:, begin:end]
        last.append(
            model(text[:, begin:end], attention_mask=given, position_ids=positions, past_key_values=cache).logits
        )
    return torch.stack([logits[:, -1] for logits in last]).cpu()


def test_rows_have_tails_of_their_own_where_the_tensors_are(shallow):
    expected = padded_turns(shallow, "cpu")
    with fake_gpus():
        on_device = padded_turns(copy.deepcopy(shallow).to("fake:1"), "fake:1")
    torch.testing.assert_close(on_device, expected, atol=2e-4, rtol=2e-4)
