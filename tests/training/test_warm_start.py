"""The warm start: eviction errors against attention without each token in float64, and what a policy learns of them."""

import math
from dataclasses import replace

import pytest
import torch

from lkv.errors import PromptError
from lkv.hf.attention import patch_attention, unpatch_attention
from lkv.hf.loading import load_model
from lkv.hf.prompt_kv import read_prompt
from lkv.methods.budgets import GlobalTopKBudget
from lkv.methods.selectors.kvzip import REQUEST
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.training.data.samples import TokenizedSample
from lkv.training.eviction_errors import measure_eviction_errors
from lkv.training.warm_start import (
    _scores_of_all_heads,
    calibrate,
    fit_to_targets,
    regression_targets,
    warm_start,
)
from lkv.utils.prompts import encode_question
from tests.conftest import present, save_model
from tests.families import HYBRIDS
from tests.training.fit.helpers import ids


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A model one of whose heads attends to all tokens nearly alike, so that the shares of the heads differ."""
    model, tokenizer = load_model(str(save_model(tmp_path_factory.mktemp("model"))), torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[:16].mul_(0.1)
    return model, tokenizer


def text(number: int) -> TokenizedSample:
    return TokenizedSample("random", ids(number, 120), [])


def fresh(model) -> Policy:
    torch.manual_seed(1)
    policy = Policy(patch_attention(model).spec, inputs=ScorerInputs("unrotated", "learned", 9))
    calibrate(model, policy, [text(100).context, text(101).context])
    return policy


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean over heads of the correlation over tokens of two tables [L, H, T]."""
    pairs = zip(a.flatten(0, 1), b.flatten(0, 1), strict=True)
    return float(torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs]).mean())


@torch.no_grad()
def scores(model, policy: Policy, context: list[int]) -> torch.Tensor:
    prompt = read_prompt(model, torch.tensor([context]))
    return torch.cat([policy.tokens(part, layer) for layer, part in enumerate(prompt)])


@pytest.mark.slow
def test_the_warm_start_ranks_unseen_tokens_and_splits_the_budget_by_what_eviction_changes(loaded):
    model, tokenizer = loaded
    policy = fresh(model)
    unseen = text(50).context
    prompt = read_prompt(model, torch.tensor([unseen]))
    table = measure_eviction_errors(model, tokenizer, unseen, prompt)
    target = table[:, 0].log()
    before = correlation(scores(model, policy, unseen), target)
    warm_start(model, tokenizer, policy, text, 80)
    assert correlation(scores(model, policy, unseen), target) > max(before + 0.2, 0.6)
    for retention in (0.05, 0.15, 0.3):
        contest = GlobalTopKBudget.from_scores(table, retention)
        shares = torch.tensor([contest.counts(layer, table)[0] for layer in range(len(prompt))]) / len(unseen)
        assert (policy.inference_ratios(retention) - shares).abs().max() < 0.1
    assert (shares.max() - shares.min()) > 0.2, "the heads of this model do not differ: the test would show nothing"


def test_few_texts_teach_that_the_first_token_is_kept(loaded):
    """It is one token of a text, and steps of a gradient hardly move the knots that it alone reads."""
    model, tokenizer = loaded
    policy = fresh(model)
    targets = [regression_targets(model, tokenizer, policy, text(number).context) for number in range(4)]
    for target in targets:
        assert target.positions[:4].tolist() == [0, 1, 2, 3]
        target.scores[:, 0] = 20.0
    before = [_scores_of_all_heads(policy, target) for target in targets]
    assert not all(bool((scores[:, :1] >= scores).all()) for scores in before)
    fit_to_targets(policy, targets)
    after = [_scores_of_all_heads(policy, target) for target in targets]
    assert all(bool((scores[:, :1] > scores[:, 1:] + 3).all()) for scores in after)


def test_a_text_that_the_model_cannot_read_twice_is_shortened(tmp_path):
    model, tokenizer = load_model(str(save_model(tmp_path, max_position_embeddings=200)), torch.float32)
    policy, whole = fresh(model), text(0).context
    longest = (200 - len(encode_question(tokenizer, REQUEST))) // 2
    assert 0 < longest < len(whole)
    targets, of_shortened = (regression_targets(model, tokenizer, policy, each) for each in (whole, whole[:longest]))
    assert targets.end == longest and torch.equal(targets.scores, of_shortened.scores)
    assert math.isfinite(warm_start(model, tokenizer, policy, text, 2))


