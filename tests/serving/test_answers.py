"""Requests answered in batches over compressed contexts: every answer is that of `ask`, and nothing stays behind."""

import gc
import random
import threading
import weakref
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import BusyError, PromptError
from lkv.serving import batcher
from lkv.serving.answer import IncrementalDetokenizer, Sampler, SamplingParams
from lkv.serving.batcher import AnswerWorker
from lkv.utils.prompts import encode_question
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.serving.server import slow_answers, until

QUESTIONS = ["what is one ?", "and what now then please ?", "why ?", "where did all of them go to ?"]


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


@pytest.fixture
def start(model):
    """Starts workers, which are stopped at the end."""
    started = []

    def start(*args, **options):
        started.append(AnswerWorker(options.pop("model", model), Words(), *args, **options))
        return started[-1]

    yield start
    for worker in started:
        worker.stop(0)


@pytest.fixture
def worker(start):
    return start()


def asked(question):
    return encode_question(Words(), question)


def submit(worker, question, context, length, notify=None, **sampling):
    """Queue a question, a text or its ids."""
    ids = asked(question) if isinstance(question, str) else question
    return worker.submit(ids, context, SamplingParams(max_tokens=length, **sampling), notify)


def expected(context, question, length):
    return context.complete(asked(question), length)


def result(answer, seconds=120):
    assert answer.done.wait(seconds)
    assert answer.error is None, answer.error
    return answer.ids


@pytest.mark.slow
def test_hundreds_of_requests_in_any_order_with_cancellations(start, contexts, monkeypatch):
    monkeypatch.setattr(batcher, "TURN_TOKENS", 2)  # batches make way again and again
    draw, threads = random.Random(3), threading.active_count()
    worker = start(1000, 7)
    wanted = {
        (place, question, length): expected(contexts[place], question, length)
        for place in range(4) for question in QUESTIONS for length in (1, 2, 5, 9)
    }  # fmt: skip
    requests = []
    for _ in range(3):
        with worker._changed:  # a hundred at once: some are cancelled before their first token, however fast they are
            for _ in range(100):
                place, question, length = draw.choice(list(wanted))
                answer = submit(worker, question, contexts[place], length)
                requests.append((answer, wanted[place, question, length]))
                if draw.random() < 0.1:
                    worker.cancel(draw.choice(requests)[0])
    cancelled = 0
    for answer, right in requests:
        found = result(answer)
        cancelled += answer.reason == "cancelled"
        assert found == (right[: len(found)] if answer.reason == "cancelled" else right)
    assert 10 < cancelled < 100 and worker.open == 0 and not worker._waiting
    assert worker.tokens == sum(len(answer.ids) for answer, _ in requests)
    worker.stop()
    assert threading.active_count() == threads


@pytest.mark.parametrize("penalty", [None, 1.7])
def test_answers_are_those_of_ask_with_and_without_a_context(start, model, contexts, monkeypatch, penalty):
    monkeypatch.setattr(model.generation_config, "repetition_penalty", penalty)
    worker, questions = start(), QUESTIONS if penalty is None else QUESTIONS[:2]
    full = compress(model, Words(), TEXT, method="full")
    evicting = compress(model, Words(), TEXT, method="knorm", retention=0.3, decode_eviction=True)
    every = [*contexts[:2], full, evicting]
    answers = [(context, q, submit(worker, q, context, 16)) for q in questions for context in every]
    plain = [(q, submit(worker, q, None, 9)) for q in questions]
    for context, question, answer in answers:
        assert result(answer) == expected(context, question, 16)
    for question, answer in plain:
        ids = torch.tensor([asked(question)])
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        assert result(answer) == alone[0, ids.shape[1] :].tolist()


def test_contexts_take_turns(start, contexts):
    worker = start(100, 4)
    long = [submit(worker, "why ?", contexts[0], 100) for _ in range(8)]
    other = submit(worker, "why ?", contexts[1], 3)
    assert result(other) == expected(contexts[1], "why ?", 3)
    assert not any(answer.done.is_set() for answer in long)
    right = expected(contexts[0], "why ?", 100)
    assert all(result(answer) == right for answer in long)


