"""Uses that once gave wrong answers without an error: each is right now, or refused."""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, TextStreamer

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.chat import Chat
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import CacheError, PromptError
from lkv.hf.attention import patch_attention, unpatch_attention
from lkv.methods.budgets import Uniform
from lkv.methods.method import Method
from lkv.methods.selectors import Selector
from tests.conftest import present, tiny_llama, uneven_policy
from tests.context.test_compression import TEXT, Words
from tests.families import SERVED

QUESTIONS = ("what is one ?", "and what now then ?", "who ?", "say it all again")


def ids(tokens: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 67, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", ["knorm", "full"])
def test_threads_get_the_answers_of_one(method):
    model = tiny_llama(dtype=torch.float32)
    context = compress(model, Words(), TEXT, method=method)
    expected = {question: context.ask(question, 5) for question in QUESTIONS}
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        questions = [*QUESTIONS] * 6
        answers = pool.map(lambda question: context.ask(question, 5), questions)
        assert list(answers) == [expected[question] for question in questions]
    assert {question: context.ask(question, 5) for question in QUESTIONS} == expected


def test_an_answer_is_not_interrupted_by_its_own_streamer(model, policy):
    context = compress(model, Words(), TEXT, policy=policy)

    class Asking(TextStreamer):
        def put(self, value):
            with pytest.raises(CacheError, match="is already generating an answer"):
                context.ask("and you ?")
            answers.append(context.fork().ask("who ?", 3))

    answers: list[str] = []
    expected = context.ask("what is one ?", 5)
    assert context.ask("what is one ?", 5, streamer=Asking(Words())) == expected
    assert set(answers) == {context.ask("who ?", 3)}


@pytest.mark.parametrize("filled", [False, True])
def test_a_cache_without_its_attention_is_refused(model, policy, filled):
    cache = RaggedCache(model, policy=policy, retention=0.5)
    text = ids(46)
    with pytest.raises(CacheError, match="made for another model"):
        tiny_llama()(text, past_key_values=cache, use_cache=True)
    cache.reset()
    if filled:
        model(text[:, :40], past_key_values=cache, use_cache=True)
    unpatch_attention(model)
    with pytest.raises(CacheError, match="computed attention without LKV"):
        model.generate(text, past_key_values=cache, max_new_tokens=5)
    patch_attention(model)
    if filled:
        cache.rewind()
        fresh = RaggedCache(model, policy=policy, retention=0.5)
        model(text[:, :40], past_key_values=fresh, use_cache=True)
        expected, logits = (model(text[:, 40:], past_key_values=c, use_cache=True).logits for c in (fresh, cache))
        assert torch.equal(logits, expected)
    else:
        cache.reset()
        model(text, past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 46


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.17"), reason="refused before 5.17")
def test_assisted_decoding_goes_on_from_a_cache_that_holds_something(model, policy):
    text = " ".join(["one two three four five six"] * 10)
    context = compress(model, Words(), text, retention=0.6, policy=policy)
    for number in (0, 3):
        question = f"what about {'one two three ' * number}?"
        for how in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny_llama(seed=1)}):
            assert context.ask(question, 12, **how) == context.ask(question, 12)
    full = compress(model, Words(), text, method="full")
    for how in ({"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}):
        with pytest.raises(CacheError, match="assisted decoding fails"):
            full.ask("what ?", 5, **how)


def generate(model, text, cache, **how):
    return model.generate(text, past_key_values=cache, max_new_tokens=4, do_sample=False, eos_token_id=None, **how)


@pytest.mark.parametrize("tokens", [60, 45, 44, 43, 40, 30, 10])
def test_another_prompt_on_a_used_cache_is_refused(model, tokens):
    cache, fresh = (RaggedCache(model, method="knorm", retention=0.5) for _ in range(2))
    first = generate(model, ids(40), cache)
    assert cache.get_seq_length() == 43
    message = "do not begin with those that this cache has read" if tokens > 43 else "has read 43 tokens, but the ids"
    with pytest.raises(CacheError, match=message):
        generate(model, ids(tokens, 1), cache)
    # The conversation goes on as if nothing had been.
    assert torch.equal(generate(model, ids(40), fresh), first)
    more = torch.cat([first, ids(5, 2)], 1)
    assert torch.equal(generate(model, more, cache), generate(model, more, fresh))
    cache.reset()
    assert torch.equal(generate(model, ids(40), cache), first)


def test_what_was_cut_off_or_fed_by_hand_is_no_reason_to_refuse(model):
    cache = RaggedCache(model, method="knorm", retention=0.5)
    generate(model, ids(40), cache)
    cache.rewind()
    generate(model, torch.cat([ids(40), ids(6, 3)], 1), cache)
    cache.rewind()
    model(ids(6, 4), past_key_values=cache, use_cache=True)
    generate(model, torch.cat([ids(40), ids(6, 4), ids(2, 5)], 1), cache)
    # New ids alone, with a mask over everything; older versions cannot do so with any cache.
    if Version(transformers.__version__) >= Version("5.4"):
        held = cache.get_seq_length()
        generate(model, ids(3, 6), cache, attention_mask=torch.ones(1, held + 3, dtype=torch.long))
        assert cache.get_seq_length() == held + 6
    cache.rewind()
    cache.batch_repeat_interleave(2)
    generate(model, torch.cat([ids(40), ids(2, 5)], 1).repeat(2, 1), cache, num_beams=1)
    with pytest.raises(CacheError, match="do not begin"):
        generate(model, torch.cat([ids(40), ids(40, 1)], 0).repeat(1, 2), cache)
    beams = RaggedCache(model, method="knorm", retention=0.5)
    generate(model, ids(40), beams, num_beams=3)
    with pytest.raises(CacheError, match="do not begin"):
        generate(model, ids(60, 1).repeat(3, 1), beams)


def test_a_context_knows_its_ids(model, policy, tmp_path):
    path = tmp_path / "context.kv"
    compress(model, Words(), TEXT, policy=policy).save(path)
    contexts = [
        Context.load(path, model, Words()),
        compress(model, Words(), TEXT, policy=policy, chunk=9),
        compress(model, Words(), TEXT, policy=policy, chunk=10**30),
        compress(model, Words(), TEXT, method="kvzip"),
    ]
    for context in contexts:
        with pytest.raises(CacheError, match="do not begin"):
            generate(model, ids(70), context.cache)


WRONG_SCORES = {
    "short": lambda scores: scores[..., 1:],
    "no rows": lambda scores: scores[0],
    "nan": lambda scores: scores * torch.nan,
    "one nan": lambda scores: torch.where(scores == scores.amax(), torch.nan, scores),
    "no tensor": lambda scores: 3,
}


@pytest.mark.parametrize("how", WRONG_SCORES)
def test_scores_that_cannot_rank_the_tokens_are_refused(model, how):
    class Wrong(Selector):
        def scores(self, layer, prompt):
            return WRONG_SCORES[how](prompt.key.float().sum(-1))

    cache = RaggedCache(model, method=Method("own", Uniform(0.15), Wrong()))
    with pytest.raises(CacheError, match="selector Wrong"):
        model(ids(40), past_key_values=cache, use_cache=True)


WRONG_OPTIONS = [
    *(({"max_new_tokens": wrong}, PromptError, "max_new_tokens is") for wrong in (0, -3, 2.5, True, "9")),
    (
        {"max_new_tokens": 600},
        PromptError,
        r"would reach 66\d tokens, but the model reads at most 512; ask for at most",
    ),
    ({"temprature": 2.0}, CacheError, "has no option temprature"),
    ({"past_key_values": None}, CacheError, "sets past_key_values itself"),
    ({"generation_config": GenerationConfig(num_beams=3)}, CacheError, "for beams use"),
    ({"generation_config": {"max_new_tokens": 7}}, CacheError, "give a GenerationConfig of transformers"),
    *(
        ({name: 3}, CacheError, f"{name} is 3; give {remedy}")
        for name, remedy in {
            "streamer": "one such as TextStreamer",
            "stopping_criteria": "a StoppingCriteriaList",
            "logits_processor": "a LogitsProcessorList",
            "prefix_allowed_tokens_fn": "a function",
            "assistant_model": "a model",
            "stop_strings": "a text or a list of texts",
            "suppress_tokens": "a list of ids",
            "top_p": "a number from 0 to 1",
        }.items()
    ),
    ({"stopping_criteria": [3]}, CacheError, r"stopping_criteria is \[3\]"),
    *(
        ({name: "x"}, CacheError, f"{name} is 'x'; give {remedy}")
        for name, remedy in {
            "eos_token_id": "a token's id",
            "pad_token_id": "a token's id",
            "min_new_tokens": "a whole number",
            "prompt_lookup_num_tokens": "a whole number",
            "max_time": "a number of seconds",
        }.items()
    ),
]


@pytest.mark.parametrize("asks", [Context, Chat])
def test_options_that_cannot_be_are_refused_before_an_answer_is_begun(model, policy, asks):
    context = compress(model, Words(), TEXT, policy=policy)
    answers = context if asks is Context else Chat(context)
    handle = model.register_forward_pre_hook(lambda *_: pytest.fail("the model was called"))
    for options, error, message in WRONG_OPTIONS:
        with pytest.raises(error, match=message):
            answers.ask("what ?", **options)
    with pytest.raises(PromptError, match="the question is a list, but it must be one text"):
        answers.ask(["what ?"])
    handle.remove()


def test_an_answer_takes_what_is_left_and_no_more_than_that():
    model = tiny_llama(max_position_embeddings=128)
    policy = uneven_policy(model)
    context = compress(model, Words(), TEXT, policy=policy)
    free_positions = 129 - 60 - 3
    context.ask("?", free_positions, eos_token_id=None)
    assert context.answer_tokens == free_positions
    long = compress(model, Words(), "word " * 116, policy=policy)
    long.ask("?", eos_token_id=None)
    assert long.answer_tokens == 10


def test_a_streamer_gets_every_token(model, policy):
    streamer = mock.Mock()
    compress(model, Words(), TEXT, policy=policy).ask("what ?", 5, streamer=streamer, eos_token_id=None)
    assert streamer.put.call_count == 6


@pytest.mark.parametrize("asks", [Context, Chat])
def test_a_generation_configuration_says_what_single_options_say(model, policy, asks):
    model.generation_config.do_sample = True  # the model's own is not asked for
    about = compress(model, Words(), TEXT, policy=policy)

    def answer(**options):
        torch.manual_seed(0)
        return (about if asks is Context else Chat(about)).ask("what ?", **options)

    greedy = answer(max_new_tokens=7, eos_token_id=None)
    config = GenerationConfig(max_new_tokens=7, eos_token_id=None)
    assert answer(generation_config=config) == greedy == answer(max_new_tokens=7, generation_config=config)
    config = GenerationConfig(max_new_tokens=7, do_sample=True, temperature=3.0)
    sampled = answer(generation_config=config)
    assert sampled == answer(max_new_tokens=7, do_sample=True, temperature=3.0) != greedy


@pytest.mark.parametrize("trained", ["", "v_proj"])
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Gemma3n"])
def test_gradients_over_kept_entries_are_refused_and_those_of_a_prompt_are_the_models(family, trained):
    model = present(next(own for own in SERVED if own.name == family)).build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    prompt, new = ids(20), ids(4, 1)
    gradients = []
    caches = lambda: transformers.DynamicCache(config=model.config), lambda: RaggedCache(model, method="knorm")
    for make in caches:
        model.zero_grad()
        model(prompt, past_key_values=(cache := make())).logits.square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for expected, own in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected)
    loss = model(new, past_key_values=cache).logits.square().sum()
    with pytest.raises(CacheError, match="gradients do not pass through a compressed cache"):
        loss.backward()
    with torch.no_grad():  # the cache is as it was
        assert model(new, past_key_values=cache).logits.isfinite().all()


@pytest.mark.parametrize("family", ["Llama", "Gemma3n"])
@pytest.mark.parametrize(
    ("options", "passes"),
    [({"prompt_tokens": 20}, [12, 8]), ({"prompt_tokens": 20, "streaming": True}, [20]), ({"prompt_tokens": 16}, [20])],
    ids=["second chunk", "streaming", "beyond the prompt"],
)
def test_gradients_of_a_prompt_that_is_not_read_in_one_pass_are_refused(family, options, passes):
    model = present(next(own for own in SERVED if own.name == family)).build()
    cache = RaggedCache(model, method="knorm", **options)
    for part in ids(20).split(passes, 1):
        loss = model(part, past_key_values=cache).logits.square().sum()
    with pytest.raises(CacheError, match="on prompts that are read in one pass"):
        loss.backward()
