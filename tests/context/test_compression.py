"""Compress once, ask many: every question starts from the same cache."""

import copy
import threading
import warnings

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, TextStreamer

import lkv
from lkv.cache.ragged_cache import RaggedCache
from lkv.context.chat import Chat
from lkv.context.compress_prefill import compress_prefill
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import CacheError, ContextFileError, LkvError, PromptError, RetentionError
from lkv.hf.spec import inspect_model
from lkv.methods.targets import MemoryTarget
from lkv.policy.policy import Policy
from lkv.utils.prompts import encode_question
from tests.conftest import tiny_llama
from tests.requests import resolve_method


class Words:
    """A tokenizer of one token a word, numbered as they come (vocabulary of the tiny models)."""

    chat_template = None
    eos_token_id, pad_token_id, vocab_size = 2, 0, 0

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [3 + sum(map(ord, word)) % 64 for word in text.split()]}

    def decode(self, ids, **_):
        return " ".join(map(str, ids.tolist() if isinstance(ids, torch.Tensor) else ids))

    def convert_ids_to_tokens(self, ids):
        return [str(token) for token in ids]


TEXT = " ".join(f"word{number}" for number in range(60))


@pytest.mark.parametrize("method", ["lkv", "lkv-t", "full"])
def test_questions_do_not_see_each_other(model, policy, method):
    context = compress(model, Words(), TEXT, method=method, retention=None if method == "full" else 0.4, policy=policy)
    first = context.ask("what is one ?", max_new_tokens=8)
    other = context.ask("and what now then ?", max_new_tokens=8)
    assert context.ask("what is one ?", max_new_tokens=8) == first != other
    context.rewind()
    assert context.cache.get_seq_length() == context.tokens == 60


