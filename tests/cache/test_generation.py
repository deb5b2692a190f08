"""The cache under everything that `generate` does: batches, beams, chunks, turns, candidates, long answers."""

from itertools import chain, pairwise

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers import DynamicCache, GenerationConfig

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.budgets import PerHead, Uniform
from lkv.methods.method import Method
from lkv.methods.selectors import H2O, TOVA, KeyDiff, SnapKV, StreamingLLM
from lkv.methods.targets import RetentionTarget
from tests.cache.helpers import METHOD, RATIOS, OwnScores, evicting_at, ids, padded, score
from tests.conftest import tiny_llama
from tests.masked import hidden_from_continuation


@settings(max_examples=10)
@given(st.lists(st.integers(4, 40), min_size=1, max_size=4), st.integers(0, 9), st.sampled_from(["sdpa", "eager"]))
def test_a_padded_batch_equals_its_rows_alone(lengths, seed, implementation):
    model = tiny_llama(dtype=torch.float64 if implementation == "sdpa" else torch.float32)
    model.set_attn_implementation(implementation)
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "output_logits": True,
           "return_dict_in_generate": True}  # fmt: skip
    texts = [ids(1, length, seed + row) for row, length in enumerate(lengths)]
    cache = RaggedCache(model, method=METHOD, slack=2)
    out = model.generate(**padded(texts), past_key_values=cache, **how)
    tolerance = 1e-10 if implementation == "sdpa" else 1e-3
    for row, text in enumerate(texts):
        alone = RaggedCache(model, method=METHOD)
        single = model.generate(text, past_key_values=alone, **how)
        for mine, theirs in zip(out.logits, single.logits, strict=True):
            torch.testing.assert_close(mine[row], theirs[0], atol=tolerance, rtol=tolerance)
        # Budgets come from the real length; padding is not stored.
        for layer, own in zip(cache.ragged_layers, alone.ragged_layers, strict=True):
            assert torch.equal(layer.lens[row], own.lens[0])
    if len(texts) == 1:
        return
    kept = sum(int(layer.lens.sum()) for layer in cache.ragged_layers)
    assert cache.realised_retention() == pytest.approx(kept / (6 * sum(lengths)))
    entries = kept + 6 * len(texts) * 5  # the last generated token is never fed
    stored = cache.nbytes() / model.lm_head.weight.element_size() / 16
    assert entries <= stored <= entries + 6 * len(texts) * 3


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 3, "do_sample": False, "num_return_sequences": 3, "length_penalty": 0.5},
        {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5},
        {"num_beams": 2, "do_sample": True},
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
    ],
    ids=["beams", "beams-3", "samples-3", "beam-sample", "greedy", "sample"],
)
def test_generate_at_full_retention_equals_the_stock_model(how, policy):
    """Beam search, several return sequences and a padded batch, against transformers' own cache."""
    model = tiny_llama()
    batch = padded([ids(1, 30), ids(1, 22, 1)])
    outs = []
    for cache in (None, RaggedCache(model, policy=policy, retention=1.0, slack=3)):
        torch.manual_seed(3)
        outs.append(model.generate(**batch, past_key_values=cache, max_new_tokens=9, **how))
    assert torch.equal(*outs)


def test_beam_search_over_a_compressed_prompt_equals_the_masked_model():
    model = tiny_llama()
    text = ids(1, 30)
    keys = score_table(model, text)
    hidden = []
    for layer, table in enumerate(keys):
        gone = torch.ones(1, 2, 30, dtype=torch.bool)
        for head in range(2):
            best = table[0, head].argsort(descending=True)[: int(RATIOS[layer][head] * 30 + 1e-6)]
            gone[0, head, best] = False
        hidden.append(gone)
    how = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    mine = model.generate(text, past_key_values=RaggedCache(model, method=METHOD), **how)
    # The stock model without a cache: every step reads the whole text under the mask.
    with hidden_from_continuation(model, hidden, 30):
        expected = model.generate(text, use_cache=False, **how)
    assert torch.equal(mine, expected)


def score_table(model, text: torch.Tensor) -> list[torch.Tensor]:
    return [score(layer.key, layer.value) for layer in read_prompt(model, text)]


