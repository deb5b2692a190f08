"""The package on GPUs as far as a fake one shows: devices kept apart, limits of launches, waits, eviction."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import CacheError, UnsupportedModelError
from lkv.hf.spec import inspect_model
from lkv.kernels.ragged_attention import RaggedKV, append_and_attend, ragged_attention
from lkv.kernels.soft_mask_attention import soft_mask_attention
from lkv.kernels.soft_topk import soft_topk
from lkv.methods.budgets import PerHead
from lkv.methods.method import Method
from lkv.methods.selectors import Knorm, LearnedScores
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.utils import devices
from lkv.utils.cpp_compiler import find_compiler
from tests.cache.test_tiered_store import TIERS
from tests.conftest import tiny_llama, uneven_policy
from tests.context.test_compression import TEXT, Words
from tests.families import build
from tests.kernels.pools import in_tiers

if find_compiler() is None:
    pytest.skip("there is no C++ compiler to build the fake GPU with", allow_module_level=True)
pytest.importorskip("triton")
from tests.fake_gpu.device import watched
from tests.fake_gpu.kernels import fake_gpus

pytestmark = pytest.mark.usefixtures("fake_gpu")
KNORM = Method("knorm", PerHead([[0.5, 0.2], [0.1, 0.6], [0.0, 1.0]]), Knorm())
COMPENSATED = replace(KNORM, name="knorm+compensation", compensation=True)
SHALLOW_KNORM = Method("knorm", PerHead([[0.5, 0.2], [0.0, 1.0]]), Knorm())


def tiered(method):
    """Options of caches whose entries are quantised in one tier, and in some of several."""
    return {
        "8 bits": {"method": method, "bits": 8},
        "3 bits": {"method": method, "bits": 3},
        "three tiers": {"method": in_tiers(method, *TIERS)},
    }


TIERED, SHALLOW_TIERED = tiered(KNORM), tiered(SHALLOW_KNORM)


def policy_of(model) -> Policy:
    policy = uneven_policy(model, inputs=ScorerInputs("unrotated", "learned", 8))
    for part in (policy.tokens.query_mean, policy.tokens.query_spread, policy.tokens.start, policy.tokens.end):
        torch.nn.init.normal_(part)
    return policy


def ids(tokens=60, batch=1, seed=0):
    return torch.randint(3, 67, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, device):
    """Logits of 3 tokens and then 1 more after a compressed prompt."""
    cache = RaggedCache(model, method=SHALLOW_KNORM, slack=2)
    text = ids(64).to(device)
    model.base_model(text[:, :60], past_key_values=cache)
    parts = [model(part, past_key_values=cache).logits for part in text[:, 60:].split([3, 1], 1)]
    return torch.cat(parts, 1).cpu()


def test_the_kernels_run_where_the_tensors_are(shallow):
    """The second device, while the first is the current one."""
    expected = logits(shallow, "cpu")
    with fake_gpus() as launches:
        found = logits(copy.deepcopy(shallow).to("fake:1"), "fake:1")
    kernels = {"select_kernel", "append_kernel", "slice_kernel"}
    assert set(launches) == kernels
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_soft_mask_runs_where_the_tensors_are():
    torch.manual_seed(0)
    given = [torch.randn(1, h, t, 64) for h, t in ((2, 12), (1, 20), (1, 20))]
    mask = torch.randn(1, 1, 20).clamp(max=0)
    expected = soft_mask_attention(*given, mask, backend="reference")
    with fake_gpus() as launches:
        own = [x.to("fake:1").requires_grad_() for x in (*given, mask)]
        out = soft_mask_attention(*own)
        out.sum().backward()
    assert launches == ["forward", "query_gradient", "key_gradient"]
    torch.testing.assert_close(out.detach().cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [8192, 65_536])
def test_no_launch_is_larger_than_a_grid_may_be(rows):
    """A part of a long prompt, with as many query heads a group as large models have."""
    with fake_gpus(stubbed=True) as launches:
        q = torch.empty(1, 8, rows, 16, device="fake")
        key = torch.empty(1, 1, rows, 16, device="fake")
        pool = torch.empty(rows + 9, 16, device="fake")
        kv = RaggedKV(pool, pool, *(torch.zeros(1, 1, dtype=torch.int32, device="fake") for _ in range(2)))
        ragged_attention(q, kv, 1.0)
        append_and_attend(q, key, key, kv, 1.0)
    assert launches == ["slice_kernel", "append_kernel", "slice_kernel"]


def generated(model, device, text, **options):
    cache = RaggedCache(model, **options)
    text = text.to(device)
    out = model.generate(
        text, attention_mask=torch.ones_like(text), past_key_values=cache, do_sample=False, max_new_tokens=5,
        eos_token_id=None,
    )  # fmt: skip
    return out.cpu(), cache


@pytest.mark.parametrize("options", [{"decode_eviction": True, "slack": 1}, {"streaming": True, "prompt_tokens": 60}])
def test_every_way_to_read_gives_what_a_cpu_gives(base, on_fake, options):
    options = {"policy": policy_of(base), "retention": 0.4, **options}
    (expected, cache), (found, own) = (
        generated(m, d, ids(), **options) for m, d in ((base, "cpu"), (on_fake, "fake:0"))
    )
    assert torch.equal(found, expected) and own.kept_counts() == cache.kept_counts()


def test_a_policy_stays_where_its_owner_put_it(base, on_fake):
    policy = policy_of(base)
    cache = RaggedCache(on_fake, policy=policy, retention=0.4)
    assert {x.device.type for x in policy.parameters()} == {"cpu"}
    assert {x.device.type for x in cache.policy.parameters()} == {"fake"}
    assert RaggedCache(base, policy=policy, retention=0.4).policy is policy


def spread(model, first, second):
    """The model over two devices, as `device_map` spreads it."""
    accelerate = pytest.importorskip("accelerate")
    places = {f"model.{name}": "fake:0" for name in first} | {f"model.{name}": "fake:1" for name in second}
    return accelerate.dispatch_model(model, places | {"lm_head": "fake:1"}, main_device="fake:0", force_hooks=True)


@pytest.fixture(scope="module")
def split(base):
    first = ("embed_tokens", "rotary_emb", "layers.0")
    return spread(copy.deepcopy(base), first, ("layers.1", "layers.2", "norm"))


@pytest.mark.parametrize("method", ["lkv", "expected", "criticalkv", "ada+lkv-t", "random"])
def test_a_model_over_two_devices(base, split, method):
    options = {"policy": policy_of(base), "retention": 0.4, "method": method}
    text = ids(80)
    (expected, cache), (found, own) = (generated(m, d, text, **options) for m, d in ((base, "cpu"), (split, "fake:0")))
    assert torch.equal(found, expected) and own.kept_counts() == cache.kept_counts()
    assert [str(layer.store.k.device) for layer in own.ragged_layers] == ["fake:0", "fake:1", "fake:1"]


@pytest.mark.parametrize("method", ["kvzip", "global+knorm", "lkv-h+kvzip"])
def test_methods_of_whole_prompts_over_two_devices(base, split, method):
    options = {"policy": policy_of(base)} if method.startswith("lkv") else {}
    expected, found = (
        compress(model, Words(), TEXT, method=method, retention=0.4, **options).cache for model in (base, split)
    )
    assert found.kept_counts() == expected.kept_counts()
    assert [str(layer.store.k.device) for layer in found.ragged_layers] == ["fake:0", "fake:1", "fake:1"]


def saved_and_loaded(model, path, **amount):
    """A context that answers as the one did that was saved."""
    context = compress(model, Words(), TEXT, method="knorm", **amount)
    answer = context.ask("what is one ?", 6)
    context.save(path)
    again = Context.load(path, model, Words())
    assert again.ask("what is one ?", 6) == answer
    return again


@pytest.mark.parametrize("amount", [{"retention": 0.4}, {"memory": 0.2}], ids=str)
def test_a_saved_context_is_loaded_to_the_device_of_each_layer(split, tmp_path, amount):
    again = saved_and_loaded(split, tmp_path / "context.kv", **amount)
    stores = [layer.store.restore() if "memory" in amount else layer.store for layer in again.cache.ragged_layers]
    assert [str(store.k.device) for store in stores] == ["fake:0", "fake:1", "fake:1"]


def test_saved_windows_are_loaded_to_the_device_of_each_layer(fake_gpu, tmp_path):
    model = build("Gemma3", torch.float32, tie_word_embeddings=False)
    first = ("embed_tokens", "rotary_emb", "layers.0", "layers.1")
    model = spread(model, first, ("layers.2", "layers.3", "layers.4", "norm"))
    again = saved_and_loaded(model, tmp_path / "context.kv", retention=0.4)
    assert [str(layer.keys.device) for layer in again.cache.others.values()] == ["fake:0", "fake:1"]


def test_weights_that_are_nowhere_are_refused():
    with torch.device("meta"):
        model = tiny_llama()
    with pytest.raises(UnsupportedModelError, match="are offloaded"):
        inspect_model(model)


def test_soft_topk_computes_on_the_cpu_where_a_device_has_no_float64(monkeypatch, caplog):
    monkeypatch.setattr(devices, "has_float64", lambda device: device.type == "cpu")
    scores = torch.randn(3, 20)
    gradients = []
    for device in ("cpu", "fake:0"):
        x = scores.detach().to(device).requires_grad_()
        k = torch.tensor([1.5, 4.0, 9.0], device=device, requires_grad=True)
        out = soft_topk(x, k, 0.1)
        assert out.mask.device == out.log_mask.device == torch.device(device)
        (out.mask.square().sum() + out.log_mask.sum()).backward()
        gradients.append([x.grad.cpu(), k.grad.cpu()])
    torch.testing.assert_close(*gradients)
    assert len(caplog.records) == 1 and "computed on the CPU" in caplog.text


def test_other_errors_than_memory_keep_their_name(on_fake, monkeypatch):
    cache = RaggedCache(on_fake, method=KNORM, slack=0)
    on_fake(ids().to("fake"), past_key_values=cache)

    def broken(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(cache.ragged_layers[0].store, "reallocate", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        on_fake(ids(3).to("fake"), past_key_values=cache)


def test_slack_does_not_outweigh_a_short_context(on_fake):
    text = ids(64).to("fake")
    cache = RaggedCache(on_fake, policy=policy_of(on_fake), retention=0.15)
    on_fake.base_model(text, past_key_values=cache)
    assert cache.nbytes() < cache.full_nbytes() / 2


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
    assert launches == ["select_kernel"] * 2


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