def test_texts_of_a_few_tokens_leave_every_number_finite(loaded):
    model, tokenizer = loaded
    policy = fresh(model)
    calibrate(model, policy, [text(100).context, *(text(number).context[:number] for number in range(1, 7))])
    targets = [regression_targets(model, tokenizer, policy, text(0).context[:tokens]) for tokens in (1, 2, 5, 120)]
    assert targets[0].scores.tolist() == [[0.0]] * len(targets[0].scores)
    assert math.isfinite(fit_to_targets(policy, targets))
    assert all(bool(value.isfinite().all()) for value in policy.state_dict().values())


@torch.no_grad()
def expected_errors(model, tokenizer, context: list[int]) -> torch.Tensor:
    """The errors [L, H, T] by attention without each token, from the stock model over the text and its repetition."""
    tokens = len(context)
    sequence = torch.tensor([context + encode_question(tokenizer, REQUEST) + context])
    model.double()
    model.set_attn_implementation("eager")
    blocks = {layer: block.self_attn for layer, block in enumerate(model.model.layers) if hasattr(block, "self_attn")}
    projected: list[torch.Tensor] = []
    hooks = [
        block.q_proj.register_forward_hook(lambda *call: projected.append(call[2][0])) for block in blocks.values()
    ]
    out = model(sequence, output_attentions=True, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    errors = []
    for (layer, block), weights, queries in zip(blocks.items(), out.attentions, projected, strict=True):
        value, attention = out.past_key_values.layers[layer].values[0], weights[0, :, tokens:]
        heads, groups = attention.shape[0], attention.shape[0] // value.shape[0]
        weights = block.o_proj.weight.unflatten(1, (heads, -1))
        # Qwen3.5 computes the gates together with the queries.
        _, *gates = queries[tokens:].unflatten(-1, (heads, -1)).split(value.shape[-1], -1)
        gate = gates[0].sigmoid() if gates else torch.ones(len(attention[0]), heads, 1)
        hidden = out.hidden_states[layer][0, tokens:].square().sum(-1).mean()
        table = torch.zeros(value.shape[0], tokens, dtype=torch.float64)
        for head in range(heads):
            values, projection = value[head // groups], weights[:, head]
            for token in range(tokens):
                without = attention[head].clone()
                without[:, token] = 0
                without /= without.sum(-1, keepdim=True)
                difference = (attention[head] @ values - without @ values) * gate[:, head] @ projection.T
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


@pytest.mark.parametrize("columns", ["orthogonal", "any"])
def test_the_error_of_a_token_counts_only_what_passes_the_gates_of_qwen35(columns, tmp_path):
    """It is exact where the columns of the output projection are orthogonal, and close for random ones."""
    family = next(family for family in HYBRIDS if family.name == "Qwen3_5")
    present(family)
    _, tokenizer = load_model(str(save_model(tmp_path)), torch.float32)
    model = replace(family, changes=family.changes | {"vocab_size": 259}).build(torch.float32)
    with torch.no_grad():
        for block in model.model.layers:
            if hasattr(block, "self_attn"):
                block.self_attn.q_proj.weight.mul_(3)  # some gates are open, some closed
                weight = block.self_attn.o_proj.weight
                parts = [torch.linalg.qr(part).Q for part in weight.split(16, 1)]
                weight.copy_(torch.cat(parts, 1) if columns == "orthogonal" else torch.randn(weight.shape))
    context = ids(1, 80)
    prompt = read_prompt(model, torch.tensor([context]))
    errors = measure_eviction_errors(model, tokenizer, context, prompt)[:, 0].double()
    unpatch_attention(model)
    expected = expected_errors(model, tokenizer, context)
    assert expected.max() > 5 * expected.median(), "all tokens count alike: the test would show nothing"
    if columns == "orthogonal":
        assert errors == pytest.approx(expected, rel=1e-3, abs=1e-6)
    else:
        assert correlation(errors.log(), expected.log()) > 0.98


def test_a_bias_of_the_output_projection_changes_nothing(tmp_path):
    model, tokenizer = load_model(str(save_model(tmp_path, attention_bias=True)), torch.float64)
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
