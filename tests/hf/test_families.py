"""Every family in tests/families.py, by a tiny random model: compresses, generates, streams and trains."""

import sys
from collections.abc import Callable

import pytest
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from experiments.profile.predict import check_uniform
from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import UnsupportedModelError
from lkv.hf.attention import patch_attention
from lkv.hf.cache_argument import cache_argument, pass_arguments
from lkv.hf.prompt_kv import read_prompt
from lkv.hf.rotation import Rotation, equal_tokens, layer_rotations
from lkv.hf.spec import decoder_kinds
from lkv.methods.budgets import PerHead
from lkv.methods.method import Method
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.training.data.samples import TokenizedSample
from lkv.training.distillation import SampleDistillation, gumbel, soft_mask
from lkv.training.warm_start import calibrate
from tests.cache.helpers import RATIOS, OwnScores, ids, padded, score
from tests.conftest import present
from tests.families import HYBRIDS, REFUSED, SERVED, Family, build
from tests.model_table import DOCUMENT, document, downloaded_models

PROMPT = 40


def method_of(layers: int, heads: int) -> Method:
    return Method("own", PerHead([[RATIOS[i % 3][h % 2] for h in range(heads)] for i in range(layers)]), OwnScores())


def masked_logits(model, text: torch.Tensor, method: Method, monkeypatch) -> torch.Tensor:
    """Of the stock model, whose full-attention layers hide from rows beyond the prompt what a head gives up there."""
    kinds = [(index, kind) for index, kind in enumerate(decoder_kinds(model)) if kind.is_evicted]
    # The number of each full-attention layer, and of the one whose k and v a layer reads.
    full = {layer: number for number, (index, kind) in enumerate(kinds) for layer in (index, *kind.readers)}
    own = sys.modules[type(model).__module__]
    is_eager = model.config._attn_implementation.endswith("eager")
    original = own.eager_attention_forward if is_eager else ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module, query, key, value, mask, **kwargs):
        if module.layer_idx in full:
            gone = torch.zeros(key.shape[:3], dtype=torch.bool)
            table = score(key[:, :, :PROMPT], value[:, :, :PROMPT])
            ratios = method.budget.ratios(full[module.layer_idx], key.shape[1], PROMPT)
            for head, ratio in enumerate(ratios):
                worst = table[:, head].argsort(-1)[:, : PROMPT - int(ratio * PROMPT + 1e-6)]
                gone[:, head].scatter_(1, worst, True)
            rows = torch.arange(text.shape[1])
            hidden = (rows[:, None] < rows) | (gone[:, :, None] & (rows[:, None] >= PROMPT))
            mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, -torch.inf)
            mask = mask.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return original(module, query, key, value, mask, **kwargs)

    if is_eager:
        monkeypatch.setattr(own, "eager_attention_forward", attention)
    else:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attention)
    return model(text, use_cache=False).logits


def check_generation(model, method: Method, monkeypatch) -> None:
    out = model.generate(
        ids(2, PROMPT), past_key_values=RaggedCache(model, method=method), max_new_tokens=5, do_sample=False,
        eos_token_id=None, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        expected = masked_logits(model, out.sequences, method, patch)[:, PROMPT:-1]
    # generate() gives its logits in float32.
    torch.testing.assert_close(torch.stack(out.logits[1:], 1), expected.float(), atol=1e-5, rtol=1e-5)
    cache, found = RaggedCache(model, method=method), []
    for part in out.sequences[:, :-1].split([PROMPT, 1, 3], 1):
        found.append(model(part, **pass_arguments(cache, part)).logits)
    # The routers of these two compute in float32.
    error = 1e-6 if type(model).__name__.startswith(("Dots1", "MiniMaxM2")) else 1e-9
    torch.testing.assert_close(torch.cat(found[1:], 1), expected, atol=error, rtol=error)


def check_rotations(model, rotation: str) -> None:
    """k of equal hidden states is equal everywhere once it is un-rotated."""
    with equal_tokens(model) as text:
        layers = read_prompt(model, text)
    assert {layer.rotation is None for layer in layers} == {rotation.startswith("none")}
    for layer in layers:
        if layer.rotation is not None:
            bare = layer.rotation.unrotate(layer.key)
            torch.testing.assert_close(bare, bare[:, :, :1].expand_as(bare), atol=1e-5, rtol=1e-5)


def check_streaming(model, policy: Policy) -> None:
    cache = RaggedCache(model, policy=policy, retention=0.3, streaming=True, prompt_tokens=PROMPT)
    for part in ids(2, PROMPT).split(20, 1):
        out = model(part, past_key_values=cache, use_cache=True)
    assert cache.realised_retention() == pytest.approx(0.3, abs=0.03) and out.logits.isfinite().all()


def check_training(model, policy: Policy, steps: int = 1, is_exact: bool = False) -> None:
    """Steps of training change every parameter; if `is_exact`, gradients equal finite differences."""
    calibrate(model, policy, [ids(1, PROMPT, seed)[0].tolist() for seed in range(steps)])
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    item = TokenizedSample("random", ids(1, PROMPT)[0].tolist(), [(ids(1, 9, 1)[0].tolist(), 4)] * 2)
    run = SampleDistillation(model.requires_grad_(False), item)
    with torch.no_grad():
        teacher = run.run(None)
    for step in range(steps):

        def compute_loss(seed: int = step) -> torch.Tensor:
            scores = run.scores(policy)
            noise = gumbel((2, *scores.shape), torch.Generator().manual_seed(seed))
            return run.kl(teacher, run.run(soft_mask(policy, scores, 0.3, 0.5, noise)))

        loss = compute_loss()
        optimizer.zero_grad()
        loss.backward()
        assert loss > 0 and all(parameter.grad.isfinite().all() for parameter in policy.parameters())
        if is_exact:
            check_gradient(policy, compute_loss)
        optimizer.step()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())


