"""Evaluations on a fake GPU whose memory runs out, and policies that lie elsewhere."""

import json
import pkgutil

import pytest
import torch

from lkv.cache.layer import RaggedLayer
from lkv.evaluation import runner
from lkv.evaluation.runner import EvaluationConfig, evaluate
from lkv.utils.cpp_compiler import find_compiler
from tests.fake_gpu.device import load, memory_limit
from tests.fake_suite import Letters, make_examples, make_prompt, score
from tests.gpu.test_gpu import policy_of

if find_compiler() is None:
    pytest.skip("there is no C++ compiler to build the fake GPU with", allow_module_level=True)


def evaluated(model, out, methods=("knorm", "keydiff", "snapkv", "h2o", "tova", "streaming-llm"), **options):
    """Rows of 18 caches beside each other, which take more memory than the one prompt read."""
    config = EvaluationConfig(methods, [0.5, 0.3, 0.2], make_prompt=make_prompt, score=score, **options)
    evaluate(model, Letters(), make_examples(1, ("alpha",), tokens=90), config, out)
    return [json.loads(line)["rows"] for line in out.read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def expected_rows(on_fake, tmp_path_factory):
    """What an evaluation with enough memory writes."""
    return evaluated(on_fake, tmp_path_factory.mktemp("expected") / "a.jsonl")


@pytest.fixture(scope="module")
def needed_memory(on_fake, expected_rows, tmp_path_factory):
    """The most bytes that such an evaluation takes, its first in a process left out."""
    library, before = load(), load().fake_gpu_held(0)
    library.fake_gpu_forget_most(0)
    assert evaluated(on_fake, tmp_path_factory.mktemp("needed") / "b.jsonl") == expected_rows
    return library.fake_gpu_most(0) - before


def test_an_evaluation_takes_a_policy_from_wherever_it_lies(base, on_fake, tmp_path):
    policy = policy_of(base)
    (own,), (expected,) = (
        evaluated(model, tmp_path / f"{name}.jsonl", ["lkv", "ada+lkv-t"], policy=policy)
        for name, model in (("fake", on_fake), ("cpu", base))
    )
    for found, right in zip(own, expected, strict=True):
        assert all(found[key] == right[key] for key in ("method", "realised", "answer"))
        assert found["kl"] == pytest.approx(right["kl"], abs=1e-5)
    assert {parameter.device.type for parameter in policy.parameters()} == {"cpu"}


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
def test_an_evaluation_goes_on_with_fewer_rows_where_memory_runs_out(
    on_fake, expected_rows, needed_memory, tmp_path, share
):
    """Less and less memory, so that it runs out while methods are compared, questions read and room made."""
    with memory_limit(load().fake_gpu_held(0) + int(share * needed_memory)):
        assert evaluated(on_fake, tmp_path / "c.jsonl") == expected_rows


STAGES = {
    "the prompt is read": "lkv.evaluation.runner.read_prompt",
    "methods score it": "lkv.evaluation.comparison.MethodGrid.bind",
    "it is evicted from": "lkv.evaluation.comparison.MethodComparison.__init__",
    "the question is read": "lkv.evaluation.comparison.MethodComparison.append",
    "the right answer is predicted": "lkv.evaluation.comparison.MethodComparison.predict",
    "predictions are made precise": "lkv.evaluation.comparison.BatchPrediction.row",
    "predictions are compared": "lkv.evaluation.comparison.RowPrediction.fidelity_to",
    "answers are written": "lkv.evaluation.comparison.MethodComparison.generate",
}


def failing_once(monkeypatch, place, allocations):
    """Memory runs out once: in the first call of the function at `place`, after that many allocations."""
    path, _, name = place.rpartition(".")
    owner, left = pkgutil.resolve_name(path), [1]
    plain = getattr(owner, name)

    def call(*args, **options):
        if left:
            left.pop()
            load().fake_gpu_fail_after(allocations)
        return plain(*args, **options)

    monkeypatch.setattr(owner, name, call)
    return left


@pytest.mark.sweep(4)
@pytest.mark.parametrize("allocations", [0, 5])
@pytest.mark.parametrize("stage", STAGES)
def test_memory_may_run_out_in_every_stage_of_an_evaluation(
    on_fake, expected_rows, tmp_path, monkeypatch, stage, allocations
):
    plain, tries = runner._run_methods, []
    monkeypatch.setattr(runner, "_run_methods", lambda *args: tries.append(args[-1]) or plain(*args))
    unused = failing_once(monkeypatch, STAGES[stage], allocations)
    assert evaluated(on_fake, tmp_path / "b.jsonl") == expected_rows
    assert not unused and tries == [19, 10]  # with half of the rows


@pytest.mark.slow
def test_memory_that_runs_out_in_any_layer_of_a_step_means_fewer_rows(on_fake, tmp_path, monkeypatch):
    """Out of memory as a cache reports it while it makes room, not as PyTorch does."""
    methods = ("knorm", "snapkv")
    expected, plain, rows = evaluated(on_fake, tmp_path / "a.jsonl", methods), RaggedLayer._make_space, []

    def make_room(self, *given):
        rows.append(len(self.lens))
        if len(self.lens) > 2 and self._context.index == 1:
            monkeypatch.setattr(self.store, "reallocate", out_of_memory)
        return plain(self, *given)

    def out_of_memory(room):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(RaggedLayer, "_make_space", make_room)
    monkeypatch.setattr("lkv.cache.cache_config._MAX_SLACK_GPU", 4)
    monkeypatch.setattr("lkv.cache.cache_config._MIN_SLACK", 4)
    assert evaluated(on_fake, tmp_path / "b.jsonl", methods) == expected
    assert max(rows) > 2 and min(rows) <= 2
