"""Texts beyond max_position_embeddings under YaRN, and the change of LongRoPE's frequencies."""

import pytest
import torch
from transformers import Qwen3Config

from lkv.context.compression import compress_ids
from lkv.errors import PromptError
from lkv.integrations.transformers.positions import max_positions
from lkv.integrations.transformers.spec import inspect_model
from lkv.utils.prompts import encode_question
from tests.context.test_compression import Words
from tests.families import SHAPE, build

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@torch.no_grad()
def test_yarn_reads_texts_beyond_max_position_embeddings():
    """As Qwen3's model card enables it: `max_position_embeddings` stays as it was."""
    text, model = list(range(3, 53)) * 2, build("Qwen3", max_position_embeddings=64, rope_parameters=YARN)
    assert inspect_model(model).max_positions == 256
    context = compress_ids(model, Words(), text, method="knorm", retention=1.0)
    logits, ids = context.predict("what is one ?", "so it is")
    whole = text + encode_question(Words(), "what is one ?") + ids.tolist()
    stock = model(torch.tensor([whole]), use_cache=False).logits[0, -4:-1]
    torch.testing.assert_close(logits, stock, atol=1e-9, rtol=1e-9)
    assert len(context.complete([5, 9, 7], 20, eos_token_id=None)) == 20
    with pytest.raises(PromptError, match="has 300 tokens, but the model reads at most 256"):
        compress_ids(model, Words(), text * 3, method="knorm", retention=1.0)


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
