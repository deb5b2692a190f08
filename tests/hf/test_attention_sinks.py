"""Models with attention sinks (gpt-oss): one more logit a head, against transformers' own softmax over it."""

import pytest
import torch
import transformers
from transformers import DynamicCache

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import UnsupportedModelError
from lkv.hf.attention import patch_attention
from lkv.kernels.ragged_attention import join_sinks, masked_attention
from tests.cache.helpers import METHOD, ids, padded
from tests.context.test_compression import TEXT, Words
from tests.families import SHAPE

FULL = ["full_attention"] * 3


def gpt_oss(dtype: torch.dtype = torch.float64, layer_types: list[str] = FULL):
    """A tiny random model, by default without sliding windows, whose sinks take about half of the attention."""
    torch.manual_seed(0)
    # Both experts for every token: the choice of one could turn over by rounding.
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}}
    config = transformers.GptOssConfig(**SHAPE | experts, sliding_window=12, layer_types=layer_types)
    model = transformers.GptOssForCausalLM(config)
    model.set_experts_implementation("eager")  # the fused one knows no float64
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=3.0)
    return model.to(dtype).eval().requires_grad_(False)


def test_a_sink_is_one_more_logit_without_a_value():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 7, 8, dtype=torch.float64) for heads in (4, 2, 2))
    sinks, visible = torch.randn(4, dtype=torch.float64), torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    logits = query @ key.repeat_interleave(2, 1).mT
    logits = torch.cat([logits.masked_fill(~visible, -torch.inf), sinks[:, None, None].expand(2, 4, 7, 1)], -1)
    expected = torch.softmax(logits, -1)[..., :-1] @ value.repeat_interleave(2, 1)
    out, lse = masked_attention(query, key, value, visible, 1.0)
    torch.testing.assert_close(join_sinks(out, lse, sinks), expected, atol=1e-12, rtol=1e-12)
    assert join_sinks(out.bfloat16(), lse, sinks).dtype == torch.bfloat16
    assert bool((join_sinks(out, torch.full_like(lse, -torch.inf), sinks) == 0).all())
    with pytest.raises(ValueError, match=r"sinks \[Hq\], but got \[2, 4, 7, 8\], \[2, 4, 7\] and \[3\]"):
        join_sinks(out, lse, sinks[:3])


def logits_of(model, cache, text: torch.Tensor, prompt: int) -> torch.Tensor:
    """Of what follows the prompt, read token by token and then at once."""
    model(text[:, :prompt], past_key_values=cache, use_cache=True)
    parts = [text[:, prompt : prompt + 1], text[:, prompt + 1 : prompt + 2], text[:, prompt + 2 :]]
    return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in parts], 1)


@pytest.mark.parametrize("layer_types", [FULL, ["sliding_attention", "full_attention", "sliding_attention"]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "options", "tolerance"),
    [
        (torch.float64, {}, 1e-9),
        (torch.float32, {}, 1e-3),  # with the compiled kernel
        (torch.float32, {"bits": 8}, 0.1),
        (torch.float64, {"streaming": True, "prompt_tokens": 40}, 1e-9),
    ],
    ids=["float64", "float32", "8 bits", "streaming"],
)
def test_everything_kept_equals_the_stock_model(layer_types, dtype, options, tolerance):
    model, text = gpt_oss(dtype, layer_types), ids(2, 46)
    stock = logits_of(model, DynamicCache(config=model.config), text, 40)
    for slack in (0, 2):
        cache = RaggedCache(model, method="knorm", retention=1.0, slack=slack, **options)
        ours = logits_of(model, cache, text, 40)
        assert float((ours - stock).abs().max()) < tolerance * float(stock.abs().max())
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-torch.inf)
    without = logits_of(model, DynamicCache(config=model.config), text, 40)
    assert float((without - stock).abs().max()) > 0.3 * float(stock.abs().max())  # the sinks matter here


def test_padded_rows_and_later_turns_equal_each_row_alone():
    model, texts = gpt_oss(), [ids(1, 40), ids(1, 33, 1)]
    cache, turn = RaggedCache(model, method=METHOD), ids(2, 5, 2)
    batch = padded(texts)
    mask = torch.cat([batch["attention_mask"], torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])], 1)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    model(**batch, position_ids=places[:, :40], past_key_values=cache, use_cache=True)
    together = model(
        turn, attention_mask=mask, position_ids=places[:, 40:], past_key_values=cache, use_cache=True
    ).logits
    for row, (text, first) in enumerate(zip(texts, (0, 2), strict=True)):
        alone = RaggedCache(model, method=METHOD)
        model(text, past_key_values=alone, use_cache=True)
        single = model(turn[row : row + 1, first:], past_key_values=alone, use_cache=True).logits
        torch.testing.assert_close(together[row, first:], single[0], atol=1e-9, rtol=1e-9)


def test_contexts_answer_in_batches_and_from_files(tmp_path):
    model, questions = gpt_oss(torch.float32), ["what is one ?", "where is two ?"]
    context = compress(model, Words(), TEXT, method="tova", retention=0.4)
    answers = [context.ask(question, max_new_tokens=6, eos_token_id=None) for question in questions]
    assert context.batch_ask(questions, 6, eos_token_id=None) == answers
    context.save(tmp_path / "text.kv")
    again = Context.load(tmp_path / "text.kv", model, Words())
    assert [again.ask(question, max_new_tokens=6, eos_token_id=None) for question in questions] == answers


def test_sinks_of_another_shape_are_refused():
    other = gpt_oss()
    for layer in other.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UnsupportedModelError, match="has attention sinks that are not one number a query head"):
        patch_attention(other)