@settings(max_examples=10)
@given(
    st.lists(st.integers(1, 13), min_size=1, max_size=6), st.integers(0, 9), st.integers(1, 3),
    st.sampled_from([0, 4, 1000]),
)  # fmt: skip
def test_a_prompt_in_parts_is_evicted_when_it_has_ended(parts, seed, batch, queries):
    """Exact mode: the same cache as after one pass, whatever the parts; of the queries what is read is held."""
    model, tokens = tiny_llama(), sum(parts) + 6
    text = ids(batch, tokens + 4, seed)
    selector = {0: METHOD.selector, 4: SnapKV(window=4), 1000: H2O()}[queries]
    method = Method("any", PerHead(RATIOS), selector)
    whole = RaggedCache(model, method=method)
    model(text[:, :tokens], past_key_values=whole, use_cache=True)
    cache, place = RaggedCache(model, method=method, prompt_tokens=tokens), 0
    for size in [*parts, 6]:
        # While it is read a prompt is held whole: 6 heads of 8 values of k and of v, 8 bytes each.
        assert cache.full_nbytes() == batch * place * 6 * 2 * 8 * 8
        # Twice as many query heads.
        assert cache.nbytes() - cache.full_nbytes() == batch * min(place, queries) * 12 * 8 * 8
        model(text[:, place : place + size], past_key_values=cache, use_cache=True)
        place += size
    assert cache.get_seq_length() == cache.prompt_length == tokens
    for mine, theirs in zip(cache.ragged_layers, whole.ragged_layers, strict=True):
        assert torch.equal(mine.lens, theirs.lens)
        torch.testing.assert_close(mine.store.pack(), theirs.store.pack(), atol=1e-11, rtol=1e-11)
    after = [model(text[:, tokens:], past_key_values=c, use_cache=True).logits for c in (cache, whole)]
    torch.testing.assert_close(*after, atol=1e-10, rtol=1e-10)
    # The last part may go on after the prompt.
    beyond = RaggedCache(model, method=method, prompt_tokens=tokens)
    for part in (text[:, : tokens - 6], text[:, tokens - 6 :]):
        out = model(part, past_key_values=beyond, use_cache=True).logits
    torch.testing.assert_close(out[:, -4:], after[0], atol=1e-10, rtol=1e-10)


@pytest.fixture
def stock_chunks() -> None:
    """Skips where transformers' own chunked prefill (5.2) gives another text than its unchunked one."""
    model, text = tiny_llama(), ids(1, 30)
    plain = model.generate(text, max_new_tokens=4, do_sample=False)
    how = {"past_key_values": DynamicCache(), "prefill_chunk_size": 7}
    if not torch.equal(model.generate(text, max_new_tokens=4, do_sample=False, **how), plain):
        pytest.skip("transformers' own chunked prefill is wrong in this version")


def test_generate_reads_a_padded_prompt_in_chunks(policy, stock_chunks):
    model, batch = tiny_llama(), padded([ids(1, 30), ids(1, 22, 1)])
    window = Method("snapkv", PerHead(RATIOS), SnapKV(window=4))
    for options in ({"policy": policy, "retention": 0.4}, {"method": window}):
        outs, kept = [], []
        for prompt_tokens, how in ((None, {}), (30, {"prefill_chunk_size": 7})):
            cache = RaggedCache(model, prompt_tokens=prompt_tokens, **options)
            outs.append(model.generate(**batch, past_key_values=cache, max_new_tokens=6, do_sample=False, **how))
            kept.append(torch.stack([layer.lens for layer in cache.ragged_layers]))
        assert torch.equal(*outs) and torch.equal(*kept)


def test_generate_reads_no_unannounced_prompt_in_parts(policy):
    """The first part would be taken for the whole prompt, and nothing evicted of the rest."""
    model, text = tiny_llama(), ids(1, 30)
    how = {"max_new_tokens": 4, "do_sample": False, "prefill_chunk_size": 8}
    cache = RaggedCache(model, policy=policy, retention=0.4)
    with pytest.raises(CacheError, match=r"needs its length: give prompt_tokens=input_ids\.shape\[1\]"):
        model.generate(text, past_key_values=cache, **how)
    cache.reset()
    plain = model.generate(text[:, :8], past_key_values=cache, max_new_tokens=4, do_sample=False)
    one = RaggedCache(model, policy=policy, retention=0.4)
    assert torch.equal(model.generate(text[:, :8], past_key_values=one, **how), plain)
    assert one.realised_retention() < 0.5 and one.prompt_length == 8


