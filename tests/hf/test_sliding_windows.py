"""Models with sliding-window layers, and the full cache of the main families, against the stock model."""

import pytest
import torch
from transformers import DynamicCache

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.context.saved_context import CONTEXT_FILE
from lkv.errors import CacheError, ContextFileError
from lkv.evaluation.comparison import MethodComparison, MethodGrid
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import read_prompt
from lkv.policy.policy import Policy
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import SampleDistillation, hard_mask
from lkv.utils import tensor_file
from tests.cache.helpers import METHOD, ids, padded
from tests.context.test_compression import TEXT, Words
from tests.families import FAMILIES, build


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
@torch.no_grad()
def test_full_retention_equals_the_stock_model(family, dtype, tolerance):
    model, batch = build(family, dtype), padded([ids(1, 40), ids(1, 33, 1)])
    policy = Policy(patch_attention(model).spec).requires_grad_(False)
    outs = [
        model.generate(
            **batch, past_key_values=cache, max_new_tokens=8, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )
        for cache in (DynamicCache(config=model.config), RaggedCache(model, policy=policy, retention=1.0, slack=3))
    ]  # fmt: skip
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    for stock, ours in zip(outs[0].logits, outs[1].logits, strict=True):
        torch.testing.assert_close(ours, stock, atol=tolerance, rtol=tolerance)


@torch.no_grad()
def test_sliding_layers_hold_their_window_and_answers_start_afresh():
    model = build("Gemma3")
    policy = Policy(patch_attention(model).spec).requires_grad_(False)
    assert policy.spec.layers == 3
    context = compress(model, Words(), TEXT, retention=0.3, policy=policy)
    first = context.ask("what is one ?", max_new_tokens=20, eos_token_id=None)
    assert context.ask("what is one ?", max_new_tokens=20, eos_token_id=None) == first
    held = sum(layer.nbytes() for layer in context.cache.ragged_layers)
    # 2 layers, k and v, 2 heads, the window but one token; now and at the end of the text
    assert context.nbytes() - held == context.cache.other_nbytes() == 2 * (2 * 2 * 2 * 11 * 8 * 8)
    with pytest.raises(CacheError, match="lacks the sliding-window or recurrent layers"):
        RaggedCache(model, policy=policy).fill(list(read_prompt(model, ids(1, 20))))


@torch.no_grad()
def test_an_interrupted_pass_over_sliding_layers_is_noticed():
    model, text = build("Gemma3"), ids(1, 46)
    cache = RaggedCache(model, method=METHOD)
    model(text[:, :40], past_key_values=cache, use_cache=True)
    before = cache.fork()
    expected = model(text[:, 40:], past_key_values=cache.fork(), use_cache=True).logits

    def interrupt(layer: int) -> None:
        if layer == 2:  # the first layer of full attention, and the sliding one behind it, are through
            raise KeyboardInterrupt

    cache.on_layer_start = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(text[:, 40:], past_key_values=cache, use_cache=True)
    cache.on_layer_start = None
    with pytest.raises(CacheError, match=r"unequal; call rewind\(\)"):
        model(text[:, 40:], past_key_values=cache, use_cache=True)
    cache.rewind()
    for again in (before, cache):
        assert torch.equal(model(text[:, 40:], past_key_values=again, use_cache=True).logits, expected)


def test_contexts_with_sliding_layers_are_saved_and_asked_again(tmp_path):
    model = build("Gemma3")
    policy = Policy(patch_attention(model).spec).requires_grad_(False)
    for text, name in ((TEXT, "long.kv"), ("word1 word2 word3 word4 word5 word6", "shorter-than-the-window.kv")):
        context = compress(model, Words(), text, retention=0.5, policy=policy)
        context.save(tmp_path / name)
        again = Context.load(tmp_path / name, model, Words())
        expected, _ = context.predict("what is one ?", "so it is")
        assert torch.equal(again.predict("what is one ?", "so it is")[0], expected)
        assert again.ask("what is one ?", 20, eos_token_id=None) == context.ask("what is one ?", 20, eos_token_id=None)
        assert again.nbytes() <= context.nbytes()


