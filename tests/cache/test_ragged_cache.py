"""RaggedCache against the stock model, plain at retention 1 and with a -inf mask on what was evicted otherwise."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.profile.memory import LiveBytes
from lkv.cache import ragged_store
from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError, LkvError, PolicyFileError, PolicyMismatchError, PromptError, RetentionError
from lkv.hf.attention import patch_attention
from lkv.methods.budgets import PerHead, Uniform
from lkv.methods.budgets.lkv_h import raise_to_least
from lkv.methods.method import Method
from lkv.methods.selectors import Knorm, Selector
from tests.conftest import tiny_llama
from tests.families import build as build_family
from tests.masked import hidden_from_continuation

PROMPT, LATER = 40, 9
HALF = Method("half", Uniform(0.5), Knorm())


class RandomScores(Selector):
    """A selector with scores that the oracle can see too."""

    def __init__(self, layers: int = 3, heads: int = 2, tokens: int = PROMPT, seed: int = 0):
        self.table = torch.rand(layers, 1, heads, tokens, generator=torch.Generator().manual_seed(seed))

    def scores(self, layer, prompt):
        return self.table[layer].expand(prompt.key.shape[0], -1, -1)


def ids(tokens: int = PROMPT + LATER, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 67, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def stepwise(model, cache, text: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Logits of everything after the prompt, fed in `chunks`."""
    model(text[:, :PROMPT], past_key_values=cache, use_cache=True)
    logits, place = [], PROMPT
    for size in chunks:
        logits.append(model(text[:, place : place + size], past_key_values=cache, use_cache=True).logits)
        place += size
    return torch.cat(logits, 1)


# Stock eager attention takes its softmax in float32 whatever the dtype: it has no exact float64 form to equal.
@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [("sdpa", torch.float64, 1e-12), ("sdpa", torch.float32, 1e-4), ("eager", torch.float32, 1e-4)],
)
def test_full_retention_equals_the_stock_model(implementation, dtype, tolerance):
    model = tiny_llama(dtype=dtype, attn_implementation=implementation)
    text = ids()
    expected = model(text).logits
    cache = RaggedCache(model, method=Method("all", Uniform(1.0), RandomScores()))
    prompt = model(text[:, :PROMPT], past_key_values=cache, use_cache=True).logits
    assert torch.equal(prompt, tiny_llama(dtype=dtype, attn_implementation=implementation)(text[:, :PROMPT]).logits)
    cache.reset()
    torch.testing.assert_close(
        stepwise(model, cache, text, [1] * LATER), expected[:, PROMPT:], atol=tolerance, rtol=tolerance
    )
    # Other caches work as before in a model that LKV is attached to.
    assert torch.equal(model(text).logits, expected)


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([0.0, 0.03, 0.2, 0.5, 1.0]), min_size=6, max_size=6),
    st.sampled_from([[1] * LATER, [LATER], [4, 1, 3, 1], [2, 7]]),
    st.integers(0, 5), st.integers(1, 2), st.integers(0, 3),
)  # fmt: skip
def test_any_budgets_equal_the_stock_model_with_a_mask(ratios, chunks, slack, batch, seed):
    """Budgets of every size, zero included; any chunks; slack that runs out and is laid again; unpadded batches."""
    model, text = tiny_llama(), ids(batch=batch, seed=seed)
    selector, table = RandomScores(seed=seed), [ratios[0:2], ratios[2:4], ratios[4:6]]
    hidden = []
    for layer in range(3):
        gone = torch.ones(batch, 2, PROMPT, dtype=torch.bool)
        for head in range(2):
            count = int(table[layer][head] * PROMPT + 1e-6)
            gone[:, head, selector.table[layer, 0, head].argsort(descending=True)[:count]] = False
        hidden.append(gone)
    with hidden_from_continuation(model, hidden, PROMPT):
        expected = model(text).logits[:, PROMPT:]
    cache = RaggedCache(model, method=Method("random", PerHead(table), selector), slack=slack)
    torch.testing.assert_close(stepwise(model, cache, text, chunks), expected, atol=1e-11, rtol=1e-11)
    assert cache.get_seq_length() == PROMPT + LATER
    assert cache.kept_counts() == [[batch * int(r * PROMPT + 1e-6) for r in row] for row in table]


