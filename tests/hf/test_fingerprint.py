"""One model however it is stored, and no other: cosines of sampled rows, their margins, and forms of weights."""

import sys
import warnings
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import gguf
import pytest
import torch
from torch import Tensor, nn

from lkv.errors import PolicyMismatchError
from lkv.hf.fingerprint import encode_direction, read_directions, read_norms
from lkv.hf.loading import load_default
from lkv.hf.spec import inspect_model
from lkv.policy.lookup import default_policy
from lkv.policy.model_match import ONE_MODEL, agreement, model_difference
from lkv.policy.policy import Policy
from lkv.policy.shipped import shipped_policies
from tests.conftest import tiny_llama

NF4 = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip


def grouped(bits: int, group: int = 0):
    """Symmetric rounding with one scale for each row, or for each `group` of values."""

    def store(weight: Tensor) -> Tensor:
        rows = weight.reshape(-1, group or weight.shape[1])
        scale = rows.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        return ((rows / scale).round() * scale).reshape(weight.shape)

    return store


def normal_float(weight: Tensor) -> Tensor:
    levels, rows = torch.tensor(NF4), weight.reshape(-1, 64)
    scale = rows.abs().amax(1, keepdim=True)
    return (levels[((rows / scale)[..., None] - levels).abs().argmin(-1)] * scale).reshape(weight.shape)


def in_gguf(kind: str):
    number = getattr(gguf.GGMLQuantizationType, kind)

    def store(weight: Tensor) -> Tensor:
        values = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), number), number)
        return torch.from_numpy(values.copy()).reshape(weight.shape)

    return store


def original(weight: Tensor) -> Tensor:
    """The weights that the 4-bit file was made of may have been: anywhere within a step of its groups of 32."""
    groups = weight.reshape(-1, 32)
    step = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / 15
    return (groups + step * (torch.rand_like(groups) - 0.5)).reshape(weight.shape)


def tuned(share: float):
    """Weights that moved by `share` of their size."""
    return lambda weight: weight + share * weight.std() * torch.randn_like(weight)


def adapted(share: float):
    """A product of two thin matrices added, of `share` of the size of the weights."""

    def store(weight: Tensor) -> Tensor:
        update = torch.randn(weight.shape[0], 4) @ torch.randn(4, weight.shape[1])
        return weight + share * weight.norm() / update.norm() * update

    return store


# The least cosine to the shipped policy's fingerprint that is asked of each way to store the model.
COPIES = {
    "bf16": (lambda weight: weight.bfloat16(), 0.9999),
    "int8": (grouped(8), 0.999),
    "int4, a scale for each row": (grouped(4), 0.975),
    "int4, groups of 64": (grouped(4, 64), 0.99),
    "nf4": (normal_float, 0.99),
    "GGUF Q4_0": (in_gguf("Q4_0"), 0.99),
    "GGUF Q4_1": (in_gguf("Q4_1"), 0.99),
    "GGUF Q5_0": (in_gguf("Q5_0"), 0.995),
    "GGUF Q8_0": (in_gguf("Q8_0"), 0.999),
    "original": (original, 0.99),
    "original in nf4": (lambda weight: normal_float(original(weight)), 0.985),
    "original in int4": (lambda weight: grouped(4)(original(weight)), 0.97),
    "light fine-tune": (tuned(0.1), 0.98),
    "low-rank adapter merged": (adapted(0.15), 0.97),
}


class Sampled(NamedTuple):
    """The matrices of the demo model that the fingerprint is read from, and the norms before them, by name."""

    matrices: dict[str, Tensor]
    norms: dict[str, Tensor]

    def directions(self, store: Callable[[Tensor], Tensor] = lambda weight: weight) -> tuple[str, ...]:
        """Of a copy whose matrices are stored by `store`."""
        return read_directions({name: store(weight) for name, weight in self.matrices.items()}, 30, self.norms)


@pytest.fixture(scope="module")
def sampled():
    decoder = load_default()[0].get_decoder()
    sampled = ("layers.0.", "layers.15.", "layers.29.")
    matrices = {
        name: weight.detach()
        for name, weight in decoder.named_parameters()
        if weight.ndim == 2 and name.startswith(sampled)
    }
    return Sampled(matrices, read_norms(decoder, 30))


