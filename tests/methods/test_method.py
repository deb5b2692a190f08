"""Methods by name: resolved, run in compress, and against the stock model with a mask; LKV-T's selector."""

import copy

import pytest
import torch

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.errors import LkvError
from lkv.hf.prompt_kv import LayerKV, read_prompt
from lkv.hf.spec import inspect_model
from lkv.methods.registry import METHODS, parse_method
from lkv.methods.selectors import LearnedScores
from lkv.policy.policy import Policy
from tests.conftest import tiny_llama
from tests.context.test_compression import Words
from tests.masked import hidden_from_continuation
from tests.methods.test_kvzip import kvzip
from tests.requests import resolve_method


def by_the_formula(policy, k, v, layer: int) -> torch.Tensor:
    """LKV-T in float64, head by head, from the parameters as the paper has them."""
    mlp = policy.tokens
    scores = torch.empty(k.shape[:3], dtype=torch.float64)
    for head in range(k.shape[1]):
        mean, std, hidden, bias, output = (
            getattr(mlp, name)[layer, head].double() for name in ("mean", "std", "hidden", "bias", "output")
        )
        x = (torch.cat([k[:, head], v[:, head]], -1).double() - mean) / std
        x = x @ hidden + bias
        scores[:, head] = (x / (1 + torch.exp(-x))) @ output
    return scores


def test_a_text_much_longer_than_those_of_the_training_is_warned_of_once(policy):
    known = Policy(policy.spec, {"trained_tokens": 100})
    k = torch.randn(1, 2, 121, 8)
    for layer in range(3):
        LearnedScores(known).scores(layer, LayerKV(k[:, :, :120], k[:, :, :120], 1.0))
        LearnedScores(policy).scores(layer, LayerKV(k, k, 1.0))  # its card does not tell
    with pytest.warns(UserWarning, match=r"trained on texts of up to 100 tokens and may keep the wrong tokens"):
        LearnedScores(known).scores(0, LayerKV(k, k, 1.0))
    LearnedScores(known).scores(1, LayerKV(k, k, 1.0))  # the first layer has said it