def test_a_turn_in_parts_goes_on_from_a_compressed_prompt(policy):
    model, text = tiny_llama(), ids(1, 30)
    caches = [RaggedCache(model, policy=policy, retention=0.4) for _ in range(2)]
    for cache in caches:
        model(text[:, :12], past_key_values=cache, use_cache=True)
    plain = model.generate(text, past_key_values=caches[0], max_new_tokens=4, do_sample=False)
    how = {"past_key_values": caches[1], "max_new_tokens": 4, "do_sample": False, "prefill_chunk_size": 7}
    if Version(transformers.__version__) < Version("5.4"):
        with pytest.raises(CacheError, match="would read a text in chunks from its first token on"):
            model.generate(text, **how)
        return
    assert torch.equal(model.generate(text, **how), plain)


def test_generate_without_the_cache_that_it_is_given_is_refused(policy):
    """It would feed the text again with every token."""
    model, text = tiny_llama(), ids(1, 20)
    without = {"use_cache": False, "max_new_tokens": 4}
    for how in (without, {"generation_config": GenerationConfig(**without)}):
        with pytest.raises(CacheError, match="use_cache=False"):
            model.generate(text, past_key_values=RaggedCache(model, policy=policy, retention=0.4), **how)


@settings(max_examples=12)
@given(st.integers(1, 17), st.integers(20, 40), st.integers(1, 2), st.integers(0, 9))
def test_streaming_equals_the_model_that_evicts_between_chunks(chunk, tokens, batch, seed):
    model = tiny_llama()
    text = ids(batch, tokens + 5, seed)
    cache = RaggedCache(model, method=METHOD, prompt_tokens=tokens, streaming=True, slack=3)
    logits = []
    places = [*range(0, tokens, chunk), tokens]
    for start, end in pairwise(places):
        logits.append(model(text[:, start:end], past_key_values=cache, use_cache=True).logits)
        limits = [int(ratio * end + 1e-6) for row in RATIOS for ratio in row]
        assert all(h <= batch * x for h, x in zip(chain(*cache.kept_counts()), limits, strict=True))
    assert cache.prompt_length == tokens
    logits.append(model(text[:, tokens:], past_key_values=cache, use_cache=True).logits)
    with evicting_at(model, places[1:], score, RATIOS):
        expected = model(text).logits
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-10, rtol=1e-10)


def test_streaming_in_generate(policy, stock_chunks):
    model = tiny_llama()
    text = ids(1, 40)
    cache = RaggedCache(model, policy=policy, retention=0.4, prompt_tokens=40, streaming=True)
    out = model.generate(text, past_key_values=cache, max_new_tokens=5, do_sample=False, prefill_chunk_size=9)
    assert out.shape == (1, 45) and cache.prompt_length == 40
    exact = RaggedCache(model, policy=policy, retention=0.4)
    model(text, past_key_values=exact, use_cache=True)
    assert cache.kept_counts() == exact.kept_counts()


def test_one_streamed_part_is_the_exact_mode(policy):
    model = tiny_llama()
    text = ids(2, 40)
    exact, streamed = (
        RaggedCache(model, policy=policy, retention=0.4),
        RaggedCache(model, policy=policy, retention=0.4, prompt_tokens=36, streaming=True),
    )
    model(text[:, :36], past_key_values=exact, use_cache=True)
    expected = model(text[:, 36:], past_key_values=exact, use_cache=True).logits
    # Prompt and what follows in one pass.
    mine = model(text, past_key_values=streamed, use_cache=True).logits[:, 36:]
    torch.testing.assert_close(mine, expected, atol=1e-10, rtol=1e-10)