@torch.no_grad()
def check_gradient(policy: Policy, compute_loss: Callable[[], torch.Tensor]) -> None:
    """Along the sum of all parameters' normalised gradients the loss changes by the sum of their norms.

    Experts are chosen by the largest logit, so that the loss jumps in some places: one of several steps has none.
    """
    parameters = [*policy.parameters()]
    norms = [torch.linalg.vector_norm(parameter.grad) for parameter in parameters]
    assert all(norm > 0 for norm in norms)
    original, differences = [parameter.clone() for parameter in parameters], []
    for size in (3e-3, 1e-3, 1e-2, 3e-4):
        losses = []
        for sign in (1, -1):
            for parameter, value, norm in zip(parameters, original, norms, strict=True):
                parameter.copy_(value + sign * size / norm * parameter.grad)
            losses.append(compute_loss().double())
        differences.append(float((losses[0] - losses[1]) / (2 * size) / sum(norms)))
        if abs(differences[-1] - 1) < 0.02:
            break
    for parameter, value in zip(parameters, original, strict=True):
        parameter.copy_(value)
    assert differences[-1] == pytest.approx(1, abs=0.02), differences


@pytest.mark.slow
@pytest.mark.parametrize("family", SERVED + HYBRIDS, ids=lambda family: family.label)
def test_gradients_of_two_training_steps_equal_finite_differences(family: Family):
    present(family)
    if not family.fits:
        pytest.skip("refused, see test_hybrid_models.py")
    model = family.build(torch.float32)
    # With seed 1 the loss of these mixtures of experts jumps where training starts.
    torch.manual_seed(2 if family.name in ("Ernie4_5_Moe", "Mixtral", "Phimoe") else 1)
    check_training(model, Policy(patch_attention(model).spec, inputs=scorer_inputs(family)), 2, is_exact=True)


def scorer_inputs(family: Family) -> ScorerInputs:
    """All inputs of a scorer that the family allows."""
    return ScorerInputs() if family.rotation.startswith("none") else ScorerInputs("unrotated", "learned", 8)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.label)
def test_a_family_generates_streams_and_trains(family: Family, monkeypatch, exact_softmax):
    present(family)
    model = family.build()
    spec = patch_attention(model).spec
    assert spec.layers == (2 if family.layers.startswith("full") else model.config.num_hidden_layers)
    patched = patch_attention(model)
    is_plain = patched.softcap is None and all(sinks is None for sinks in patched.sinks)
    assert family.is_served_in_vllm == (is_plain and not any(kind.other for kind in patched.kinds))
    with torch.no_grad():
        check_generation(model, method_of(spec.layers, spec.kv_heads), monkeypatch)
        check_rotations(model, family.rotation)
    torch.manual_seed(1)
    policy, model = Policy(spec, inputs=scorer_inputs(family)), family.build(torch.float32)
    check_training(model, policy, 2 if family.name == "Llama" else 1)
    check_streaming(model, policy.requires_grad_(False))


