"""`lkv fit` short of time or memory, and runs that are continued."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lkv.errors import TrainingError, TrainingStoppedError
from lkv.hf.attention import patch_attention
from lkv.hf.loading import load_model
from lkv.policy.policy import Policy
from lkv.policy.shipped import fitted_folder
from lkv.training import fit_run, fitting, loop
from lkv.training.checkpoint import Checkpoint
from lkv.training.config import RECIPE
from lkv.training.cost import seconds_per_token
from lkv.training.fit_plan import (
    config_for,
    config_for_distillation,
    distillation_lengths,
    longest_context,
    make_plan,
    shorter_contexts,
)
from lkv.training.fitting import fit
from tests.training.fit.helpers import TEXT, interrupt

# A run that is killed: of the model in argv[1], and if argv[2] is "statistics", before the regression.
INTERRUPTED = """
import sys, time, torch
from lkv.hf.loading import load_model
from lkv.training import fit_run, fitting
torch.set_num_threads(1)
fitting.clock = time.process_time
if sys.argv[2] == "statistics":
    fit_run.fit_to_targets = lambda *_: time.sleep(60)
fitting.fit(*load_model(sys.argv[1], torch.float32), minutes=0.5, name=sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["statistics", "contexts"])
def test_a_killed_run_continues(folder, cache, stage, capfd):
    model, tokenizer = load_model(str(folder), torch.float32)
    state = fitted_folder(str(folder), patch_attention(model).spec) / ".fit" / "state"
    # A process of its own: threads of earlier backward passes would not survive a fork.
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(folder), stage])
    end, line = time.monotonic() + 300, "statistics: held-out" if stage == "statistics" else " contexts: held-out"
    seen = ""
    # The state is written after the line.
    while not (line in seen and (state / "checkpoint.safetensors").exists()) and time.monotonic() < end:
        time.sleep(0.1)
        seen += capfd.readouterr().err
    child.kill()
    child.wait()
    assert line in seen and (state / "checkpoint.safetensors").exists()
    policy = fit(model, tokenizer, minutes=0.35 if stage == "contexts" else 0.2, name=str(folder))
    said = capfd.readouterr().err
    assert "continuing the run that was interrupted after" in said
    assert "statistics: held-out" not in said and ("regression, " in said) == (stage == "statistics")
    assert policy.card["fit"]["contexts"] > 0 and not state.exists()


def interrupt_before_regression(model, tokenizer, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fit_run, "fit_to_targets", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fit(model, tokenizer, minutes=0.06, name="tiny")


@pytest.mark.slow
@pytest.mark.usefixtures("ticking")
def test_an_interrupted_run_on_other_texts_is_not_thrown_away(loaded, cache, capsys, monkeypatch):
    model, tokenizer = loaded
    interrupt_before_regression(model, tokenizer, monkeypatch)
    run = fitted_folder("tiny", patch_attention(model).spec) / ".fit"
    assert f"the stages that were finished are saved in {run}; run the same" in capsys.readouterr().err
    with pytest.raises(TrainingError, match=f"{run} holds an interrupted run of 0.0 minutes on other data"):
        fit(model, tokenizer, [TEXT], minutes=0.06, name="tiny")
    (run / "state" / "checkpoint.safetensors").write_bytes(b"damaged")
    fit(model, tokenizer, [TEXT], minutes=0.06, name="tiny")
    said = capsys.readouterr().err
    assert "cannot be read" in said and "starting anew" in said and said.count("statistics: ") == 1
    moved = run.with_name(".fit-unreadable")
    assert str(moved) in said and (moved / "checkpoint.safetensors").read_bytes() == b"damaged"


@pytest.mark.usefixtures("ticking")
def test_a_run_interrupted_in_the_distillation_says_how_to_continue(loaded, cache, capsys, monkeypatch):
    model, tokenizer = loaded
    original, signals = loop.distillation_losses, [signal.SIGINT]  # a second one would not wait for the step

    def interrupted(*arguments):
        if signals:
            signal.raise_signal(signals.pop())
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "distillation_losses", interrupted)
        with pytest.raises(
            TrainingStoppedError, match=r"of 0.07 minutes, which are saved in .* run the same command to"
        ):
            fit(model, tokenizer, minutes=0.07, name="tiny")
    capsys.readouterr()
    policy = fit(model, tokenizer, minutes=0.07, name="tiny")
    said = capsys.readouterr().err
    assert "continuing the run" in said and "1. statistics" not in said and "2. regression" not in said
    assert policy.card["fit"]["contexts"] > 4 and policy.card["fit"]["minutes"] == pytest.approx(0.07, abs=0.035)