@settings(max_examples=12)
@given(st.integers(1, 6), st.integers(8, 25), st.integers(0, 9))
def test_long_answers_are_evicted_from_when_the_slack_runs_out(slack, answer, seed):
    model, tokens = tiny_llama(), 20
    text = ids(1, tokens + answer, seed)
    cache = RaggedCache(model, method=METHOD, slack=slack, decode_eviction=True)
    logits = [model(text[:, :tokens], past_key_values=cache, use_cache=True).logits]
    room, places = slack, [tokens]
    for place in range(tokens, tokens + answer):
        if room == 0:
            places.append(place)
            room = slack + 1
        room -= 1
        logits.append(model(text[:, place : place + 1], past_key_values=cache, use_cache=True).logits)
        # Never more than each head's share, the slack and one token.
        held = sum(int((layer.store.lens + layer.store.appended_tokens).sum()) for layer in cache.ragged_layers)
        assert held <= sum(int(r * (place + 1) + 1e-6) + slack + 1 for row in RATIOS for r in row)
    with evicting_at(model, places, score, RATIOS):
        expected = model(text).logits
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-10, rtol=1e-10)
    if len(places) > 1:
        with pytest.raises(CacheError, match="there is no way back to the end of the prompt"):
            cache.rewind()


def attention_of_last(queries, key, window):
    """The mean attention [window, n] of the last queries of a group, [G, t, d], to the keys [n, d]."""
    logits = queries[:, -window:] @ key.T * key.shape[-1] ** -0.5
    future = torch.arange(len(key)) > torch.arange(len(key) - window, len(key))[:, None]
    return logits.masked_fill(future, -torch.inf).softmax(-1).mean(0)


def observed_by_window(queries, key):
    window = min(4, len(key) - 1)
    scores = attention_of_last(queries, key, window).mean(0)
    scores[-window:] = 2 + torch.arange(window)
    return scores


def unlike_the_mean(queries, key):
    directions = key / key.norm(dim=-1, keepdim=True)
    return -torch.cosine_similarity(directions, directions.mean(0, keepdim=True), -1)


OBSERVERS = {
    "snapkv": (SnapKV(4, 1), observed_by_window),
    "tova": (TOVA(), lambda queries, key: attention_of_last(queries, key, 1)[0]),
    "keydiff": (KeyDiff(), unlike_the_mean),
    "streaming": (StreamingLLM(2), lambda _, key: torch.tensor([1e6, 1e5, *range(2, len(key))])),
}


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("ratios", [[[0.5, 0.25], [0.3, 0.6], [0.2, 1.0]], [[0.4, 0.4]] * 3], ids=["unequal", "equal"])
def test_long_answers_are_evicted_from_by_what_the_last_queries_attend_to(name, ratios):
    selector, observe = OBSERVERS[name]
    heads = 1 if name == "tova" else 2  # TOVA takes the mean of all query heads, not those of a KV head
    ratios = [row[:heads] for row in ratios]
    model, text, prompt = tiny_llama(num_key_value_heads=heads), ids(2, 44), 20
    cache = RaggedCache(model, method=Method(name, PerHead(ratios), selector), slack=3, decode_eviction=True)
    logits = [model(text[:, :prompt], past_key_values=cache, use_cache=True).logits]
    for place in range(prompt, 44):
        logits.append(model(text[:, place : place + 1], past_key_values=cache, use_cache=True).logits)
    places = [prompt, *range(prompt + 3, 44, 4)]
    with evicting_at(model, places, score, ratios, observe):
        expected = model(text).logits
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-10, rtol=1e-10)


def test_with_equal_budgets_tova_keeps_the_same_tokens_in_all_heads_of_a_layer():
    model, text = tiny_llama(), ids(1, 40)
    cache = RaggedCache(model, method="tova", retention=0.5, slack=3, decode_eviction=True)
    for part in (text[:, :20], *text[:, 20:].split(1, 1)):
        model(part, past_key_values=cache, use_cache=True)
    for layer in cache.ragged_layers:
        first, second = (layer.store.positions[start : start + 19].tolist() for start in layer.store.starts[0].tolist())
        assert first == second and layer.store.lens.tolist() == [[19, 19]]
    with pytest.raises(CacheError, match="only the 0 tokens"):
        cache.crop(-1)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.17"), reason="refused before 5.17")
