"""The model of times on a GPU against what was measured, and the script that measures tiers, without a GPU."""

import json
from pathlib import Path

import pytest

from experiments import gpu_model, gpu_tiers


def test_the_model_is_near_what_was_measured():
    found = list(gpu_model.measurements())
    assert len(found) == 21
    for what, measured, modelled in found:
        assert modelled == pytest.approx(measured, rel=0.15), what


def test_the_page_has_the_estimates():
    assert gpu_model.table() in (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()


def test_a_shape_of_many_rows_is_bound_by_instructions_and_a_short_one_by_launches():
    many, few = (gpu_model.entries(tokens, rows, 0.15, gpu_model.TIERS) for tokens, rows in ((131_072, 8), (128, 1)))
    ratio = gpu_model.attention_seconds(many, 3, gpu_model.INSTRUCTIONS_BEFORE) / gpu_model.attention_seconds(
        many, 3, gpu_model.INSTRUCTIONS
    )
    assert ratio > 2.5
    assert gpu_model.attention_seconds(few, 3, gpu_model.INSTRUCTIONS) == pytest.approx(60e-6, rel=0.02)


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_without_one(tmp_path):
    out, words = tmp_path / "tiers.json", "--device cpu --tokens 200 --batches 1 --heads 4 --kv-heads 2 --dim 16"
    gpu_tiers.main([*words.split(), "--repeats", "1", "--layers", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [len(row["tiers"]) for row in rows] == [2, 2, 1]
    assert all(0 < row["low"] <= row["value"] <= row["high"] and row["estimated"] > 20 for row in rows)