@pytest.mark.parametrize("method", ["lkv", "kvzip", "full"])
def test_no_warning_of_ours_is_shown(model, policy, method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        context = compress(model, Words(), TEXT, method=method, policy=policy)
        context.ask("what is one ?", 4)
        context.predict("what is one ?", "two")
        with compress_prefill(model, method="knorm"):
            model.generate(torch.tensor([context.ids]), max_new_tokens=4, pad_token_id=0)


@pytest.mark.parametrize("method", ["lkv", "full"])
def test_what_else_was_done_with_the_cache_is_forgotten(model, policy, method):
    context = compress(model, Words(), TEXT, method=method, policy=policy)
    answer, (logits, _) = context.ask("what is one ?", 8), context.predict("what is one ?", "so it is")
    ids = torch.tensor([Words()(TEXT)["input_ids"] + [9] * 6])
    model.generate(ids, past_key_values=context.cache, max_new_tokens=4)
    assert context.ask("what is one ?", 8) == answer
    model(torch.full((1, 5), 9), past_key_values=context.cache, use_cache=True)
    assert torch.equal(context.predict("what is one ?", "so it is")[0], logits)


def test_ends_of_answers_are_the_models_where_a_configuration_names_none(model, policy):
    context = compress(model, Words(), TEXT, policy=policy)
    whole = context.complete([5, 9, 7], 12, eos_token_id=None)
    end = whole[4]
    model.generation_config.eos_token_id = end
    length = whole.index(end) + 1
    for options in ({"max_new_tokens": 12}, {"generation_config": GenerationConfig(max_new_tokens=12)}):
        assert context.complete([5, 9, 7], **options) == whole[:length] and not context.is_truncated
        context.batch_ask(["what is one ?", "what ?"], **options)
        together = context.answer_tokens
        assert together == sum(
            len(context.complete(Words()(q)["input_ids"], **options)) for q in ("what is one ?", "what ?")
        )
    context.complete([5, 9, 7], 12, eos_token_id=torch.tensor([end, 66]))
    assert context.answer_tokens <= length and not context.is_truncated


def test_what_one_answer_takes_alone_is_asked_one_by_one_or_refused(model, policy):
    context = compress(model, Words(), TEXT, policy=policy)
    questions = ["what is one ?", "what ?"]
    answers = context.batch_ask(questions, 8, eos_token_id=66)
    counted = context.answer_tokens, context.is_truncated
    assert 8 < counted[0] <= 16
    with pytest.raises(CacheError, match="a streamer shows one answer alone"):
        context.batch_ask(questions, 8, streamer=TextStreamer(Words()))
    if Version(transformers.__version__) < Version("5.17"):
        with pytest.raises(CacheError, match=r"it needs transformers 5\.17 or newer"):
            context.batch_ask(questions, 8, eos_token_id=66, prompt_lookup_num_tokens=3)
        return
    assert context.batch_ask(questions, 8, eos_token_id=66, prompt_lookup_num_tokens=3) == answers
    assert (context.answer_tokens, context.is_truncated) == counted


@pytest.mark.parametrize("method", ["lkv", "full"])
def test_the_models_own_configuration_changes_no_answer(model, policy, method, tmp_path):
    """How generate would read a prompt, search and answer by itself; a generation_config of the caller's, too."""
    context = compress(model, Words(), TEXT, method=method, policy=policy)
    questions = ["what is one ?", "and what now then ?"]
    expected = [context.ask(question, 8, eos_token_id=None) for question in questions]
    config = GenerationConfig(
        use_cache=False, prefill_chunk_size=3, do_sample=False, max_new_tokens=8, return_dict_in_generate=True
    )
    own = {"generation_config": config, "eos_token_id": None}
    assert [context.ask(question, **own) for question in questions] == expected
    changes = {
        "use_cache": False, "prefill_chunk_size": 3, "cache_implementation": "static", "num_beams": 3,
        "num_return_sequences": 2, "return_dict_in_generate": True, "eos_token_id": None,
    }  # fmt: skip
    for name, value in changes.items():
        setattr(model.generation_config, name, value)
    assert [context.ask(question, 8) for question in questions] == expected
    assert context.ask(questions[0], 8, num_beams=None, num_return_sequences=None) == expected[0]
    assert context.batch_ask((question for question in questions), 8) == expected
    assert "".join(context.stream(questions[0], 8)).strip() == expected[0]
    if method == "lkv":
        assert Chat(context).ask(questions[0], 8) == expected[0]
        again = compress(model, Words(), TEXT, policy=policy)
        again.save(tmp_path / "text.kv")
        for other in (again, Context.load(tmp_path / "text.kv", model, Words())):
            assert other.ask(questions[0], 8) == expected[0]


def test_what_is_no_model_or_tokenizer_is_named(model, policy, tmp_path):
    words, path = Words(), tmp_path / "text.kv"
    compress(model, words, TEXT, policy=policy).save(path)
    for given in ((words, model, TEXT), (TEXT, model, words)):
        with pytest.raises(PromptError, match=r"the model is a \w+; give one as AutoModelForCausalLM loads it"):
            compress(*given)
    with pytest.raises(PromptError, match="the model is a Words"):
        Context.load(path, words, model)
    for tokenizer in (None, model):
        with pytest.raises(PromptError, match=r"the tokenizer is a \w+; give the model's own"):
            Context.load(path, model, tokenizer)


def test_a_retention_of_another_kind_of_number_is_saved(model, policy, tmp_path):
    context = compress(model, Words(), TEXT, retention=np.float32(0.25), policy=policy)
    context.save(tmp_path / "text.kv")
    assert Context.load(tmp_path / "text.kv", model, Words()).metadata["retention"] == 0.25


def test_counts_are_whole_numbers_of_any_type(model, policy, tmp_path):
    def use(count):
        options = {"budget_tokens": count(12), "chunk": count(8), "slack": count(5), "bits": count(8)}
        context = compress(model, Words(), TEXT, policy=policy, **options)
        context.save(tmp_path / "text.kv")
        saved = Context.load(tmp_path / "text.kv", model, Words())
        answers = [*saved.batch_ask(["what ?"] * 2, count(3)), saved.ask("what ?", count(5), num_beams=count(1))]
        chat = Chat(saved)
        answers += [chat.ask("what ?", count(3)), "".join(chat.stream("who ?", count(4)))]
        chat.undo(count(1))
        cache = RaggedCache(model, method="knorm", prompt_tokens=count(20))
        with cache.graphed(model, count(8)):
            model.generate(torch.arange(3, 23)[None], past_key_values=cache, max_new_tokens=4)
        cache.crop(count(-2))
        cache.batch_repeat_interleave(count(2))
        return answers, saved.metadata, len(chat.turns), cache.get_seq_length(), cache.nbytes()

    expected = use(int)
    assert use(np.int64) == expected == use(torch.tensor)
    assert MemoryTarget.parse(np.int64(9000)) == MemoryTarget.parse(9000)
    assert MemoryTarget.parse(np.float32(0.5)) == MemoryTarget.parse(0.5)


@pytest.mark.parametrize(
    "count", [2.0, True, np.float32(2), np.bool_(True), torch.tensor(True), torch.tensor(2.0)], ids=repr
)
def test_counts_are_no_booleans_and_no_other_numbers(model, count):
    context = compress(model, Words(), TEXT, method="knorm")
    with pytest.raises(PromptError, match="max_new_tokens is"):
        context.ask("what ?", count)
    for name in ("chunk", "slack", "bits", "budget_tokens"):
        with pytest.raises(LkvError, match=f"{name} is"):
            compress(model, Words(), TEXT, method="knorm", **{name: count})


@pytest.mark.parametrize("method", ["lkv", "full"])
def test_no_positions_are_made_up_beyond_the_models(model, policy, method):
    context = compress(model, Words(), TEXT, method=method, policy=policy)
    room = model.config.max_position_embeddings - context.tokens - len(encode_question(Words(), "what ?"))
    assert len(context.predict("what ?", "word " * room)[1]) == room
    with pytest.raises(PromptError, match=r"would reach .* but the model reads at most"):
        context.predict("what ?", "word " * (room + 1))


def test_full_retention_answers_as_the_full_cache(model, policy):
    answers = {
        method: compress(model, Words(), TEXT, method=method, retention=1.0, policy=policy).ask("say it", 10)
        for method in ("lkv", "lkv-t", "full")
    }
    assert len(set(answers.values())) == 1


def test_prediction_is_teacher_forced(model, policy):
    context = compress(model, Words(), TEXT, method="full")
    logits, ids = context.predict("why ?", "so it is")
    whole = Words()(TEXT + " Question: why ? Answer: so it is")["input_ids"]
    expected = model(torch.tensor([whole])).logits[0, -4:-1]
    assert ids.tolist() == whole[-3:]
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        ("  \n", {}, PromptError, "the text is empty"),
        ("a\0b", {}, PromptError, "the text holds NUL characters, the first at 1"),
        (
            "one two three",
            {"retention": 0.15},
            PromptError,
            r"has 3 tokens: at retention 0\.15 nothing .* kept\. Give at least 7",
        ),
        ("word " * 600, {}, PromptError, "has 600 tokens, but the model reads at most 512"),
        (TEXT, {"retention": 1.5}, RetentionError, "retention is 1.5"),
        (TEXT, {"prompt_tokens": 100}, PromptError, "the whole text is the prompt here"),
        (TEXT, {"progress": 3}, PromptError, "progress is 3; give a function"),
        (TEXT, {"chunk": 0}, PromptError, "chunk is 0"),
        (TEXT, {"streaming": True}, PromptError, "give their size in tokens as chunk"),
        (TEXT, {"method": "full", "bits": 8, "slack": 2}, CacheError, "'full' has no options; leave bits, slack out"),
        (TEXT, {"method": resolve_method("knorm", retention=0.5), "retention": 0.3}, RetentionError, "of its own"),
    ],
)
def test_bad_texts_and_options_are_named(model, policy, text, options, error, message):
    with pytest.raises(error, match=message):
        compress(model, Words(), text, **({} if "method" in options else {"policy": policy}) | options)


