"""Models whose weights are quantised: what docs/models.md says of each kind, on models that are tiny."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lkv.cache.ragged_cache import RaggedCache
from lkv.context.compression import compress
from lkv.errors import PolicyMismatchError, UnsupportedModelError
from lkv.hf.attention import patch_attention
from lkv.policy.model_match import agreement
from lkv.policy.policy import Policy
from tests.cache.helpers import ids
from tests.conftest import tiny_llama
from tests.context.test_compression import TEXT, Words
from tests.hf.test_fingerprint import Params4bit

SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "dtype": torch.float32}
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


class Packed(nn.Module):
    """A linear layer as GPTQ and AWQ have it: codes and scales as buffers, and no weight at all."""

    def __init__(self, of: nn.Linear):
        super().__init__()
        scales = of.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (of.weight.detach() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.in_features, self.out_features = of.in_features, of.out_features

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.qweight.to(x.dtype) * self.scales)


class FourBits(nn.Module):
    """A linear layer as bitsandbytes has it."""

    def __init__(self, of: nn.Linear):
        super().__init__()
        self.weight = Params4bit(of.weight.detach())
        self.in_features, self.out_features = of.in_features, of.out_features

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.quant_state.weight)


def replaced(model, kind):
    """`model` with every linear layer of its decoder made anew by `kind`."""
    for parent in list(model.get_decoder().modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, nn.Linear):
                setattr(parent, name, kind(module))
    return model


def torchao(bits, seed=0):
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_llama(seed, **SIZES)
    how = {
        "int8": quantization.Int8WeightOnlyConfig,
        "int4": lambda: quantization.IntxWeightOnlyConfig(torch.int4, quantization.granularity.PerGroup(32)),
    }[bits]
    quantization.quantize_(model.get_decoder(), how())
    return model


KINDS = {
    "torchao int8": lambda: torchao("int8"),
    "torchao int4": lambda: torchao("int4"),
    "bitsandbytes": lambda: replaced(tiny_llama(**SIZES), FourBits),
    "GPTQ and AWQ": lambda: replaced(tiny_llama(**SIZES), Packed),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_methods_without_a_policy_work_on_quantised_models(kind):
    """At retention 1 as the model's own cache; below it, from a cache of the size asked for."""
    model, text = KINDS[kind](), ids(1, 100)
    expected = model(text).logits[:, 90:]
    for method in ("knorm", "snapkv", "expected", "keydiff"):
        cache = RaggedCache(model, method=method, retention=1.0)
        model(text[:, :90], past_key_values=cache, use_cache=True)
        found = model(text[:, 90:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    for method in ("snapkv", "kvzip"):
        context = compress(model, Words(), " ".join([TEXT, TEXT]), method=method, retention=0.3)
        assert context.realised_retention() == pytest.approx(0.3) and context.ask("what ?", 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_policy_of_the_plain_weights_serves_the_quantised_ones(bits):
    model, policy = torchao(bits), Policy(patch_attention(tiny_llama(**SIZES)).spec).requires_grad_(False)
    assert 0.98 < agreement(policy.spec.directions, patch_attention(model).spec.directions) <= 1.0
    context = compress(model, Words(), TEXT, retention=0.4, policy=policy)
    assert context.metadata["policy"] == policy.digest() and context.ask("what ?", 4)
    with pytest.raises(PolicyMismatchError, match="other weights"):
        policy.check_model(patch_attention(torchao(bits, seed=1)).spec)


@pytest.mark.parametrize("kind", ["bitsandbytes", "GPTQ and AWQ"])
def test_a_policy_for_weights_that_cannot_be_read_is_refused_unless_asked_for(tmp_path, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    policy = Policy(patch_attention(tiny_llama(**SIZES)).spec).requires_grad_(False)
    model = KINDS[kind]()
    assert patch_attention(model).spec.directions == patch_attention(model).spec.weights == ()
    with pytest.raises(PolicyMismatchError, match=r"packed so that LKV cannot read and compare them; .*strict=False"):
        compress(model, Words(), TEXT, policy=policy)
    policy.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="packed so that LKV cannot read"):
        context = compress(model, Words(), TEXT, policy=Policy.from_pretrained(tmp_path, strict=False))
    assert context.metadata["policy"] == policy.digest() and context.ask("what ?", 4)


def test_a_method_that_reads_weights_says_that_these_cannot_be_read():
    for kind in ("bitsandbytes", "GPTQ and AWQ"):
        model = KINDS[kind]()
        with pytest.raises(UnsupportedModelError, match="output projection"):
            compress(model, Words(), TEXT, method="uniform+critical-expected")


def test_the_page_names_every_kind():
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"| {name}" in text for name in KINDS)
