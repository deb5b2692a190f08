"""The policy: parameter counts of the paper, scores against plain layers, files that refuse to lie."""

import json
import os
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lkv.errors import PolicyFileError, PolicyMismatchError, RetentionError
from lkv.hf.model_spec import ModelSpec
from lkv.hf.spec import inspect_model
from lkv.methods.targets import DEFAULT_TABLE, TierTable
from lkv.policy.policy import POLICY_FILE, WEIGHTS, HeadScores, Policy
from lkv.policy.token_scores import TokenScores
from lkv.utils import tensor_file
from tests.conftest import tiny_llama


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def spec(layers: int, kv_heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec("X", layers, 4 * kv_heads, kv_heads, head_dim, "{}", 1000, (0.5, -1.0))


@pytest.mark.parametrize(("layers", "tokens", "embeddings"), [(32, 8_454_144, 32_768), (36, 9_510_912, 36_864)])
def test_parameter_counts_of_the_papers_table(layers, tokens, embeddings):
    """App. C.1: Llama-3.1-8B has 8.50M parameters, Qwen3-8B 9.56M."""
    with torch.device("meta"):
        heads, scores = HeadScores(layers, 8, 128), TokenScores(layers, 8, 8, 128)
    assert size(scores) == tokens == layers * 8 * 33_024
    assert heads.embeddings.numel() == embeddings
    assert size(heads) - embeddings == 8_320
    assert round((size(heads) + size(scores)) / 1e6, 2) == {32: 8.50, 36: 9.56}[layers]


@given(st.floats(0.01, 0.99))
def test_ratios_average_to_the_retention(retention):
    torch.manual_seed(3)
    policy = Policy(spec(5, 3, 16))
    torch.nn.init.normal_(policy.heads.embeddings, std=20.0)
    ratios = policy.ratios(retention).detach()
    assert float(ratios.mean()) == pytest.approx(retention, rel=1e-5)
    assert float(ratios.min()) >= 0 and float(ratios.max()) <= 1
    assert float(ratios.std()) > 0.001
    assert bool((policy.inference_ratios(1.0) == 1.0).all())


@pytest.mark.parametrize("retention", [0.0, -0.1, 1.01, float("nan"), "much"])
def test_retention_outside_its_range_is_refused(retention):
    with pytest.raises(RetentionError, match=re.escape("must lie in (0, 1]")):
        Policy(spec(2, 2, 8)).inference_ratios(retention)


def test_a_folder_of_something_else_is_not_overwritten(tmp_path, policy):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(PolicyFileError, match=r"holds the config\.json of something else"):
        policy.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_saved_policy_loads_equal(tmp_path, policy):
    policy.card["sources"] = ["a"]
    policy.save_pretrained(tmp_path / "p")
    loaded = Policy.from_pretrained(tmp_path / "p")
    assert loaded.spec == policy.spec and loaded.card == {"sources": ["a"]}
    for name, tensor in policy.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["config.json", "policy.safetensors"]


def test_missing_truncated_and_tampered_files_are_refused(tmp_path, policy):
    with pytest.raises(PolicyFileError, match="there is no policy folder"):
        Policy.from_pretrained(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(PolicyFileError, match=r"there is no file .*policy\.safetensors; give a folder that"):
        Policy.from_pretrained(tmp_path)
    policy.save_pretrained(tmp_path)
    weights = tmp_path / "policy.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(PolicyFileError, match="is not a saved policy"):
        Policy.from_pretrained(tmp_path)
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(PolicyFileError, match="damaged or changed"):
        Policy.from_pretrained(tmp_path)
    # The description counts as the numbers do.
    weights.write_bytes(whole.replace(b'max_positions\\": 512', b'max_positions\\": 519'))
    assert weights.read_bytes() != whole
    with pytest.raises(PolicyFileError, match="damaged or changed"):
        Policy.from_pretrained(tmp_path)
    weights.unlink()
    with pytest.raises(PolicyFileError, match=r"there is no file .*policy\.safetensors"):
        Policy.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, "the dtype 'F4', which torch cannot hold"),
        ({"x": {"dtype": "F8_E9", "shape": [1], "data_offsets": [0, 1]}}, "the dtype 'F8_E9'"),
        ({"x": {"dtype": "F32", "shape": [2.5], "data_offsets": [0, 8]}}, "is not a saved policy"),
        ({"x": {"dtype": "F32", "shape": [2**70], "data_offsets": [0, 8]}}, "is not a saved policy"),
        ({"x": None}, "is not a saved policy"),
        (b"[1]", "its header is not a JSON object"),
        (b"{" + b" " * 2**24 + b"}", "header has 16,777,218 bytes, more than the 16,777,216"),
        (b"[" * 100_000, "is not a saved policy"),
    ],
)
def test_hostile_headers_are_refused_in_one_sentence(tmp_path, header, message):
    if isinstance(header, dict):
        about = {"lkv-policy": json.dumps({"format": 2}), "sha256": ""}
        header = json.dumps({"__metadata__": about, **header}).encode()
    path = tmp_path / "policy.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(PolicyFileError, match=message):
        tensor_file.read(path, POLICY_FILE)