@pytest.mark.parametrize(
    ("question", "options", "error", "message"),
    [
        (" ", {}, PromptError, "the question is empty"),
        ("word " * 500, {}, PromptError, "the model reads at most 512"),
        ("why ?", {"num_beams": 2}, CacheError, "one answer"),
        *(("what ?", {name: False}, CacheError, rf"ask\(\) sets {name} itself; leave that out")
          for name in ("use_cache", "cache_implementation", "prefill_chunk_size")),
        ("what ?", {"temperature": 0.7, "top_p": 1}, CacheError, "temperature would change nothing.* leave it"),
        ("what ?", {"top_k": 5, "min_p": 0.1}, CacheError, "top_k and min_p would change nothing.* leave them out"),
        *(("what ?", {"do_sample": True, "temperature": value}, CacheError, "but sampling divides by it")
          for value in (0, -1.0, "0.7")),
    ],
)  # fmt: skip
def test_bad_questions_are_named(model, policy, question, options, error, message):
    context = compress(model, Words(), TEXT, policy=policy)
    with pytest.raises(error, match=message):
        context.ask(question, **options)
    assert context.cache.get_seq_length() == 60


def test_a_fork_goes_its_own_way(model, policy):
    context = compress(model, Words(), TEXT, retention=0.4, policy=policy)
    answer = context.ask("what is one ?", max_new_tokens=8)
    twin = context.fork()
    model(torch.full((1, 5), 9), past_key_values=twin.cache, use_cache=True)
    assert context.cache.get_seq_length() == 60 and twin.cache.get_seq_length() == 65
    twin.rewind()
    assert twin.ask("what is one ?", max_new_tokens=8) == context.ask("what is one ?", max_new_tokens=8) == answer
    copied, full = copy.deepcopy(context), compress(model, Words(), TEXT, method="full")
    assert copied.model is model and copied.cache is not context.cache and copied.ask("what is one ?", 8) == answer
    with pytest.raises(CacheError, match="every method but 'full'"):
        full.fork()
    assert copy.deepcopy(full).ask("what is one ?", 8) == full.ask("what is one ?", 8)