def test_long_questions_are_read_again_seldom(start, contexts, monkeypatch):
    monkeypatch.setattr(batcher, "TURN_TOKENS", 2)
    reads, plain, worker = [], Context.complete, start()
    right, question = expected(contexts[1], "why ?", 120), asked("why " * 300)
    right_long = contexts[2].complete(question, 120)
    monkeypatch.setattr(Context, "complete", lambda self, ids, **how: reads.append(len(ids)) or plain(self, ids, **how))
    with worker._changed:
        long, other = submit(worker, question, contexts[2], 120), submit(worker, "why ?", contexts[1], 120)
    assert result(long) == right_long and result(other) == right
    again = [length for length in reads if length >= len(question)]
    assert 2 <= len(again) <= 120 // (len(question) // 8) + 1


def test_settings_that_a_batch_cannot_apply_are_answered_one_by_one(start, model, contexts, monkeypatch, caplog):
    monkeypatch.setattr(model.generation_config, "no_repeat_ngram_size", 1)
    monkeypatch.setattr(model.generation_config, "min_new_tokens", 2)
    worker, contexts = start(), contexts[:2]
    wanted = [expected(context, question, 16) for context in contexts for question in QUESTIONS]
    assert "min_new_tokens, no_repeat_ngram_size" in caplog.text
    answers = [submit(worker, question, context, 16) for context in contexts for question in QUESTIONS]
    assert list(map(result, answers)) == wanted


def test_other_uses_of_the_model_go_on_meanwhile(worker, model, contexts):
    right = expected(contexts[0], QUESTIONS[3], 60)
    answers = [submit(worker, QUESTIONS[3], contexts[0], 60) for _ in range(4)]
    assert expected(contexts[1], QUESTIONS[0], 9) == expected(contexts[1], QUESTIONS[0], 9)
    again = compress(model, Words(), TEXT, method="knorm", retention=0.2)
    assert again.ask(QUESTIONS[1], 5) == contexts[0].ask(QUESTIONS[1], 5)
    assert [result(answer) for answer in answers] == [right] * 4


def test_sampling_is_by_seed_and_of_its_request_alone(worker, contexts):
    ask = partial(submit, worker, "why ?", contexts[0], 12)
    drawn = [ask(temperature=1.5, seed=4) for _ in range(3)]
    greedy, other = ask(), ask(temperature=1.5, seed=5)
    certain = [ask(temperature=2.0, top_k=1), ask(temperature=2.0, top_p=1e-6)]
    extreme = [ask(temperature=1e-40), ask(temperature=5e-324), ask(temperature=1.0, top_p=1e-50, seed=1)]
    results = [result(answer) for answer in drawn]
    right = expected(contexts[0], "why ?", 12)
    assert results[0] == results[1] == results[2] != result(other)
    assert results[0] != right and all(result(answer) == right for answer in (greedy, *certain, *extreme))


def test_draws_follow_the_probabilities():
    torch.manual_seed(0)
    logits = torch.randn(6)
    draw = Sampler(SamplingParams(temperature=0.7, top_k=4, top_p=0.95, seed=1))
    counts = torch.bincount(torch.tensor([draw(logits) for _ in range(4000)]), minlength=6) / 4000
    shares = (logits / 0.7).softmax(-1)
    shares[logits.argsort()[:2]] = 0
    kept, total = torch.zeros(6), 0.0
    for token in shares.argsort(descending=True).tolist():
        if total < 0.95 * shares.sum():
            kept[token] = shares[token]
        total += float(shares[token])
    torch.testing.assert_close(counts, kept / kept.sum(), atol=0.03, rtol=0)


def test_answers_grow_and_can_be_cancelled(worker, contexts, monkeypatch):
    slow_answers(monkeypatch)
    changed = threading.Event()
    answer = submit(worker, "why ?", contexts[0], 400, notify=changed.set)
    waiting = submit(worker, "why ?", contexts[1], 3)
    until(lambda: len(answer.ids) >= 3)
    assert changed.is_set()
    worker.cancel(answer)
    assert answer.reason == "cancelled" and 3 <= len(answer.ids) < 400
    assert result(waiting) == expected(contexts[1], "why ?", 3)
    assert worker.open == 0


