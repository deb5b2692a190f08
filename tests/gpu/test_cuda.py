"""The whole cache on a real GPU against the same model in float64 on the CPU; skipped where there is none."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lkv.cache.ragged_cache import RaggedCache
from lkv.kernels.causal_attention import causal_attention
from lkv.methods.budgets import PerHead
from lkv.methods.method import Method
from tests.cache.helpers import OwnScores
from tests.cache.test_tiered_store import TIERS
from tests.conftest import tiny_llama
from tests.kernels.pools import in_tiers

if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no CUDA device", allow_module_level=True)
DEVICE = "cuda"
# Ranking by scores whose neighbours differ by more than float32 rounds, also for equal tokens: both devices keep the
# same.
METHOD = Method("own", PerHead([[0.5, 0.2], [0.1, 0.6], [0.05, 1.0]]), OwnScores())
OPTIONS = [
    {"slack": 3}, {"decode_eviction": True, "slack": 2}, {"streaming": True, "prompt_tokens": 90},
    {"bits": 8, "slack": 3}, {"bits": 3, "slack": 3},
    {"method": in_tiers(METHOD, *TIERS), "slack": 3}, {"method": in_tiers(METHOD, *TIERS[1:])},
]  # fmt: skip


def ids(batch, tokens):
    return torch.randint(3, 67, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


@torch.no_grad()
def logits(model, device, text, **options):
    """Of a question of 5 tokens, then of 12 single ones, after a prompt of 90; and what was kept."""
    cache = RaggedCache(model, **{"method": METHOD} | options)
    text = text.to(device)
    model.base_model(text[:, :90], past_key_values=cache)
    parts = [model(part, past_key_values=cache).logits for part in text[:, 90:107].split([5] + [1] * 12, 1)]
    return torch.cat(parts, 1).cpu().double(), cache.kept_counts()


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_it_computes_what_a_cpu_computes_in_float64(dim, options):
    base = tiny_llama(head_dim=dim, initializer_range=0.1)
    text = ids(1 if "decode_eviction" in options else 3, 107)
    exact, kept = logits(base, "cpu", text, **options)
    for dtype, allowed in ((torch.float32, 2e-4), (torch.bfloat16, 0.06)):
        found, own = logits(copy.deepcopy(base).to(DEVICE, dtype), DEVICE, text, **options)
        error = float((found - exact).norm() / exact.norm())
        # Scores in bfloat16 rank some tokens otherwise, and codes differ where values were rounded before.
        is_exact = dtype == torch.float32 and not options.keys() & {"bits", "method"}
        assert error <= (allowed if is_exact else max(allowed, 0.15))
        assert dtype != torch.float32 or own == kept


# Without the filter the warning is an error that leaves the mode on, and every later test of the process fails.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@torch.no_grad()
def test_a_decode_step_waits_for_nothing():
    model = tiny_llama(dtype=torch.bfloat16, head_dim=64).to(DEVICE)
    cache, text = RaggedCache(model, method=METHOD), ids(2, 95).to(DEVICE)
    model(text[:, :90], past_key_values=cache)
    model(text[:, 90:91], past_key_values=cache)
    places = [torch.full((2, 1), place, device=DEVICE) for place in (91, 92)]
    try:
        torch.cuda.set_sync_debug_mode("error")
        for place, token in zip(places, text[:, 91:93].split(1, 1), strict=True):
            model(token, position_ids=place, past_key_values=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
def test_a_captured_step_replayed_twice_is_two_steps():
    model = tiny_llama(dtype=torch.float32, head_dim=64).to(DEVICE)
    text = ids(1, 99).to(DEVICE)
    caches = [RaggedCache(model, method=METHOD, slack=64) for _ in range(2)]
    layers = []
    for cache in caches:
        model.base_model(text[:, :90], past_key_values=cache)
        layers.append(cache.ragged_layers[0].store)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 1, 64, device=DEVICE) for heads in (4, 2, 2))
    buffers = {}
    for _ in range(3):  # compiles, and makes the buffers
        layers[0].extend(query, key, value, 0.1, buffers=buffers)
        layers[1].extend(query, key, value, 0.1, buffers={})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers[0].extend(query, key, value, 0.1, buffers=buffers)
    before = layers[0].attention_view().lens.clone()
    for _ in range(2):
        graph.replay()
        right = layers[1].extend(query, key, value, 0.1, buffers={})
        torch.testing.assert_close(out, right)
    assert torch.equal(layers[0].attention_view().lens, before + 2)


@pytest.mark.parametrize("options", [{}, {"bits": 3}], ids=["16 bits", "3 bits"])
def test_graphed_steps_equal_eager_ones(options):
    model, text = tiny_llama(dtype=torch.float32, head_dim=64).to(DEVICE), ids(2, 90).to(DEVICE)
    how = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(text)}
    caches = [RaggedCache(model, method=METHOD, slack=4, **options) for _ in range(2)]
    expected = model.generate(text, past_key_values=caches[0], **how)
    with caches[1].graphed(model, max_new_tokens=30):  # the last ones go beyond the captured slots
        assert torch.equal(model.generate(text, past_key_values=caches[1], **how), expected)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # float32 is what is tested
@torch.no_grad()
def test_compiled_models_decode_alike():
    base = tiny_llama(dtype=torch.float32, head_dim=64).to(DEVICE)
    text, found = ids(1, 100), []
    for model in (base, torch.compile(copy.deepcopy(base), mode="reduce-overhead")):
        cache = RaggedCache(base if model is base else model._orig_mod, method=METHOD, slack=64)
        model(text[:, :90].to(DEVICE), past_key_values=cache)
        parts = [model(token.to(DEVICE), past_key_values=cache).logits.clone() for token in text[:, 90:].split(1, 1)]
        found.append(torch.cat(parts, 1))
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize(("tokens", "padding"), [(90, [0, 7, 7]), (40, [0, 20, 70]), (40, None)])
def test_prompts_without_a_mask(tokens, padding, dtype, allowed):
    """Outputs and gradients; in half precision by flash attention alone."""
    torch.manual_seed(0)
    inputs = [torch.randn(3, heads, length, 64) for heads, length in ((6, tokens), (2, 90), (2, 90))]
    results = []
    for device, kind in (("cpu", torch.float64), (DEVICE, dtype)):
        q, k, v = (x.to(device, kind).requires_grad_() for x in inputs)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if kind == torch.bfloat16 else nullcontext():
            out = causal_attention(q, k, v, 0.1, padding)
            results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for exact, found in zip(*results, strict=True):
        assert float((found.cpu().double() - exact).norm() / exact.norm()) <= allowed
