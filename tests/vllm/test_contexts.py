"""Contexts inside vLLM: what is compressed there, and answers about them, are those of transformers."""

import json
import random
import threading

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMNotFoundError, VLLMValidationError
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from lkv.cache.ragged_store import RaggedStore
from lkv.cache.tiered_store import TieredStore
from lkv.context.compression import compress as compress_with_transformers
from lkv.context.context import Context
from lkv.errors import LkvError
from lkv.integrations.vllm.requests import compress, question_prompt
from lkv.utils.prompts import encode_question
from tests.vllm.lab import Lab, ask, asked, forget


def same_entries(lab, name, context):
    """The stored context `name` has the entries of `context`: equal counts, and equal keys up to rounding."""
    stored = Context.load(lab.store / f"{name}.kv", lab.model, lab.tokenizer)
    assert stored.ids == context.ids and stored.metadata == context.metadata | {"stored_id": name}
    for own, other in zip(stored.cache.ragged_layers, context.cache.ragged_layers, strict=True):
        assert torch.equal(own.store.lens, other.store.lens)
        is_tiered = isinstance(other.store, TieredStore)
        for left, right in zip(*(packed(store) for store in (own.store, other.store)), strict=True):
            # Another token's key differs by far more.
            if is_tiered:  # where a value lies between two codes, rounding decides
                assert (left - right).norm() < 0.02 * right.norm()
            else:
                torch.testing.assert_close(left, right, atol=1e-3, rtol=1e-3)


def packed(store):
    """All k and v as the model computes them, and how many entries each tier has."""
    if not isinstance(store, TieredStore):
        return store.pack()
    return *store.restore().pack(), torch.stack([tier.lens for tier in store.tiers]).double()


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_a_family_compresses_and_answers_as_transformers_does(family, tmp_path):
    lab = Lab(tmp_path, family)
    texts = [lab.text(1), lab.text(2, 90)]
    contexts = [lab.context(text) for text in texts]
    questions = [lab.tokenizer(lab.text(seed, 12))["input_ids"] for seed in range(3)]
    with lab.engine() as llm:
        names = [compress(llm, text) for text in texts]
        for name, context in zip(names, contexts, strict=True):
            same_entries(lab, name, context)
        pairs = [(name, context, ids) for name, context in zip(names, contexts, strict=True) for ids in questions]
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for *_, ids in pairs], [asked(name) for name, *_ in pairs], use_tqdm=False
        )
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    assert answers == [lab.answer(context, ids, 16) for _, context, ids in pairs]
    assert len({tuple(answer) for answer in answers}) > 3  # the contexts matter


def test_a_text_read_in_chunks_is_compressed_as_a_whole(lab):
    text = lab.text(3, 700)
    with lab.engine(max_num_batched_tokens=64, max_num_seqs=8) as llm:
        name = compress(llm, text, retention=0.2)
        same_entries(lab, name, lab.context(text, 0.2))
        # Found again: nothing is read a second time.
        before = (lab.store / f"{name}.kv").stat().st_mtime_ns
        assert compress(llm, text, retention=0.2) == name
        assert not any(thread.name.startswith("lkv") for thread in threading.enumerate())  # see store_behind
        assert (lab.store / f"{name}.kv").stat().st_mtime_ns == before


def test_contexts_saved_by_transformers_are_loaded(lab):
    text = lab.text(4)
    llm, context = lab.shared, lab.context(lab.text(4))
    name = compress(llm, text)
    context.save(lab.store / f"{name}.kv")
    forget(llm)
    ids = encode_question(lab.tokenizer, "what?")
    assert ask(llm, ids, name) == lab.answer(context, ids, 16)