def rewrite(policy, folder, change):
    """Save the policy with other fields of its description; an empty object replaces what was there."""
    policy.save_pretrained(folder)
    tensors, about = tensor_file.read(folder / WEIGHTS, POLICY_FILE)
    about.pop("format")
    for name, value in change.items():
        about[name] = about[name] | value if value and isinstance(value, dict) else value
    tensor_file.write(folder / WEIGHTS, POLICY_FILE, tensors, about)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"card": ["tiers"]}, "card"),
        ({"model": {"weights": ["a"]}}, "weights"),
        ({"model": {"directions": [3]}}, "directions"),
        ({"model": {"rope": None}}, "rope"),
        ({"model": {"rope": "{"}}, "property name"),
        ({"model": {"rope": "x" * 10**5}}, "Expecting value"),
        ({"model": {"rope": '{"a": ' + "[" * 100_000}}, "recursion"),
        ({"model": {"layers": 3.0}}, "layers"),
        ({"model": {}}, "missing"),
        ({"model": None}, ""),
        ({"inputs": {"knots": True}}, "knots"),
        ({"inputs": {"knots": 10**9}}, "knots is 1000000000, but .* from 0 to 32"),
        ({"inputs": {"key": "sideways"}}, "key is 'sideways'"),
        ({"inputs": {"touch": True}}, r"unknown fields \['touch'\] for ScorerInputs"),
        ({"inputs": [3]}, "unknown fields"),
    ],
)
def test_a_description_that_this_version_does_not_know_is_refused_in_one_sentence(tmp_path, policy, change, names):
    rewrite(policy, tmp_path, change)
    with pytest.raises(PolicyFileError, match=f"does not hold a policy .*{names}"):
        Policy.from_pretrained(tmp_path)


@pytest.mark.parametrize("change", [{"card": {"trained_tokens": 10**400}}, {"model": {"directions": [""] * 50}}])
def test_a_description_that_says_nothing_is_used_or_refused_in_one_sentence(tmp_path, policy, change):
    rewrite(policy, tmp_path, change)
    loaded = Policy.from_pretrained(tmp_path)
    assert loaded.trained_tokens is None
    if "model" in change:
        with pytest.raises(PolicyMismatchError) as error:
            loaded.check_model(policy.spec)
        assert len(str(error.value)) < 1500


@pytest.mark.parametrize(
    "rows",
    [
        3, [], [[0.0]], [[0.0, []]], [[0.0, [[8, 4]]]], [[0.0, [[8.0, 4.0, 1.0]]]], [[0.0, [[5, 4, 1.0]]]],
        [[1.0, [[8, 4, 1.0]]]], [[10**400, [[8, 4, 1.0]]]], [[0.0, [[8, 4, 10**400]]]], [[0.0, [[8, 4, 0.5]]]],
        [[0.0, [[4, 3, 0.5], [8, 4, 0.5]]]], [[0.0, [[[], {}, 1.0]]]], ["ab"], [[0.0, "abc"]] * 1000,
        [[0.0, [[8, 4, 2.0], [4, 4, -1.0]]]], [[0.0, [[8, 4, float("nan")]]]],
    ],
)  # fmt: skip
def test_a_table_of_precisions_that_is_none_is_refused_in_one_sentence(rows):
    with pytest.raises(PolicyFileError, match="the policy's table of precisions is") as error:
        TierTable.from_json(rows)
    assert len(str(error.value)) < 400
    assert TierTable.from_json(DEFAULT_TABLE.to_json()) == DEFAULT_TABLE


@pytest.mark.parametrize("version", [1, 99])
def test_another_format_is_refused(tmp_path, policy, version):
    policy.save_pretrained(tmp_path)
    tensors, about = tensor_file.read(tmp_path / WEIGHTS, POLICY_FILE)
    tensor_file.write(tmp_path / WEIGHTS, POLICY_FILE._replace(version=version), tensors, about | {"format": version})
    with pytest.raises(PolicyFileError, match=f"format {version}, but this version reads 2"):
        Policy.from_pretrained(tmp_path)


def test_a_description_of_a_huge_model_takes_no_memory(tmp_path, policy):
    for name in ("layers", "kv_heads", "head_dim"):
        rewrite(policy, tmp_path, {"model": {name: 10**6}})
        with pytest.raises(PolicyFileError, match="does not hold a policy"):
            Policy.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "number"), [("tokens.bias", torch.nan), ("heads.embeddings", torch.inf), ("tokens.std", 0.0)]
)
def test_numbers_that_decide_nothing_are_refused(tmp_path, policy, name, number):
    state = policy.state_dict()
    state[name].flatten()[3] = number
    policy.save_pretrained(tmp_path)
    with pytest.raises(PolicyFileError, match=f"{name} of .* contains NaN, infinite or impossible values"):
        Policy.from_pretrained(tmp_path)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_save_leaves_one_policy_or_the_other(tmp_path, policy, monkeypatch, failing):
    """The first rename is the policy itself, the second the description for people."""
    policy.save_pretrained(tmp_path)
    before = Policy.from_pretrained(tmp_path).digest()
    renames, replace = [], os.replace

    def fail(source, target):
        renames.append(target)
        if len(renames) == failing:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    policy.tokens.bias += 1
    with pytest.raises(PolicyFileError, match="No space left on device"):
        policy.save_pretrained(tmp_path)
    assert Policy.from_pretrained(tmp_path).digest() == (before if failing == 1 else policy.digest())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "policy.safetensors"]


def test_other_models_are_refused_and_other_dtypes_are_not(policy, model):
    policy.check_model(inspect_model(model.to(torch.bfloat16)))
    with pytest.raises(PolicyMismatchError, match="other weights"):
        policy.check_model(inspect_model(tiny_llama(seed=1)))
    with pytest.raises(PolicyMismatchError, match="kv_heads 2, but the model given has 4"):
        policy.check_model(replace(policy.spec, kv_heads=4))