def test_assisted_decoding_equals_greedy_decoding(policy):
    patch_attention(model := tiny_llama())
    # A repeating text, so that prompt lookup finds candidates, right and wrong ones.
    text = ids(1, 8).repeat(1, 5)
    greedy = model.generate(
        text, past_key_values=RaggedCache(model, policy=policy, retention=0.5), max_new_tokens=15, do_sample=False
    )
    lengths = []

    def note(module, args, kwargs):
        lengths.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    for how in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": tiny_llama(seed=1)}):
        cache = RaggedCache(model, policy=policy, retention=0.5, prompt_tokens=40)
        lengths.clear()
        out = model.generate(text, past_key_values=cache, max_new_tokens=15, do_sample=False, **how)
        assert torch.equal(out, greedy)
        assert max(lengths[1:]) > 1, "no candidate was ever checked"
        assert cache.prompt_length == 40
    handle.remove()


def test_budget_in_tokens(policy):
    model = tiny_llama()
    for tokens in (40, 60):
        cache = RaggedCache(model, policy=policy, budget_tokens=10)
        model(ids(1, tokens), past_key_values=cache, use_cache=True)
        kept = sum(map(sum, cache.kept_counts()))
        assert 54 <= kept <= 60  # 6 heads; each count is rounded down
        other = RaggedCache(model, policy=policy, retention=10 / tokens)
        model(ids(1, tokens), past_key_values=other, use_cache=True)
        assert cache.kept_counts() == other.kept_counts()
    assert RetentionTarget(tokens=10).share(5) == 1.0
    everything = RaggedCache(model, policy=policy, budget_tokens=1000)
    model(ids(1, 40), past_key_values=everything, use_cache=True)
    assert everything.realised_retention() == 1.0


def test_no_step_of_decoding_copies_the_cache():
    """Bytes newly allocated while a token is read, but for the one re-lay when the slack is used up."""
    peaks = {}
    for tokens in (400, 1600):
        model = tiny_llama(max_position_embeddings=4096, dtype=torch.float32)
        cache = RaggedCache(model, method=Method("half", Uniform(0.5), OwnScores()), slack=6)
        model(ids(1, tokens), past_key_values=cache, use_cache=True)
        pools = [layer.store.k.data_ptr() for layer in cache.ragged_layers]
        largest = 0
        for step in range(5):
            with torch.profiler.profile(profile_memory=True) as profile:
                model(ids(1, 1, step), past_key_values=cache, use_cache=True)
            largest = max(largest, *(event.self_cpu_memory_usage for event in profile.events()))
        assert pools == [layer.store.k.data_ptr() for layer in cache.ragged_layers]
        peaks[tokens] = largest
    entry_bytes = 8 * 4
    # The logits of one token over the held entries, for the four query heads of a layer, are all that may grow.
    assert peaks[1600] - peaks[400] <= 600 * 4 * 4 < 600 * entry_bytes


@pytest.mark.parametrize("streaming", [False, True])
def test_an_answer_before_the_end_of_an_announced_prompt_is_refused(streaming):
    model, prompt = tiny_llama(), torch.arange(3, 53)[None]
    options = {"max_new_tokens": 6, "do_sample": False}
    cache = RaggedCache(model, method="knorm", retention=0.3, prompt_tokens=500, streaming=streaming)
    with pytest.raises(CacheError, match="prompt_tokens is 500, but the prompt has 50 tokens, and nothing"):
        model.generate(prompt, past_key_values=cache, **options)
    parted = RaggedCache(model, method="knorm", retention=0.3, prompt_tokens=50)
    with torch.no_grad():
        model(prompt[:, :49], past_key_values=parted)  # the last token comes with generate
    alone = RaggedCache(model, method="knorm", retention=0.3)
    assert torch.equal(
        model.generate(prompt, past_key_values=parted, **options),
        model.generate(prompt, past_key_values=alone, **options),
    )


def test_a_prompt_of_other_layers_is_refused_before_anything_is_filled():
    model, prompt = tiny_llama(), torch.arange(3, 53)[None]
    cache = RaggedCache(model, method="knorm", retention=0.3)
    with pytest.raises(CacheError, match="the prompt has 2 layers, but this cache 3"):
        cache.fill(read_prompt(model, prompt)[:2])
    assert cache.get_seq_length() == 0
