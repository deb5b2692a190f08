"""Models with recurrent or convolution layers, against the stock model with a -inf mask on what was evicted.

The stock model reads the same tokens in the same passes: its recurrent layers compute in float32 whatever its dtype.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from lkv.cache.ragged_cache import RaggedCache
from lkv.cache.tiered_store import TieredStore
from lkv.cli.ask import _describe_size
from lkv.context import saved_context
from lkv.context.chat import Chat
from lkv.context.compress_prefill import compress_prefill
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.context.generation import decode_answer
from lkv.errors import CacheError, ContextFileError, LkvError, TrainingError, UnsupportedModelError
from lkv.evaluation.comparison import MethodComparison
from lkv.hf.attention import patch_attention
from lkv.hf.cache_argument import pass_arguments
from lkv.hf.prompt_kv import read_prompt
from lkv.hf.spec import decoder_kinds
from lkv.methods.request import CompressionRequest, resolve_method
from lkv.methods.selectors.kvzip import replay
from lkv.policy.policy import Policy
from lkv.training.config import TrainingConfig
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import SampleDistillation, check_batching, hard_mask
from lkv.utils import devices
from lkv.utils.prompts import encode, encode_next_question, encode_question, render_messages
from tests.cache.helpers import ids, padded
from tests.conftest import present
from tests.context.test_compression import TEXT, Words
from tests.context.test_images import NoRecord
from tests.families import HYBRIDS, MIXED, Family
from tests.hf.masked_models import PROMPT, assert_close, masked, method_of, read, turns
from tests.hf.test_families import check_training, scorer_inputs
from tests.serving.server import KNORM, serving, tiny
from tests.serving.server import TEXT as SERVED

# One of each kind of states, and one that reads stepwise.
_QUICK = "Qwen3_5", "Lfm2", "NemotronH", "FalconH1", "Jamba"
# Of logits where recurrent layers, in float32, read the same tokens in other passes.
OTHER_PASSES = {"atol": 1e-3, "rtol": 1e-3}
_PARAMS = [pytest.param(each, marks=[] if each.name in _QUICK else pytest.mark.slow, id=each.name) for each in HYBRIDS]


@pytest.fixture(params=_PARAMS)
def family(request) -> Family:
    return present(request.param)


@pytest.fixture
def model(family: Family) -> Any:
    return family.build()


@pytest.fixture(params=[*_PARAMS, *(pytest.param(each, id=each.label) for each in MIXED)])
def mixed(request, exact_softmax) -> Any:
    """A model with layers of several kinds."""
    present(request.param)
    return request.param.build()


def test_turns_forks_and_rewinds_equal_the_masked_model(mixed, monkeypatch):
    method, chunks, text = method_of(mixed), turns(mixed), ids(2, PROMPT + 6)
    expected = masked(mixed, method, text, [PROMPT, *chunks], [PROMPT], monkeypatch)
    cache = RaggedCache(mixed, method=method)
    assert_close(read(mixed, cache, text[:, :PROMPT], [PROMPT]), expected[:, :PROMPT])
    fork = cache.fork()
    assert_close(read(mixed, cache, text[:, PROMPT:], chunks), expected[:, PROMPT:])
    late = cache.fork()
    other = ids(2, 6, 5)
    changed = masked(mixed, method, torch.cat([text[:, :PROMPT], other], 1), [PROMPT, *chunks], [PROMPT], monkeypatch)
    for again in (fork, cache, late):
        again.rewind()
        assert again.get_seq_length() == PROMPT
        assert_close(read(mixed, again, other, chunks), changed[:, PROMPT:])
        again.rewind()
        assert_close(read(mixed, again, text[:, PROMPT:], chunks), expected[:, PROMPT:])


def test_generation_equals_the_masked_model(mixed, monkeypatch):
    method, text = method_of(mixed), ids(2, PROMPT)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    cache = RaggedCache(mixed, method=method)
    out = mixed.generate(text, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **options)
    expected = masked(mixed, method, out.sequences[:, :-1], [PROMPT, 1, 1, 1, 1], [PROMPT], monkeypatch)
    # generate() gives its logits in float32.
    torch.testing.assert_close(torch.stack(out.logits, 1), expected[:, PROMPT - 1 :].float(), atol=1e-6, rtol=1e-6)
    with compress_prefill(mixed, method=method) as compression:
        assert torch.equal(mixed.generate(text, **options), out.sequences)
    assert compression.cache.kept_counts() == cache.kept_counts()


def test_beams_of_one_text_equal_those_of_the_stock_model(mixed):
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, "eos_token_id": None}
    cache = RaggedCache(mixed, method="knorm", retention=1.0)
    assert torch.equal(
        mixed.generate(ids(1, PROMPT), past_key_values=cache, **options), mixed.generate(ids(1, PROMPT), **options)
    )


@torch.no_grad()
def test_a_batch_padded_on_the_left_equals_its_rows_alone(mixed):
    if type(mixed).__name__ == "Llama4ForCausalLM":
        pytest.skip("transformers counts padding in the temperature of its queries")
    method, rows, more = method_of(mixed), [ids(1, PROMPT), ids(1, PROMPT - 13, 1)], ids(2, 3, 2)
    batch, cache = padded(rows), RaggedCache(mixed, method=method)
    mask = batch["attention_mask"]
    mixed(**batch, position_ids=mask.cumsum(1) - 1, past_key_values=cache, use_cache=True)
    alone = [RaggedCache(mixed, method=method) for _ in rows]
    for text, own in zip(rows, alone, strict=True):
        read(mixed, own, text, [text.shape[1]])
    for step in range(3):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        token, places = more[:, step : step + 1], mask.sum(1, keepdim=True) - 1
        out = mixed(token, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True).logits
        for row, own in enumerate(alone):
            # Sums of blocks of float32 in another order.
            torch.testing.assert_close(
                out[row : row + 1], read(mixed, own, token[row : row + 1], [1]), atol=2e-4, rtol=2e-4
            )
    if cache.shared.has_states and not cache.is_stepwise:
        late = torch.cat([mask, torch.tensor([[1, 1], [0, 1]])], 1)
        with pytest.raises(CacheError, match="would read padding after the prompt as text"):
            mixed(ids(2, 2), attention_mask=late, past_key_values=cache, use_cache=True)


def test_streaming_and_eviction_of_answers_equal_the_masked_model(mixed, monkeypatch):
    method, text, tail = method_of(mixed), ids(1, PROMPT + 8), [1] * 8
    streamed, chunks = RaggedCache(mixed, method=method, streaming=True, prompt_tokens=PROMPT), [17, 17, 6, *tail]
    if streamed.is_stepwise:
        with pytest.raises(CacheError, match="several tokens after a text wrongly in this model"):
            read(mixed, streamed, text, chunks)
    else:
        expected = masked(mixed, method, text, chunks, [17, 34, PROMPT], monkeypatch)
        assert_close(read(mixed, streamed, text, chunks), expected)
        streamed.rewind()
        assert_close(read(mixed, streamed, text[:, PROMPT:], tail), expected[:, PROMPT:])
    evicted = RaggedCache(mixed, method=method, decode_eviction=True, slack=3)
    expected = masked(mixed, method, text, [PROMPT, *tail], [PROMPT, PROMPT + 3, PROMPT + 7], monkeypatch)
    assert_close(read(mixed, evicted, text, [PROMPT, *tail]), expected)
    with pytest.raises(CacheError, match=r"no way back to the end of the prompt; continue from a fork\(\) made before"):
        evicted.rewind()


@pytest.mark.parametrize("options", [{"retention": 0.4}, {"memory": 0.4}], ids=str)
def test_contexts_are_asked_saved_and_loaded(model, options, tmp_path, monkeypatch):
    context = compress(model, Words(), TEXT, method="knorm", **options)
    questions = ["what is one ?", "and two"]
    answers = [context.ask(question, 6, eos_token_id=None) for question in questions]
    assert [context.fork().ask(question, 6, eos_token_id=None) for question in questions] == answers
    assert context.batch_ask(questions, 6, eos_token_id=None) == answers
    assert list(context.stream(questions[0], 6, eos_token_id=None))
    context.save(tmp_path / "text.kv")
    loaded = Context.load(tmp_path / "text.kv", model, Words())
    assert [loaded.ask(question, 6, eos_token_id=None) for question in reversed(questions)] == answers[::-1]
    with monkeypatch.context() as patch:
        patch.setattr(saved_context.transformers, "__version__", "5.99.1")
        with pytest.raises(ContextFileError, match=r"states of transformers .*, which 5\.99 may lay out"):
            Context.load(tmp_path / "text.kv", model, Words())
    states = context.cache.other_nbytes()
    assert f", {states / 1e6:.1f} MB of it windows and states (" in _describe_size(context)
    assert 0 < states < context.nbytes() == states + sum(layer.nbytes() for layer in context.cache.ragged_layers)
    if options == {"retention": 0.4}:
        full = compress(model, Words(), TEXT, method="full")
        assert full.nbytes() > 0
        everything = compress(model, Words(), TEXT, method="knorm", retention=1.0)
        for _ in range(2):
            assert full.ask(questions[0], 6, eos_token_id=None) == everything.ask(questions[0], 6, eos_token_id=None)
        for each in (full, everything):
            logits, ids = each.predict(questions[0], "so it is")
            asked = encode_question(Words(), questions[0], "", "text")
            stock = model(torch.tensor([each.ids + asked + ids.tolist()])).logits[0]
            torch.testing.assert_close(logits, stock[-len(ids) - 1 : -1], **OTHER_PASSES)


@torch.no_grad()
def test_comparisons_predict_and_generate_as_the_stock_model(model):
    text, question, answer = (ids(1, count, count)[0].tolist() for count in (PROMPT, 5, 4))
    everything = resolve_method(CompressionRequest(method="knorm", retention=1.0), model)
    comparison = MethodComparison(model, text, read_prompt(model, torch.tensor([text])), [everything])
    comparison.append(question[:-1])
    found = comparison.predict(question[-1:] + answer, 1)
    stock = model(torch.tensor([text + question + answer])).logits[:, -len(answer) - 1 : -1]
    torch.testing.assert_close(found.logits, stock, **OTHER_PASSES)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(torch.tensor([text + question]), **options)[0, -6:].tolist()
    assert comparison.generate(question[-1:], 6) == [expected[: expected.index(2) + 1] if 2 in expected else expected]


@pytest.mark.slow
def test_lkv_serve_answers_several_clients(family, tmp_path):
    """Each as the context itself, also from a file of the store; without a context as the stock model."""
    sizes = {"vocab_size": 259, "max_position_embeddings": 2048}
    model, (_, tokenizer) = (
        replace(family, changes=family.changes | sizes).build(torch.float32),
        tiny(tmp_path / "tiny"),
    )
    own, questions = compress(model, tokenizer, SERVED, **KNORM), ["Who?", "How many boats are there?", "And then?"]
    expected = [own.ask(question, 8) for question in questions]
    with serving(model, tokenizer, tmp_path / "store") as server, ThreadPoolExecutor(3) as pool:
        context = server.compressed(SERVED)
        assert [*pool.map(lambda question: server.answer(question, context), questions)] == expected
        alone = server.answer("Who?")
    ids = encode(tokenizer, render_messages(tokenizer, [{"role": "user", "content": "Who?"}]))
    out = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(ids) :]
    assert alone == decode_answer(tokenizer, out.tolist())
    with serving(model, tokenizer, tmp_path / "store") as server:
        assert server.answer(questions[1], context) == expected[1]


@pytest.mark.slow
def test_everything_kept_in_8_bits_is_near_the_stock_model(mixed):
    model, text, chunks = mixed.float(), ids(2, PROMPT + 6), [PROMPT, *turns(mixed)]
    stock = read(model, DynamicCache(config=model.config), text, chunks)
    cache = RaggedCache(model, method="knorm", retention=1.0, bits=8)
    error = (read(model, cache, text, chunks) - stock).abs().mean()
    assert isinstance(cache.ragged_layers[0].store, TieredStore) and 0 < error < 0.1 * stock.abs().mean()


def test_steps_are_not_replayed_as_a_cuda_graph_and_the_reason_is_logged(monkeypatch, caplog):
    model = present(HYBRIDS[3]).build(torch.float32)
    monkeypatch.setattr(devices, "can_capture", lambda device: True)
    caplog.set_level(logging.INFO, "lkv")
    text, options = ids(1, PROMPT), {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    caches = [RaggedCache(model, method="knorm", retention=0.4) for _ in range(2)]
    with caches[0].graphed(model, max_new_tokens=4):
        found = model.generate(text, past_key_values=caches[0], **options)
    assert "the model has sliding-window or recurrent layers, which lie elsewhere after every token" in caplog.text
    assert torch.equal(found, model.generate(text, past_key_values=caches[1], **options))


@pytest.mark.slow
def test_turns_of_a_chat_are_taken_back(mixed):
    """A later turn sees the earlier ones: with everything kept, it is the stock model on the whole conversation."""
    options: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None}
    chat, tokenizer = Chat(compress(mixed, Words(), TEXT, method="knorm", retention=1.0)), Words()
    answers = [chat.ask(question, **options) for question in ("what is one ?", "and two", "and three")]
    ids = chat._ids[: chat.turns[2].start] + encode_next_question(tokenizer, "and three")
    stock = mixed.generate(torch.tensor([ids]), do_sample=False, **options)[0, len(ids) :]
    assert answers[2] == decode_answer(tokenizer, stock.tolist())
    chat.undo()
    assert chat.ask("and three", **options) == answers[2]
    with pytest.raises(ValueError, match="bad_words_ids"):
        chat.ask("and four", bad_words_ids="x", **options)
    chat.undo(2)
    assert [chat.ask(question, **options) for question in ("and two", "and three")] == answers[1:]
    kept = Chat(compress(mixed, Words(), TEXT, method="knorm", retention=1.0, decode_eviction=True))
    assert [kept.ask(question, **options) for question in ("what is one ?", "and two")] == answers[:2]
    with pytest.raises(CacheError, match="so no turn can be removed"):
        kept.undo()


def test_policies_are_trained_as_the_cache_computes(family, model):
    """The student equals the cache, the teacher the stock model; a step changes every parameter."""
    policy, text = Policy(patch_attention(model).spec).requires_grad_(False), ids(1, PROMPT)
    target = ids(1, 20, 1)
    run = SampleDistillation(model, TokenizedSample("random", text[0].tolist(), [(target[0].tolist(), 4)]))
    assert family.fits != any(kind.is_stepwise for kind in patch_attention(model).kinds)
    assert not family.is_served_in_vllm
    if not family.fits:
        with torch.no_grad(), pytest.raises(CacheError, match="several tokens after a text wrongly in this model"):
            run.run(None)
        return
    with torch.no_grad():
        stock, cache = DynamicCache(config=model.config), RaggedCache(model, policy=policy, retention=0.5)
        read(model, cache, text, [PROMPT])
        read(model, stock, text, [PROMPT])
        student = run.run(hard_mask(policy, run.scores(policy), 0.5, 1))
        for found, own in ((run.run(None), stock), (student, cache)):
            expected = torch.log_softmax(read(model, own, target, [20])[0, 3:-1].float(), -1)
            torch.testing.assert_close(found.log_probs, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(TrainingError, match=r"has recurrent states, which .* give student 'continuation'"):
        check_batching(TrainingConfig(student="full"), model, 1)
    torch.manual_seed(1)
    check_training(family.build(torch.float32), Policy(patch_attention(model).spec, inputs=scorer_inputs(family)))


@torch.no_grad()
@pytest.mark.slow
def test_kvzip_expected_and_compensation(mixed):
    """KVzip's second pass is the stock model that reads on; the others need to un-rotate keys."""
    text, request = ids(1, PROMPT), torch.tensor([[20, 21, 22]])
    prompt, more = read_prompt(mixed, text), torch.cat([request, text], 1)
    if any(kind.is_stepwise for kind in patch_attention(mixed).kinds):
        with pytest.raises(CacheError, match="several tokens after a text wrongly in this model"):
            compress(mixed, Words(), TEXT, method="kvzip")
    else:
        found = replay(mixed, prompt, [NoRecord(layer) for layer in prompt], more[0].tolist())[0]
        stock = DynamicCache(config=mixed.config)
        mixed.base_model(text, **pass_arguments(stock, text))
        assert_close(found, mixed.base_model(more, **pass_arguments(stock, more))[0])
        assert compress(mixed, Words(), TEXT, method="kvzip", retention=0.5).ask("what is one ?", 4)
    for method in ("expected", "tova+compensation"):
        if any(layer.rotation is None for layer in prompt):
            with pytest.raises(LkvError, match=r"cannot undo|no rotary embedding that LKV can undo"):
                compress(mixed, Words(), TEXT, method=method)
            continue
        context = compress(mixed, Words(), TEXT, method=method, retention=0.5)
        assert context.realised_retention() == pytest.approx(0.5, abs=0.02)
        assert context.fork().ask("what is one ?", 4) == context.ask("what is one ?", 4)


