"""A prompt read once: what it holds, and that nothing of it outlives its last reference."""

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

from lkv.cache.ragged_cache import RaggedCache
from lkv.hf.prompt_kv import read_prompt
from lkv.policy.policy import Policy
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import SampleDistillation, gumbel, soft_mask


@pytest.fixture
def no_collector():
    """Python's cycle collector off: it cannot see a cycle through a tensor's base, and reference counts must do."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensors_alive() -> int:
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def test_it_holds_the_stock_models_keys_and_values(model):
    ids = torch.randint(3, 67, (2, 20))
    stock = DynamicCache()
    model(ids, past_key_values=stock)
    for captured, layer in zip(read_prompt(model, ids, queries=True), stock.layers, strict=True):
        torch.testing.assert_close(captured.key, layer.keys, rtol=0, atol=0)
        torch.testing.assert_close(captured.value, layer.values, rtol=0, atol=0)
        assert captured.queries.shape == (2, 4, 20, 8)
    whole = read_prompt(model, ids, queries=True)
    for captured, every in zip(read_prompt(model, ids, queries=3), whole, strict=True):
        torch.testing.assert_close(captured.queries, every.queries[:, :, -3:], rtol=0, atol=0)
        assert captured.queries.untyped_storage().nbytes() == captured.queries.numel() * captured.queries.element_size()


def test_a_prompt_dies_with_its_last_reference(model, no_collector):
    prompt = read_prompt(model, torch.randint(3, 67, (1, 20)), queries=True)
    watched = [weakref.ref(x) for layer in prompt for x in (layer.key, layer.value, layer.queries)]
    del prompt
    assert not any(reference() is not None for reference in watched)


def test_a_training_step_leaves_no_tensor_behind(model, policy: Policy, no_collector):
    policy.requires_grad_(True)
    model.requires_grad_(False)
    sample = TokenizedSample("random", list(range(3, 33)), [(list(range(5, 12)), 3)])

    def step() -> None:
        run = SampleDistillation(model, sample)
        scores = run.scores(policy)
        noise = gumbel((1, *scores.shape), torch.Generator().manual_seed(0))
        run.kl(run.run(None), run.run(soft_mask(policy, scores, 0.3, 0.2, noise))).backward()
        policy.zero_grad(set_to_none=True)

    step()
    before = tensors_alive()
    for _ in range(3):
        step()
    assert tensors_alive() == before


def test_a_ragged_cache_dies_with_its_last_reference(model, policy, no_collector):
    cache = RaggedCache(model, policy=policy, retention=0.5)
    with torch.no_grad():
        model(torch.randint(3, 67, (1, 20)), past_key_values=cache)
    pools = [weakref.ref(layer.store.k) for layer in cache.ragged_layers]
    del cache
    assert not any(reference() is not None for reference in pools)
