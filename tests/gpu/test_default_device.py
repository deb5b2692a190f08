"""Where and in what new tensors are made: neither a default device nor autocast may change what a cache does."""

from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache

from experiments.profile.__main__ import Profile
from experiments.profile.measure import Profiler
from experiments.profile.random_models import random_policy
from lkv.cache.ragged_cache import RaggedCache
from lkv.cache.shared_cache import SharedCache
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.hf.prompt_kv import read_prompt
from lkv.hf.spec import inspect_model
from lkv.methods.budgets import estimate_mean_pattern, estimate_pattern
from lkv.methods.registry import METHODS
from lkv.policy.lookup import default_policy
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import SampleDistillation, gumbel
from tests.cache.helpers import METHOD, ids
from tests.cache.test_tiered_store import TIERS
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.kernels.pools import in_tiers
from tests.requests import resolve_method

# Tensors on it have no values: whatever is made there by mistake cannot be used.
ELSEWHERE = torch.device("meta")
CPU = torch.device("cpu")
TIERED = in_tiers(METHOD, *TIERS)


@contextmanager
def bfloat16_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def small():
    return tiny_llama(dtype=torch.float32).requires_grad_(False)


every_method = pytest.mark.parametrize(
    "method",
    sorted({name for name, spec in METHODS.items() if not (spec.needs_second_pass or spec.needs_pattern)} - {"rdkv"}),
)


@every_method
@torch.no_grad()
def test_every_method_under_another_default_device(small, method):
    policy = random_policy(inspect_model(small))
    text, question, found = ids(1, 140), ids(1, 3), []
    for device in (CPU, ELSEWHERE):
        with device:
            cache = RaggedCache(small, policy=policy, retention=0.4, method=method)
            small(text, past_key_values=cache)
            found.append((cache.kept_counts(), small(question, past_key_values=cache).logits))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


@every_method
@torch.no_grad()
def test_every_method_scores_alike_under_another_default_dtype(small, method):
    policy = random_policy(inspect_model(small), inputs=ScorerInputs("unrotated", "learned", 8))
    chosen = resolve_method(method, small, policy=policy, retention=0.4)
    prompt = read_prompt(small, ids(1, 140), queries=True)
    expected = [chosen.selector.scores(index, layer) for index, layer in enumerate(prompt)]
    with bfloat16_by_default():
        found = [chosen.selector.scores(index, layer) for index, layer in enumerate(prompt)]
    assert all(map(torch.equal, found, expected))


def test_patterns_are_estimated_alike_under_another_default_dtype(small):
    texts = [ids(1, 50)[0].tolist()]
    expected = estimate_pattern(small, texts, 4, 8), estimate_mean_pattern(small, texts, 50)
    with bfloat16_by_default():
        assert (estimate_pattern(small, texts, 4, 8), estimate_mean_pattern(small, texts, 50)) == expected


OPTIONS = [{}, {"streaming": True, "prompt_tokens": 40}, {"decode_eviction": True, "slack": 1}]


KINDS = [*OPTIONS, {"bits": 8}, {"bits": 3}, {"method": TIERED}, *({"policy": True} | x for x in OPTIONS)]


@pytest.mark.parametrize("options", KINDS, ids=range(len(KINDS)))
@torch.no_grad()
def test_every_kind_of_cache_under_another_default_device(small, options):
    if "policy" in options:  # with every component
        torch.manual_seed(0)
        policy = Policy(inspect_model(small), inputs=ScorerInputs("unrotated", "learned", 8)).requires_grad_(False)
        for part in (policy.tokens.query_mean, policy.tokens.query_spread, policy.tokens.start, policy.tokens.end):
            torch.nn.init.normal_(part)
        options = options | {"policy": policy, "retention": 0.4}
    else:
        options = {"method": METHOD} | options
    prompt, question, more, found = ids(2, 40), ids(2, 3), ids(4, 5), []
    for device in (CPU, ELSEWHERE):
        with device:
            cache = RaggedCache(small, **options)
            small(prompt, past_key_values=cache)
            small(question, past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 0], device="cpu"))
            cache.batch_repeat_interleave(2)
            twin = cache.fork()
            found.append(small(more, past_key_values=twin).logits)
    assert torch.equal(*found)


def test_beams_under_another_default_device(small):
    text = ids(1, 40)
    with ELSEWHERE:
        cache = RaggedCache(small, method=METHOD)
        with CPU:
            out = small.generate(text, past_key_values=cache, num_beams=3, do_sample=False, max_new_tokens=4)
    assert out.device == CPU


