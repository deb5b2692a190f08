"""SnapKV against its definition written out with loops; budgets against the floor of r t."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lkv.budget import PerHead, Uniform
from lkv.errors import LkvError, PromptError
from lkv.methods import NAMES, make_method
from lkv.selection import LearnedScores, SnapKV


def test_snapkv_equals_its_definition():
    torch.manual_seed(0)
    tokens, window, kernel = 20, 4, 5
    query = torch.randn(1, 4, tokens, 8, dtype=torch.float64)
    key = torch.randn(1, 2, tokens, 8, dtype=torch.float64)
    scores = SnapKV(window, kernel).scores(0, query, key, key, 0.3)
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
        SnapKV().scores(0, torch.zeros(1, 2, 10, 8), torch.zeros(1, 2, 10, 8), torch.zeros(1, 2, 10, 8), 1.0)


def test_learned_scores_are_the_same_in_blocks(policy):
    k, v = torch.randn(1, 2, 5000, 8), torch.randn(1, 2, 5000, 8)
    torch.testing.assert_close(LearnedScores(policy).scores(1, k, k, v, 1.0), policy.tokens(k, v, 1))


@given(st.floats(0.001, 1.0), st.integers(1, 5000))
def test_uniform_budget_is_the_floor(retention, tokens):
    (count, _), *_ = Uniform(retention).counts(0, torch.empty(1, 2, tokens))
    assert abs(count - retention * tokens) < 1 and count <= retention * tokens + 1e-5


def test_per_head_budgets_are_read_by_layer():
    assert PerHead([[0.0, 1.0], [0.5, 0.15]]).counts(1, torch.empty(1, 2, 4000)) == [[2000, 600]]


def test_methods_are_found_by_name(policy):
    for name in NAMES:
        assert make_method(name, 0.15, policy).name == name
    with pytest.raises(LkvError, match=r"no method 'snapvk'; did you mean .*'snapkv'"):
        make_method("snapvk", 0.15, policy)
    with pytest.raises(LkvError, match="needs a policy"):
        make_method("lkv", 0.15, None)
