"""As kvpress's users know it: a block around generate, and a pipeline of contexts and questions."""

import contextvars
import copy
import logging
import pickle
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationMixin
from transformers import pipeline as stock_pipeline

import lkv
from lkv.errors import CacheError, LkvError, ModelLoadError, PromptError
from lkv.hf.cache_argument import NAMES
from tests.cache.helpers import ids
from tests.conftest import save_model, tiny_llama
from tests.context.test_compression import TEXT as WORDS
from tests.context.test_compression import Words

TEXT = "The lamp of the lighthouse was lit at dusk. " * 6


def test_generate_compresses_in_the_block_and_nowhere_else(model, policy):
    prompt, other = ids(1, 60), ids(2, 40, 1)
    options = {"max_new_tokens": 8, "do_sample": False}
    whole = model.generate(prompt, **options)
    cache = lkv.RaggedCache(model, retention=0.3, policy=policy)
    expected = model.generate(prompt, past_key_values=cache, **options)
    with lkv.compress_prefill(model, retention=0.3, policy=policy) as compression:
        assert compression.cache is None
        assert torch.equal(model.generate(prompt, **options), expected)
        assert compression.cache.kept_counts() == cache.kept_counts()
        assert torch.equal(model.generate(inputs=prompt, **options), expected)
        model.generate(input_ids=other, **options)
        assert compression.cache.ragged_layers[0].row_count == 2
        own = lkv.RaggedCache(model, method="knorm")
        model.generate(prompt, past_key_values=own, **options)
        assert own.prompt_length == 60 and compression.cache is not own
        with pytest.raises(CacheError, match="use_cache=False leaves no cache to compress"):
            model.generate(prompt, use_cache=False, **options)
    assert "generate" not in vars(model) and torch.equal(model.generate(prompt, **options), whole)
    assert not torch.equal(whole, expected)


def test_a_block_takes_the_place_of_a_cache_that_the_model_s_settings_name(model):
    prompt, options = ids(1, 40), {"max_new_tokens": 6, "do_sample": False}
    cache = lkv.RaggedCache(model, method="knorm", retention=0.3)
    expected = model.generate(prompt, past_key_values=cache, **options)
    model.generation_config.cache_implementation = "static"
    with lkv.compress_prefill(model, method="knorm", retention=0.3) as compression:
        assert torch.equal(model.generate(prompt, **options), expected)
        assert compression.cache.kept_counts() == cache.kept_counts()
        with pytest.raises(CacheError, match="cache_implementation='dynamic' is another cache"):
            model.generate(prompt, cache_implementation="dynamic", **options)
    assert model.generation_config.cache_implementation == "static"


def test_generate_reads_in_chunks_in_the_block(model, policy):
    prompt = ids(1, 60)
    options = {"max_new_tokens": 8, "do_sample": False}
    chunked = {**options, "prefill_chunk_size": 25}
    stock = model.generate(prompt, past_key_values=DynamicCache(), **chunked)
    if not torch.equal(stock, model.generate(prompt, **options)):
        pytest.skip("transformers' own chunked prefill is wrong in this version")
    with lkv.compress_prefill(model, retention=0.3, policy=policy) as compression:
        expected, counts = model.generate(prompt, **options), compression.cache.kept_counts()
        assert torch.equal(model.generate(prompt, **chunked), expected)
        assert compression.cache.kept_counts() == counts


def test_a_block_streams_prompts_as_a_cache_does(model, policy):
    prompt, streaming = ids(1, 60), {"retention": 0.3, "policy": policy, "streaming": True}
    options = {"max_new_tokens": 8, "do_sample": False}
    for chunked in (options, {**options, "prefill_chunk_size": 25}):
        cache = lkv.RaggedCache(model, prompt_tokens=60, **streaming)
        expected = model.generate(prompt, past_key_values=cache, **chunked)
        with lkv.compress_prefill(model, **streaming) as compression:
            assert torch.equal(model.generate(prompt, **chunked), expected)
        assert compression.cache.config.request.streaming and compression.cache.kept_counts() == cache.kept_counts()


