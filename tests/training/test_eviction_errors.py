"""What evicting a token changes, against a model that is run without it in float64."""

import pytest
import torch

from lkv.errors import PromptError
from lkv.hf.attention import unpatch_attention
from lkv.hf.loading import load_model
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.replay import REQUEST
from lkv.training.warm_start import measure_eviction_errors
from lkv.utils.prompts import encode_question
from tests.conftest import save_model
from tests.training.fit.helpers import ids


@torch.no_grad()
def expected_errors(model, tokenizer, context: list[int]) -> torch.Tensor:
    """The errors [L, H, T] by attention without each token, from the stock model over the text and its repetition."""
    tokens = len(context)
    sequence = torch.tensor([context + encode_question(tokenizer, REQUEST) + context])
    model.double()
    model.set_attn_implementation("eager")
    out = model(sequence, output_attentions=True, output_hidden_states=True)
    errors = []
    for layer, block in enumerate(model.model.layers):
        value, attention = out.past_key_values.layers[layer].values[0], out.attentions[layer][0, :, tokens:]
        heads, groups = attention.shape[0], attention.shape[0] // value.shape[0]
        weights = block.self_attn.o_proj.weight.unflatten(1, (heads, -1))
        hidden = out.hidden_states[layer][0, tokens:].square().sum(-1).mean()
        table = torch.zeros(value.shape[0], tokens, dtype=torch.float64)
        for head in range(heads):
            values, projection = value[head // groups], weights[:, head]
            for token in range(tokens):
                without = attention[head].clone()
                without[:, token] = 0
                without /= without.sum(-1, keepdim=True)
                difference = (attention[head] @ values - without @ values) @ projection.T
                table[head // groups, token] += difference.square().sum(-1).mean() / hidden
        errors.append(table.sqrt())
    return torch.stack(errors)


def test_the_error_of_a_token_is_that_of_attention_without_it(tmp_path):
    model, tokenizer = load_model(str(save_model(tmp_path)), torch.float32)
    context = ids(1, 150)
    prompt = read_prompt(model, torch.tensor([context]))
    errors = measure_eviction_errors(model, tokenizer, context, prompt)
    unpatch_attention(model)
    expected = expected_errors(model, tokenizer, context)
    assert errors.shape == (len(prompt), 1, *expected.shape[1:])
    assert errors[:, 0].double() == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert expected.max() > 20 * expected.median(), "all tokens count alike: the test would show nothing"


def test_a_bias_of_the_output_projection_changes_nothing(tmp_path):
    model, tokenizer = load_model(str(save_model(tmp_path, attention_bias=True)), torch.float32)
    context = ids(2, 40)
    prompt = read_prompt(model, torch.tensor([context]))
    last = model.model.layers[-1].self_attn.o_proj
    with torch.no_grad():
        last.bias.zero_()
        before = measure_eviction_errors(model, tokenizer, context, prompt)
        last.bias.fill_(3.0)
        after = measure_eviction_errors(model, tokenizer, context, prompt)
    assert torch.allclose(before, after, rtol=1e-4)


def test_a_text_that_cannot_be_read_twice_is_refused(tmp_path):
    model, tokenizer = load_model(str(save_model(tmp_path, max_position_embeddings=128)), torch.float32)
    context = ids(3, 100)
    prompt = read_prompt(model, torch.tensor([context]))
    with pytest.raises(PromptError, match="reads at most 128"):
        measure_eviction_errors(model, tokenizer, context, prompt)