def test_eviction_during_generate_follows_the_policy(model, policy):
    text = ids(PROMPT)
    cache = RaggedCache(model, policy=policy, retention=0.4)
    out = model.generate(text, max_new_tokens=6, do_sample=False, past_key_values=cache)
    expected = (raise_to_least(policy.inference_ratios(0.4), 5 / PROMPT) * PROMPT + 1e-6).floor().long()
    assert cache.kept_counts() == expected.tolist()
    assert len(set(expected.flatten().tolist())) > 2
    assert cache.realised_retention() == pytest.approx(float(expected.sum()) / (6 * PROMPT))
    assert out.shape[1] == PROMPT + 6


def test_bytes_are_those_of_the_kept_entries_and_slack(model, policy):
    cache = RaggedCache(model, policy=policy, retention=0.25, slack=3)
    text = ids(PROMPT)
    model(text, past_key_values=cache, use_cache=True)
    kept = sum(map(sum, cache.kept_counts()))
    assert cache.nbytes() == (kept + 6 * 3) * 2 * 8 * 8
    assert cache.full_nbytes() == 6 * PROMPT * 2 * 8 * 8
    for step in range(10):
        model(text[:, step : step + 1], past_key_values=cache, use_cache=True)
    # Two re-lays: at most one fresh slack lies unused.
    assert cache.nbytes() <= (kept + 6 * (10 + 3 + 1)) * 2 * 8 * 8


@torch.no_grad()
def test_prefill_never_holds_more_than_the_kept_part_and_one_layer():
    """Counted when each layer has attended: the k and v of all earlier layers are gone but for what was kept."""
    model = tiny_llama(hidden_size=48, head_dim=20, num_hidden_layers=5, max_position_embeddings=4096)
    tokens = 1000
    selector = RandomScores(5, 2, tokens)
    text, seen = ids(tokens), []

    class Counting(RandomScores):
        def scores(self, layer, prompt):
            seen.append(live.current)
            return selector.scores(layer, prompt)

    cache = RaggedCache(model, method=Method("count", Uniform(0.15), Counting(5, 2, tokens)), slack=8)
    with LiveBytes() as live:
        model.base_model(text, past_key_values=cache, use_cache=True)
    entry = 2 * 20 * 8
    kept_layer, full_layer = 2 * (150 + 8) * entry, 2 * tokens * entry
    # Of this layer: q, k and their rotations, the attention's output; tables of positions; three hidden states.
    transient = (2 * (4 + 2) + 4 + 4) * tokens * 20 * 8 + 3 * tokens * 48 * 8
    assert len(seen) == 5
    for layer, held in enumerate(seen):
        assert held <= layer * kept_layer + full_layer + transient
    # Starts and lengths of the spans are a few bytes more.
    assert all(kept_layer <= b - a <= kept_layer + 1000 for a, b in pairwise(seen[1:]))
    assert 5 * kept_layer <= live.current <= 5 * (kept_layer + 1000)