@pytest.mark.parametrize("damage", ["missing", "shape", "another"])
def test_damaged_sliding_layers_are_one_sentence(tmp_path, damage):
    model = build("Gemma3")
    context = compress(
        model, Words(), TEXT, retention=0.3, policy=Policy(patch_attention(model).spec).requires_grad_(False)
    )
    context.save(tmp_path / "text.kv")
    tensors, about = tensor_file.read(tmp_path / "text.kv", CONTEXT_FILE)
    if damage == "missing":
        del tensors["sliding_v.1"]
    elif damage == "shape":
        tensors["sliding_k.1"] = tensors["sliding_k.1"][:, :, 1:].clone()
    else:
        tensors["sliding_k.2"] = tensors.pop("sliding_k.1")
    tensor_file.write(tmp_path / "text.kv", CONTEXT_FILE, tensors, about)
    with pytest.raises(ContextFileError, match="does not hold a whole context"):
        Context.load(tmp_path / "text.kv", model, Words())


@pytest.mark.parametrize("tokens", [40, 7])
def test_teacher_and_student_of_a_model_with_sliding_layers(tokens):
    """The teacher is the stock model over the whole text, the hard-masked student what the cache computes."""
    model = build("Gemma3")
    torch.manual_seed(3)
    policy = Policy(patch_attention(model).spec).requires_grad_(False)
    text, continuations = ids(1, tokens), [(ids(1, 20, 1)[0].tolist(), 4), (ids(1, 15, 2)[0].tolist(), 0)]
    run = SampleDistillation(model, TokenizedSample("random", text[0].tolist(), continuations))
    whole = [torch.cat([text, torch.tensor([row])], 1) for row, _ in continuations]
    starts = [tokens + max(0, skip - 1) for _, skip in continuations]
    stock = [model(row, use_cache=False).logits[0, start:-1] for row, start in zip(whole, starts, strict=True)]
    assert_rows(run.run(None).log_probs, stock)
    student = run.run(hard_mask(policy, run.scores(policy), 0.5, 2))
    cached = []
    for (row, _), start in zip(continuations, starts, strict=True):
        cache = RaggedCache(model, policy=policy, retention=0.5)
        model(text, past_key_values=cache, use_cache=True)
        logits = model(torch.tensor([row]), past_key_values=cache, use_cache=True).logits[0]
        cached.append(logits[start - tokens : -1])
    assert_rows(student.log_probs, cached)


def assert_rows(found: torch.Tensor, logits: list[torch.Tensor]) -> None:
    expected = torch.log_softmax(torch.cat(logits).float(), -1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_methods_are_compared_and_kvzip_reads_twice_on_a_model_with_sliding_layers():
    model, text = build("Gemma3"), ids(1, 60)
    policy = Policy(patch_attention(model).spec).requires_grad_(False)
    grid = MethodGrid(model, Words(), ["lkv", "kvzip", "knorm"], [0.3], policy)
    prompt = read_prompt(model, text, queries=True)
    rows, skipped = grid.bind(text[0].tolist(), prompt)
    run = MethodComparison(model, text[0].tolist(), prompt, [row.method for row in rows])
    continuation = ids(1, 20, 1)
    found = run.predict(continuation[0].tolist(), 5)
    assert torch.equal(run.predict(continuation[0].tolist(), 5).logits, found.logits) and not skipped
    stock = model(torch.cat([text, continuation], 1)).logits[:, 64:-1]
    torch.testing.assert_close(found.logits[:1], stock, atol=1e-6, rtol=1e-6)
    for place, row in enumerate(rows[1:], 1):
        cache = RaggedCache(model, method=row.method)
        model(text, past_key_values=cache, use_cache=True)
        alone = model(continuation[:, :-1], past_key_values=cache, use_cache=True).logits[:, 4:]
        torch.testing.assert_close(found.logits[place : place + 1], alone, atol=1e-6, rtol=1e-6)
    assert len(run.generate([5, 6], 6)) == len(rows)