@pytest.mark.sweep(5)
@pytest.mark.parametrize("way", COPIES)
def test_copies_of_the_embedded_model_are_one_model_by_a_margin(sampled, way):
    torch.manual_seed(0)
    store, least = COPIES[way]
    cosine = agreement(default_policy().spec.directions, sampled.directions(store))
    assert cosine > least > ONE_MODEL + 0.05


def test_factors_moved_between_a_norm_and_its_readers_leave_the_model_one(sampled):
    """As AWQ and SmoothQuant move them before they round: whole columns grow or shrink several times."""
    torch.manual_seed(0)
    factors = {name: (0.7 * torch.randn_like(gain)).exp() for name, gain in sampled.norms.items()}
    norms = {name: gain / factors[name] for name, gain in sampled.norms.items()}

    def moved(name: str, weight: Tensor) -> Tensor:
        layer, _, part = name.partition(".self_attn." if "self_attn" in name else ".mlp.")
        norm = layer + (".input_layernorm" if "self_attn" in name else ".post_attention_layernorm")
        return weight if part in ("o_proj.weight", "down_proj.weight") else weight * factors[norm]

    matrices = {name: moved(name, weight) for name, weight in sampled.matrices.items()}
    shipped = default_policy().spec.directions
    assert agreement(shipped, Sampled(matrices, norms).directions()) > 0.999
    assert agreement(shipped, Sampled(matrices, norms).directions(in_gguf("Q4_0"))) > ONE_MODEL + 0.05
    # Without the norms it would be another model.
    assert agreement(read_directions(sampled.matrices, 30), read_directions(matrices, 30)) < ONE_MODEL


def test_norms_are_asked_what_they_multiply_by(model):
    decoder = model.get_decoder()
    plain = decoder.layers[1].input_layernorm
    torch.nn.init.uniform_(plain.weight, 0.1, 3.0)

    class OnePlus(type(plain)):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.rms_norm(x, x.shape[-1:]) * (1 + self.weight)

    centred = OnePlus(32).to(torch.float64)
    centred.weight.data.uniform_(-0.5, 0.5)
    shifted = nn.LayerNorm(32, dtype=torch.float64)
    torch.nn.init.normal_(shifted.weight)
    torch.nn.init.normal_(shifted.bias)
    decoder.layers[0].input_layernorm, decoder.layers[2].input_layernorm = centred, shifted
    found = read_norms(decoder, 3)
    torch.testing.assert_close(found["layers.1.input_layernorm"], plain.weight.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["layers.0.input_layernorm"], 1 + centred.weight.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["layers.2.input_layernorm"], shifted.weight.detach(), rtol=1e-4, atol=1e-5)
    assert set(found) == {
        f"layers.{n}.{norm}" for n in range(3) for norm in ("input_layernorm", "post_attention_layernorm")
    }


def test_a_model_that_moved_far_is_another(sampled):
    torch.manual_seed(0)
    own, shipped = sampled.directions(), default_policy().spec
    assert agreement(shipped.directions, own) > 0.9999
    spec = replace(shipped, directions=sampled.directions(tuned(0.6)))
    assert 0.7 < agreement(own, spec.directions) < ONE_MODEL - 0.05
    assert "other weights of the same architecture (rows agree to a cosine of 0.8" in model_difference(shipped, spec)


