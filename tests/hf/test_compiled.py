"""LKV caches in compiled models: how many graphs there are, and that they give what the model gives without."""

import pytest
import torch

from lkv.cache.ragged_cache import RaggedCache
from tests.cache.helpers import ids, padded
from tests.conftest import tiny_llama, uneven_policy


class Graphs(list):
    """A backend that keeps the graphs it was given and runs them as they are."""

    def __call__(self, graph, inputs):
        self.append(graph)
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def logits(model, owner, text, prompt, **options):
    """Logits of each token after a compressed prompt of `prompt` tokens, read one by one."""
    cache = RaggedCache(owner, method="knorm", retention=0.3, **options)
    first = model(text[:, :prompt], past_key_values=cache).logits[:, -1:]
    steps = [model(token, past_key_values=cache).logits for token in text[:, prompt:].split(1, 1)]
    return torch.cat([first, *steps], 1)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 32])
def test_a_prompt_and_its_steps_are_two_graphs_whatever_the_layers(layers):
    """And stay two while free slots are made; another cache adds none but that of a prompt of another length."""
    model, text = tiny_llama(dtype=torch.float32, num_hidden_layers=layers), ids(1, 154)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs)
    torch.testing.assert_close(logits(compiled, model, text, 90), logits(model, model, text, 90))
    assert len(graphs) == 2
    attention = [
        node for node in graphs[0].graph.nodes if node.target is torch.nn.functional.scaled_dot_product_attention
    ]
    assert [(node.kwargs["attn_mask"], node.kwargs["is_causal"]) for node in attention] == [(None, True)] * layers
    logits(compiled, model, text[:, :80], 70)
    assert len(graphs) == 3


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_prompt_with_padding_equals_that_of_the_model():
    """Without a mask of its queries and keys in the graph."""
    model, rows = tiny_llama(dtype=torch.float32), padded([ids(1, 80), ids(1, 50, 1)])
    graphs = Graphs()
    compiled, outs = torch.compile(model, backend=graphs, fullgraph=True), []
    positions = (rows["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    for reader in (model, compiled):
        cache = RaggedCache(model, method="knorm", retention=0.3)
        reader(**rows, position_ids=positions, past_key_values=cache)
        mask = torch.cat([rows["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
        step = {"attention_mask": mask, "position_ids": positions[:, -1:] + 1}
        outs.append(model(ids(2, 1, 2), **step, past_key_values=cache).logits)
    torch.testing.assert_close(outs[1], outs[0])
    shapes = [
        x.meta["example_value"].shape
        for x in graphs[0].graph.nodes
        if "example_value" in x.meta and isinstance(x.meta["example_value"], torch.Tensor)
    ]
    assert not [shape for shape in shapes if shape[-2:] == (80, 80)]


@pytest.mark.slow
def test_compiled_steps_of_a_batch_equal_those_of_the_model():
    """In tiers, through the part of the compiler that makes operators without side effects of all."""
    model, text = tiny_llama(dtype=torch.float32, num_hidden_layers=1), ids(2, 40)
    compiled, options = torch.compile(model, backend="aot_eager", fullgraph=True), {"bits": 4, "slack": 1}
    torch.testing.assert_close(logits(compiled, model, text, 30, **options), logits(model, model, text, 30, **options))


def test_compiled_generation_gives_the_same():
    model, outs = tiny_llama(dtype=torch.float32, num_hidden_layers=2), []
    policy = uneven_policy(model)
    for compiled in (False, True):
        if compiled:
            model.forward = torch.compile(model.forward, backend=Graphs())
        cache = RaggedCache(model, policy=policy, retention=0.5)
        outs.append(model.generate(ids(1, 30), past_key_values=cache, max_new_tokens=3, do_sample=False))
    assert torch.equal(*outs)
