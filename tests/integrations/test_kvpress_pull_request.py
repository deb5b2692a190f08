"""The press in examples/kvpress masks what the method "lkv" evicts, and works as kvpress's tests use one."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

with warnings.catch_warnings():
    # A package that kvpress imports uses a module of the standard library that goes away.
    warnings.filterwarnings("ignore", "'pipes' is deprecated", DeprecationWarning)
    kvpress = pytest.importorskip("kvpress")

from examples.kvpress.lkv_press import LKVPress
from lkv.hf.prompt_kv import read_prompt
from lkv.hf.spec import inspect_model
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from tests.conftest import tiny_llama
from tests.requests import resolve_method

PAGE = Path(__file__).parents[2] / "examples" / "kvpress" / "README.md"
TOKENS = 200
IDS = torch.randint(3, 67, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def saved(tmp_path) -> str:
    """A random policy with the paper's scorer, in a folder."""
    torch.manual_seed(0)
    policy = Policy(inspect_model(tiny_llama()))
    with torch.no_grad():
        policy.heads.embeddings.normal_(std=3)
        policy.tokens.bias.normal_()
        policy.tokens.mean.normal_()
        policy.tokens.std.uniform_(0.5, 2)
    policy.save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


def indices(mask: torch.Tensor) -> set[tuple[int, ...]]:
    """(row, head, token) of each true element of `mask` [B, H, T]."""
    return set(map(tuple, mask.nonzero().tolist()))


@torch.no_grad()
def evicted(model, retention: float, policy: Policy) -> list[set[tuple[int, ...]]]:
    """(row, head, token) of what the method "lkv" evicts in each layer after reading two texts."""
    method = resolve_method("lkv", model, retention=retention, policy=policy)
    found = []
    for number, layer in enumerate(read_prompt(model, IDS)):
        scores = method.selector.scores(number, layer)
        ranks = scores.argsort(-1, descending=True).argsort(-1)
        counts = torch.tensor(method.budget.counts(number, scores))
        found.append(indices(ranks >= counts[..., None]))
    return found


@torch.no_grad()
def masked(model, press) -> list[set[tuple[int, ...]]]:
    """(row, head, token) of what each layer masks after reading two texts."""
    with press(model):
        model.model(input_ids=IDS, past_key_values=DynamicCache(), cache_position=torch.arange(TOKENS))
    found = []
    for layer in model.model.layers:
        places = layer.self_attn.masked_key_indices
        found.append(set(zip(*(place.tolist() for place in places), strict=True)) if places else set())
    return found


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.85])
def test_it_masks_what_lkv_evicts(saved, ratio):
    expected = evicted(tiny_llama(), 1 - ratio, Policy.from_pretrained(saved))
    assert masked(tiny_llama(), LKVPress(saved, compression_ratio=ratio)) == expected
    share = sum(map(len, expected)) / (2 * 3 * 2 * TOKENS)
    assert share == pytest.approx(ratio, abs=0.01)


def test_what_it_cannot_use_is_refused(saved, tmp_path):
    with pytest.raises(ValueError, match=r"has \(layers, KV heads\) \(3, 2\), but the model has \(2, 2\)"):
        masked(tiny_llama(num_hidden_layers=2), LKVPress(saved, 0.5))
    Policy(inspect_model(tiny_llama()), inputs=ScorerInputs(key="unrotated")).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="has not the scorer of the paper"):
        masked(tiny_llama(), LKVPress(str(tmp_path / "other"), 0.5))
    with pytest.raises(AssertionError, match="Compression ratio"):
        LKVPress(saved, 1.0)


def test_the_class_for_kvpresss_tests_works():
    code = re.findall(r"```python\n(class .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    names = {"LKVPress": LKVPress, "torch": torch}
    exec(code, names)
    for ratio in (0.2, 0.8):
        found = masked(tiny_llama(), names["TestLKVPress"](compression_ratio=ratio))
        assert sum(map(len, found)) / (2 * 3 * 2 * TOKENS) == pytest.approx(ratio, abs=0.02)
