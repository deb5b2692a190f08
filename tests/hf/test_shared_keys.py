"""Layers that read the keys and values of an earlier layer (Gemma-4 E2B and E4B): what the tests of families do not."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import CacheError, TrainingError
from lkv.hf.prompt_kv import read_prompt
from lkv.hf.state import has_waiting_layer
from lkv.methods.selectors import H2O
from lkv.training.config import TrainingConfig
from lkv.training.distillation import check_batching
from tests.cache.helpers import METHOD, ids, padded
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.families import MIXED

FAMILY = next(family for family in MIXED if family.variant == "E2B, E4B")
PROMPT = 40
pytestmark = pytest.mark.skipif(bool(FAMILY.missing), reason=FAMILY.missing)


def gemma4(dtype: torch.dtype = torch.float64):
    return FAMILY.build(dtype).requires_grad_(False)


def test_scores_read_the_queries_of_all_layers_that_read_the_entries(monkeypatch):
    model, received = gemma4(), torch.zeros(1, 2, PROMPT, dtype=torch.float64)
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def noted(module, query, key, value, mask, **kwargs):
        if module.layer_idx in (3, 5, 7):  # the second full-attention layer, and those that read its keys
            logits = query @ key.repeat_interleave(2, 1).mT * kwargs["scaling"]
            future = torch.ones(PROMPT, PROMPT, dtype=torch.bool).triu(1)
            weights = logits.masked_fill(future, -torch.inf).softmax(-1)
            received.add_(weights.sum(2).unflatten(1, (2, 2)).sum(2) / 6)
        return stock(module, query, key, value, mask, **kwargs)

    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", noted)
        model(ids(1, PROMPT), use_cache=False)
    prompt = read_prompt(model, ids(1, PROMPT), queries=True)
    assert [layer.query.shape[1] for layer in prompt] == [4, 12]
    torch.testing.assert_close(H2O().scores(1, prompt[1]), received, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("method", ["h2o", "tova", "expected", "knorm"])
def test_generate_evicts_as_a_prompt_that_was_read_before(method):
    """In chunks, too, though generate() asks for the last token's logits only."""
    model, text = gemma4(), ids(1, PROMPT)
    prompt = read_prompt(model, text, queries=True)
    outs, kept = [], []
    for options in ({}, {"prefill_chunk_size": 13}):
        cache = RaggedCache(model, method=method, retention=0.4, prompt_tokens=PROMPT)
        outs.append(model.generate(text, past_key_values=cache, max_new_tokens=5, eos_token_id=None, **options))
        for layer in cache.ragged_layers:
            layer.crop(-layer.store.appended_tokens)
        kept.append([layer.store.pack() for layer in cache.ragged_layers])
    read = RaggedCache(model, method=method, retention=0.4)
    for own, part in zip(read.ragged_layers, prompt, strict=True):
        own.fill(part)
    kept.append([layer.store.pack() for layer in read.ragged_layers])
    assert torch.equal(*outs)
    for other in kept[1:]:
        for pair in zip(kept[0], other, strict=True):
            for ours, theirs in zip(*pair, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_later_turns_with_padding_equal_each_row_alone():
    model, texts, turn = gemma4(), [ids(1, PROMPT), ids(1, PROMPT - 7, 1)], ids(2, 5, 2)
    cache, batch = RaggedCache(model, method=METHOD), padded(texts)
    mask = torch.cat([batch["attention_mask"], torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])], 1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    model(**batch, position_ids=places[:, :PROMPT], past_key_values=cache, use_cache=True)
    options = {"attention_mask": mask, "position_ids": places[:, PROMPT:]}
    together = model(turn, **options, past_key_values=cache, use_cache=True).logits
    first = RaggedCache(model, method=METHOD)
    model(texts[0], past_key_values=first, use_cache=True)
    alone = model(turn[:1], past_key_values=first, use_cache=True).logits
    torch.testing.assert_close(together[:1], alone, atol=1e-9, rtol=1e-9)
    assert together[1, 2:].isfinite().all()


@pytest.mark.parametrize(
    ("method", "amount"),
    [("kvzip", {"memory": 0.4}), ("snapkv+compensation", {"retention": 0.5}), ("criticalkv", {"retention": 0.5})],
    ids=str,
)
def test_contexts_are_asked_saved_and_loaded(method, amount, tmp_path):
    model, text, questions = gemma4(torch.float32), " ".join([TEXT] * 4), ["what is one ?", "and two"]
    context = compress(model, Words(), text, method=method, **amount)
    answers = [context.ask(question, 6, eos_token_id=None) for question in questions]
    assert [context.fork().ask(question, 6, eos_token_id=None) for question in questions] == answers
    assert context.batch_ask(questions, 6, eos_token_id=None) == answers
    context.save(tmp_path / "text.kv")
    loaded = Context.load(tmp_path / "text.kv", model, Words())
    assert [loaded.ask(question, 6, eos_token_id=None) for question in questions] == answers


def test_a_pass_that_failed_is_forgotten_by_the_next_cache():
    model, other = gemma4(), tiny_llama()
    cache = RaggedCache(model, method="tova", retention=0.5)
    with pytest.raises(CacheError):
        model(ids(1, PROMPT), past_key_values=cache, use_cache=True, logits_to_keep=1)
    assert has_waiting_layer()
    other(ids(1, 9), past_key_values=RaggedCache(other, method="knorm", retention=0.5), use_cache=True)
    assert not has_waiting_layer()


def test_what_shared_keys_do_not_allow_is_one_sentence():
    model = gemma4()
    cache = RaggedCache(model, method="tova", retention=0.5)
    with pytest.raises(CacheError, match="computes its later layers for the last ones only: leave logits_to_keep out"):
        model(ids(1, PROMPT), past_key_values=cache, use_cache=True, logits_to_keep=1)
    with pytest.raises(CacheError, match=r"reads the queries of later layers.* end this pass where the prompt ends"):
        model(ids(1, PROMPT), past_key_values=RaggedCache(model, method="tova", retention=0.5, prompt_tokens=30))
    local = RaggedCache(model, method="knorm", retention=1.0, prompt_tokens=30)
    found = model(ids(1, PROMPT), past_key_values=local, use_cache=True, logits_to_keep=1).logits
    torch.testing.assert_close(found, model(ids(1, PROMPT), use_cache=False).logits[:, -1:], atol=1e-9, rtol=1e-9)
    with pytest.raises(TrainingError, match="layers of this model share keys and values; give student 'continuation'"):
        check_batching(TrainingConfig(student="full"), model, 1)
