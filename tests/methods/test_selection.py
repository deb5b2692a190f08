"""SnapKV against its definition written out with loops; budgets against the floor of r t."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lkv.cache.ragged_cache import RaggedCache
from lkv.cli.main import main
from lkv.context.context import compress
from lkv.errors import LkvError, PromptError
from lkv.integrations.transformers.prefill import LayerKV, read_prompt
from lkv.integrations.transformers.spec import inspect_model
from lkv.methods.budgets import PerHead, Uniform
from lkv.methods.method import resolve_method
from lkv.methods.registry import METHODS, parse_method, selectors
from lkv.methods.selectors import LearnedScores, SnapKV
from lkv.policy.policy import Policy
from tests.conftest import tiny_llama
from tests.context.test_compression import Words
from tests.oracle import hidden_from_continuation
from tests.second_pass import kvzip


def test_snapkv_equals_its_definition():
    torch.manual_seed(0)
    tokens, window, kernel = 20, 4, 5
    query = torch.randn(1, 4, tokens, 8, dtype=torch.float64)
    key = torch.randn(1, 2, tokens, 8, dtype=torch.float64)
    scores = SnapKV(window, kernel).scores(0, LayerKV(key, key, 0.3, query))
    for head in range(2):
        pooled = torch.zeros(2, tokens - window, dtype=torch.float64)
        for group in range(2):
            received = torch.zeros(tokens - window, dtype=torch.float64)
            for row in range(tokens - window, tokens):
                logits = key[0, head, : row + 1] @ query[0, 2 * head + group, row] * 0.3
                received += torch.softmax(logits, 0)[: tokens - window] / window
            padded = torch.cat([torch.zeros(2), received, torch.zeros(2)])
            pooled[group] = torch.stack([padded[i : i + kernel].mean() for i in range(tokens - window)])
        torch.testing.assert_close(scores[0, head, : tokens - window].double(), pooled.mean(0), atol=1e-6, rtol=1e-5)
        assert float(scores[0, head, -window:].min()) > float(scores[0, :, : tokens - window].max())


def test_snapkv_names_a_prompt_that_is_too_short():
    with pytest.raises(PromptError, match="the prompt has 10 tokens, but SnapKV observes the last 64"):
        SnapKV().scores(0, LayerKV(*[torch.zeros(1, 2, 10, 8)] * 2, 1.0, torch.zeros(1, 2, 10, 8)))


def test_learned_scores_are_the_same_in_blocks(policy):
    k, v = torch.randn(1, 2, 5000, 8), torch.randn(1, 2, 5000, 8)
    torch.testing.assert_close(
        LearnedScores(policy).scores(1, LayerKV(k, v, 1.0, k)), policy.tokens(LayerKV(k, v, 1.0), 1)
    )


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
    with pytest.warns(UserWarning, match=r"trained on texts of up to 100 tokens and may keep the wrong ones"):
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


@given(st.floats(0.001, 1.0), st.integers(1, 5000))
def test_uniform_budget_is_the_floor(retention, tokens):
    (count, _), *_ = Uniform(retention).counts(0, torch.empty(1, 2, tokens))
    assert abs(count - retention * tokens) < 1 and count <= retention * tokens + 1e-5


def test_per_head_budgets_are_read_by_layer():
    assert PerHead([[0.0, 1.0], [0.5, 0.15]]).counts(1, torch.empty(1, 2, 4000)) == [[2000, 600]]


@pytest.mark.parametrize("name", [*METHODS, "duo+snapkv", "pyramid+keydiff", "ada+h2o"])
def test_methods_are_found_by_name(name, model, policy):
    spec = parse_method(name)
    options = {"retention": 0.15, "policy": policy, "pattern": [[0.1, 0.9]] * 3 if spec.needs_pattern else None}
    if spec.needs_second_pass:
        with pytest.raises(LkvError, match=r"reads the text a second time: use lkv\.compress"):
            resolve_method(name, model, **options)
        return
    method = resolve_method(name, model, **options)
    assert method.name == name and method.target.retention == 0.15
    assert (method.policy is not None) == spec.needs_policy
    # What the list of methods says about queries is what the selector says.
    assert ("queries" in spec.needs) == method.selector.reads_queries
    assert resolve_method(method, model) is method


def test_at_least_fourteen_methods_are_listed(capsys):
    assert len(METHODS) >= 14
    assert main(["methods"]) == 0
    said = capsys.readouterr().out
    assert all(f"{name} " in said for name in METHODS) and all(name in said for name in selectors())
    for name, whose in {
        "pyramidkv": "as its paper has it", "pyramidkv-kvpress": "as kvpress has it", "duo": "exact budget",
        "duo-kvpress": "as kvpress has it", "expected": "epsilon 0, ", "adakv-expected-e2": "epsilon 0.01, as kvpress",
    }.items():  # fmt: skip
        assert main(["methods", name]) == 0
        assert whose in " ".join(capsys.readouterr().out.split())


def test_unknown_methods_and_missing_needs_are_named(policy):
    with pytest.raises(LkvError, match=r"no method 'snapvk'; did you mean .*'snapkv'"):
        resolve_method("snapvk", policy=policy)
    with pytest.raises(LkvError, match="'critical-snapkv' ranks the tokens of each head separately"):
        parse_method("ada+critical-snapkv")
    with pytest.raises(LkvError, match=r"there is no selector 'snap' for 'ada\+snap'; use one of .*snapkv"):
        resolve_method("ada+snap", policy=policy)
    with pytest.raises(LkvError, match="'full' keeps everything: use transformers' DynamicCache"):
        resolve_method("full", policy=policy)
    with pytest.raises(LkvError, match="the method needs a policy; give one"):
        resolve_method("lkv")
    with pytest.raises(LkvError, match="the method needs a model"):
        resolve_method("expected")
    with pytest.raises(LkvError, match="the method needs a pattern; give one with pattern="):
        resolve_method("duo")


PATTERN = [[0.2, 0.9], [0.8, 0.1], [0.3, 0.4]]
# Of 450 tokens and 6 heads at R = 0.5, as kvpress's DuoAttention has it: half of the heads whole, a window of the rest.
OF_HEADS = 3 * 450 + 3 * 384
ABLATION = [
    f"{rule}+{selector}" for rule in ("uniform", "ada", "lkv-h") for selector in ("snapkv", "expected", "lkv-t")
]


@pytest.mark.parametrize("name", [*METHODS, *ABLATION])
def test_every_method_works_by_name_in_compress(name, model, policy):
    """In the real cache, with the share of bytes that it realised, and answers that start from the same context."""
    options = {"pattern": PATTERN} if parse_method(name).needs_pattern else {}
    text = " ".join(f"word{number}" for number in range(450 if parse_method(name).needs_pattern else 160))
    retention = 0.95 if name == "duo" else 0.5
    context = compress(model, Words(), text, method=name, retention=retention, policy=policy, **options)
    realised = context.cache.realised_retention()
    if name == "duo-kvpress":
        assert realised == pytest.approx(OF_HEADS / 2700)
    else:
        assert 0.9 * retention < realised <= retention + 1e-9
    assert context.ask("what is one ?", 4) == context.ask("what is one ?", 4)


@pytest.mark.parametrize("name", [*METHODS, "uniform+critical-expected", "duo+kvzip"])
@torch.no_grad()
def test_every_method_equals_the_stock_model_with_a_mask(name):
    """Later logits are those of the stock model, in float64, to which all that the method did not choose is -inf."""
    duo, of_heads = parse_method(name).needs_pattern, name == "duo-kvpress"
    model, retention = tiny_llama(max_position_embeddings=1024), (0.5 if of_heads else 0.95) if duo else 0.15
    tokens = 450 if duo else 160
    policy = Policy(inspect_model(model)).requires_grad_(False)
    torch.nn.init.normal_(policy.heads.embeddings, std=20.0)
    pattern = PATTERN if duo else None
    text = " ".join(f"word{number}" for number in range(tokens))
    cache = compress(model, Words(), text, method=name, retention=retention, policy=policy, pattern=pattern).cache

    ids = Words()(text)["input_ids"]
    prompt = read_prompt(model, torch.tensor([ids]), queries=True)
    if parse_method(name).needs_second_pass:
        method = kvzip(model, Words(), ids, prompt, retention, name, policy, pattern)
    else:
        method = resolve_method(name, model, retention=retention, policy=policy, pattern=pattern)
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
    assert cache.kept_counts() == kept and 0 < sum(map(sum, kept)) <= (OF_HEADS if of_heads else retention * 6 * tokens)
    later = torch.tensor([[9, 41, 5, 17, 30]])
    mine = [model(later[:, step : step + 1], past_key_values=cache, use_cache=True).logits for step in range(5)]
    with hidden_from_continuation(model, hidden, tokens):
        expected = model(torch.cat([torch.tensor([ids]), later], 1)).logits[:, tokens:]
    torch.testing.assert_close(torch.cat(mine, 1), expected, atol=1e-10, rtol=1e-10)
