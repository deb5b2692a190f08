"""One model however it is stored, and no other: cosines of sampled rows, their margins, and forms of weights."""

import copy
import sys
import warnings
from types import SimpleNamespace

import gguf
import pytest
import torch
from torch import Tensor, nn

from lkv.config import asdict, from_dict, replace
from lkv.errors import PolicyMismatchError
from lkv.fingerprint import ONE_MODEL, agreement, differs
from lkv.host.fingerprint import read_directions
from lkv.host.spec import inspect_model
from lkv.models import default_policy, load_default
from lkv.policy import Policy
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
}


@pytest.fixture(scope="module")
def sampled():
    """The matrices of the embedded model that the fingerprint is read from, by name."""
    decoder = load_default()[0].get_decoder()
    wanted = ("layers.0.", "layers.15.", "layers.29.")
    return {
        name: weight.detach()
        for name, weight in decoder.named_parameters()
        if weight.ndim == 2 and name.startswith(wanted)
    }


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_the_embedded_model_are_one_model_by_a_margin(sampled, way):
    torch.manual_seed(0)
    store, least = COPIES[way]
    cosine = agreement(default_policy().spec.directions, read_directions({n: store(w) for n, w in sampled.items()}, 30))
    assert cosine > least > ONE_MODEL + 0.05


def test_a_model_that_moved_far_is_another(sampled):
    torch.manual_seed(0)
    own, shipped = read_directions(sampled, 30), default_policy().spec
    assert agreement(shipped.directions, own) > 0.9999
    spec = replace(shipped, directions=read_directions({n: tuned(0.6)(w) for n, w in sampled.items()}, 30))
    assert 0.7 < agreement(own, spec.directions) < ONE_MODEL - 0.05
    assert "other weights of the same architecture (rows agree to a cosine of 0.8" in differs(shipped, spec)


def test_none_of_a_thousand_random_models_of_the_same_shape_passes(sampled):
    own, shapes = default_policy().spec.directions, {name: weight.shape for name, weight in sampled.items()}
    generator = torch.Generator().manual_seed(0)
    # Rows are read by their place alone: views of a pool of random numbers stand for whole matrices.
    pool = torch.randn(2_000_000, generator=generator)
    worst = 0.0
    for _ in range(1000):
        starts = torch.randint(0, 1_000_000, (len(shapes),), generator=generator).tolist()
        model = {
            name: pool[start : start + shape.numel()].view(shape)
            for (name, shape), start in zip(shapes.items(), starts, strict=True)
        }
        worst = max(worst, abs(agreement(own, read_directions(model, 30))))
    assert worst < 0.15


def test_none_of_the_small_random_models_passes(model):
    expected = inspect_model(model)
    worst = max(agreement(expected.directions, inspect_model(tiny_llama(seed)).directions) for seed in range(1, 60))
    assert worst < 0.3 and differs(expected, inspect_model(tiny_llama(7)))


def test_a_policy_saved_with_single_values_serves_the_model_it_was_made_for(model, tmp_path):
    spec = inspect_model(model)
    old = {name: value for name, value in asdict(spec).items() if name != "directions"}
    policy = Policy(from_dict(type(spec), old))
    assert policy.spec.directions == () and len(policy.spec.weights) == 84
    policy.save_pretrained(tmp_path)
    policy = Policy.from_pretrained(tmp_path)
    policy.check_model(inspect_model(copy.deepcopy(model).to(torch.bfloat16)))
    with pytest.raises(PolicyMismatchError, match="other weights of the same architecture;"):
        policy.check_model(inspect_model(tiny_llama(1)))


def test_numbers_of_rope_are_one_however_they_are_spelled(model):
    spec = replace(inspect_model(model), rope="rope_theta 100000.0, rope_type default")
    assert differs(spec, replace(spec, rope="rope_theta 100000, rope_type default")) is None
    assert "rope 'rope_theta 100000.0" in differs(spec, replace(spec, rope="rope_theta 10000, rope_type default"))
    assert "rope" in differs(spec, replace(spec, rope="rope_theta 100000, rope_type yarn"))


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


def test_damaged_fingerprints_fit_nothing(policy):
    damaged = replace(policy.spec, directions=tuple(text[:-3] + "!!!" for text in policy.spec.directions))
    assert differs(damaged, policy.spec) == "weight matrices of other names or sizes"


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


def test_weights_that_cannot_be_read_are_refused_in_one_sentence(monkeypatch, policy, tmp_path):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    spec = inspect_model(packed_by(Params4bit, tiny_llama()))
    assert spec.directions == () and spec.weights == ()
    with pytest.raises(PolicyMismatchError, match=r"packed so that LKV cannot read and compare them; .*strict=False"):
        policy.check_model(spec)
    policy.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="packed so that LKV cannot read"):
        Policy.from_pretrained(tmp_path, strict=False).check_model(spec)


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_read_from_what_torchao_packs(bits):
    quantization = pytest.importorskip("torchao.quantization")
    settings = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "dtype": torch.float32}
    model = tiny_llama(**settings)
    policy = Policy(inspect_model(model))
    if bits == 8:
        how = quantization.Int8WeightOnlyConfig()
    else:
        how = quantization.IntxWeightOnlyConfig(torch.int4, quantization.granularity.PerGroup(32))
    quantization.quantize_(model, how)
    assert type(quantised_linears(model)[0].weight).__name__ not in ("Parameter", "Tensor")
    spec = inspect_model(model)
    assert 0.98 < agreement(policy.spec.directions, spec.directions) <= 1.0
    policy.check_model(spec)
    other = tiny_llama(seed=1, **settings)
    quantization.quantize_(other, how)
    with pytest.raises(PolicyMismatchError, match="other weights"):
        policy.check_model(inspect_model(other))