def test_a_context_is_asked_in_a_block_as_outside(model, policy):
    context = lkv.compress(model, Words(), WORDS, policy=policy)
    expected = context.ask("what is one ?", 6)
    with lkv.compress_prefill(model, method="knorm") as compression:
        assert "".join(context.stream("what is one ?", 6)).strip() == expected
        with pytest.raises(CacheError, match="no option nothing"):
            context.ask("what is one ?", 6, nothing=1)
    assert compression.cache is None


def test_copies_that_are_made_in_a_block_are_stock_models(model):
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids(1, 50), **options)
    with lkv.compress_prefill(model, method="knorm", retention=0.2) as compression:
        compressed = model.generate(ids(1, 50), **options)
        copies = [copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        cache = compression.cache
        assert all(torch.equal(twin.generate(ids(1, 50), **options), expected) for twin in copies)
        assert compression.cache is cache and torch.equal(model.generate(ids(1, 50), **options), compressed)
    assert all(torch.equal(twin.generate(ids(1, 50), **options), expected) for twin in copies)
    assert type(model).generate is GenerationMixin.generate


def test_a_block_gives_generate_back_after_an_error_and_in_another_block(model):
    with pytest.raises(ZeroDivisionError), lkv.compress_prefill(model, method="knorm"):
        raise ZeroDivisionError
    assert "generate" not in vars(model)
    with lkv.compress_prefill(model, method="knorm", retention=0.5) as outer:
        with lkv.compress_prefill(model, method="knorm", retention=0.2) as inner:
            model.generate(ids(1, 50), max_new_tokens=2)
        model.generate(ids(1, 50), max_new_tokens=2)
    assert inner.cache.realised_retention() == 0.2 and outer.cache.realised_retention() == 0.5


def _call_in_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def test_a_block_applies_to_its_own_thread(model, caplog):
    def generate():
        return model.generate(ids(1, 50), max_new_tokens=6, do_sample=False)

    def in_own_block():
        with lkv.compress_prefill(model, method="knorm", retention=0.5) as own:
            return generate(), own.cache.realised_retention()

    stock, (half, _) = generate(), in_own_block()
    # Blocks that overlap and do not end in order, one entered and one left by another thread.
    fifth = lkv.compress_prefill(model, method="knorm", retention=0.2)
    with caplog.at_level(logging.WARNING, "lkv"):
        compression = fifth.__enter__()
        compressed = generate()
        cache = compression.cache
        other, retention = _call_in_thread(in_own_block)
        assert torch.equal(other, half) and retention == 0.5 and not caplog.records
        assert all(torch.equal(_call_in_thread(generate), stock) for _ in range(2))
        assert compression.cache is cache and cache.realised_retention() == 0.2
    (record,) = caplog.records  # once a block
    assert "outside of the thread or task of an open compress_prefill block" in record.getMessage()
    run = contextvars.copy_context().run
    assert torch.equal(_call_in_thread(lambda: run(generate)), compressed) and compression.cache is not cache
    _call_in_thread(lambda: fifth.__exit__(None, None, None))
    assert torch.equal(generate(), stock) and type(model).generate is GenerationMixin.generate
    assert not torch.equal(stock, compressed)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_tokens": 5}, "prompt_tokens follows from each prompt"),
        ({"method": "kvzip"}, "reads the text a second time"),
        ({"memory": 0.1, "retention": 0.1}, "memory says how much"), ({"method": "lkv"}, "policy"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_before_a_prompt_is_read(options, says):
    with pytest.raises(LkvError, match=says), lkv.compress_prefill(tiny_llama(), **options):
        raise AssertionError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def test_a_pipeline_answers_as_a_context_does(folder):
    pipe = lkv.pipeline(str(folder), method="knorm", retention=0.4, max_new_tokens=6)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    context = lkv.compress(model, tokenizer, TEXT, method="knorm", retention=0.4)
    when, who = context.ask("When?", 6), context.ask("Who?", 6)
    assert pipe(TEXT, question="When?") == {"answer": when}
    assert pipe(TEXT, questions=["When?", "Who?"]) == {"answers": [when, who]}
    other = lkv.compress(model, tokenizer, TEXT * 2, method="knorm", retention=0.4)
    assert pipe([TEXT, TEXT * 2], question="Who?") == [{"answer": who}, {"answer": other.ask("Who?", 6)}]
    turns = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "It was."}]
    conversation = lkv.compress(model, tokenizer, turns, method="knorm", retention=0.4)
    assert pipe(turns, question="Who?") == {"answer": conversation.ask("Who?", 6)}
    assert pipe([turns, turns], question="Who?") == [{"answer": conversation.ask("Who?", 6)}] * 2
    # Options of a call win, and the task is one of transformers' own.
    less = lkv.compress(model, tokenizer, TEXT, method="knorm", memory=0.5, protect=["lamp"]).ask("Who?", 3)
    own = stock_pipeline("lkv-text-generation", model=model, tokenizer=tokenizer, method="knorm", max_new_tokens=6)
    assert own(TEXT, question="Who?", memory=0.5, protect=["lamp"], max_new_tokens=3) == {"answer": less}