def test_an_answer_ends_at_the_models_own_end_and_at_stops(start, model, contexts, monkeypatch):
    whole = expected(contexts[0], "why ?", 12)
    worker = start()
    stopped = submit(worker, "why ?", contexts[0], 12, stop=[str(whole[3])])
    others = [submit(worker, question, contexts[0], 12) for question in QUESTIONS]
    assert result(stopped) == whole[: whole.index(whole[3]) + 1] and stopped.reason == "stop"
    assert stopped.text == " ".join(map(str, whole[: whole.index(whole[3])]))
    assert [result(answer) for answer in others] == [expected(contexts[0], question, 12) for question in QUESTIONS]
    assert {answer.reason for answer in others} == {"length"}
    monkeypatch.setattr(model.generation_config, "eos_token_id", whole[4])
    answers = [submit(worker, question, contexts[0], 12) for question in ["why ?", *QUESTIONS]]
    assert result(answers[0]) == whole[: whole.index(whole[4]) + 1] and answers[0].reason == "stop"
    assert [result(answer) for answer in answers[1:]] == [expected(contexts[0], q, 12) for q in QUESTIONS]


def test_a_context_dies_with_its_last_request(worker, model):
    context = compress(model, Words(), TEXT, method="knorm", retention=0.3)
    reference = weakref.ref(context)
    answers = [submit(worker, question, context, 5) for question in QUESTIONS]
    del context
    assert all(map(result, answers))
    del answers
    until(lambda: gc.collect() < 0 or reference() is None)


@pytest.mark.parametrize("budget", [{"retention": 0.3}, {"memory": 0.3}])
def test_a_context_gives_back_the_memory_of_its_answers(worker, model, budget):
    context = compress(model, Words(), TEXT, method="knorm", **budget)
    question, before = asked("why " * 100), context.nbytes()
    right = context.fork().complete(question, 50)
    for _ in range(2):
        assert result(submit(worker, question, context, 50)) == right
        until(lambda: context.nbytes() == before)


def test_too_many_too_long_and_stopped(start, contexts):
    worker = start(2)
    with pytest.raises(PromptError, match="the model reads at most 512"):
        submit(worker, "why ?", contexts[0], 600)
    rest = [submit(worker, "why ?", contexts[0], 300) for _ in range(2)]
    with pytest.raises(BusyError, match="2 requests are open, as many as are allowed; ask again later"):
        submit(worker, "why ?", contexts[0], 3)
    worker.stop(0)
    for answer in rest:
        assert answer.done.wait(10) and "was stopped before" in answer.error
    with pytest.raises(BusyError, match="is stopping"):
        submit(worker, "why ?", contexts[0], 3)
    assert worker.open == 0 and not worker.is_alive


def test_contexts_of_open_requests_are_bounded(start, contexts):
    worker = start(memory_bytes=contexts[0].nbytes() + contexts[1].nbytes())
    rest = [submit(worker, "why ?", context, 300) for context in (*contexts[:2], *contexts[:2])]
    with pytest.raises(BusyError, match="fill the memory for contexts; ask again later"):
        submit(worker, "why ?", contexts[2], 3)
    for answer in rest:
        worker.cancel(answer)
    assert result(submit(worker, "why ?", contexts[2], 3)) == expected(contexts[2], "why ?", 3)
    small = start(memory_bytes=1)  # a context larger than that is served all the same
    assert result(submit(small, "why ?", contexts[2], 3))