@pytest.mark.slow
def test_contexts_become_shorter_where_memory_is_short(loaded, cache, capsys, monkeypatch):
    """What was learned until then is kept."""
    model, tokenizer = loaded
    original = loop.distillation_losses

    def limited(model, policy, group, config, now):
        if max(len(sample.context) for _, sample in group.numbered) > 500:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(model, policy, group, config, now)

    monkeypatch.setattr(loop, "distillation_losses", limited)
    monkeypatch.setattr(fitting, "_SHORTEST", 200)
    policy = fit(model, tokenizer, minutes=0.1, name="tiny")
    said = capsys.readouterr().err
    assert said.count("out of memory: going on with contexts half as long") == 1
    assert said.count("statistics: held-out") == said.count("regression, ") == 1
    assert policy.trained_tokens == 480 and policy.card["fit"]["contexts"] > 0
    assert policy.card["fit"]["minutes"] == pytest.approx(0.1, abs=0.06)
    monkeypatch.setattr(loop, "distillation_losses", run_out_of_memory)
    with pytest.raises(TrainingError, match="not enough memory to fit a policy, even with the shortest contexts"):
        fit(model, tokenizer, minutes=0.1, name="tiny")


@pytest.mark.slow
def test_the_comparison_takes_shorter_texts_where_memory_is_short(loaded, cache, capsys, monkeypatch):
    model, tokenizer = loaded
    original, lengths = fit_run.compare, []

    def limited(model, tokenizer, samples, *rest):
        lengths.append(max(len(sample.context) for sample in samples))
        if lengths[-1] > 240:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(model, tokenizer, samples, *rest)

    monkeypatch.setattr(fit_run, "compare", limited)
    policy = fit(model, tokenizer, minutes=0.04, name="tiny")
    assert lengths[0] > 240 >= lengths[1] and len(lengths) == 2
    assert "out of memory in the comparison: going on with texts of at most 240" in capsys.readouterr().err
    assert policy.card["fidelity"][0]["tokens"][1] <= 240
    monkeypatch.setattr(fit_run, "compare", run_out_of_memory)
    with pytest.raises(
        TrainingError, match="not enough memory to compare the policy with the baselines; it is in"
    ) as e:
        fit(model, tokenizer, minutes=0.04, name="other")
    Policy.from_pretrained(str(e.value).rpartition(" ")[2].rstrip("."))


def run_out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_time_that_is_too_short_is_refused_before_it_starts(loaded, cache, monkeypatch):
    with pytest.raises(TrainingError, match=r"--minutes 0.5 is too short.*give --minutes 5 or more"):
        make_plan(10.0, 30.0)
    plan = make_plan(2.0, 600.0)
    assert plan.regression_texts == 16 and plan.statistics + plan.regression + plan.distillation + plan.table == 600
    short = make_plan(1.2, 60.0)
    assert short.regression_texts == 7 and short.distillation == 0  # too few contexts to distill on
    assert make_plan(1.2, 120.0).regression_texts == 16 and make_plan(1.2, 180.0).regression_texts == 9
    resumed = make_plan(2.0, 600.0, 500.0, 2)
    assert resumed.statistics == resumed.regression == 0 and resumed.distillation == 100 - resumed.table
    assert make_plan(2.0, 600.0, 599.0, 2).distillation == 0
    with pytest.raises(TrainingError, match=r"--minutes 10 is too short.*give --minutes 14 or more"):
        make_plan(2.0, 600.0, 599.0)
    for minutes in (0, -1, float("nan"), "ten"):
        with pytest.raises(TrainingError, match="must be a number above 0"):
            fit(*loaded, minutes=minutes)
    monkeypatch.setattr(fitting, "seconds_per_token", lambda *_: 1.0)
    with pytest.raises(TrainingError, match="is too short"):
        fit(*loaded, minutes=1)
    assert not list((cache / "policies").rglob("*"))


