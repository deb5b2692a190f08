"""Models with capped attention scores (Gemma-2) in the parts of LKV that the tests of families do not reach."""

import pytest
import torch
from transformers import DynamicCache

from lkv.cache.ragged_cache import RaggedCache
from lkv.cache.tiered_store import TieredStore
from lkv.context.compression import compress
from lkv.errors import UnsupportedModelError
from tests.cache.helpers import ids
from tests.context.test_compression import TEXT, Words
from tests.families import CAPPED, build
from tests.hf.test_attention_sinks import FULL, gpt_oss, logits_of


def gemma2(dtype: torch.dtype = torch.float32, **changes):
    """A tiny random model without sliding windows, most of whose scores are capped."""
    return build("Gemma2", dtype, **CAPPED, layer_types=FULL, **changes).requires_grad_(False)


@pytest.mark.parametrize(("options", "tolerance"), [({}, 1e-4), ({"bits": 8}, 0.1)], ids=str)
def test_everything_kept_equals_the_stock_model(options, tolerance):
    """With the compiled kernel, also over tiers, whose keys are not centred: that would change capped scores."""
    model, text = gemma2(), ids(2, 46)
    stock = logits_of(model, DynamicCache(config=model.config), text, 40)
    cache = RaggedCache(model, method="knorm", retention=1.0, **options)
    ours = logits_of(model, cache, text, 40)
    assert float((ours - stock).abs().max()) < tolerance * float(stock.abs().max())
    plain = gemma2()
    for layer in plain.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    without = logits_of(plain, DynamicCache(config=plain.config), text, 40)
    assert float((without - stock).abs().max()) > 0.3 * float(stock.abs().max())  # the cap matters here
    store = cache.ragged_layers[0].store
    assert isinstance(store, TieredStore) is bool(options)
    if isinstance(store, TieredStore):
        assert not store.basis.tensor[0].any() and store.basis.tensor[1].all()


@pytest.mark.parametrize("build_model", [gemma2, gpt_oss])
@pytest.mark.parametrize("method", ["kvzip", "expected", "criticalkv", "snapkv+compensation"])
def test_methods_compress_and_contexts_answer_in_batches(build_model, method):
    model = build_model(torch.float32)
    questions = ["what is one ?", "where is two ?"]
    text = " ".join([TEXT] * 4)
    context = compress(model, Words(), text, method=method, retention=0.4)
    answers = [context.ask(question, max_new_tokens=6, eos_token_id=None) for question in questions]
    assert context.batch_ask(questions, 6, eos_token_id=None) == answers


def test_what_would_leave_the_cap_out_is_refused():
    model = build("Gemma2", attn_logit_softcapping=1.0, layer_types=FULL)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedModelError, match="caps attention scores, which the implementation 'sdpa' leaves"):
        RaggedCache(model, method="knorm")
    ignores = build("Gemma3", attn_logit_softcapping=1.0, attn_implementation="eager")
    with pytest.raises(
        UnsupportedModelError, match=r"does not cap attention scores at 1\.0, as its configuration says"
    ):
        ignores(ids(1, 9), past_key_values=RaggedCache(ignores, method="knorm", retention=0.5))
