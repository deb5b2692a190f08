"""A policy for any model in minutes: stages, and the policies that are found afterwards."""

import shutil
import sys
from dataclasses import replace
from statistics import NormalDist

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lkv
from lkv.cli.main import main
from lkv.cli.options import check_policy_exists
from lkv.errors import PolicyFileError, PolicyMismatchError, TrainingError, UnsupportedModelError
from lkv.hf.attention import patch_attention
from lkv.hf.prompt_kv import read_prompt
from lkv.policy import lookup
from lkv.policy.lookup import default_policy, estimate_fit_minutes, load_policy
from lkv.policy.policy import Policy
from lkv.policy.shipped import fitted_folder, fitted_policies
from lkv.training import fit_run, fitting, loop
from lkv.training.config import RECIPE, schedule
from lkv.training.fit_plan import Plan
from lkv.training.fitting import fit
from lkv.training.heldout import HeldOutFidelity, compare, measure_policy, read_text
from lkv.training.loop import make_optimizer, set_learning_rate
from lkv.training.warm_start import _scores_of_all_heads, regression_scores, regression_targets
from tests.training.fit.helpers import TEXT, comparison_rows, ids, random_policy, sample


def test_held_out_fidelity_is_that_of_the_cache_with_its_entries_evicted(loaded):
    model, tokenizer = loaded
    policy, samples = random_policy(model), [sample(1), sample(2)]
    rows = {(row["method"], row["retention"]): row for row in compare(model, tokenizer, samples, policy)}
    assert set(rows) == {(name, r) for name in ("lkv", "lkv-h+expected", "kvzip", "snapkv") for r in (0.3, 0.15, 0.05)}
    texts = [read_text(model, text) for text in samples]
    for retention, (kl, agreement) in measure_policy(policy, texts, (0.15, 0.05)).items():  # by masks
        assert kl == pytest.approx(rows["lkv", retention]["kl"], abs=1e-5)
        assert agreement == pytest.approx(rows["lkv", retention]["agreement"], abs=1e-5)


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
    expected = (log - log.mean()) / log.std(correction=0) + deviates
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


def test_the_rate_of_a_fraction_of_a_step_is_not_above_that_of_the_recipe():
    rates = [schedule(RECIPE, RECIPE.warmup + part).lr for part in (-1.5, -1.0, -0.5, 0.0, 1.0)]
    assert rates[0] < rates[1] == rates[2] == rates[3] == RECIPE.lr > rates[4]


@pytest.mark.slow
def test_a_policy_is_fitted_in_time_and_found_by_its_model(loaded, cache, capsys, monkeypatch):
    model, tokenizer = loaded
    monkeypatch.setitem(sys.modules, "accelerate", None)  # the extra for research trainings is not needed
    with pytest.raises(PolicyMismatchError, match=r"make one with `lkv fit MODEL` \(--minutes 10\)"):
        lkv.RaggedCache(model)
    rates, update = [], loop.TrainingLoop.update
    monkeypatch.setattr(loop.TrainingLoop, "update", lambda self, now: rates.append(now.lr) or update(self, now))
    started = fitting.clock()
    policy = fit(model, tokenizer, [TEXT], minutes=0.07, name="owner/tiny")
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert fitting.clock() - started < 0.07 * 60 + 4
    said = capsys.readouterr()
    for text in (
        "1. statistics of 6 texts",
        "regression, ",
        "contexts: held-out KL",
        "of own text and texts that come with Python and LKV",
    ):
        assert text in said.err
    for text in ("R = 0.05", "new policy", "KVzip (reads twice)", "SnapKV", "Expected Attention, its budgets"):
        assert text in said.out
    assert policy.card["fit"]["contexts"] > 0 and policy.card["fit"]["preferred"]
    first, last = policy.card["training"]["lr"], policy.card["training"]["lr_end"]
    assert last / RECIPE.lr_end == pytest.approx((first / RECIPE.lr) ** 2)
    assert max(rates) <= first and last <= rates[-1] < first
    assert not (cache / "policies" / fitted_policies()[0].name / ".fit").exists()
    # Stored in 16 bits, it is found by the model's weights, by the model's name, and listed.
    for found in (default_policy("owner/tiny"), default_policy(model)):
        assert torch.allclose(found.tokens.hidden, policy.tokens.hidden, atol=1e-3)
    inputs = torch.tensor([ids(8, 100)])
    cached = lkv.RaggedCache(model, retention=0.3)
    model.generate(inputs, past_key_values=cached, max_new_tokens=2, do_sample=False)
    assert cached.ragged_layers[0].lens.sum() > 0
    assert main(["policies"]) == 0 and "fitted    here in" in capsys.readouterr().out
    # The budgets and scores that it was given are not those of a policy that knows nothing.
    text = sample(9)
    kl = {row["retention"]: row["kl"] for row in compare(model, tokenizer, [text], policy) if row["method"] == "lkv"}
    torch.manual_seed(0)
    fresh = Policy(policy.spec, inputs=policy.inputs)
    none = {row["retention"]: row["kl"] for row in compare(model, tokenizer, [text], fresh) if row["method"] == "lkv"}
    assert kl[0.3] < none[0.3]