def test_contexts_within_a_memory_are_made_and_answered_in_one_batch(lab):
    """Codes are read as they are stored, whoever made the file, beside requests about others and none."""
    llm, texts = lab.shared, [lab.text(18, 400), lab.text(19, 300)]
    contexts = {}
    for text, memory in zip(texts, ("20%", "6kB"), strict=True):
        context = compress_with_transformers(lab.model, lab.tokenizer, text, memory=memory, policy=lab.policy)
        name = compress(llm, text, memory=memory)
        same_entries(lab, name, context)
        contexts[name] = context
        about = json.loads((lab.store / f"{name}.json").read_text())
        assert about["nbytes"] == context.nbytes() and about["retention"] is None
    assert compress(llm, texts[0], memory="0.2") in contexts  # however it is written
    with pytest.raises(LkvError, match="both say how much to keep"):
        compress(llm, texts[0], memory="0.2", retention=0.3)
    contexts[compress(llm, texts[0])], contexts[None] = lab.context(texts[0]), None
    draw = random.Random(0)
    pairs = [(name, encode_question(lab.tokenizer, lab.text(seed, 6))) for name in contexts for seed in range(4)]
    draw.shuffle(pairs)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for _, ids in pairs], [asked(name) for name, _ in pairs], use_tqdm=False
    )
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    assert answers == [lab.answer(contexts[name], ids, 16) for name, ids in pairs]
    # The codes of `lkv.compress`, read from its own file.
    name, context = next(iter(contexts.items()))
    context.save(lab.store / f"{name}.kv")
    forget(llm)
    assert ask(llm, pairs[0][1], name) == lab.answer(context, pairs[0][1], 16)


def test_protected_spans_are_kept_as_lkv_compress_keeps_them(lab):
    llm, text, protect = lab.shared, f"{lab.text(50, 150)} PIN 5308. {lab.text(51, 150)}", ["PIN 5308", (0, 4)]
    ids = encode_question(lab.tokenizer, "PIN?")
    for budget in ({"retention": 0.2}, {"memory": "20%"}):
        context, plain = (
            compress_with_transformers(lab.model, lab.tokenizer, text, policy=lab.policy, protect=spans, **budget)
            for spans in (protect, ())
        )
        pairs = zip(context.cache.ragged_layers, plain.cache.ragged_layers, strict=True)
        assert not any(torch.equal(packed(own.store)[0], packed(other.store)[0]) for own, other in pairs)
        name = compress(llm, text, protect=protect, **budget)
        assert name != compress(llm, text, **budget)
        same_entries(lab, name, context)
        assert ask(llm, ids, name) == lab.answer(context, ids, 16)
    with pytest.raises(LkvError, match="does not contain 'no such words'"):
        compress(llm, text, protect=["no such words"])
    with pytest.raises(LkvError, match="the protected spans have 200 of"):
        compress(llm, text, retention=0.05, protect=[(0, 200)])


def test_beams_over_contexts_are_those_of_transformers(lab):
    """Two contexts and none in one search: a prompt names its context by its cache salt."""
    llm, texts = lab.shared, [lab.text(52), lab.text(53)]
    contexts = {compress(llm, text): lab.context(text) for text in texts} | {None: None}
    prompts = [question_prompt(llm, "what?", name) for name in contexts]
    found = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    ids, best = prompts[0]["prompt_token_ids"], set()
    for context, output in zip(contexts.values(), found, strict=True):
        beams, scores = lab.beams(context, ids, 3, 6)
        assert [beam.tokens[len(ids) :] for beam in output.sequences] == beams
        found_scores = torch.tensor([beam.cum_logprob for beam in output.sequences])
        torch.testing.assert_close(found_scores, scores, atol=1e-3, rtol=1e-3)
        best.add(tuple(beams[0]))
    assert len(best) == 3  # the contexts matter


def test_a_salt_names_the_context_of_any_request(lab):
    """Else a request without its context could share pages with those that have it."""
    llm, text, ids = lab.shared, lab.text(52), encode_question(lab.tokenizer, "a" * 300)
    name, context = compress(llm, text), lab.context(text)
    salted = {"prompt_token_ids": ids, "cache_salt": f"lkv_context:{name}:"}
    (output,) = llm.generate(salted, asked(None), use_tqdm=False)
    assert list(output.outputs[0].token_ids) == lab.answer(context, ids, 16) != lab.answer(None, ids, 16)
    for salt, extra, match in (
        ("lkv_context:none", None, "no context 'none'"),
        ("lkv_context", None, "no context ''"),
        ("lkv_context:none:x", {"lkv_context": name}, "two contexts"),
        (f"lkv_context:{name}", {"lkv_compress": "{}"}, "one of them"),
    ):
        params = SamplingParams(max_tokens=1, extra_args=extra)
        with pytest.raises((VLLMNotFoundError, VLLMValidationError), match=match):
            llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, params, use_tqdm=False)