@pytest.mark.parametrize("far", [0.0, 100.0])
@pytest.mark.parametrize("batch", [1, 2])
def test_learned_scores_equal_the_formula_within_the_error_of_the_dtype(policy, far, batch):
    """At most twice the error that rounding k and v to the dtype makes, however far their means lie from 0."""
    torch.manual_seed(0)
    shape, mlp = (batch, 2, 3000, 8), policy.tokens
    mlp.mean.normal_().mul_(far)
    mlp.std.uniform_(0.5, 2.0)
    k, v = (
        torch.randn(shape, dtype=torch.float64) * mlp.std[1, :, None, part] + mlp.mean[1, :, None, part]
        for part in (slice(8), slice(8, 16))
    )
    exact = by_the_formula(policy, k, v, 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        near = k.to(dtype), v.to(dtype)
        reference = by_the_formula(policy, *near, 1)
        found = LearnedScores(policy).scores(1, LayerKV(*near, 1.0))
        assert found.dtype == torch.float32 and not found.requires_grad
        error = float((found - reference).abs().mean())
        rounding = by_the_formula(policy, k.float(), v.float(), 1) if dtype == torch.float64 else reference
        assert error <= max(2 * float((rounding - exact).abs().mean()), 2e-7 * (1 + far))
    heads = LearnedScores(policy, slice(1, 2)).scores(1, LayerKV(k[:, 1:], v[:, 1:], 1.0))
    torch.testing.assert_close(heads, LearnedScores(policy).scores(1, LayerKV(k, v, 1.0))[:, 1:])


def test_scoring_a_long_prompt_takes_no_more_memory_than_a_block(policy):
    peaks = {}
    for tokens in (8_192, 32_768):
        k = torch.randn(1, 2, tokens, 8)
        with torch.profiler.profile(profile_memory=True) as profile:
            LearnedScores(policy).scores(1, LayerKV(k, k, 1.0))
        peaks[tokens] = max(event.self_cpu_memory_usage for event in profile.events())
    # 16 values of k and v, 8 of the hidden layer in two precisions; the scores themselves are the rest.
    assert peaks[32_768] <= max(2048 * 2 * 4 * 16 * 2, 32_768 * 2 * 4)
    assert peaks[32_768] < k.untyped_storage().nbytes() / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_policy_works_in_any_dtype(model, policy, dtype):
    rough = copy.deepcopy(policy).to(dtype)
    text = torch.arange(3, 43)[None]
    caches = [RaggedCache(model, policy=given, retention=0.4) for given in (rough, policy)]
    for cache in caches:
        model(text, past_key_values=cache, use_cache=True)
    kept = [sum(map(sum, cache.kept_counts())) for cache in caches]
    assert abs(kept[0] - kept[1]) <= 6


@pytest.mark.parametrize(
    ("name", "missing"),
    [("lkv", "policy"), ("expected", "model"), ("duo", "pattern")],
)
def test_missing_inputs_are_named(name, missing):
    with pytest.raises(LkvError, match=f"the method needs '{missing}', which is missing; pass (the )?{missing}"):
        resolve_method(name)


PATTERN = [[0.2, 0.9], [0.8, 0.1], [0.3, 0.4]]
# Of 450 tokens and 6 heads at R = 0.5, as kvpress's DuoAttention has it: half of the heads whole, a window of the rest.
OF_HEADS = 3 * 450 + 3 * 384


@pytest.mark.parametrize("name", [*METHODS, "uniform+critical-expected", "duo+kvzip", "pyramid+keydiff"])
@torch.no_grad()
def test_every_method_equals_the_stock_model_with_a_mask(name):
    """Later logits are those of the stock model, in float64, to which all that the method did not choose is -inf."""
    spec, of_heads = parse_method(name), name == "duo-kvpress"
    duo = spec.needs_pattern
    model, retention = tiny_llama(max_position_embeddings=1024), (0.5 if of_heads else 0.95) if duo else 0.15
    tokens = 450 if duo else 160
    policy = Policy(inspect_model(model)).requires_grad_(False)
    torch.nn.init.normal_(policy.heads.embeddings, std=20.0)
    pattern = PATTERN if duo else None
    text = " ".join(f"word{number}" for number in range(tokens))
    cache = compress(model, Words(), text, method=name, retention=retention, policy=policy, pattern=pattern).cache

    ids = Words()(text)["input_ids"]
    prompt = read_prompt(model, torch.tensor([ids]), queries=True)
    options = {"retention": retention, "policy": policy, "pattern": pattern}
    if spec.needs_second_pass:
        with pytest.raises(LkvError, match=r"reads the text a second time: use lkv\.compress"):
            resolve_method(name, model, **options)
        method = kvzip(model, Words(), ids, prompt, name=name, **options)
    else:
        method = resolve_method(name, model, **options)
        # What the list of methods says about queries is what the selector says.
        assert ("queries" in spec.needs) == method.selector.reads_queries
        assert resolve_method(method, model) is method
        method = method.for_prompt(ids, prompt)
    assert method.name == name and (method.policy is not None) == spec.needs_policy
    hidden = []
    for layer, whole in enumerate(prompt):
        scores = method.selector.scores(layer, whole)
        counts = method.budget.counts(layer, scores)
        scores = method.selector.refine(layer, whole, scores, counts)
        gone = torch.ones(1, 2, tokens, dtype=torch.bool)
        for head, count in enumerate(counts[0]):
            gone[0, head, scores[0, head].topk(count).indices] = False
        hidden.append(gone)
    kept = [(~gone).sum((0, 2)).tolist() for gone in hidden]
    most = OF_HEADS if of_heads else retention * 6 * tokens
    assert cache.kept_counts() == kept and 0.9 * most < sum(map(sum, kept)) <= most
    later = torch.tensor([[9, 41, 5, 17, 30]])
    mine = [model(later[:, step : step + 1], past_key_values=cache, use_cache=True).logits for step in range(5)]
    with hidden_from_continuation(model, hidden, tokens):
        expected = model(torch.cat([torch.tensor([ids]), later], 1)).logits[:, tokens:]
    torch.testing.assert_close(torch.cat(mine, 1), expected, atol=1e-10, rtol=1e-10)
