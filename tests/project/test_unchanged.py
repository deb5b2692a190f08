"""The check that nothing measured has changed finds what has."""

import pytest
import torch

from experiments import unchanged
from experiments.unchanged import (
    RETENTIONS,
    compressing,
    differences,
    indices_of,
    kept_and_predicted,
    text_of,
    tiny,
)
from lkv.errors import LkvError
from lkv.methods.registry import METHODS


def test_a_change_of_a_kept_index_or_of_a_number_is_told():
    before = {"kept": torch.tensor([3, 5]), "logits": torch.tensor([1.0, float("nan")])}
    assert differences(before, {name: tensor.clone() for name, tensor in before.items()}, 0.0) == []
    nearly = {"kept": torch.tensor([3, 5]), "logits": torch.tensor([1.0 + 2**-20, float("nan")])}
    assert differences(before, nearly, 0.0) == ["logits: up to 9.54e-07 apart"]
    assert differences(before, nearly, 1e-6) == []
    other = {"kept": torch.tensor([3, 6]), "logits": torch.tensor([1.0, 2.0])}
    assert differences(before, other, 10.0) == ["kept: up to 1 apart", "logits: measured at the one alone"]
    assert differences(before, {"kept": torch.tensor([3])}, 10.0) == [
        "logits: only at the one",
        "kept: (2,) and now (1,)",
    ]


def test_kept_indices_are_read_from_k():
    whole = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0))
    state = {"kept.1": torch.tensor([[2, 3]]), "k.1": torch.cat([whole[0, [1, 4]], whole[1, [0, 5, 6]]])}
    assert indices_of(state, 1, whole).tolist() == [2, 3, 1, 4, 0, 5, 6]
    state["k.1"][0] += 1
    with pytest.raises(ValueError, match="layer 1 holds entries that the text has not"):
        indices_of(state, 1, whole)


def test_a_text_read_once_for_all_methods_gives_what_each_reading_gives(tmp_path):
    model, tokenizer, policy = tiny(tmp_path / "model")
    text = text_of(0, tokenizer, 120)
    methods = ("lkv", "snapkv", "kvzip", "lkv-h+kvzip")
    ways = [compressing(model, tokenizer, policy, METHODS, text, once) for once in (False, True)]
    results = [kept_and_predicted(way, methods, "a text", text, tmp_path / "context.kv") for way in ways]
    assert len(results[0]) == 2 * len(methods) * len(RETENTIONS)
    assert differences(*results, 1e-5) == []


def test_methods_with_windows_are_compared_on_a_text_that_is_long_enough(tmp_path, monkeypatch):
    model, tokenizer, policy = tiny(tmp_path / "model")
    text = text_of(0, tokenizer, unchanged.WINDOWS_TOKENS["tiny"])
    way = compressing(model, tokenizer, policy, METHODS, text, once=True)
    results = kept_and_predicted(way, ("duo", "duo-kvpress"), "a text", text, tmp_path / "context.kv")
    refused = [name for name in results if name.endswith("refused")]
    assert refused == ["duo at 0.15, a text: refused"] and len(results) == 7
    monkeypatch.setattr(unchanged, "pattern_of", lambda model: None)
    with pytest.raises(LkvError, match="pattern"):  # which is not a text that is too short
        kept_and_predicted(way, ("duo",), "a text", text, tmp_path / "context.kv")