def test_two_hundred_requests_with_aborts_and_preemption(lab):
    """Random arrivals, few pages, chunked questions: every answer that ends is the oracle's."""
    draw, contexts = random.Random(0), {}
    with lab.engine(
        {"contexts_memory": 0.3},
        num_gpu_blocks_override=14,
        block_size=32,
        max_model_len=416,
        max_num_batched_tokens=48,
        max_num_seqs=12,
    ) as llm:
        for seed in range(20):
            text = lab.text(100 + seed, draw.randint(60, 380))
            contexts[compress(llm, text)] = lab.context(text)
        engine, names = llm.llm_engine, [*contexts, None]
        waiting = []
        for number in range(200):
            name, length = draw.choice(names), draw.choice([3, 10, 30, 60, 110])
            ids = lab.tokenizer(lab.text(draw.randint(0, 9), length))["input_ids"]
            waiting.append((str(number), name, ids, draw.randint(1, 40)))
        requests = {number: rest for number, *rest in waiting}
        running, aborted, answers, preempted = set(), set(), {}, 0
        scheduler = engine.engine_core.engine_core.scheduler
        while waiting or running:
            for _ in range(draw.choice([0, 1, 2, 8])):
                if waiting:
                    number, name, ids, tokens = waiting.pop()
                    engine.add_request(number, {"prompt_token_ids": ids}, asked(name, tokens))
                    running.add(number)
            if running and draw.random() < 0.05:
                number = draw.choice(sorted(running))
                engine.abort_request([number])
                running.discard(number)
                aborted.add(number)
            for output in engine.step():
                if output.finished and output.request_id in running:
                    running.discard(output.request_id)
                    answers[output.request_id] = list(output.outputs[0].token_ids)
            preempted += sum(request.num_preemptions for request in scheduler.running)
        assert preempted > 0 and len(aborted) > 5 and len(answers) == 200 - len(aborted)
        # The engine drops the last requests: no page and no state is left, and memory stays bounded.
        ask(llm, [5, 6], None, 1)
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's own
        (statistics,) = llm.collective_rpc("lkv_statistics")
        resident = statistics["resident"]
        assert sum(resident.values()) <= 0.3 * 2**20 and 1 <= len(resident) < 20
    for number, answer in answers.items():
        name, ids, tokens = requests[number]
        assert answer == lab.answer(contexts.get(name), ids, tokens), number


def test_a_context_is_read_once_a_step(lab, monkeypatch):
    """However many requests ask it: one call of attention for each context and layer."""
    llm, names = lab.shared, [compress(lab.shared, lab.text(seed)) for seed in (7, 8)]
    attend, calls = RaggedStore.attend_compressed, []

    def count(self, query, *rest):
        calls.append(query.shape[2])
        return attend(self, query, *rest)

    monkeypatch.setattr(RaggedStore, "attend_compressed", count)
    prompts = [{"prompt_token_ids": [5, 6, number]} for number in range(7, 12)]
    params = [asked(names[number % 2], 3, ignore_eos=True) for number in range(5)]
    llm.generate(prompts, params, use_tqdm=False)
    layers = len(lab.model.model.layers)
    # Three questions of three tokens and two, then a token each.
    assert calls == [9, 6] * layers + [3, 2] * layers * 2


