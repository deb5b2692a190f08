"""The package on GPUs as far as a fake one shows: devices kept apart, limits of launches, saved contexts."""

import copy

import pytest
import torch

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.context.context import Context
from lkv.errors import UnsupportedModelError
from lkv.hf.spec import inspect_model
from lkv.kernels.ragged_attention import RaggedKV, append_and_attend, ragged_attention
from lkv.kernels.soft_mask_attention import soft_mask_attention
from lkv.kernels.soft_topk import soft_topk
from lkv.utils import devices
from lkv.utils.cpp_compiler import find_compiler
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.families import build
from tests.gpu.methods import KNORM, SHALLOW_KNORM, ids, policy_of

if find_compiler() is None:
    pytest.skip("there is no C++ compiler to build the fake GPU with", allow_module_level=True)
pytest.importorskip("triton")
from tests.fake_gpu.kernels import fake_gpus

pytestmark = pytest.mark.usefixtures("fake_gpu")


@torch.no_grad()
def logits(model, device):
    """Logits of 3 tokens and then 1 more after a compressed prompt."""
    cache = RaggedCache(model, method=SHALLOW_KNORM, slack=2)
    text = ids(64).to(device)
    model.base_model(text[:, :60], past_key_values=cache)
    parts = [model(part, past_key_values=cache).logits for part in text[:, 60:].split([3, 1], 1)]
    return torch.cat(parts, 1).cpu()


def test_the_kernels_run_where_the_tensors_are(shallow):
    """The second device, while the first is the current one."""
    expected = logits(shallow, "cpu")
    with fake_gpus() as launches:
        found = logits(copy.deepcopy(shallow).to("fake:1"), "fake:1")
    kernels = {"select_kernel", "append_kernel", "slice_kernel"}
    assert set(launches) == kernels
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_soft_mask_runs_where_the_tensors_are():
    torch.manual_seed(0)
    given = [torch.randn(1, h, t, 64) for h, t in ((2, 12), (1, 20), (1, 20))]
    mask = torch.randn(1, 1, 20).clamp(max=0)
    expected = soft_mask_attention(*given, mask, backend="reference")
    with fake_gpus() as launches:
        own = [x.to("fake:1").requires_grad_() for x in (*given, mask)]
        out = soft_mask_attention(*own)
        out.sum().backward()
    assert launches == ["forward", "query_gradient", "key_gradient"]
    torch.testing.assert_close(out.detach().cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [8192, 65_536])
def test_no_launch_is_larger_than_a_grid_may_be(rows):
    """A part of a long prompt, with as many query heads a group as large models have."""
    with fake_gpus(stubbed=True) as launches:
        q = torch.empty(1, 8, rows, 16, device="fake")
        key = torch.empty(1, 1, rows, 16, device="fake")
        pool = torch.empty(rows + 9, 16, device="fake")
        kv = RaggedKV(pool, pool, *(torch.zeros(1, 1, dtype=torch.int32, device="fake") for _ in range(2)))
        ragged_attention(q, kv, 1.0)
        append_and_attend(q, key, key, kv, 1.0)
    assert launches == ["slice_kernel", "append_kernel", "slice_kernel"]


def generated(model, device, text, **options):
    cache = RaggedCache(model, **options)
    text = text.to(device)
    out = model.generate(
        text, attention_mask=torch.ones_like(text), past_key_values=cache, do_sample=False, max_new_tokens=5,
        eos_token_id=None,
    )  # fmt: skip
    return out.cpu(), cache


@pytest.mark.parametrize("options", [{"decode_eviction": True, "slack": 1}, {"streaming": True, "prompt_tokens": 60}])
def test_every_way_to_read_gives_what_a_cpu_gives(base, on_fake, options):
    options = {"policy": policy_of(base), "retention": 0.4, **options}
    (expected, cache), (found, own) = (
        generated(m, d, ids(), **options) for m, d in ((base, "cpu"), (on_fake, "fake:0"))
    )
    assert torch.equal(found, expected) and own.kept_counts() == cache.kept_counts()


def test_a_policy_stays_where_its_owner_put_it(base, on_fake):
    policy = policy_of(base)
    cache = RaggedCache(on_fake, policy=policy, retention=0.4)
    assert {x.device.type for x in policy.parameters()} == {"cpu"}
    assert {x.device.type for x in cache.policy.parameters()} == {"fake"}
    assert RaggedCache(base, policy=policy, retention=0.4).policy is policy


def spread(model, first, second):
    """The model over two devices, as `device_map` spreads it."""
    accelerate = pytest.importorskip("accelerate")
    places = {f"model.{name}": "fake:0" for name in first} | {f"model.{name}": "fake:1" for name in second}
    return accelerate.dispatch_model(model, places | {"lm_head": "fake:1"}, main_device="fake:0", force_hooks=True)