@pytest.mark.usefixtures("ticking")
def test_the_command_fits_and_asks(folder, tmp_path, capsys):
    texts, document = tmp_path / "texts", tmp_path / "book.txt"
    texts.mkdir()
    (texts / "own.md").write_text(TEXT)
    document.write_text(TEXT[:500])
    assert main(["ask", str(document), "Who?", "--model", str(folder), "--max-new-tokens", "2"]) == 2
    assert f"lkv fit {folder}" in capsys.readouterr().err
    arguments = ["fit", str(folder), "--data", str(texts), "--minutes", "0.06", "--dtype", "float32"]
    assert main(arguments) == 0
    assert "used as text: own.md" in capsys.readouterr().err
    assert main(["ask", str(document), "Who?", "--model", str(folder), "--max-new-tokens", "2"]) == 0
    assert main(["policies", "--model", str(folder)]) == 0
    assert "fitted    here in" in capsys.readouterr().out


def test_a_policy_that_is_worse_than_snapkv_is_saved_but_is_not_the_default(loaded, cache, capsys, monkeypatch):
    model, tokenizer = loaded
    rows = comparison_rows({"lkv": (0.2, 0.9), "kvzip": (0.3, 0.5), "snapkv": (0.1, 0.8)})
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
    assert said.out.splitlines()[-1].endswith(
        f"so the new one is not the default; to use it, give it as the policy: {folder}"
    )
    assert "3. no distillation: there is no time for it" in said.err
    fit(model, tokenizer, [TEXT], minutes=0.1, out=cache / "elsewhere")
    assert "default" not in capsys.readouterr().out  # which a policy elsewhere never is
    for wanted in (model, "owner/tiny"):
        with pytest.raises(PolicyMismatchError, match=f"{folder} was worse than SnapKV"):
            default_policy(wanted)
    assert lkv.RaggedCache(model, policy=folder).config.method.name == "lkv"


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(("last", "is_last_kept"), [(0.12, True), (0.14, False)])
def test_the_last_weights_are_kept_unless_they_are_clearly_worse(loaded, monkeypatch, last, is_last_kept):
    """Held-out KL is of few texts, and the last weights have learned at the smallest rates."""
    model, tokenizer = loaded
    measured, seen = iter([0.3, 0.2, 0.1]), []

    def measure(policy, texts, retentions):
        seen.append(policy.tokens.hidden.detach().clone())
        kl = next(measured, last)
        return {retention: HeldOutFidelity(kl, 0.5) for retention in retentions}

    monkeypatch.setattr(fit_run, "measure_policy", measure)
    monkeypatch.setattr(fit_run, "_REPORT_SHARE", 0.2)
    policy = fit(model, tokenizer, minutes=0.06, name="tiny")
    assert len(seen) > 3
    assert torch.equal(policy.tokens.hidden, seen[-1 if is_last_kept else 2])


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
    Policy(patch_attention(loaded[0]).spec).save_pretrained(tmp_path / "policy")
    with pytest.raises(TrainingError, match=r"policy already holds a policy; give another --out, or delete it"):
        fit(*loaded, minutes=1, out=tmp_path / "policy")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "own.md").write_text(TEXT)
    with pytest.raises(TrainingError, match=r"lies inside .* and would be read as data"):
        fit(*loaded, minutes=1, data=tmp_path / "texts", out=tmp_path / "texts" / "policy")
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["own.md"]


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
    assert default_policy(model).card["is"] == "shipped"
    fitted.card["fit"]["preferred"] = True
    fitted.save_pretrained(fitted_folder("tiny", spec))
    assert default_policy(spec).card["is"] == "fitted"
    (fitted_folder("tiny", spec) / "config.json").write_text("{")
    assert default_policy(model).card["is"] == "shipped"
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
    assert default_policy("owner/tiny").commit == "abc" and default_policy(model, name="owner/tiny").commit == "abc"
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
        default_policy(other, name="owner/tiny")
    assert not capsys.readouterr().err
    count = len(asked)
    with pytest.raises(PolicyMismatchError):
        default_policy(model)  # not asked for by a name
    assert len(asked) == count and estimate_fit_minutes(model) == 10