@pytest.mark.parametrize("options", [{"chunk": 7}, {"chunk": 100}, {"chunk": 60, "streaming": True}])
def test_reading_in_parts_gives_the_same_context(model, policy, options):
    whole = compress(model, Words(), TEXT, retention=0.4, policy=policy)
    parts = compress(model, Words(), TEXT, retention=0.4, policy=policy, **options)
    assert parts.cache.kept_counts() == whole.cache.kept_counts()
    assert parts.ask("what is one ?", 8) == whole.ask("what is one ?", 8)


def test_long_answers_leave_the_context_as_it_was(model, policy):
    context = compress(model, Words(), TEXT, retention=0.3, policy=policy, decode_eviction=True, slack=2)
    kept, size = context.cache.kept_counts(), context.nbytes()
    answer = context.ask("go on", max_new_tokens=30, eos_token_id=None)
    assert context.answer_tokens == 30
    assert (context.cache.kept_counts(), context.nbytes(), context.cache.get_seq_length()) == (kept, size, 60)
    assert context.ask("go on", max_new_tokens=30, eos_token_id=None) == answer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_saved_context_answers_as_before(dtype, tmp_path):
    model = tiny_llama(dtype=dtype)
    policy = Policy(inspect_model(model)).requires_grad_(False)
    context = compress(model, Words(), TEXT, retention=0.4, policy=policy)
    answer = context.ask("what is one ?", max_new_tokens=8)
    context.save(tmp_path / "deep" / "context.kv")
    again = Context.load(tmp_path / "deep" / "context.kv", model, Words(), policy)
    assert again.ask("what is one ?", max_new_tokens=8) == answer
    assert again.metadata == context.metadata and again.cache.kept_counts() == context.cache.kept_counts()
    assert again.cache.realised_retention() == context.cache.realised_retention()
    for mine, theirs in zip(again.cache.ragged_layers, context.cache.ragged_layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.store.pack(), theirs.store.pack(), strict=True))
    # No bytes of the evicted entries are in the file.
    entries = sum(map(sum, context.cache.kept_counts()))
    size = (tmp_path / "deep" / "context.kv").stat().st_size
    # Beside them stand the names, the places, the fingerprint and the digests of the model.
    assert size - entries * 2 * 8 * torch.finfo(dtype).bits // 8 < 9000
    again.cache.reset()
    with pytest.raises(CacheError, match="cannot read another text"):
        model(torch.full((1, 30), 9), past_key_values=again.cache, use_cache=True)


