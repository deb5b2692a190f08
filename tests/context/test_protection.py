"""Protected spans: every head keeps them, within the budget, in the best precision; what remains is as ever."""

import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lkv.context.chat import Chat
from lkv.context.compression import compress, compress_ids
from lkv.context.context import Context
from lkv.context.protection import protected_tokens
from lkv.errors import CacheError, LkvError, PromptError
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.request import CompressionRequest
from lkv.methods.targets import Precision
from lkv.utils.prompts import encode_context, encode_question
from tests.cache.helpers import head_entries, ids
from tests.conftest import save_model, tiny_llama, uneven_policy
from tests.context.test_chat import TEMPLATE
from tests.context.test_compression import Words
from tests.masked import hidden_from_continuation
from tests.requests import resolve_method

RULE = "Answer in capital letters. "
TEXT = "The lamp was lit at dusk. " * 4 + RULE + "Nobody came that night, and the sea was calm. " * 4
METHODS = ("lkv", "knorm", "snapkv", "adakv-snapkv", "pyramidkv", "kvzip", "lkv-h+kvzip", "criticalkv")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A tiny model in float64 with a byte tokenizer, its chat template, and a policy."""
    folder = save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    return model, tokenizer, uneven_policy(model)


def kept_positions(context: Context, prompt) -> list[list[set[int]]]:
    """Which tokens each head of each layer keeps, found by their keys in the whole prompt."""
    table = []
    for layer, whole in zip(context.cache.ragged_layers, prompt, strict=True):
        heads = []
        for head, keys in enumerate(whole.key[0]):
            own = head_entries(layer.store, 0, head)[0]
            matches = (own[:, None] == keys[None]).all(-1)
            assert (matches.sum(1) == 1).all()
            heads.append(set(matches.nonzero()[:, 1].tolist()))
        table.append(heads)
    return table


@pytest.mark.parametrize("method", METHODS)
def test_every_head_keeps_them_and_answers_as_the_stock_model_that_sees_no_more(parts, method):
    model, tokenizer, policy = parts
    options = {"method": method, "policy": policy, "retention": 0.4}
    context = compress(model, tokenizer, TEXT, protect=[RULE], **options)
    encoded = encode_context(tokenizer, TEXT)
    protected = set(protected_tokens(tokenizer, TEXT, [RULE]))
    assert [encoded[place] for place in sorted(protected)] == tokenizer(RULE)["input_ids"]
    prompt = read_prompt(model, torch.tensor([encoded]))
    kept = kept_positions(context, prompt)
    assert all(protected <= own for heads in kept for own in heads)
    # As many entries as without protection, but for what each head rounds off.
    alone = compress(model, tokenizer, TEXT, **options)
    own, other = (sum(map(sum, each.cache.kept_counts())) for each in (context, alone))
    assert own <= 0.4 * 6 * len(encoded) and abs(own - other) <= 6
    assert context.metadata["protected_tokens"] == len(RULE) and alone.metadata["protected_tokens"] is None
    hidden = [torch.tensor([[[place not in own for place in range(len(encoded))] for own in heads]]) for heads in kept]
    question, answer = encode_question(tokenizer, "Who came?"), tokenizer("NOBODY.")["input_ids"]
    with hidden_from_continuation(model, hidden, len(encoded)):
        logits = model(torch.tensor([encoded + question + answer])).logits[0, -len(answer) - 1 : -1]
    torch.testing.assert_close(context.predict("Who came?", "NOBODY.")[0], logits, rtol=1e-9, atol=1e-9)


def test_the_rest_of_the_text_is_compressed_to_what_they_leave(parts):
    model, tokenizer, _ = parts
    context = compress(model, tokenizer, TEXT, method="knorm", retention=0.3, protect=[RULE])
    encoded, protected = encode_context(tokenizer, TEXT), protected_tokens(tokenizer, TEXT, [RULE])
    prompt = read_prompt(model, torch.tensor([encoded]))
    rest = [place for place in range(len(encoded)) if place not in protected]
    count = int(0.3 * len(encoded) - len(protected) + 1e-6)
    for heads, layer in zip(kept_positions(context, prompt), prompt, strict=True):
        scores = -layer.key[0].norm(dim=-1)
        for own, score in zip(heads, scores, strict=True):
            best = sorted(rest, key=lambda place: -float(score[place]))[:count]
            assert own == set(best) | set(protected)


@pytest.mark.slow
@settings(max_examples=20)
@given(
    tokens=st.integers(100, 400),
    memory=st.sampled_from([0.06, 0.1, 0.2, 0.4, 0.8, 0.95]),
    method=st.sampled_from(METHODS),
    part=st.floats(0.01, 1.1),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_memory_budget_holds_them_in_its_best_precision(tokens, memory, method, part, seed, dtype):
    model = tiny_llama(dtype=dtype, max_position_embeddings=2048)
    text = ids(1, tokens, seed)[0].tolist()
    options = {"method": method, "policy": uneven_policy(model) if method.startswith("lkv") else None, "memory": memory}
    best = max(1, int(tokens * memory * part))
    protected = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[:best].sort().values.tolist()
    # In 8 bits k and v with their norms; in the model's dtype where the budget has the whole text in more than that.
    entry = 20 if 16 * memory < 10 else 16 * dtype.itemsize
    allowed = memory * tokens * 16 * 2
    if (len(protected) + 1) * entry + 32 > allowed:
        with pytest.raises(PromptError, match="the protected spans have"):
            compress_ids(
                model, Words(), text, CompressionRequest(protected=(*range(int(allowed / entry) + 1),), **options)
            )
        return
    context = compress_ids(model, Words(), text, CompressionRequest(protected=tuple(protected), **options))
    assert context.nbytes() <= memory * context.full_nbytes() * 2 / dtype.itemsize
    for layer, whole in zip(context.cache.ragged_layers, read_prompt(model, torch.tensor([text])), strict=True):
        store = layer.store.restore() if hasattr(layer.store, "restore") else layer.store
        for head, values in enumerate(whole.value[0].float()):
            own = head_entries(store, 0, head)[1].float()
            expected = values[protected]
            error = (own[None] - expected[:, None]).norm(dim=-1).amin(1) / expected.norm(dim=-1)
            bits = layer.store.tiers[0].precision.value_bits if memory < 0.5 and hasattr(layer.store, "tiers") else 8
            assert (error < {8: 0.02, 4: 0.15}[bits]).all()


def test_the_rest_has_the_precisions_of_the_whole_text_and_the_context_can_be_saved(tmp_path):
    """The whole text has 2.35 bits a value, what the protected tokens leave 1.5: other precisions on their own."""
    model = tiny_llama(dtype=torch.bfloat16, max_position_embeddings=2048)
    text = ids(1, 300)[0].tolist()
    context = compress_ids(
        model, Words(), text, CompressionRequest(method="knorm", memory=0.15, protected=tuple(range(30)))
    )
    assert context.nbytes() <= 0.15 * context.full_nbytes()
    stores = [layer.store for layer in context.cache.ragged_layers]
    assert {store.precisions for store in stores} == {(Precision(8, 8), Precision(4, 4))}
    context.save(tmp_path / "text.kv")
    loaded = Context.load(tmp_path / "text.kv", model, Words())
    assert loaded.ask("what is one ?", 6) == context.ask("what is one ?", 6)


def test_spans_are_found_by_words_and_by_characters_wherever_they_are(parts):
    _, tokenizer, _ = parts
    text = "Être bref. Ask Zoë. Ask no one."

    def words(spans, system=None):
        encoded = encode_context(tokenizer, text, system)
        return [encoded[place] for place in protected_tokens(tokenizer, text, spans, system)]

    def ids_of(*parts):
        return [number for part in parts for number in tokenizer(part)["input_ids"]]

    assert words(["Zoë"]) == words([(np.int64(15), 18)]) == words([(15, 18)]) == ids_of("Zoë")
    assert words(["Ask"]) == ids_of("Ask", "Ask") and words([(0, 4), "no one."]) == ids_of("Être", "no one.")
    assert words(["Be brief.", "Zoë"], system="Be brief.") == ids_of("Be brief.", "Zoë")
    assert words([]) == []
    plain = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    assert protected_tokens(plain, "abc", ["c"]) == [2]


@pytest.mark.parametrize("strip", ["", "|trim"])
@pytest.mark.parametrize("system", ["Be brief.", " an apple", "bees"])
def test_a_system_prompt_is_found_behind_the_same_words_of_the_template(parts, system, strip):
    tokenizer = AutoTokenizer.from_pretrained(parts[1].name_or_path)
    header = f"{system} Do as the system says: {system}: "
    tokenizer.chat_template = (
        header + "{% for m in messages %}[{{ m.role }}]{{ m.content" + strip + " }}</s>{% endfor %}"
    )
    start = len(header) + len("[system]") + (0 if strip else len(system) - len(system.lstrip()))
    found = protected_tokens(tokenizer, "Nobody came.", [system.strip()], system)
    assert found == list(range(start, start + len(system.strip())))  # a token a byte


def test_a_system_prompt_stays_in_a_chat_and_in_a_saved_context(parts, tmp_path):
    model, tokenizer, policy = parts
    options = {"policy": policy, "retention": 0.3, "system": RULE.strip()}
    context = compress(model, tokenizer, TEXT, protect=["The lamp", RULE.strip()], **options)
    places = protected_tokens(tokenizer, TEXT, [RULE.strip()], RULE.strip())
    kept = kept_positions(context, read_prompt(model, torch.tensor([context.ids])))
    assert len(places) == 2 * len(RULE.strip()) and all(set(places) <= own for heads in kept for own in heads)
    context.save(tmp_path / "text.kv")
    loaded = Context.load(tmp_path / "text.kv", model, tokenizer)
    assert loaded.metadata == context.metadata and loaded.metadata["protected_tokens"] == len(places) + 4 * 8
    assert Chat(loaded).ask("Who?", 6) == Chat(context).ask("Who?", 6) == context.ask("Who?", 6)


@pytest.mark.parametrize(
    ("protect", "says"),
    [
        ("The lamp", "give a list"), (5, "give a list"), ([""], "is empty"), ([" \n"], "is empty"),
        ([(3, 3)], "is empty"),
        ([(5, 2)], "is empty or outside"), ([(-1, 2)], "outside of the text"), ([(0, 10**6)], "outside of the text"),
        (["the moon"], "does not contain 'the moon'"), ([5], "is neither"), ([(1, 2.5)], "is neither"),
        ([(0, 8), (4, 12)], "overlap at 'lamp'"), (["The lamp", "lamp was"], "overlap at 'lamp'"),
        (["lit", "lit"], "overlap at 'lit'"), ([(0, len(TEXT) - 1)], "the protected spans have"),
    ],
)  # fmt: skip
def test_bad_spans_get_one_sentence(parts, protect, says):
    model, tokenizer, policy = parts
    with pytest.raises(PromptError, match=r"^[^\n]+$") as found:
        compress(model, tokenizer, TEXT, policy=policy, retention=0.2, protect=protect)
    assert says in str(found.value)


def test_what_cannot_keep_them_says_so(parts):
    model, tokenizer, policy = parts
    for options, says in (
        ({"method": "full"}, "'full' keeps everything; leave protect out"),
        ({"method": resolve_method("knorm", model)}, "has a budget of its own, which counts no protected tokens"),
        ({"policy": policy, "streaming": True, "chunk": 50}, "streaming cannot keep protected spans yet"),
        ({"policy": policy, "decode_eviction": True}, "decode eviction cannot keep protected spans yet"),
    ):
        with pytest.raises(CacheError, match=says):
            compress(model, tokenizer, TEXT, protect=[RULE], **options)
    with pytest.raises(PromptError, match="characters of each token, which Words does not tell"):
        compress(model, Words(), TEXT, method="knorm", protect=[RULE])
    with pytest.raises(LkvError, match=r"token 500 is protected, but the prompt has 90; give less\."):
        compress_ids(model, tokenizer, list(range(3, 93)), CompressionRequest(method="knorm", protected=(500,)))


def test_a_word_that_is_everywhere_is_found_without_comparing_all_tokens_with_all_places(parts):
    _, tokenizer, _ = parts
    text = "a " * 20_000
    began = time.process_time()
    found = protected_tokens(tokenizer, text, ["a"])
    assert time.process_time() - began < 5  # comparing all takes minutes
    encoded = encode_context(tokenizer, text)
    start = len(encoded) - len(text)
    assert found == list(range(start, start + len(text), 2))


def test_a_word_that_is_everywhere_and_named_again_and_again_takes_no_memory(parts):
    _, tokenizer, _ = parts
    tracemalloc.start()
    try:
        with pytest.raises(PromptError, match="protected spans overlap at '-'"):
            protected_tokens(tokenizer, "-" * 20_000, ["-"] * 64)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20  # all places of all spans take 200 MiB
    finally:
        tracemalloc.stop()