@pytest.fixture(scope="module")
def split(base):
    first = ("embed_tokens", "rotary_emb", "layers.0")
    return spread(copy.deepcopy(base), first, ("layers.1", "layers.2", "norm"))


@pytest.mark.parametrize("method", ["lkv", "expected", "criticalkv", "ada+lkv-t", "random"])
def test_a_model_over_two_devices(base, split, method):
    options = {"policy": policy_of(base), "retention": 0.4, "method": method}
    text = ids(80)
    (expected, cache), (found, own) = (generated(m, d, text, **options) for m, d in ((base, "cpu"), (split, "fake:0")))
    assert torch.equal(found, expected) and own.kept_counts() == cache.kept_counts()
    assert [str(layer.store.k.device) for layer in own.ragged_layers] == ["fake:0", "fake:1", "fake:1"]


@pytest.mark.parametrize("method", ["kvzip", "global+knorm", "lkv-h+kvzip"])
def test_methods_of_whole_prompts_over_two_devices(base, split, method):
    options = {"policy": policy_of(base)} if method.startswith("lkv") else {}
    expected, found = (
        compress(model, Words(), TEXT, method=method, retention=0.4, **options).cache for model in (base, split)
    )
    assert found.kept_counts() == expected.kept_counts()
    assert [str(layer.store.k.device) for layer in found.ragged_layers] == ["fake:0", "fake:1", "fake:1"]


def saved_and_loaded(model, path, **amount):
    """A context that answers as the one did that was saved."""
    context = compress(model, Words(), TEXT, method="knorm", **amount)
    answer = context.ask("what is one ?", 6)
    context.save(path)
    again = Context.load(path, model, Words())
    assert again.ask("what is one ?", 6) == answer
    return again


@pytest.mark.parametrize("amount", [{"retention": 0.4}, {"memory": 0.2}], ids=str)
def test_a_saved_context_is_loaded_to_the_device_of_each_layer(split, tmp_path, amount):
    again = saved_and_loaded(split, tmp_path / "context.kv", **amount)
    stores = [layer.store.restore() if "memory" in amount else layer.store for layer in again.cache.ragged_layers]
    assert [str(store.k.device) for store in stores] == ["fake:0", "fake:1", "fake:1"]


def test_saved_windows_are_loaded_to_the_device_of_each_layer(fake_gpu, tmp_path):
    model = build("Gemma3", torch.float32, tie_word_embeddings=False)
    first = ("embed_tokens", "rotary_emb", "layers.0", "layers.1")
    model = spread(model, first, ("layers.2", "layers.3", "layers.4", "norm"))
    again = saved_and_loaded(model, tmp_path / "context.kv", retention=0.4)
    assert [str(layer.keys.device) for layer in again.cache.others.values()] == ["fake:0", "fake:1"]


def test_weights_that_are_nowhere_are_refused():
    with torch.device("meta"):
        model = tiny_llama()
    with pytest.raises(UnsupportedModelError, match="are offloaded"):
        inspect_model(model)


def test_soft_topk_computes_on_the_cpu_where_a_device_has_no_float64(monkeypatch, caplog):
    monkeypatch.setattr(devices, "has_float64", lambda device: device.type == "cpu")
    scores = torch.randn(3, 20)
    gradients = []
    for device in ("cpu", "fake:0"):
        x = scores.detach().to(device).requires_grad_()
        k = torch.tensor([1.5, 4.0, 9.0], device=device, requires_grad=True)
        out = soft_topk(x, k, 0.1)
        assert out.mask.device == out.log_mask.device == torch.device(device)
        (out.mask.square().sum() + out.log_mask.sum()).backward()
        gradients.append([x.grad.cpu(), k.grad.cpu()])
    torch.testing.assert_close(*gradients)
    assert len(caplog.records) == 1 and "computed on the CPU" in caplog.text


def test_other_errors_than_memory_keep_their_name(on_fake, monkeypatch):
    cache = RaggedCache(on_fake, method=KNORM, slack=0)
    on_fake(ids().to("fake"), past_key_values=cache)

    def broken(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(cache.ragged_layers[0].store, "reallocate", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        on_fake(ids(3).to("fake"), past_key_values=cache)


def test_slack_does_not_outweigh_a_short_context(on_fake):
    text = ids(64).to("fake")
    cache = RaggedCache(on_fake, policy=policy_of(on_fake), retention=0.15)
    on_fake.base_model(text, past_key_values=cache)
    assert cache.nbytes() < cache.full_nbytes() / 2