def test_one_slow_reading_of_a_busy_machine_does_not_count(loaded, monkeypatch):
    model, _ = loaded
    now, costs = 0.0, iter([9.0, 5.0, 0.25, 0.5, 0.25, 0.25])  # seconds of each reading, the first a warm-up

    def read(input_ids, use_cache):
        nonlocal now
        now += next(costs)
        return SimpleNamespace(last_hidden_state=torch.zeros(1, input_ids.shape[1], 4))

    monkeypatch.setattr(model, "get_decoder", lambda: read)
    assert seconds_per_token(model, 100, 6.2, lambda: now) == 0.25 / 100
    costs = iter([9.0, 2.0, 3.0])
    assert seconds_per_token(model, 100, 0.1, lambda: now) == 2.0 / 100


@pytest.mark.slow
@pytest.mark.usefixtures("ticking")
def test_an_interrupted_run_keeps_its_length_of_contexts(loaded, cache, monkeypatch, capsys):
    """What was read fast enough for long contexts then may be slow now, and memory may have run out then."""
    model, tokenizer = loaded

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "longest_context", lambda tokens: 150)
        interrupt_before_regression(model, tokenizer, monkeypatch)
    policy = fit(model, tokenizer, minutes=0.06, name="tiny")
    assert policy.trained_tokens == 2 * 150 and "continuing the run" in capsys.readouterr().err


def test_contexts_are_longer_where_there_is_time():
    assert longest_context(2e6) == 4000 and longest_context(1e6) == RECIPE.max_tokens == 2000
    lengths = [distillation_lengths(config_for(8192, longest), 8192) for longest in (2000, 4000, 1000)]
    assert lengths == [(250, 4000, 1.0), (500, 4000, 0.0), (250, 2000, 1.0)]
    assert distillation_lengths(config_for(1000, 2000), 1000).most <= 1000 - RECIPE.max_continuation


@pytest.mark.parametrize("longest", [4000, 2000, 1000])
def test_contexts_that_memory_is_short_for_become_half_as_long(longest):
    config = config_for(8192, longest)
    shorter = config_for(8192, shorter_contexts(config))
    assert 2 * distillation_lengths(shorter, 8192).most == distillation_lengths(config, 8192).most


@pytest.mark.slow
@pytest.mark.usefixtures("ticking")
def test_a_run_that_memory_is_too_short_to_resume_goes_on_with_shorter_contexts(loaded, cache, monkeypatch, capsys):
    model, tokenizer = loaded
    interrupt_before_regression(model, tokenizer, monkeypatch)
    capsys.readouterr()
    original, calls = Checkpoint.load_policy, []

    def limited(checkpoint, policy):
        calls.append(policy)
        if len(calls) == 1:
            run_out_of_memory()
        original(checkpoint, policy)

    monkeypatch.setattr(Checkpoint, "load_policy", limited)
    monkeypatch.setattr(fitting, "_SHORTEST", 50)
    fit(model, tokenizer, minutes=0.06, name="tiny")
    said = capsys.readouterr().err
    assert "out of memory: going on with contexts half as long" in said
    assert "continuing the run" in said and "statistics: held-out" not in said


def test_rates_are_smaller_where_there_are_more_contexts():
    reading = 2.0  # a context is learned from in 3.5 times as many seconds
    for contexts, first, last in ((1, 1, 1), (150, 1, 1), (600, 1 / 2, 1 / 4), (15_000, 1 / 10, 1 / 100)):
        config = config_for_distillation(RECIPE, reading, contexts * 3.5 * reading)
        assert (config.lr, config.lr_end) == pytest.approx((first * RECIPE.lr, last * RECIPE.lr_end))
        assert replace(config, lr=RECIPE.lr, lr_end=RECIPE.lr_end) == RECIPE