@torch.no_grad()
def test_keys_are_unrotated_exactly(family, model):
    layers, whole = read_prompt(model, ids(1, 20)), DynamicCache(config=model.config)
    read(model, whole, ids(1, 20), [20])
    stock = [whole.layers[index].keys for index, kind in enumerate(decoder_kinds(model)) if kind.is_evicted]
    for layer, key in zip(layers, stock, strict=True):
        assert torch.equal(layer.key, key)
        assert (layer.rotation is None) == family.rotation.startswith("none")
        if layer.rotation is not None:
            # Some models compute the tables of the rotation in float32.
            bare = layer.rotation.unrotate(key)
            torch.testing.assert_close(layer.rotation.rotate(bare), key, atol=1e-5, rtol=1e-5)


def test_what_states_cannot_undo_is_one_sentence(model):
    cache = RaggedCache(model, method="knorm", retention=0.5, prompt_tokens=PROMPT)
    with pytest.raises(CacheError, match="assisted decoding cuts off rejected tokens, but the states"):
        cache.activate_past_recording()
    text = ids(1, PROMPT + 1)
    read(model, cache, text, [PROMPT, 1])
    with pytest.raises(CacheError, match=r"states of recurrent layers cannot be cut back.*call rewind\(\)"):
        cache.crop(-1)

    def interrupt(layer: int) -> None:
        if layer == len(cache.layers) - 1:
            raise KeyboardInterrupt

    before = cache.fork()
    cache.on_layer_start = interrupt
    with pytest.raises(KeyboardInterrupt):
        read(model, cache, text[:, :1], [1])
    cache.on_layer_start = None
    with pytest.raises(
        CacheError, match=r"interrupted forward pass left the layers of this cache unequal; call rewind"
    ):
        read(model, cache, text[:, :1], [1])
    cache.rewind()
    before.rewind()
    assert torch.equal(read(model, cache, text[:, :1], [1]), read(model, before, text[:, :1], [1]))


@pytest.mark.parametrize("family", HYBRIDS, ids=lambda family: family.name)
def test_a_transformers_without_caches_for_states_is_refused(family):
    if not family.missing:
        pytest.skip("this one has them")
    try:
        model = family.build()
    except (AttributeError, TypeError, ValueError) as error:
        pytest.skip(f"this version of transformers has no such {family.name} ({error})")
    with pytest.raises(UnsupportedModelError):
        patch_attention(model)