@pytest.mark.sweep(12)
@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.label)
def test_rows_padded_on_the_left_are_compressed_and_answered_as_alone(family: Family):
    """By eager attention in float64: transformers' own masks for it make rows of padding NaN, and then all others."""
    if family.name == "Llama4":
        pytest.skip("transformers counts padding in the temperature of its queries")
    model, texts = present(family).build(), [ids(1, PROMPT), ids(1, PROMPT - 7, 1)]
    model.set_attn_implementation("eager")
    method = "knorm" if family.rotation.startswith("none") else "adakv-expected"

    def generate(**inputs: torch.Tensor):
        cache = RaggedCache(model, method=method, retention=0.3)
        out = model.generate(
            **inputs, **cache_argument(cache), max_new_tokens=4, do_sample=False, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return torch.stack(out.logits, 1), [layer.lens for layer in cache.ragged_layers]

    logits, counts = generate(**padded(texts))
    for row, text in enumerate(texts):
        own_logits, own_counts = generate(input_ids=text)
        torch.testing.assert_close(logits[row], own_logits[0], atol=1e-4, rtol=1e-4)
        assert [lens[row].tolist() for lens in counts] == [lens[0].tolist() for lens in own_counts]


@torch.no_grad()
def test_a_window_as_long_as_the_models_positions_is_full_attention(monkeypatch):
    """As in Phi-3.5-mini and Phi-4-mini."""
    model = build("Phi3", sliding_window=1024)
    check_uniform(model.config)
    spec = patch_attention(model).spec
    assert spec.layers == model.config.num_hidden_layers
    method = method_of(spec.layers, spec.kv_heads)
    check_generation(model, method, monkeypatch)
    batch = padded([ids(1, PROMPT), ids(1, PROMPT - 7, 1)])
    stock = model(**batch, use_cache=False).logits
    # As for a model without windows, no mask with an entry for each query and key is made.
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def make_key_mask(*args, **kwargs):
        mask = make_mask(*args, **kwargs)
        assert mask is None or mask.ndim == 2
        return mask

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "sdpa", make_key_mask)
    kept = model(**batch, past_key_values=RaggedCache(model, method=method), use_cache=True).logits
    for row, length in enumerate((PROMPT, PROMPT - 7)):
        torch.testing.assert_close(kept[row, -length:], stock[row, -length:], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("window", "layers"), [(512, 4), (511, 2)])
def test_only_a_window_as_long_as_the_positions_hides_nothing(window: int, layers: int):
    kinds = ["sliding_attention", "full_attention"] * 2
    model = build("Gemma3", num_hidden_layers=4, layer_types=kinds, sliding_window=window)
    assert patch_attention(model).spec.layers == layers


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_large_biases_that_hardly_turn_are_no_layers_without_rope(dtype: torch.dtype):
    """As in Qwen2.5: k of one token repeated is nearly equal at all positions, though it is rotated."""
    model = build("Qwen2", dtype)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.view(2, 8)[:, [3, 7]] = 100.0
    assert {type(rotation) for rotation in patch_attention(model).rotations} == {Rotation}


@pytest.mark.parametrize("name", ["Llama", "SmolLM3", "HunYuanDenseV1"])
def test_without_weights_the_rotation_of_layers_that_may_differ_is_not_taken(name: str):
    model = next(family for family in SERVED if family.name == name).build()
    assert {type(rotation) for rotation in layer_rotations(model, has_weights=False)} == {
        Rotation if name == "Llama" else type(None)
    }


def test_a_layer_kind_that_nobody_knows_is_refused_by_name():
    model = build("Qwen3")
    model.config.layer_types = ["full_attention", "spiral_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match=r"layers of kind \['spiral_attention'\]; LKV works with"):
        patch_attention(model)


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_a_family_is_refused_with_its_reason(family: Family):
    present(family)
    with pytest.raises(UnsupportedModelError) as error:
        patch_attention(family.build())
    assert family.refused.removeprefix("attention by ") in str(error.value)


def test_the_document_has_the_tables_of_now():
    assert DOCUMENT.read_text(encoding="utf-8") == document()


def test_the_most_downloaded_models_are_those_of_the_families_that_are_tested():
    models = downloaded_models()
    assert len(models) == 50 and sum(model.is_served for model in models) >= 45
    for model in models:
        assert model.is_served or model.refusal or model.model_type not in CONFIG_MAPPING_NAMES
        assert not (model.is_served and model.refusal)
        for family in (model.text, model.images, model.refusal):
            if family and not family.missing:
                config = getattr(transformers, f"{family.name}Config")
                assert config.model_type == model.model_type


@pytest.mark.parametrize(("name", "halves"), [("Llama", True), ("Olmo2", True), ("Cohere", False), ("Glm", False)])
def test_the_fast_rotation_is_taken_only_where_it_is_the_models_own(name: str, halves: bool):
    model = next(family for family in SERVED if family.name == name).build()
    turning = Rotation(model)
    x = torch.randn(2, 3, 20, patch_attention(model).spec.head_dim, dtype=torch.float64)
    cos, sin = turning._compute(x, torch.arange(5, 25))
    torch.testing.assert_close(turning.rotate(x, 5), turning._turn_by_model(x, cos, sin), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(turning.unrotate(turning.rotate(x, 5), 5), x, rtol=1e-5, atol=1e-5)
    assert turning._rotates_halves is halves
    half = x.bfloat16()
    assert turning.unrotate(half).dtype == turning.rotate(half).dtype == torch.bfloat16