def test_pages_are_shared_within_a_context_only(lab):
    llm = lab.shared
    texts = [lab.text(7), lab.text(8)]
    names = [compress(llm, text) for text in texts]
    contexts = [lab.context(text) for text in texts]
    ids = lab.tokenizer(lab.text(9, 300))["input_ids"]
    cached = {}
    for turn in range(2):
        for name, context in [*zip(names, contexts, strict=True), (None, None)]:
            (output,) = llm.generate({"prompt_token_ids": ids}, asked(name), use_tqdm=False)
            cached[turn, name] = output.num_cached_tokens
            assert list(output.outputs[0].token_ids) == lab.answer(context, ids, 16)
    assert [cached[0, name] for name in (*names, None)] == [0, 0, 0]
    assert all(cached[1, name] >= 128 for name in (*names, None))


def test_several_answers_logprobs_and_choices(lab):
    llm, text = lab.shared, lab.text(10)
    name, context = compress(llm, text), lab.context(lab.text(10))
    ids = lab.tokenizer("how many?")["input_ids"]
    params = asked(name, 12, n=3, temperature=1.0, seed=1, logprobs=2)
    (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1
    for choice in output.outputs:
        with torch.no_grad(), context.working_cache() as cache:
            rows = torch.tensor([ids + list(choice.token_ids)])
            logits = lab.model(input_ids=rows, past_key_values=cache, use_cache=True).logits[0, len(ids) - 1 : -1]
        expected = logits.log_softmax(-1)
        for step, (token, found) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
            assert abs(found[token].logprob - float(expected[step, token])) < 1e-3
    guided = asked(name, 12, allowed_token_ids=[70, 71])
    (output,) = llm.generate({"prompt_token_ids": ids}, guided, use_tqdm=False)
    assert set(output.outputs[0].token_ids) <= {70, 71}


def test_the_least_tokens_are_those_of_the_answer(lab):
    """vLLM counts them from positions, which are shifted behind the context for the model alone."""
    llm, text = lab.shared, lab.text(10)
    name, context = compress(llm, text), lab.context(text)
    row = lab.tokenizer("how many?")["input_ids"]
    stop, answer = lab.answer(context, row, 3)[2], []
    with torch.no_grad(), context.working_cache() as cache:
        while stop not in answer and len(answer) < 12:
            logits = lab.model(input_ids=torch.tensor([row]), past_key_values=cache, use_cache=True).logits[0, -1]
            logits[stop] += -torch.inf if len(answer) < 6 else 0.0
            row = [int(logits.argmax())]
            answer += row
    params = asked(name, 12, min_tokens=6, stop_token_ids=[stop])
    (output,) = llm.generate({"prompt_token_ids": lab.tokenizer("how many?")["input_ids"]}, params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == answer and len(answer) >= 6


def test_guided_decoding_takes_the_most_probable_of_what_is_allowed(lab):
    llm, text = lab.shared, lab.text(20)
    name, context = compress(llm, text), lab.context(text)
    ids = lab.tokenizer("which?")["input_ids"]
    words = [lab.tokenizer(word)["input_ids"] for word in ("abc", "lmnop", "xyz")]
    guided = asked(name, 8, structured_outputs=StructuredOutputsParams(choice=["abc", "lmnop", "xyz"]))
    (output,) = llm.generate({"prompt_token_ids": ids}, guided, use_tqdm=False)
    answer = [token for token in output.outputs[0].token_ids if token != lab.tokenizer.eos_token_id]
    with torch.no_grad(), context.working_cache() as cache:
        logits = lab.model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
    # Their first letters differ, and decide.
    assert answer == max(words, key=lambda word: float(logits[word[0]]))


def test_bfloat16_differs_by_its_rounding_alone(lab):
    with lab.engine(dtype="bfloat16") as llm:
        for seed in (0, 1):
            name, context = compress(llm, lab.text(seed)), lab.context(lab.text(seed))
            ids = lab.tokenizer(lab.text(seed + 9, 15))["input_ids"]
            (output,) = llm.generate({"prompt_token_ids": ids}, asked(name, 1, logprobs=5), use_tqdm=False)
            found = output.outputs[0].logprobs[0]
            with torch.no_grad(), context.working_cache() as cache:
                logits = lab.model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
            expected = logits.log_softmax(-1)
            # Without the context they differ by 5 to 11.
            assert max(abs(entry.logprob - float(expected[token])) for token, entry in found.items()) < 1