def test_rewind_forgets_what_came_after_the_prompt(model, policy):
    cache = RaggedCache(model, policy=policy, retention=0.5, slack=2)
    text = ids()
    first = stepwise(model, cache, text, [LATER])
    cache.rewind()
    assert cache.get_seq_length() == PROMPT
    again = model(text[:, PROMPT:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(again, first, atol=1e-12, rtol=1e-12)
    with pytest.raises(
        CacheError,
        match=r"cannot crop \d+ tokens: only the \d+ tokens after the compressed prompt can be removed; pass",
    ):
        cache.crop(-LATER - 1)
    with pytest.raises(CacheError, match=r"crop\(5\) is not a number of tokens to cut"):
        cache.crop(5)
    cache.crop(0)
    assert cache.get_seq_length() == PROMPT + LATER


def test_a_deep_copy_is_a_fork(model, policy):
    """The documented way to use one prompt's cache several times."""
    cache = RaggedCache(model, policy=policy, retention=0.5)
    text = ids()
    model(text[:, :PROMPT], past_key_values=cache, use_cache=True)
    twin = copy.deepcopy(cache)
    outs = [model(text[:, PROMPT:], past_key_values=c, use_cache=True).logits for c in (twin, cache)]
    assert torch.equal(*outs) and twin.policy is policy
    assert all(
        a.store.k.data_ptr() != b.store.k.data_ptr()
        for a, b in zip(twin.ragged_layers, cache.ragged_layers, strict=True)
    )


@pytest.mark.parametrize("options", [{}, {"streaming": True, "prompt_tokens": PROMPT}, {"decode_eviction": True}])
def test_a_prompt_read_in_inference_mode_goes_on_outside_it(model, policy, options):
    text, outs = ids(), []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = RaggedCache(model, policy=policy, retention=0.5, slack=2, **options)
        with mode():
            model(text[:, :PROMPT], past_key_values=cache, use_cache=True)
        steps = [text[:, PROMPT : PROMPT + 1], text[:, PROMPT + 1 :]]
        outs.append([model(step, past_key_values=cache, use_cache=True).logits for step in steps])
    assert all(map(torch.equal, *outs))


@torch.no_grad()
def test_reset_forgets_sliding_layers_too_and_leaves_forks_alone():
    model = build_family("Gemma3")
    first, second, more = (
        torch.randint(3, 60, (1, n), generator=torch.Generator().manual_seed(n)) for n in (40, 30, 5)
    )

    def read(cache, *texts):
        return [model(text, past_key_values=cache, use_cache=True).logits for text in texts][-1]

    cache, options = RaggedCache(model, method="knorm", retention=0.5), {"method": "knorm", "retention": 0.5}
    read(cache, first)
    fork = cache.fork()
    cache.reset()
    assert cache.nbytes() == 0
    torch.testing.assert_close(read(cache, second, more), read(RaggedCache(model, **options), second, more))
    torch.testing.assert_close(read(fork, more), read(RaggedCache(model, **options), first, more))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"retention": 0}, RetentionError, "retention is 0"),
        ({"budget_tokens": 0}, RetentionError, "budget_tokens is 0"),
        ({"retention": 0.5, "budget_tokens": 9}, RetentionError, r"retention 0\.5 and budget_tokens 9 both say"),
        ({"compression_ratio": 0.85}, RetentionError, r"instead of compression_ratio=0\.85 give retention=0\.15"),
        ({"method": "lvk"}, LkvError, "no method"),
        ({"slack": -1}, CacheError, "slack is -1"),
        ({"prompt_tokens": 0}, CacheError, "prompt_tokens is 0"),
        ({"streaming": True}, CacheError, "needs its length: give prompt_tokens"),
        ({"streaming": 1}, CacheError, "streaming is 1, but it is either True or False"),
        ({"policy": 0.5, "method": "snapkv"}, PolicyFileError, r"policy is 0\.5; pass a Policy, .*retention=0\.15"),
        ({"method": "expected", "decode_eviction": True}, CacheError, "does not work with 'expected'"),
        ({"method": "snapkv", "streaming": True, "prompt_tokens": 9}, CacheError, "does not work with 'snapkv'"),
        ({"method": HALF, "bits": 2}, CacheError, "bits is 2, but it must be one of 8, 'fp8', 4, 3"),
        ({"method": HALF, "bits": True}, CacheError, "bits is True, but it must be one of"),
        ({"method": HALF, "bits": "fp8/4"}, CacheError, "bits is 'fp8/4', but it must be one of 8, 'fp8', 4, 3"),
        ({"method": HALF, "bits": -8}, CacheError, "bits is -8, but it must be one of"),
        ({"memory": 0.2, "budget_tokens": 9}, RetentionError, "memory says how much to keep and in which precision"),
        ({"method": HALF, "memory": 0.1}, RetentionError, "'half' has a budget.* of its own: leave retention, "),
        ({"method": HALF, "retention": 0.1}, RetentionError, "'half' has a budget.* of its own: leave retention, "),
        ({"method": HALF, "budget_tokens": 3}, RetentionError, "'half' has a budget.* of its own: leave retention, "),
    ],
)
def test_options_that_cannot_work_are_refused(model, policy, options, error, message):
    with pytest.raises(error, match=message):
        RaggedCache(model, **({} if "method" in options else {"policy": policy}) | options)


def test_another_models_policy_is_refused(policy):
    with pytest.raises(PolicyMismatchError):
        RaggedCache(tiny_llama(seed=9), policy=policy)