@pytest.mark.parametrize("entry", shipped_policies(), ids=lambda entry: entry.name)
def test_every_shipped_policy_knows_its_model_with_the_norms_and_no_other(entry):
    """Noise of 4 bits passes with room to spare; none of 200 random models of the same shape comes near."""
    own = entry.spec.directions
    places = [text.rpartition(" ")[0] for text in own]
    assert sum("_layernorm[" in place for place in places) == 30 and len(own) == 42
    values = torch.stack([torch.frombuffer(bytearray(b64decode(text.split()[-1])), dtype=torch.int8) for text in own])
    values, generator = values.float(), torch.Generator().manual_seed(0)

    def directions(rows: Tensor) -> list[str]:
        return [encode_direction(place, row) for place, row in zip(places, rows.tolist(), strict=True)]

    step = values.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True).expand(-1, -1, 32).flatten(1) / 7
    noised = values + step * (torch.rand(values.shape, generator=generator) - 0.5)
    assert agreement(own, directions(noised)) > ONE_MODEL + 0.08
    # A random model may even have the norms of the true one: what it has not is the rest of the direction.
    size = values.abs()
    worst = 0.0
    for _ in range(200):
        worst = max(worst, abs(agreement(own, directions(size * torch.randn(values.shape, generator=generator)))))
    assert worst < 0.25 < ONE_MODEL / 3


def test_numbers_of_rope_are_one_however_they_are_spelled(model):
    spec = replace(inspect_model(model), rope='{"rope_theta": 100000.0, "rope_type": "default"}')
    assert model_difference(spec, replace(spec, rope='{"rope_theta": 100000, "rope_type": "default"}')) is None
    for other in ('{"rope_theta": 10000, "rope_type": "default"}', '{"rope_theta": 100000, "rope_type": "yarn"}'):
        assert "rope" in model_difference(spec, replace(spec, rope=other))


def test_without_strict_other_weights_are_warned_of_and_other_heads_refused(model, policy, tmp_path):
    policy.save_pretrained(tmp_path)
    loose = Policy.from_pretrained(tmp_path, strict=False)
    with pytest.warns(UserWarning, match="trained for a model with other weights .* may not be what this model needs"):
        loose.check_model(inspect_model(tiny_llama(1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loose.check_model(inspect_model(model))
    with pytest.raises(PolicyMismatchError, match="kv_heads 2, but the model given has 4"):
        loose.check_model(inspect_model(tiny_llama(num_key_value_heads=4)))
    with pytest.raises(PolicyMismatchError, match="load it with strict=False to be warned instead"):
        policy.check_model(inspect_model(tiny_llama(1)))


@pytest.mark.parametrize(
    "change", [lambda directions: (), lambda directions: [text[:-3] + "!!!" for text in directions]]
)
def test_fingerprints_that_are_empty_or_damaged_fit_nothing(policy, change):
    damaged = replace(policy.spec, directions=tuple(change(policy.spec.directions)))
    assert model_difference(damaged, policy.spec) == "weight matrices of other names or sizes"


def quantised_linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.get_decoder().modules() if isinstance(module, nn.Linear)]


class Params4bit(nn.Parameter):
    """A parameter as bitsandbytes packs it: bytes of no shape, and a state that knows how to unpack them."""

    def __new__(cls, weight: Tensor):
        packed = super().__new__(cls, torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
        packed.quant_state = SimpleNamespace(shape=weight.shape, weight=weight)
        return packed


class Int8Params(nn.Parameter):
    """Bytes with a scale for each row, as bitsandbytes has them."""

    def __new__(cls, weight: Tensor):
        scale = weight.abs().amax(1, keepdim=True)
        return super().__new__(cls, (weight / scale * 127).round().to(torch.int8), requires_grad=False)


def packed_by(kind: type, model: nn.Module) -> nn.Module:
    for linear in quantised_linears(model):
        weight = linear.weight.detach()
        del linear.weight
        linear.register_parameter("weight", kind(weight))
    return model


@pytest.mark.parametrize("kind", [Params4bit, Int8Params])
def test_rows_are_read_from_what_bitsandbytes_packs(monkeypatch, policy, kind):
    functional = SimpleNamespace(dequantize_4bit=lambda data, state: grouped(4, 8)(state.weight).bfloat16())
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(functional=functional))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)
    spec = inspect_model(packed_by(kind, tiny_llama()))
    assert 0.98 < agreement(policy.spec.directions, spec.directions) <= 1.0
    policy.check_model(spec)
    with pytest.raises(PolicyMismatchError, match="other weights of the same architecture"):
        policy.check_model(inspect_model(packed_by(kind, tiny_llama(1))))