@pytest.mark.parametrize("place", [(Sampler, "__call__"), (IncrementalDetokenizer, "push")])
def test_a_request_that_raises_ends_alone(worker, contexts, monkeypatch, place):
    plain = getattr(*place)

    def fail_once(self, *args):
        if self in victims:
            raise RuntimeError("no such thing")
        return plain(self, *args)

    victims = []
    monkeypatch.setattr(*place, fail_once)
    with worker._changed:  # all in one batch
        others = [submit(worker, "why ?", contexts[0], 40) for _ in range(2)]
        answer = submit(worker, "why ?", contexts[0], 6, temperature=1.0)
        victims += [answer.sampler, answer._detokenizer]
    assert answer.done.wait(60)
    assert answer.error == "the answer could not be computed (no such thing); ask again."
    right = expected(contexts[0], "why ?", 40)
    assert [result(other) for other in others] == [right] * 2
    assert worker.open == 0 and worker.failures == 0


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt, SystemExit])
def test_a_batch_that_raises_is_tried_one_by_one(worker, contexts, monkeypatch, error):
    plain, right = Context.complete, expected(contexts[0], "why ?", 6)

    def explode(*_, **__):
        raise error("out of memory")

    def complete(self, ids, *args, **options):
        return explode() if ids == asked("bad one ?") else plain(self, ids, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Context, "batch_complete", explode)
        patch.setattr(Context, "complete", complete)
        with worker._changed:
            good = [submit(worker, "why ?", contexts[0], 6) for _ in range(3)]
            bad = submit(worker, "bad one ?", contexts[0], 6)
        assert bad.done.wait(60) and bad.error == "the answer could not be computed (out of memory); ask again."
        assert [result(answer) for answer in good] == [right] * 3
    assert worker.failures >= 2 and worker.is_alive and worker.open == 0
    assert result(submit(worker, "why ?", contexts[0], 6)) == right


def test_models_with_windows_are_answered_one_by_one(start):
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=67, max_position_embeddings=512, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    context = compress(model, Words(), TEXT, method="knorm", retention=0.4)
    worker = start(model=model)
    answers = [submit(worker, question, context, 9) for question in QUESTIONS]
    assert list(map(result, answers)) == [expected(context, question, 9) for question in QUESTIONS]


def test_bytes_that_were_a_character_and_are_none_do_not_end_an_answer():
    """As a tokenizer with byte fallback decodes them: the stream refuses what its prefix has become."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    ids = [1 + 0xC3, 1 + 0xA9, 1 + 0xFF, 257, 257]
    stream, refused = DecodeStream(skip_special_tokens=True), False
    for token in ids:
        try:
            stream.step(backend, token)
        except Exception:
            refused = True
    assert refused
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    sent = "".join(detokenizer.push(ids[:end], end == len(ids)) for end in range(1, len(ids) + 1))
    assert sent.endswith("aa")


class Bytes:
    """A tokenizer whose tokens are bytes: characters come in parts."""

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}

    def decode(self, ids, **_):
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("backend", [False, True])
@pytest.mark.parametrize(
    ("text", "stops", "right"),
    [
        ("  Grüße, Łódź! 😀 👩‍👩‍👧 \n", [], "Grüße, Łódź! 😀 👩‍👩‍👧"), ("one stop two", ["stop"], "one"),
        ("a sto stop b", ["stop"], "a sto"), ("never ends st", ["stop"], "never ends st"),
        ("x\n\ny", ["\n\n", "y"], "x"), ("stop", ["stop"], ""), ("tab\tand  two  spaces", [], "tab\tand  two  spaces"),
        ("日本語のテキスト", [], "日本語のテキスト"), ("👍🏽", [], "👍🏽"),
    ],
)  # fmt: skip
def test_text_grows_as_it_will_stay(parts, text, stops, right, step, backend):
    tokenizer = parts[1] if backend else Bytes()
    detokenizer, sent = IncrementalDetokenizer(tokenizer, stops), ""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if backend:  # without a decoder, it shows spaces as other characters
        whole = tokenizer.decode(ids, skip_special_tokens=True).strip()
        right = whole[: min([len(whole), *(whole.index(stop) for stop in stops if stop in whole)])].rstrip()
    assert (detokenizer._backend is not None) == backend
    for end in range(step, len(ids) + step, step):
        sent += detokenizer.push(ids[:end], end >= len(ids))
        assert right.startswith(sent)
        if detokenizer.is_stopped:
            break
    assert sent == right