def test_prompts_that_cannot_be_read_are_refused(model, policy):
    with pytest.raises(PromptError, match=r"has 5 tokens: at memory 0\.1 nothing of it would be kept"):
        model.generate(ids(5), past_key_values=RaggedCache(model, policy=policy), max_new_tokens=2)
    with pytest.raises(PromptError, match="600 tokens, but the model reads at most 512"):
        model(ids(600), past_key_values=RaggedCache(model, policy=policy))
    cache = RaggedCache(model, policy=policy)
    with pytest.raises(CacheError, match="assisted decoding"):
        model.generate(ids(PROMPT), past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=4)
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    for hidden, message in (
        (slice(-5, None), "pad it on the left"),
        (slice(None), "a row of the batch is nothing but"),
    ):
        mask[0, hidden] = 0
        with pytest.raises(PromptError, match=message):
            model(ids(PROMPT, 2), attention_mask=mask, past_key_values=RaggedCache(model, policy=policy))


def test_another_number_of_rows_is_refused(model, policy):
    cache = RaggedCache(model, policy=policy)
    model(ids(PROMPT, 2), past_key_values=cache)
    with pytest.raises(CacheError, match="this cache has 2 rows, but 1 were given"):
        model(ids(4), past_key_values=cache)


def test_interrupted_forward_is_noticed_and_mended(model, policy):
    text = ids()
    cache = RaggedCache(model, policy=policy, retention=0.5)
    model(text[:, :PROMPT], past_key_values=cache, use_cache=True)
    expected = model(text[:, PROMPT:], past_key_values=cache, use_cache=True).logits
    cache.rewind()

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(text[:, PROMPT:], past_key_values=cache, use_cache=True)
    handle.remove()
    with pytest.raises(CacheError, match="interrupted forward pass"):
        model(text[:, PROMPT:], past_key_values=cache, use_cache=True)
    cache.rewind()
    torch.testing.assert_close(model(text[:, PROMPT:], past_key_values=cache, use_cache=True).logits, expected)


@pytest.mark.parametrize(("new", "padded"), [(1, False), (4, False), (4, True)])
def test_a_pass_whose_attention_failed_in_the_first_layer_can_be_made_again(model, policy, monkeypatch, new, padded):
    """k and v were appended, and counted on their device, before it failed."""
    text = ids(PROMPT + new, 2)
    cache = RaggedCache(model, policy=policy, retention=0.5)
    model(text[:, :PROMPT], past_key_values=cache, use_cache=True)
    mask = torch.ones(2, PROMPT + new)
    mask[1, PROMPT + 2 :] = 0 if padded else 1
    options = {"past_key_values": cache, "use_cache": True, "attention_mask": mask}
    expected = model(text[:, PROMPT:], **options).logits
    cache.rewind()
    name = "ragged_attention" if padded else "append_and_attend"
    compute = getattr(ragged_store, name)

    def failing(*args, **kwargs):
        compute(*args, **kwargs)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ragged_store, name, failing)
        with pytest.raises(MemoryError):
            model(text[:, PROMPT:], **options)
    assert cache.get_seq_length() == PROMPT
    torch.testing.assert_close(model(text[:, PROMPT:], **options).logits, expected, rtol=0, atol=0)


def test_a_cache_serves_its_own_model_alone(model, policy):
    cache = RaggedCache(model, policy=policy, retention=0.5)
    other = tiny_llama(seed=4)
    patch_attention(other)
    with pytest.raises(CacheError, match="made for another model"):
        other(ids(PROMPT), past_key_values=cache, use_cache=True)


def test_running_out_of_memory_leaves_the_prompt(model, policy, monkeypatch):
    text = ids()
    cache = RaggedCache(model, policy=policy, retention=0.5, slack=1)
    model(text[:, :PROMPT], past_key_values=cache, use_cache=True)
    expected = model(text[:, PROMPT:], past_key_values=cache.fork(), use_cache=True).logits

    def full(*_):
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(cache.ragged_layers[1].store, "reallocate", full)
        with pytest.raises(CacheError, match=r"no memory for 9 more tokens in layer 1 \(can't allocate memory\)"):
            model(text[:, PROMPT:], past_key_values=cache, use_cache=True)
    cache.rewind()
    torch.testing.assert_close(model(text[:, PROMPT:], past_key_values=cache, use_cache=True).logits, expected)
