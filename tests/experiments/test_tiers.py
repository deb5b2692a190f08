"""Tables of precisions, and what is expected of a GPU."""

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from experiments import gpu_model, gpu_tiers, tiers
from experiments.tiers import CANDIDATES, best_table, measure_tiers
from lkv.cache.ragged_cache import RaggedCache
from lkv.errors import LkvError
from lkv.hf.attention import patch_attention
from lkv.methods.targets import UNQUANTIZED, KVShape, MemoryTarget, Precision, TierTable, TierTarget
from lkv.policy.policy import Policy
from lkv.training.data.samples import TokenizedSample
from tests.conftest import tiny_llama
from tests.experiments.test_benchmarks import log_probabilities
from tests.requests import resolve_method

CONTEXT, CONTINUATION, SKIP = list(range(3, 63)), [5, 9, 6, 8, 7], 2


@torch.no_grad()
def test_the_divergence_is_that_of_the_stock_model():
    model = tiny_llama(dtype=torch.float32, head_dim=16)
    torch.manual_seed(0)
    policy = Policy(patch_attention(model).spec)
    (measured,) = measure_tiers(model, policy, [TokenizedSample("text", CONTEXT, [(CONTINUATION, SKIP)])], [0.8, 2.4])
    assert set(measured) == {(bits, table) for bits in (0.8, 2.4) for table in CANDIDATES}
    whole = model(torch.tensor([CONTEXT + CONTINUATION[:-1]])).logits[0]
    expected = log_probabilities(whole[len(CONTEXT) + SKIP - 1 :])
    table = TierTable.single(Precision(8, 8))
    method = resolve_method("lkv", model, memory=2.4 / 16, policy=policy, tier_table=table)
    cache = RaggedCache(model, method=method)
    model(torch.tensor([CONTEXT]), past_key_values=cache, use_cache=True)
    found = model(torch.tensor([CONTINUATION[:-1]]), past_key_values=cache, use_cache=True).logits[0, SKIP - 1 :]
    kl = (expected.exp() * (expected - log_probabilities(found))).sum(-1).mean()
    assert measured[2.4, table] == pytest.approx(float(kl), rel=1e-3, abs=1e-6) and kl > 0


def test_a_table_without_a_policy_to_write_it_into_is_refused_at_once(monkeypatch, tmp_path):
    def measured(*_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(tiers, "subject_of", measured)
    words = ["tiers", "--data", str(tmp_path), "--write", "--out", str(tmp_path / "tiers.json")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(LkvError, match="name that folder with --policy"):
        tiers.main()


def test_the_least_divergence_over_all_samples_wins_at_each_budget():
    best = {0.8: CANDIDATES[3], 1.6: CANDIDATES[3], 2.4: CANDIDATES[1]}
    # The second sample's large numbers must not outweigh the first one's: logarithms are averaged.
    samples = [
        {(bits, table): scale * (1.0 if table == best[bits] else math.e) for bits in best for table in CANDIDATES}
        for scale in (0.001, 10.0)
    ]
    samples[1][0.8, best[0.8]] = 10.1
    found = best_table(samples)
    assert found == TierTable(((0.0, best[0.8].rows[0][1]), (math.sqrt(1.6 * 2.4), best[2.4].rows[0][1])))
    # Each budget is spent in the way that was best for it, without the bits that all of a head's entries share.
    for bits, table in best.items():
        target = TierTarget(
            memory=MemoryTarget(share=bits / 16), shape=KVShape(6, 64, 2), table=found, precision=UNQUANTIZED
        )
        ((_, way),) = table.rows
        shares = target.shares(1000)
        used = [
            each
            for each, (better, share) in zip(shares, pairwise([0.0, *shares.values()]), strict=True)
            if share > better
        ]
        assert used == [precision for precision, _ in way]


def test_the_model_is_near_what_was_measured():
    found = list(gpu_model.measurements())
    assert len(found) == 24
    for what, measured, modelled in found:
        assert modelled == pytest.approx(measured, rel=0.15), what


def test_the_page_has_the_estimates():
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    assert gpu_model.table() in page and gpu_model.eviction_table() in page


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_without_one(tmp_path):
    out, words = tmp_path / "tiers.json", "--device cpu --tokens 200 --batches 1 --heads 4 --kv-heads 2 --dim 16"
    gpu_tiers.main([*words.split(), "--repeats", "1", "--layers", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [len(row["tiers"]) for row in rows] == [2, 2, 1]
    assert all(0 < row["low"] <= row["value"] <= row["high"] and row["estimated"] > 20 for row in rows)