@pytest.mark.parametrize("options", [{}, {"bits": 4}])
def test_a_context_under_another_default_device(small, options, tmp_path):
    with ELSEWHERE:
        context = compress(small, Words(), TEXT, method=METHOD, **options)
        predicted = context.predict("what is one ?", "it is so")[0]
        context.save(tmp_path / "context.kv")
        again = Context.load(tmp_path / "context.kv", small, Words())
        assert torch.equal(again.predict("what is one ?", "it is so")[0], predicted)


def test_policies_noise_and_profiles_under_another_default_device(small):
    with ELSEWHERE:
        policy = default_policy()
        assert policy.inference_ratios(0.2).device == policy.inference_ratios(1.0).device == CPU
        noise = gumbel((2, 3), torch.Generator("cpu").manual_seed(0))
        profiler = Profiler(small, "tiny", None, Profile(repeats=1, new_tokens=2, retention=0.5))
        rows = profiler.measure(40, ["full", "random"])
    assert torch.equal(noise, gumbel((2, 3), torch.Generator().manual_seed(0)))
    assert [row["n"] for row in rows] == [1, 1]


@torch.no_grad()
def test_a_cache_under_autocast_is_as_good_as_the_stock_one(small):
    text = ids(1, 48)
    exact = small(text).logits[:, 40:]
    errors = []
    for cache in (
        DynamicCache(),
        RaggedCache(small, method=METHOD),
        RaggedCache(small, policy=random_policy(inspect_model(small)), retention=1.0),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            small(text[:, :40], past_key_values=cache)
            parts = [small(part, past_key_values=cache).logits for part in text[:, 40:].split([1, 7], 1)]
        errors.append(float((torch.cat(parts, 1) - exact).norm()))
    assert errors[2] <= 1.5 * errors[0]
    assert small(ids(1, 3), past_key_values=cache).logits.dtype == torch.float32  # goes on outside


@pytest.mark.parametrize("method", ["kvzip", "rdkv", "global+lkv-t", "global+h2o"])
def test_a_method_of_the_whole_prompt_under_autocast(small, method):
    """A prompt read before it is evicted from: k is in float32 there, v in half precision."""
    policy = random_policy(inspect_model(small)) if "lkv" in method else None
    with torch.autocast("cpu", torch.bfloat16):
        context = compress(small, Words(), TEXT, method=method, policy=policy, retention=0.5)
        inside = context.predict("what is one ?", "it is so")[0]
        assert context.ask("what is one ?", 4)
    outside = context.predict("what is one ?", "it is so")[0]
    assert outside.dtype == torch.float32
    torch.testing.assert_close(inside.float(), outside, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("filled_inside", [False, True])
@torch.no_grad()
def test_a_prompt_read_under_autocast_fills_a_cache(small, filled_inside):
    with torch.autocast("cpu", torch.bfloat16):
        prompt = read_prompt(small, ids(1, 40), queries=True)
    cache = RaggedCache(small, method="h2o", retention=0.5)
    with torch.autocast("cpu", torch.bfloat16, enabled=filled_inside):
        cache.fill(prompt)
    assert {layer.store.dtype for layer in cache.ragged_layers} == {torch.bfloat16}
    assert bool(small(ids(1, 3), past_key_values=cache).logits.isfinite().all())


@pytest.mark.parametrize("options", [{"retention": 0.5}, {"memory": 0.4}], ids=str)
@pytest.mark.parametrize("compressed_inside", [False, True])
def test_a_batch_asks_a_context_of_the_other_side_of_autocast(small, compressed_inside, options):
    with torch.autocast("cpu", torch.bfloat16, enabled=compressed_inside):
        context = compress(small, Words(), TEXT, method="knorm", **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=not compressed_inside), torch.no_grad():
        caches = (SharedCache(context.cache), context.cache.fork())
        batched, alone = (small(ids(1, 3), past_key_values=cache).logits.float() for cache in caches)
        assert all(context.batch_ask(["what is one ?", "who ?"], 4))
    torch.testing.assert_close(batched, alone, atol=0.1, rtol=0.1)


def test_a_student_runs_under_autocast(small):
    sample = TokenizedSample("text", ids(1, 40)[0].tolist(), [(ids(1, 8)[0].tolist(), 2)])
    with torch.autocast("cpu", torch.bfloat16):
        out = SampleDistillation(small, sample).run(None)
    assert bool(out.log_probs.isfinite().all())
