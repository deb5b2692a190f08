"""Texts beyond max_position_embeddings under YaRN, and the change of LongRoPE's frequencies."""

import pytest
import torch
from transformers import Qwen3Config

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress_ids
from lkv.errors import PromptError
from lkv.hf.positions import max_positions
from lkv.hf.spec import inspect_model
from lkv.methods.request import CompressionRequest
from lkv.utils.prompts import encode_question
from tests.cache.helpers import ids
from tests.context.test_compression import Words
from tests.families import SHAPE, build, longrope_model

TEXT = list(range(3, 53)) * 2
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@torch.no_grad()
def test_yarn_reads_texts_beyond_max_position_embeddings():
    """As Qwen3's model card enables it: `max_position_embeddings` stays as it was."""
    model = build("Qwen3", max_position_embeddings=64, rope_parameters=YARN)
    assert inspect_model(model).max_positions == 256
    context = compress_ids(model, Words(), TEXT, CompressionRequest(method="knorm", retention=1.0))
    logits, answer = context.predict("what is one ?", "so it is")
    whole = TEXT + encode_question(Words(), "what is one ?") + answer.tolist()
    stock = model(torch.tensor([whole]), use_cache=False).logits[0, -4:-1]
    torch.testing.assert_close(logits, stock, atol=1e-9, rtol=1e-9)
    assert len(context.complete([5, 9, 7], 20, eos_token_id=None)) == 20
    with pytest.raises(PromptError, match="has 300 tokens, but the model reads at most 256"):
        compress_ids(model, Words(), TEXT * 3, CompressionRequest(method="knorm", retention=1.0))


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({}, 512),
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        (YARN, 512),  # has been extended by the configuration itself
        (YARN | {"original_max_position_embeddings": 256}, 1024),
    ],
)
def test_only_yarn_extends_the_positions(rope, limit):
    assert max_positions(Qwen3Config(**SHAPE, rope_parameters={"rope_theta": 10000.0} | rope)) == limit


@pytest.mark.parametrize(
    "options", [{"method": "full"}, {"method": "knorm"}, {"method": "knorm", "streaming": True, "retention": 0.5}]
)
@torch.no_grad()
def test_a_text_beyond_longropes_change_is_not_read_in_parts(options):
    """The first parts would be rotated with the short factors, the others with the long ones."""
    model = longrope_model()
    with pytest.raises(PromptError, match=r"beyond 64 tokens .* \(LongRoPE\) changes, and 32 of 100 tokens"):
        compress_ids(model, Words(), TEXT, CompressionRequest(chunk=32, **options))
    assert compress_ids(model, Words(), TEXT[:64], CompressionRequest(chunk=32, **options)).tokens == 64
    # All parts of which the first is longer than that have the long factors.
    context = compress_ids(model, Words(), TEXT, CompressionRequest(chunk=65, **{"retention": 1.0} | options))
    if "streaming" not in options:
        question = torch.tensor([[5, 9, 7]])
        stock = model(torch.cat([torch.tensor([TEXT]), question], 1), use_cache=False).logits[:, -3:]
        with context.working_cache() as cache:
            logits = model(question, past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(logits, stock, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("method", ["full", "knorm"])
@torch.no_grad()
def test_a_question_beyond_longropes_change_is_refused(method):
    context = compress_ids(longrope_model(), Words(), TEXT[:50], CompressionRequest(method=method, retention=1.0))
    context.predict("yes ?", "so")
    with pytest.raises(PromptError, match="beyond 64 tokens this model's rotary embedding"):
        context.predict("and then " * 10, "so it is")


@pytest.mark.parametrize("method", ["full", "knorm"])
def test_an_answer_ends_where_longropes_change_begins(method):
    model, question = longrope_model(), [5, 9, 7]
    context = compress_ids(model, Words(), TEXT[:50], CompressionRequest(method=method, retention=1.0))
    # 64 tokens are read, and the last one of an answer is not.
    assert len(context.complete(question, eos_token_id=None)) == 12
    assert [len(ids) for ids in context.batch_complete([question, question * 2], eos_token_id=None)] == (
        [12, 9] if method == "full" else [9, 9]
    )
    with pytest.raises(
        PromptError, match=r"would reach 65 tokens, but beyond 64 .* \(LongRoPE\) changes; ask for at most 12"
    ):
        context.complete(question, 13)
    longer = compress_ids(model, Words(), TEXT[:70], CompressionRequest(method=method, retention=1.0))
    assert len(longer.complete(question, 20, eos_token_id=None)) == 20


@torch.no_grad()
def test_a_forward_pass_across_longropes_change_is_refused():
    model = longrope_model()
    cache = RaggedCache(model, method="knorm", retention=0.5)
    model(ids(1, 60), past_key_values=cache, use_cache=True)
    with pytest.raises(PromptError, match="beyond 64 tokens this model's rotary embedding"):
        model(ids(1, 5), past_key_values=cache, use_cache=True)
    model(ids(1, 4), past_key_values=cache, use_cache=True)
