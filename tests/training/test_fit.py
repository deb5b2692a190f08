"""A policy for any model in minutes: stages, time, resuming, and what is refused."""

import inspect
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lkv
from lkv.cli.main import main
from lkv.cli.options import check_policy_exists
from lkv.config import ScorerInputs
from lkv.errors import (
    DataError,
    PolicyFileError,
    PolicyMismatchError,
    TrainingError,
    TrainingStoppedError,
    UnsupportedModelError,
)
from lkv.evaluation.comparison import MethodComparison, MethodGrid
from lkv.integrations.transformers.attention import patch_attention
from lkv.integrations.transformers.prefill import read_prompt
from lkv.models.loading import load_model
from lkv.policy import lookup
from lkv.policy.lookup import default_policy, estimate_fit_minutes, load_policy, policy_for
from lkv.policy.policy import Policy
from lkv.policy.shipped import fitted_folder, fitted_policies
from lkv.training import fit_run, fitting
from lkv.training.data.mixture import BUILTIN_SOURCES
from lkv.training.data.samples import TokenizedSample
from lkv.training.fit_plan import RECIPE, Plan, longest_context, make_plan
from lkv.training.fit_texts import open_texts
from lkv.training.fitting import fit
from lkv.training.heldout import HeldOutFidelity, HeldOutTexts, compare
from lkv.training.trainer import make_optimizer, set_learning_rate
from lkv.training.warm_start import _scores_of_all_heads, calibrate, regression_scores, regression_targets
from tests.conftest import save_model

TEXT = "The old mill by the river was sold in spring. Nobody knew who had bought it, but the lights came back. " * 40


