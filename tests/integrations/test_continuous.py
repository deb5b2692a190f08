"""Requests side by side over compressed contexts: every answer is that of `ask`, and nothing stays behind."""

import gc
import logging
import random
import threading
import time
import weakref

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from lkv.context.context import compress
from lkv.errors import BusyError, IntegrationError, LkvError, PromptError
from lkv.integrations import continuous
from lkv.integrations.continuous import (
    ContinuousEngine,
    PlainEngine,
    Sampler,
    SamplingParams,
    start_engine,
    unsupported_reason,
)
from lkv.utils.prompts import encode_question
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words

QUESTIONS = ["what is one ?", "and what now then please ?", "why ?", "where did all of them go to ?"]
NEWER = pytest.mark.skipif(
    unsupported_reason(tiny_llama()) is not None, reason="transformers' continuous batching fits from 5.17 on"
)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(dtype=torch.float32)


@pytest.fixture(scope="module")
def contexts(model):
    words = TEXT.split()
    texts = [words, words[::-1], words[7:40], words[::2]]
    return [
        compress(model, Words(), " ".join(text), method="knorm", retention=0.2 + 0.1 * n)
        for n, text in enumerate(texts)
    ]


def asked(question):
    return encode_question(Words(), question)


def until(condition, seconds=20):
    """Wait for a condition, which must come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def expected(context, question, length):
    return [int(word) for word in context.ask(question, length).split()]


@pytest.fixture
def batching(model):
    """Starts ContinuousEngines of these sizes; they are stopped at the end."""
    started = []

    def batching(*args, **sizes):
        started.append(ContinuousEngine(model, Words(), *args, **sizes))
        return started[-1]

    yield batching
    for engine in started:
        engine.stop(0)


@pytest.fixture(params=[pytest.param(ContinuousEngine, marks=NEWER), PlainEngine])
def engine(request, model):
    engine = request.param(model, Words())
    yield engine
    engine.stop(0)


@NEWER
def test_a_thousand_requests_in_any_order_with_cancellations(batching, model, contexts):
    draw = random.Random(3)
    threads = threading.active_count()
    # Few pages, small steps: questions are read in parts, and requests wait for pages.
    engine = batching(1000, pages=48, page_size=8, batch_tokens=24, requests=24)
    wanted = {
        (place, question, length): expected(contexts[place], question, length)
        for place in range(4) for question in QUESTIONS for length in (1, 2, 5)
    }  # fmt: skip
    requests = []
    for _ in range(1000):
        place, question, length = draw.choice(list(wanted))
        answer = engine.submit(asked(question), contexts[place], length)
        requests.append((answer, wanted[place, question, length]))
        if draw.random() < 0.1:
            draw.choice(requests)[0].cancel()
    cancelled = 0
    for answer, right in requests:
        found = answer.result(120)
        cancelled += answer.cancelled
        assert found == (right[: len(found)] if answer.cancelled else right)
    assert 20 < cancelled < 200 and engine.open == 0
    manager, pool = engine._manager, engine._manager.batch_processor.cache.pool

    def is_empty():
        pool.try_to_free_sectors()
        return not manager.requests and pool.num_free_sectors == pool.num_sectors

    until(is_empty)
    assert pool.num_sectors >= 48
    assert engine.tokens == sum(len(answer.ids) for answer, _ in requests)
    engine.stop()
    assert threading.active_count() == threads


def test_answers_are_those_of_ask_with_and_without_a_context(engine, model, contexts):
    full = compress(model, Words(), TEXT, method="full")
    every = [*contexts[:2], full]
    answers = [(context, q, engine.submit(asked(q), context, 9)) for q in QUESTIONS for context in every]
    plain = engine.submit(asked("hello there you"), None, 9)
    for context, question, answer in answers:
        found = answer.result(60)
        assert list(answer) == found == expected(context, question, 9)
    alone = model.generate(torch.tensor([asked("hello there you")]), max_new_tokens=9, do_sample=False)
    assert plain.result(60) == alone[0, len(asked("hello there you")) :].tolist()


@pytest.mark.parametrize("penalties", [{"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 1}])
def test_the_models_own_penalties_of_repetition_are_heeded(engine, model, contexts, monkeypatch, penalties):
    questions = ["why was it ?", "who is it ?", "where ?"]
    plain = [expected(context, question, 16) for context in contexts for question in questions]
    for name, value in penalties.items():
        monkeypatch.setattr(model.generation_config, name, value)
    asked_of = [(context, question) for context in contexts for question in questions]
    wanted = [expected(context, question, 16) for context, question in asked_of]
    assert wanted != plain
    got = [engine.submit(asked(question), context, 16) for context, question in asked_of]
    alone = engine.submit(asked("why was it ?"), None, 16)
    assert [answer.result(60) for answer in got] == wanted
    ids = torch.tensor([asked("why was it ?")])
    stock = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert alone.result(60) == stock[0, ids.shape[1] :].tolist()
    cold = SamplingParams(temperature=1e-4, seed=1)  # draws come after the penalties, too
    assert engine.submit(asked(questions[0]), contexts[0], 16, cold).result(60) == wanted[0]


@NEWER
def test_a_configuration_that_a_batch_cannot_heed_is_answered_one_by_one(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "bad_words_ids", [[3]])
    monkeypatch.setattr(model.generation_config, "min_new_tokens", 2)
    assert "sets bad_words_ids, min_new_tokens, which a batch does not apply" in unsupported_reason(model)


@NEWER
def test_other_uses_of_the_model_go_on_meanwhile(batching, model, contexts):
    engine = batching()
    right = expected(contexts[0], QUESTIONS[3], 60)
    answers = [engine.submit(asked(QUESTIONS[3]), contexts[0], 60) for _ in range(4)]
    assert expected(contexts[1], QUESTIONS[0], 9) == expected(contexts[1], QUESTIONS[0], 9)
    assert compress(model, Words(), TEXT, method="knorm", retention=0.2).ask(QUESTIONS[1], 5) == contexts[0].ask(
        QUESTIONS[1], 5
    )
    assert [answer.result(60) for answer in answers] == [right] * 4


@NEWER
def test_equal_questions_about_different_texts_share_nothing(batching, model, contexts):
    """Long enough for whole pages, which the library would find by their ids."""
    engine = batching(page_size=4)
    question = " ".join(QUESTIONS)
    answers = [engine.submit(asked(question), context, 6).result(60) for context in [*contexts, *contexts]]
    assert answers == [expected(context, question, 6) for context in contexts] * 2
    assert len(set(map(tuple, answers))) > 1


def test_sampling_is_by_seed_and_of_its_request_alone(engine, contexts):
    hot = SamplingParams(temperature=1.5, seed=4)
    drawn = [engine.submit(asked("why ?"), contexts[0], 12, hot) for _ in range(3)]
    greedy = engine.submit(asked("why ?"), contexts[0], 12)
    other = engine.submit(asked("why ?"), contexts[0], 12, SamplingParams(temperature=1.5, seed=5))
    sure = engine.submit(asked("why ?"), contexts[0], 12, SamplingParams(temperature=2.0, top_k=1))
    narrow = engine.submit(asked("why ?"), contexts[0], 12, SamplingParams(temperature=2.0, top_p=1e-6))
    results = [answer.result(60) for answer in drawn]
    right = expected(contexts[0], "why ?", 12)
    assert results[0] == results[1] == results[2] != other.result(60)
    assert greedy.result(60) == sure.result(60) == narrow.result(60) == right != results[0]


def test_draws_follow_the_probabilities():
    torch.manual_seed(0)
    logits = torch.randn(6)
    draw = SamplingParams(temperature=0.7, top_k=4, top_p=0.95, seed=1).sampler()
    counts = torch.bincount(torch.tensor([draw(logits) for _ in range(4000)]), minlength=6) / 4000
    shares = (logits / 0.7).softmax(-1)
    shares[logits.argsort()[:2]] = 0
    kept, total = torch.zeros(6), 0.0
    for token in shares.argsort(descending=True).tolist():
        if total < 0.95 * shares.sum():
            kept[token] = shares[token]
        total += float(shares[token])
    torch.testing.assert_close(counts, kept / kept.sum(), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"temperature": "hot"}, {"top_p": 0}, {"top_p": 1.2},
     {"top_k": 0}, {"top_k": 1.5}, {"seed": -1}, {"temperature": True}],
)  # fmt: skip
def test_bad_sampling_is_named(wrong):
    with pytest.raises(PromptError, match=f"{next(iter(wrong))} is"):
        SamplingParams(**wrong)


def test_answers_come_as_they_are_made_and_can_be_cancelled(engine, contexts):
    noted = threading.Event()
    answer = engine.submit(asked("why ?"), contexts[0], 400, notify=noted.set)
    waiting = engine.submit(asked("why ?"), contexts[1], 3)
    for count, _ in enumerate(answer, 1):
        if count == 3:
            break
    answer.cancel()
    assert noted.is_set() and answer.cancelled and 3 <= len(answer.result(10)) < 400
    assert waiting.result(60) == expected(contexts[1], "why ?", 3)


def test_an_answer_ends_at_the_models_own_end(engine, model, contexts, monkeypatch):
    whole = expected(contexts[0], "why ?", 12)
    monkeypatch.setattr(model.generation_config, "eos_token_id", whole[4])
    other = type(engine)(model, Words())
    answer = other.submit(asked("why ?"), contexts[0], 12)
    assert answer.result(60) == whole[: whole.index(whole[4]) + 1] and answer.ended_by_token
    other.stop(0)


def test_a_context_dies_with_its_last_request(engine, model):
    context = compress(model, Words(), TEXT, method="knorm", retention=0.3)
    reference = weakref.ref(context)
    answer = engine.submit(asked("why ?"), context, 5)
    del context
    assert answer.result(60)
    until(lambda: gc.collect() < 0 or reference() is None)


def test_too_many_too_long_and_stopped(engine, model, contexts):
    engine._max_requests = 2
    with pytest.raises(PromptError, match="the model reads at most 512"):
        engine.submit(asked("why ?"), contexts[0], 600)
    with pytest.raises(LkvError, match="nothing to answer"):
        engine.submit([], contexts[0], 3)
    open_ones = [engine.submit(asked("why ?"), contexts[0], 300) for _ in range(2)]
    with pytest.raises(BusyError, match="ask again later"):
        engine.submit(asked("why ?"), contexts[0], 3)
    engine.stop(0)
    for answer in open_ones:
        with pytest.raises(IntegrationError, match="was stopped before"):
            answer.result(10)
    with pytest.raises(BusyError, match="is stopping"):
        engine.submit(asked("why ?"), contexts[0], 3)


@NEWER
def test_what_cannot_be_served_is_said(batching, model, contexts):
    engine = batching(pages=4, page_size=8)
    with pytest.raises(LkvError, match="may have 32 tokens here, not 43"):
        engine.submit(asked("why ?"), contexts[0], 40 - 1 + 0)
    foreign = compress(tiny_llama(1, torch.float32), Words(), TEXT, method="knorm", retention=0.3)
    with pytest.raises(IntegrationError, match="belongs to another model"):
        engine.submit(asked("why ?"), foreign, 3)
    evicting = compress(model, Words(), TEXT, method="knorm", retention=0.3, decode_eviction=True)
    with pytest.raises(IntegrationError, match="cannot be shared"):
        engine.submit(asked("why ?"), evicting, 3)
    assert len(engine.submit(asked("why ?"), contexts[0]).result(60)) <= 32 - len(asked("why ?"))  # the default
    with pytest.raises(PromptError, match="may have 32 tokens here"):
        engine.submit(list(range(3, 40)), contexts[0])
    assert engine.open == 0


def test_where_the_version_does_not_fit_answers_come_one_by_one(batching, model, contexts, monkeypatch, caplog):
    monkeypatch.setattr("transformers.__version__", "5.16.2")
    with caplog.at_level(logging.WARNING):
        engine = start_engine(model, Words())
    assert isinstance(engine, PlainEngine) and "needs transformers 5.17 or newer, and 5.16.2" in caplog.text
    assert engine.submit(asked("why ?"), contexts[0], 4).result(60) == expected(contexts[0], "why ?", 4)
    engine.stop()
    with pytest.raises(IntegrationError, match="cannot be used: it needs"):
        batching()


@NEWER
def test_models_with_windows_are_answered_one_by_one():
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=67, max_position_embeddings=512, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    assert "has sliding layers" in unsupported_reason(Gemma3ForCausalLM(config))


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1e-40}, {"temperature": 5e-324}, {"temperature": 1.0, "top_p": 1e-50}, {"temperature": 1e-3}],
)
def test_extreme_sampling_is_greedy(engine, contexts, params):
    sampling = SamplingParams(**params, seed=1)
    right = expected(contexts[0], "why ?", 6)
    assert engine.submit(asked("why ?"), contexts[0], 6, sampling).result(60) == right
    assert engine.submit(asked("why ?"), contexts[0], 6).result(60) == right  # the engine goes on
    assert engine.is_alive


def test_a_request_that_raises_ends_alone(engine, contexts, monkeypatch):
    def fail(self, logits):
        raise RuntimeError("no such probability")

    other = engine.submit(asked("why ?"), contexts[1], 40)
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "__call__", fail)
        answer = engine.submit(asked("why ?"), contexts[0], 6, SamplingParams(temperature=1.0))
        with pytest.raises(IntegrationError, match=r"could not be computed .no such probability.; ask again"):
            answer.result(60)
    assert other.result(60) == expected(contexts[1], "why ?", 40)
    assert engine.submit(asked("why ?"), contexts[0], 6).result(60) == expected(contexts[0], "why ?", 6)
    until(lambda: not engine.open)
    assert engine.is_alive


@NEWER
def test_a_step_that_raises_fails_its_requests_and_the_engine_is_started_again(batching, model, contexts, monkeypatch):
    engine = batching(pages=64, page_size=8)
    assert engine.submit(asked("why ?"), contexts[0], 2).result(60)

    def fail(*_):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(continuous.paged.PagedBatch, "attend", fail)
        failed = [engine.submit(asked("why ?"), contexts[0], 6) for _ in range(3)]
        for answer in failed:
            with pytest.raises(IntegrationError, match=r"could not be computed .out of memory.|has failed"):
                answer.result(60)
    answer = engine.submit(asked("why ?"), contexts[0], 6)
    assert answer.result(60) == expected(contexts[0], "why ?", 6)
    assert engine.is_alive and engine.open == 0
    engine.stop(0)
    assert not engine.is_alive


@NEWER
def test_an_engine_that_cannot_start_is_not_alive(batching, model, contexts, monkeypatch):
    def fail(self):
        raise RuntimeError("no memory for the pages")

    monkeypatch.setattr(continuous.paged.PrefixBatchingManager, "_create_batch_processor", fail)
    engine = batching()
    until(lambda: not engine.is_alive)
    with pytest.raises(IntegrationError, match="the engine has failed"):
        engine.submit(asked("why ?"), contexts[0], 3).result(10)


def test_a_request_that_cannot_begin_takes_no_place(engine, contexts, monkeypatch):
    def fail(*_):
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "_begin", fail)
        with pytest.raises(RuntimeError):
            engine.submit(asked("why ?"), contexts[0], 3)
    assert engine.open == 0


def test_progress_is_of_the_thread_that_compresses(model):
    """Ending a compression does not end other uses of the model at the same time."""
    reached, release = threading.Event(), threading.Event()

    def progress(share):
        reached.set()
        release.wait(20)
        raise KeyError

    def work():
        with pytest.raises(KeyError):
            compress(model, Words(), TEXT, method="kvzip", retention=0.4, progress=progress)

    thread = threading.Thread(target=work)
    thread.start()
    assert reached.wait(20)
    release.set()
    model(torch.tensor([asked("why ?")]))
    thread.join()