def test_a_context_that_does_not_fit_is_refused(model, policy, tmp_path):
    path = tmp_path / "context.kv"
    compress(model, Words(), TEXT, retention=0.4, policy=policy).save(path)
    with pytest.raises(ContextFileError, match="saved by a model with other weights"):
        Context.load(path, tiny_llama(seed=3), Words())
    with pytest.raises(ContextFileError, match="saved by a model with layers 3, but the model given has 2"):
        Context.load(path, tiny_llama(num_hidden_layers=2), Words())
    torch.manual_seed(1)
    with pytest.raises(ContextFileError, match="compressed under another policy"):
        Context.load(path, model, Words(), Policy(inspect_model(model)))
    with pytest.raises(ContextFileError, match="there is no file"):
        Context.load(tmp_path / "nothing.kv", model, Words())


def test_a_context_tells_how_it_was_compressed(model, policy):
    def about(method, **options):
        found = compress(model, Words(), TEXT, method=method, policy=policy, **options).metadata
        return {name: found[name] for name in ("retention", "budget_tokens", "policy")}

    digest = policy.digest()
    assert about("lkv") == {"retention": None, "budget_tokens": None, "policy": digest}
    assert compress(model, Words(), TEXT, policy=policy).metadata["memory"] == "memory 0.1"
    assert about("lkv", bits=4) == {"retention": 0.15, "budget_tokens": None, "policy": digest}
    assert about("knorm", retention=0.3) == {"retention": 0.3, "budget_tokens": None, "policy": None}
    for method, own in [("lkv", digest), ("lkv-h+kvzip", digest), ("kvzip", None)]:
        assert about(method, budget_tokens=9) == {"retention": None, "budget_tokens": 9, "policy": own}
        assert about(method, retention=0.4) == {"retention": 0.4, "budget_tokens": None, "policy": own}
    method = resolve_method("knorm", retention=0.5)
    assert about(method) == {"retention": 0.5, "budget_tokens": None, "policy": None}


def test_a_file_name_is_not_taken_for_its_text(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runbook.txt").write_text(TEXT)
    with pytest.raises(
        PromptError, match=r"got the path 'runbook.txt'; read the file first.*lkv\.read_document\('runbook.txt'\)"
    ):
        compress(model, Words(), "runbook.txt", method="knorm")
    with pytest.raises(PromptError, match=r"the text is a PosixPath.*lkv\.read_document"):
        compress(model, Words(), tmp_path / "runbook.txt", method="knorm")
    context = lkv.compress(model, Words(), lkv.read_document("runbook.txt"), method="knorm")
    assert context.ids == Words()(TEXT)["input_ids"]


def test_progress_is_of_the_thread_that_compresses(model):
    """Ending a compression does not end other uses of the model at the same time."""
    reached, release = threading.Event(), threading.Event()

    def progress(share):
        reached.set()
        release.wait(20)
        raise KeyError

    def compress_until_told():
        with pytest.raises(KeyError):
            compress(model, Words(), TEXT, method="kvzip", retention=0.4, progress=progress)

    thread = threading.Thread(target=compress_until_told)
    thread.start()
    assert reached.wait(20)
    model(torch.tensor([[3, 4, 5]]))
    release.set()
    thread.join()