# A run that is killed: of the model in argv[1], and if argv[2] is "statistics", before the regression.
INTERRUPTED = """
import sys, time, torch
from lkv.models.loading import load_model
from lkv.training import fit_run, fitting
torch.set_num_threads(1)
fitting.clock = time.process_time
if sys.argv[2] == "statistics":
    fit_run.fit_to_targets = lambda *_: time.sleep(60)
fitting.fit(*load_model(sys.argv[1], torch.float32), minutes=0.5, name=sys.argv[1])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=1024)


@pytest.fixture
def loaded(folder):
    return load_model(str(folder), torch.float32)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LKV_POLICY_HUB", "")
    monkeypatch.setattr(fitting, "clock", time.process_time)  # a busy machine has no less time
    return tmp_path / "cache"


def random_policy(model) -> Policy:
    torch.manual_seed(3)
    policy = Policy(patch_attention(model).spec, inputs=ScorerInputs("unrotated", "learned", 9))
    torch.nn.init.normal_(policy.heads.embeddings, std=20.0)
    calibrate(model, policy, [ids(1, 200), ids(2, 150)])
    return policy.requires_grad_(False)


def ids(seed: int, tokens: int) -> list[int]:
    return torch.randint(3, 250, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def sample(seed: int) -> TokenizedSample:
    return TokenizedSample("random", ids(seed, 90), [(ids(seed + 50, 20), 8), (ids(seed + 60, 12), 0)])


def test_held_out_fidelity_is_that_of_the_cache_with_its_entries_evicted(loaded):
    model, tokenizer = loaded
    policy, samples = random_policy(model), [sample(1), sample(2)]
    rows = {(row["method"], row["retention"]): row for row in compare(model, tokenizer, samples, policy)}
    grid = MethodGrid(model, tokenizer, ["lkv", "lkv-h+expected", "kvzip", "snapkv"], [0.3, 0.15, 0.05], policy)
    expected: dict[tuple[str, float], list] = {}
    for text in samples:
        prompt = read_prompt(model, torch.tensor([text.context]), queries=True)
        bound, _ = grid.bind(text.context, prompt)
        comparison = MethodComparison(model, text.context, prompt, [row.method for row in bound])
        for target, skip in text.continuations:
            for row, fidelity in zip(bound, comparison.measure_fidelity(target, skip), strict=True):
                expected.setdefault((row.name, row.retention), []).append(fidelity)
    assert set(rows) == {key for key in expected if key[0] != "full"}
    for key, row in rows.items():
        assert row["kl"] == pytest.approx(sum(f.kl for f in expected[key]) / 4, abs=1e-4), key
        assert row["agreement"] == pytest.approx(sum(f.agreement for f in expected[key]) / 4, abs=1e-5), key
    measured = HeldOutTexts(model, samples).measure(policy)
    assert {r: f.kl for r, f in measured.items()} == pytest.approx({r: rows["lkv", r]["kl"] for r in (0.15, 0.05)})


def test_the_regression_scores_tokens_as_the_policy_does(loaded):
    model, tokenizer = loaded
    policy, context = random_policy(model), ids(5, 120)
    target = regression_targets(model, tokenizer, policy, context)
    prompt = read_prompt(model, torch.tensor([context]))
    scores = torch.cat([policy.tokens(part, layer) for layer, part in enumerate(prompt)])
    assert torch.allclose(_scores_of_all_heads(policy, target), scores.flatten(0, 1), atol=1e-4)
    assert torch.allclose(target.scores.std(-1), torch.full((6,), 2.0), atol=0.05)
    assert target.shares.mean((1, 2)).tolist() == pytest.approx([0.05, 0.15, 0.3], abs=0.01)


def test_the_regression_is_on_logarithms_and_ranks():
    scores = torch.tensor([[0.5, 1e-13, 0.01, 1e-11, 0.01, 0.2]])  # those below 1e-10 are equal
    log = torch.tensor([0.5, 1e-10, 0.01, 1e-10, 0.01, 0.2], dtype=torch.float64).log()
    deviates = torch.tensor([NormalDist().inv_cdf(rank / 12) for rank in (11, 2, 6, 2, 6, 9)], dtype=torch.float64)
    expected = (log - log.mean()) / log.std() + deviates
    assert regression_scores(scores)[0].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert regression_scores(torch.full((2, 5), 0.3)).abs().max() < 1e-6


def test_budgets_and_components_have_learning_rates_of_their_own(loaded):
    policy = random_policy(loaded[0]).requires_grad_(True)
    optimizer = make_optimizer(policy, RECIPE)
    set_learning_rate(optimizer, 0.5)
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    expected = {"heads.embeddings": 1.5, "tokens.hidden": 0.5, "tokens.query_mean": 0.5, "tokens.start": 10.0}
    assert {name: rates[id(policy.get_parameter(name))] for name in expected} == expected
    assert len(rates) == len(list(policy.parameters()))


def test_a_policy_is_fitted_in_time_and_found_by_its_model(loaded, cache, capsys, monkeypatch):
    model, tokenizer = loaded
    monkeypatch.setitem(sys.modules, "accelerate", None)  # the extra for research trainings is not needed
    with pytest.raises(PolicyMismatchError, match=r"make one with `lkv fit MODEL` \(--minutes 10\)"):
        lkv.RaggedCache(model)
    started = time.process_time()
    policy = fit(model, tokenizer, [TEXT], minutes=0.1, name="owner/tiny")
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert time.process_time() - started < 0.1 * 60 + 4
    said = capsys.readouterr()
    for text in (
        "1. statistics of 6 texts",
        "regression, ",
        "contexts: held-out KL",
        "of own text and Python's own",
    ):
        assert text in said.err
    for text in ("R = 0.05", "new policy", "KVzip (reads twice)", "SnapKV", "Expected Attention, its budgets"):
        assert text in said.out
    assert policy.card["fit"]["contexts"] > 0 and policy.card["fit"]["preferred"]
    assert not (cache / "policies" / fitted_policies()[0].name / ".fit").exists()
    # Stored in 16 bits, it is found by the model's weights, by the model's name, and listed.
    for found in (policy_for(model), default_policy("owner/tiny"), default_policy(model)):
        assert torch.allclose(found.tokens.hidden, policy.tokens.hidden, atol=1e-3)
    inputs = torch.tensor([ids(8, 100)])
    cached = lkv.RaggedCache(model, retention=0.3)
    model.generate(inputs, past_key_values=cached, max_new_tokens=2, do_sample=False)
    assert cached.ragged_layers[0].kept_counts.sum() > 0
    assert main(["policies"]) == 0 and "fitted    here in" in capsys.readouterr().out
    # The budgets and scores that it was given are not those of a policy that knows nothing.
    text = sample(9)
    kl = {row["retention"]: row["kl"] for row in compare(model, tokenizer, [text], policy) if row["method"] == "lkv"}
    torch.manual_seed(0)
    fresh = Policy(policy.spec, inputs=policy.inputs)
    none = {row["retention"]: row["kl"] for row in compare(model, tokenizer, [text], fresh) if row["method"] == "lkv"}
    assert kl[0.3] < none[0.3]


def test_the_command_fits_and_asks(folder, tmp_path, capsys):
    texts, document = tmp_path / "texts", tmp_path / "book.txt"
    texts.mkdir()
    (texts / "own.md").write_text(TEXT)
    document.write_text(TEXT[:500])
    assert main(["ask", str(document), "Who?", "--model", str(folder), "--max-new-tokens", "2"]) == 2
    assert f"lkv fit {folder}" in capsys.readouterr().err
    arguments = ["fit", str(folder), "--data", str(texts), "--minutes", "0.05", "--dtype", "float32"]
    assert main(arguments) == 0
    assert "used as text: own.md" in capsys.readouterr().err
    assert main(["ask", str(document), "Who?", "--model", str(folder), "--max-new-tokens", "2"]) == 0
    assert main(["policies", "--model", str(folder)]) == 0
    assert "fitted    here in" in capsys.readouterr().out


def test_a_policy_that_is_worse_than_snapkv_is_saved_but_is_not_the_default(loaded, capsys, monkeypatch):
    model, tokenizer = loaded
    kl = {"lkv": (0.2, 0.9), "kvzip": (0.3, 0.5), "snapkv": (0.1, 0.8)}
    rows = [
        {"method": name, "retention": retention, "texts": 1, "kl": value, "agreement": 0.5}
        for name, values in kl.items()
        for retention, value in zip((0.15, 0.05), values, strict=True)
    ]
    monkeypatch.setattr(fit_run, "compare", lambda *_: rows)
    # No time is left.
    monkeypatch.setattr(fit_run, "make_plan", lambda reading, seconds, *_: Plan(0, 0, 0, seconds, 0, 1))
    policy = fit(model, tokenizer, [TEXT], minutes=0.1, name="owner/tiny")
    said, folder = capsys.readouterr(), fitted_policies()[0].folder
    assert policy.card["fit"]["contexts"] == 0 and "3. the distillation did not run" in said.err
    assert "SnapKV is closer to the full cache than the new policy at R = 0.15, 0.05 " in said.out
    assert (
        'KVzip (reads twice) is closer to the full cache than the new policy at R = 0.05 on these texts: method="kvzip"'
        in (said.out)
    )
    assert said.out.splitlines()[-1].endswith(f"so it is not the default; to use it, give it as the policy: {folder}")
    for wanted in (model, "owner/tiny"):
        with pytest.raises(PolicyMismatchError, match=f"{folder} was worse than SnapKV"):
            default_policy(wanted)
    assert lkv.RaggedCache(model, policy=folder).config.method.name == "lkv"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["statistics", "contexts"])
def test_a_killed_run_continues(folder, cache, stage, capfd):
    model, tokenizer = load_model(str(folder), torch.float32)
    state = fitted_folder(str(folder), patch_attention(model).spec) / ".fit" / "state"
    # A process of its own: threads of earlier backward passes would not survive a fork.
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(folder), stage])
    end, line = time.monotonic() + 50, "statistics: held-out" if stage == "statistics" else " contexts: held-out"
    seen = ""
    while line not in seen and time.monotonic() < end:
        time.sleep(0.1)
        seen += capfd.readouterr().err
    time.sleep(0.5)  # the state is written after the line
    child.kill()
    child.wait()
    assert (state / "checkpoint.safetensors").exists()
    policy = fit(model, tokenizer, minutes=0.35 if stage == "contexts" else 0.1, name=str(folder))
    said = capfd.readouterr().err
    assert "continuing the run that was interrupted after" in said
    assert "statistics: held-out" not in said and ("regression, " in said) == (stage == "statistics")
    assert policy.card["fit"]["contexts"] > 0 and not state.exists()


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupted_run_on_other_texts_is_not_thrown_away(loaded, cache, capsys, monkeypatch):
    model, tokenizer = loaded
    with monkeypatch.context() as patch:
        patch.setattr(fit_run, "fit_to_targets", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fit(model, tokenizer, minutes=0.06, name="tiny")
    run = fitted_folder("tiny", patch_attention(model).spec) / ".fit"
    assert f"the stages that were finished are saved in {run}; run the same" in capsys.readouterr().err
    with pytest.raises(TrainingError, match=f"{run} holds an interrupted run of 0.0 minutes on other data"):
        fit(model, tokenizer, [TEXT], minutes=0.05, name="tiny")
    (run / "state" / "checkpoint.safetensors").write_bytes(b"damaged")
    fit(model, tokenizer, [TEXT], minutes=0.05, name="tiny")
    said = capsys.readouterr().err
    assert "cannot be read" in said and "starting anew" in said and said.count("statistics: ") == 1


def test_a_run_interrupted_in_the_distillation_says_how_to_continue(loaded, cache, capsys, monkeypatch):
    model, tokenizer = loaded
    original, signals = fit_run.distillation_losses, [signal.SIGINT]  # a second one would not wait for the step

    def interrupted(*arguments):
        if signals:
            signal.raise_signal(signals.pop())
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fit_run, "distillation_losses", interrupted)
        with pytest.raises(
            TrainingStoppedError, match=r"of 0.06 minutes, which are saved in .* run the same command to"
        ):
            fit(model, tokenizer, minutes=0.06, name="tiny")
    capsys.readouterr()
    policy = fit(model, tokenizer, minutes=0.06, name="tiny")
    said = capsys.readouterr().err
    assert "continuing the run" in said and "1. statistics" not in said and "2. regression" not in said
    assert policy.card["fit"]["contexts"] > 4 and policy.card["fit"]["minutes"] == pytest.approx(0.06, abs=0.05)


@pytest.mark.slow
def test_contexts_become_shorter_where_memory_is_short(loaded, cache, capsys, monkeypatch):
    """What was learned until then is kept."""
    model, tokenizer = loaded
    original = fit_run.distillation_losses

    def limited(model, policy, group, config, now):
        if max(len(sample.context) for _, sample in group.numbered) > 300:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(model, policy, group, config, now)

    monkeypatch.setattr(fit_run, "distillation_losses", limited)
    monkeypatch.setattr(fitting, "_SHORTEST", 200)
    policy = fit(model, tokenizer, minutes=0.06, name="tiny")
    said = capsys.readouterr().err
    assert "out of memory with contexts of 480 tokens: going on with at most 240" in said
    assert said.count("statistics: held-out") == said.count("regression, ") == 1
    assert policy.trained_tokens == 240 and policy.card["fit"]["contexts"] > 0
    assert policy.card["fit"]["minutes"] == pytest.approx(0.06, abs=0.05)
    monkeypatch.setattr(fit_run, "distillation_losses", run_out_of_memory)
    with pytest.raises(TrainingError, match="not enough memory to fit a policy with contexts of 240 tokens"):
        fit(model, tokenizer, minutes=0.06, name="tiny")


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


@pytest.mark.parametrize(("last", "is_last_kept"), [(0.12, True), (0.14, False)])
def test_the_last_weights_are_kept_unless_they_are_clearly_worse(loaded, monkeypatch, last, is_last_kept):
    """Held-out KL is of few texts, and the last weights have learned at the smallest rates."""
    model, tokenizer = loaded
    measured, seen = iter([0.3, 0.2, 0.1]), []

    def measure(self, policy):
        seen.append(policy.tokens.hidden.detach().clone())
        kl = next(measured, last)
        return {retention: HeldOutFidelity(kl, 0.5) for retention in (0.15, 0.05)}

    monkeypatch.setattr(HeldOutTexts, "measure", measure)
    policy = fit(model, tokenizer, minutes=0.05, name="tiny")
    assert len(seen) > 3
    assert torch.equal(policy.tokens.hidden, seen[-1 if is_last_kept else 2])


def run_out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.slow
def test_an_earlier_policy_stays_and_is_compared(loaded, cache, capsys):
    model, tokenizer = loaded
    first = fit(model, tokenizer, minutes=0.04, name="tiny")
    capsys.readouterr()
    second = fit(model, tokenizer, minutes=0.04, name="tiny")
    folders = {entry.name: entry for entry in fitted_policies()}
    name = fitted_folder("tiny", patch_attention(model).spec).name
    assert set(folders) == {name, f"{name}-2"} and first.card["fit"]["preferred"]
    said, kl = capsys.readouterr().out, {"lkv": 1.0, "default": 1.0}
    for row in second.card["fit"]["comparison"]:
        if row["method"] in kl:
            kl[row["method"]] *= row["kl"]
    assert "the default policy so far" in said
    assert second.card["fit"]["preferred"] == (kl["lkv"] < kl["default"])
    assert load_policy(f"{name}-2").card["fit"] == second.card["fit"]
    check_policy_exists(name.upper())
    assert main(["policies"]) == 0
    assert ("not the default" in capsys.readouterr().out) != second.card["fit"]["preferred"]


def test_a_folder_that_holds_something_else_is_refused(loaded, folder, tmp_path):
    with pytest.raises(TrainingError, match=r"holds the config.json of something else"):
        fit(*loaded, minutes=1, out=folder)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "own.md").write_text(TEXT)
    with pytest.raises(TrainingError, match=r"lies inside .* and would be read as data"):
        fit(*loaded, minutes=1, data=tmp_path / "texts", out=tmp_path / "texts" / "policy")
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["own.md"]


def test_time_that_is_too_short_is_refused_before_it_starts(loaded, cache, monkeypatch):
    with pytest.raises(TrainingError, match=r"0.5 minutes are too short.*give --minutes 5 or more"):
        make_plan(10.0, 30.0)
    plan = make_plan(2.0, 600.0)
    assert plan.regression_texts == 16 and plan.statistics + plan.regression + plan.distillation + plan.table == 600
    short = make_plan(1.2, 60.0)
    assert short.regression_texts == 7 and 0 <= short.distillation < 3 * 1.2  # too few contexts to distill on
    assert make_plan(1.2, 120.0).regression_texts == 16 and make_plan(1.2, 180.0).regression_texts == 9
    resumed = make_plan(2.0, 600.0, 500.0, 2)
    assert resumed.statistics == resumed.regression == 0 and resumed.distillation == 100 - resumed.table
    assert make_plan(2.0, 600.0, 599.0, 2).distillation == 0
    with pytest.raises(TrainingError, match=r"10 minutes are too short.*give --minutes 14 or more"):
        make_plan(2.0, 600.0, 599.0)
    for minutes in (0, -1, float("nan"), "ten"):
        with pytest.raises(TrainingError, match="must be a number above 0"):
            fit(*loaded, minutes=minutes)
    monkeypatch.setattr(fitting, "_seconds_per_token", lambda *_: 1.0)
    with pytest.raises(TrainingError, match="are too short"):
        fit(*loaded, minutes=1)
    assert not list((cache / "policies").rglob("*"))


def test_texts_that_are_too_few_are_refused(loaded, tmp_path, capsys):
    with pytest.raises(DataError, match="the texts hold 12 characters of text; give at least 2,000"):
        fit(*loaded, ["Hello there."])
    for texts in (TEXT, [TEXT, b"bytes"]):
        with pytest.raises(DataError, match="texts must be a list of strings, one for each document"):
            fit(*loaded, texts)
    assert open_texts(iter([TEXT])).digest == open_texts([TEXT]).digest
    (tmp_path / "empty").mkdir()
    assert main(["fit", "--data", str(tmp_path / "empty")]) == 2
    assert "holds 0 characters of text" in capsys.readouterr().err
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").write_bytes(b"\x89PNG")
    (tmp_path / "pictures" / "table.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"pictures holds 0 characters.*skipped \(data of unknown form\): table.csv"):
        open_texts((), tmp_path / "pictures")
    (tmp_path / "pictures" / "NOTES.TXT").write_text(TEXT)
    assert open_texts((), tmp_path / "pictures").training.own_chars == len(TEXT)
    with pytest.raises(DataError, match="there is no data folder"):
        open_texts((), tmp_path / "nowhere")


def test_at_least_half_of_the_samples_are_of_own_texts(tmp_path):
    assert set(open_texts((), None).training.names) == {"python", "manual", "facts"}
    assert set(open_texts([TEXT * 200], None).training.names) == {"prose", *BUILTIN_SOURCES, "facts"}
    assert open_texts([TEXT], None).digest != open_texts([TEXT + "."], None).digest
    for number in range(8):
        (tmp_path / f"tool{number}.c").write_text(f"int f{number}(int x) {{ return x + {number}; }}\n" * 40)
    mixture = open_texts((), tmp_path).training
    assert set(mixture.names) == {"code", *BUILTIN_SOURCES, "facts"}
    assert open_texts([TEXT * 200], tmp_path).training.names[:2] == ["prose", "code"]
    long_text = open_texts([TEXT * 200], None).training
    assert long_text.own_chars > 100_000
    drawn = Counter(long_text.sample(number, 1).source for number in range(600))
    assert abs(drawn["prose"] / 600 - 0.5) < 0.07


def test_a_short_text_is_not_half_of_the_samples():
    for text in (TEXT, TEXT * 10):
        mixture = open_texts([text], None).training
        share = mixture.weights["prose"] / sum(mixture.weights.values())
        natural = 5 / (5 + 10 + 8 + 20)
        assert share == pytest.approx(max(natural, mixture.own_chars / 200_000)) and share < 0.5
        drawn = sum("mill by the river" in mixture.sample(number, 1).context for number in range(300)) / 300
        assert abs(drawn - share) < 0.1  # facts are not told in this text alone


def test_of_a_text_in_two_pieces_the_shorter_one_is_held_out():
    texts = open_texts([TEXT * 3 + "end"])
    assert texts.training.own_chars == len(TEXT) * 3 + 3
    held_out, learned = (
        sum(len(item.text) for item in side._items.get("prose", ())) for side in (texts.held_out, texts.training)
    )
    assert (held_out, learned) == (len(TEXT) * 3 + 3 - 12_000, 12_000)
    assert open_texts((), None).training.weights == {"python": 10, "manual": 8, "facts": 20}


def test_texts_without_a_held_out_part_say_so(loaded, capsys, monkeypatch):
    monkeypatch.setattr(fit_run, "HeldOutTexts", interrupt)  # what follows the plan
    for texts, is_said in (([TEXT[:4000]], True), ([TEXT * 10], False), (None, False)):
        with pytest.raises(KeyboardInterrupt):
            fit(*loaded, texts, minutes=1, name="tiny")
        assert ("too little own text to hold any out" in capsys.readouterr().err) == is_said


def test_documents_that_overlap_with_evaluated_texts_are_left_out(loaded, tmp_path, capsys):
    model, tokenizer = loaded
    rng = random.Random(4)
    books = [" ".join(f"word{rng.randint(0, 999)}" for _ in range(3000)) for _ in range(4)]
    evaluated = tmp_path / "evaluated.jsonl"
    evaluated.write_text(json.dumps({"context": books[2] + inspect.getsource(random), "input": "", "answers": []}))
    policy = fit(model, tokenizer, books, minutes=0.05, name="tiny", against=[evaluated])
    assert policy.card["training"]["dtype"] == "float32"
    checked = policy.card["decontamination"]
    assert checked["removed"] and list(checked["files"]) == ["evaluated.jsonl"]
    assert checked["sets"]["texts"] == {"compared": 8, "shared": 2, "overlapping": 2}
    assert checked["sets"]["python"]["overlapping"] >= 1  # random.py
    assert "of 3 sets compared with 1 evaluation files" in capsys.readouterr().err
    with pytest.raises(DataError, match="there is no"):
        fit(model, tokenizer, books, minutes=0.05, name="tiny", against=[tmp_path / "nowhere"])


def test_samples_that_are_built_are_refused(loaded, tmp_path):
    (tmp_path / "build.json").write_text("{}")
    with pytest.raises(DataError, match="holds samples of `lkv data build`, which `lkv train` reads; give the folder"):
        open_texts((), tmp_path)


def test_an_interrupted_run_keeps_its_length_of_contexts(loaded, cache, monkeypatch, capsys):
    """What was read fast enough for long contexts then may be slow now, and memory may have run out then."""
    model, tokenizer = loaded

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "longest_context", lambda tokens: 300)
        patch.setattr(fit_run, "fit_to_targets", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fit(model, tokenizer, minutes=0.06, name="tiny")
    policy = fit(model, tokenizer, minutes=0.05, name="tiny")
    assert policy.trained_tokens == 300 and "continuing the run" in capsys.readouterr().err


def test_contexts_are_longer_where_there_is_time():
    assert longest_context(2e6) == 4000 and longest_context(1e6) == RECIPE.max_tokens == 2000


def test_a_document_of_the_extra_is_read(tmp_path):
    (tmp_path / "page.html").write_text(f"<html><body><p>{TEXT}</p></body></html>")
    assert open_texts((), tmp_path).training.own_chars == pytest.approx(len(TEXT), rel=0.05)


def test_a_model_without_rope_is_refused(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50)).eval()
    with pytest.raises(UnsupportedModelError) as error:
        fit(model, None, minutes=1, out=tmp_path)
    print(error.value)
    assert "\n" not in str(error.value)


def test_the_better_of_a_shipped_and_a_fitted_policy_is_the_default(loaded, cache, monkeypatch):
    model, _ = loaded
    spec = patch_attention(model).spec
    shipped, fitted = random_policy(model), random_policy(model)
    shipped.card, fitted.card = {"is": "shipped"}, {"is": "fitted", "fit": {"preferred": False}}
    shipped.save_pretrained(cache / "shipped" / "tiny")
    fitted.save_pretrained(fitted_folder("tiny", spec))
    monkeypatch.setattr("lkv.policy.shipped._POLICIES", cache / "shipped")
    assert policy_for(model).card["is"] == "shipped"
    fitted.card["fit"]["preferred"] = True
    fitted.save_pretrained(fitted_folder("tiny", spec))
    assert policy_for(spec).card["is"] == "fitted"
    (fitted_folder("tiny", spec) / "config.json").write_text("{")
    assert policy_for(model).card["is"] == "shipped"
    shutil.rmtree(cache / "shipped")


def test_a_policy_published_for_the_model_is_fetched_and_reported(loaded, cache, monkeypatch, capsys):
    model, _ = loaded
    asked = []

    def download(name, *_, **__):
        asked.append(name)
        if name != "team/tiny":
            raise PolicyFileError("not there")
        policy = random_policy(model)
        policy.commit = "abc"
        return policy

    monkeypatch.setattr(lookup.Policy, "from_pretrained", download)
    monkeypatch.setenv("LKV_POLICY_HUB", "team")
    assert default_policy("owner/tiny").commit == "abc" and policy_for(model, name="owner/tiny").commit == "abc"
    assert capsys.readouterr().err.count("using the policy team/tiny from the hub (commit abc)") == 2
    monkeypatch.delenv("LKV_POLICY_HUB")
    with pytest.raises(PolicyMismatchError, match="there is no policy for 'owner/other' yet; make one with `lkv fit"):
        default_policy("owner/other")
    assert asked[-1] == "lkv-policies/other"
    monkeypatch.setenv("LKV_POLICY_HUB", "team")
    capsys.readouterr()
    other = replace(patch_attention(model).spec, layers=7)  # a namesake
    with pytest.raises(
        PolicyMismatchError, match=r"there is no policy for this model .* make one with `lkv fit owner/tiny`"
    ):
        policy_for(other, name="owner/tiny")
    assert not capsys.readouterr().err
    count = len(asked)
    with pytest.raises(PolicyMismatchError):
        policy_for(model)  # not asked for by a name
    assert len(asked) == count and estimate_fit_minutes(model) == 10
