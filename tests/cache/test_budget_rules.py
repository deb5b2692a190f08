"""Budget rules of a user's own, and what a cache does not take from them."""

import pytest
import torch

from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import CacheError
from lkv.methods.budgets import PerHead
from lkv.methods.method import Method
from lkv.methods.selectors import Knorm
from tests.conftest import tiny_llama

IDS = torch.arange(3, 53)[None]


class Given:
    """A rule that returns what it was given."""

    def __init__(self, counts):
        self._counts = counts

    def counts(self, layer, scores):
        return self._counts


@pytest.mark.parametrize(
    "counts", [[[10, -5]], [[10.5, 10.0]], [10, 10], [[10]], [[60, 10]], [[10, 10, 10]], [[10, None]], [[True, False]]]
)
def test_counts_that_cannot_be_kept_are_refused(counts):
    model = tiny_llama()
    cache = RaggedCache(model, method=Method("mine", Given(counts), Knorm()))
    with pytest.raises(CacheError, match=r"Given gives layer 0 the counts .*whole numbers from 0 to 50, \[1\]\[2\]"):
        model(IDS, past_key_values=cache)


@pytest.mark.parametrize("ratio", [-0.5, float("nan")])
def test_ratios_that_are_none_are_refused(ratio):
    model = tiny_llama()
    cache = RaggedCache(model, method=Method("mine", PerHead([[0.5, ratio]] * 3), Knorm()))
    with pytest.raises(CacheError, match="give numbers from 0 to 1"):
        model(IDS, past_key_values=cache)


def test_counts_as_a_tensor_serve():
    model = tiny_llama()
    cache = RaggedCache(model, method=Method("mine", Given(torch.tensor([[7, 0]])), Knorm()))
    model(IDS, past_key_values=cache)
    assert all(layer == [7, 0] for layer in cache.kept_counts())


@pytest.mark.parametrize("tokens", [48, 49, 98, 103])
def test_one_token_may_be_kept_of_any_number(tokens):
    model = tiny_llama()
    cache = RaggedCache(model, method="knorm", budget_tokens=1)
    model(torch.arange(tokens)[None] % 60 + 3, past_key_values=cache)
    assert all(layer == [1, 1] for layer in cache.kept_counts())