def test_a_pipeline_of_a_name_reads_safetensors_alone(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    pickled = tmp_path / "pickled"
    model.config.save_pretrained(pickled)
    AutoTokenizer.from_pretrained(folder).save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"\(.*no file named model\.safetensors"):
        lkv.pipeline(str(pickled), method="knorm")
    for option, says in (({"dtype": "fp16"}, "dtype is 'fp16'; give one"), ({"device_map": {"": 0}}, "give 'auto'")):
        with pytest.raises(LkvError, match=says):
            lkv.pipeline(folder, method="knorm", **option)
    pipe = lkv.pipeline(folder, method="knorm", dtype="bfloat16")
    assert pipe.model.dtype == torch.bfloat16 and pipe(TEXT, question="Who?")["answer"] is not None


def test_a_pipeline_takes_every_option_of_compress(folder):
    options = {"retention": 0.4, "chunk": 100, "streaming": True, "decode_eviction": True, "slack": 3}
    pipe = lkv.pipeline(str(folder), method="knorm", max_new_tokens=6, **options)
    context = lkv.compress(pipe.model, pipe.tokenizer, TEXT, method="knorm", **options)
    shares = []
    assert pipe(TEXT, question="When?", progress=shares.append) == {"answer": context.ask("When?", 6)} and shares
    for option, says in (
        ({"pattern": [[1.0]]}, "does not use a pattern"),
        ({"compression_ratio": 0.5}, "share to remove"),
    ):
        with pytest.raises(LkvError, match=says):
            pipe(TEXT, question="When?", **option)


def test_a_pipeline_says_what_is_missing(folder):
    pipe = lkv.pipeline(str(folder), method="knorm")
    for inputs, options, says in (
        (TEXT, {}, "give question='...' for one answer"), (TEXT, {"questions": "Who?"}, "give question="),
        (TEXT, {"questions": 3}, "or questions="),
        (TEXT, {"question": "Who?", "questions": ["Who?"]}, "give question="), (5, {"question": "Who?"}, "is a int"),
        (TEXT, {"question": ""}, "the question is empty"), (TEXT, {"question": "?", "nothing": 1}, "no option nothing"),
        ([], {"question": "?"}, "no context in the list"), ((), {"question": "?"}, "no context in the list"),
        ([TEXT, TEXT], {"question": "?", "batch_size": 2}, "leave batch_size out"),
    ):  # fmt: skip
        with pytest.raises(LkvError, match=says):
            pipe(inputs, **options)
    with pytest.raises(PromptError, match=r"give one text, or a list of texts\."):
        pipe([[TEXT]], question="Who?")
    with pytest.raises(LkvError, match="no policy"):
        lkv.pipeline(str(folder))(TEXT, question="Who?")


def test_compress_prefill_passes_one_cache_where_generate_was_called_with_none(monkeypatch):
    model, passed = tiny_llama(), []
    monkeypatch.setattr(model, "generate", lambda *args, **kwargs: passed.append(kwargs))
    with lkv.compress_prefill(model, method="knorm", retention=0.5) as compression:
        for name in NAMES:
            model.generate(torch.tensor([[1, 2, 3]]), **{name: None}, max_new_tokens=1)
    for arguments in passed:
        (cache,) = (value for name, value in arguments.items() if name in NAMES)
        assert isinstance(cache, lkv.RaggedCache)
    assert cache is compression.cache and len(passed) == 2
