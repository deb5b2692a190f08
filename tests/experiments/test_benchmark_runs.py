"""Runs of benchmarks: resumed on the same files and versions alone, and measured again for another policy."""

import argparse
import json
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments import common, data_build, fit, remeasure, ship
from experiments.common import RESULTS, Subject
from lkv.cli.options import check_policy_is_read
from lkv.errors import DataError, ReportError
from lkv.hf.attention import patch_attention
from lkv.hf.loading import DEFAULT
from lkv.policy.policy import Policy
from lkv.policy.scorer_inputs import ScorerInputs
from lkv.policy.shipped import shipped_policies
from lkv.utils import results
from lkv.utils.results import collect_provenance
from tests.commands import parse_arguments
from tests.conftest import tiny_llama


def test_rows_of_another_machine_are_not_kept_under_the_name_of_this_one(tmp_path, capsys):
    out = tmp_path / "data_build.json"
    options = SimpleNamespace(out=out, seed=0, samples=[20])
    assert data_build.earlier_rows(options) == []
    rows = [{"asked": 20}, {"asked": 40}]
    document = collect_provenance() | {"seed": 0, "date": "2000-01-01", "rows": rows}
    for key, other in ((None, None), ("seed", 1), ("machine", "another"), ("versions", {"torch": "0"})):
        out.write_text(json.dumps(document | ({key: other} if key else {})))
        assert data_build.earlier_rows(options) == ([] if key else rows[1:])
        assert (f"of another {key}: they go" in capsys.readouterr().out) == bool(key)


@pytest.mark.parametrize("changed", ["data", "versions", "details"])
def test_an_interrupted_benchmark_resumes_on_the_same_files_and_versions_alone(tmp_path, monkeypatch, changed):
    data, measured = tmp_path / "data", []
    data.mkdir()
    (data / "texts.txt").write_text("one")
    options = argparse.Namespace(out=tmp_path / "some.json", data=data, seed=0)

    def run(details=None):
        common.run_cases(
            "experiments.some", options, "some", {"a": (1,), "b": (2,)}, measure, lambda samples: [*samples.values()],
            SimpleNamespace(digest=lambda: "p"), details={"fits": "x"} | (details or {}),
        )  # fmt: skip

    def measure(case):
        measured.append(case)
        if measured == [1, 2]:
            raise KeyboardInterrupt
        if len(measured) == 3:  # packages that go during a run
            monkeypatch.setattr(results, "_version", lambda package: "absent")
        return {"value": case}

    versions = collect_provenance()["versions"]
    with pytest.raises(KeyboardInterrupt):
        run()
    other = {}
    with monkeypatch.context() as patch:
        if changed == "data":
            (data / "texts.txt").write_text("another")
        elif changed == "versions":
            patch.setattr(common, "collect_provenance", lambda: {"versions": {"torch": "0"}})
        else:
            other = {"fits": "y"}
        with pytest.raises(DataError, match="samples of other settings"):
            run(other)
    (data / "texts.txt").write_text("one")
    run()
    document = json.loads(options.out.read_text())
    assert measured == [1, 2, 2] and document["rows"] == [{"value": 1}, {"value": 2}]
    assert (document["policy"], document["fits"], document["versions"]) == ("p", "x", versions)


def test_a_policy_is_shipped_when_it_is_measured(tmp_path, monkeypatch, capsys):
    checkpoint, candidate = tmp_path / "shipped" / DEFAULT, tmp_path / "made" / DEFAULT
    old = shipped_policies()[[entry.name for entry in shipped_policies()].index(DEFAULT)]
    shutil.copytree(old.folder, checkpoint)
    monkeypatch.setattr(ship, "shipped_policies", lambda: [replace(old, folder=checkpoint)])
    policy = Policy.from_pretrained(old.folder)
    with torch.no_grad():
        policy.tokens.bias += 1
    policy.save_pretrained(candidate, half=True)
    results, digest = tmp_path / "results", Policy.from_pretrained(candidate).digest()
    results.mkdir()
    rows = [
        {"task": "all", "method": method, "tokens": tokens, "retention": 0.15, "kl": 0.12345, "agreement": 0.9}
        for method in ("full", "lkv") for tokens in (1000, 2000)
    ]  # fmt: skip

    def refused(**document) -> str:
        (results / "length.json").write_text(json.dumps(document))
        with pytest.raises(ReportError) as error:
            ship.ship(candidate, results)
        assert Policy.from_pretrained(checkpoint).digest() == policy_digest and candidate.is_dir()
        return str(error.value)

    policy_digest = Policy.from_pretrained(checkpoint).digest()
    assert "measured with another policy" in refused(policy=policy_digest, rows=rows)
    assert "no figures of LKV at R = 0.05" in refused(policy=digest, rows=rows)
    with pytest.raises(ReportError, match="is the shipped policy itself"):
        ship.ship(checkpoint, results)
    with pytest.raises(ReportError, match="no shipped policy is named made"):
        ship.ship(tmp_path / "made", results)
    rows += [row | {"retention": 0.05} for row in rows]
    (results / "length.json").write_text(json.dumps({"policy": digest, "rows": rows}))
    (results / "old.json").write_text(json.dumps({"policy": policy_digest, "rows": []}))
    ship.ship(candidate, results)
    shipped = Policy.from_pretrained(checkpoint)
    assert shipped.digest() == digest and not candidate.exists()
    assert [(row["tokens"], row["retention"], row["kl"]) for row in shipped.card["fidelity"]] == [
        ([1000, 1000], 0.15, 0.123), ([2000, 2000], 0.15, 0.123),
        ([1000, 1000], 0.05, 0.123), ([2000, 2000], 0.05, 0.123),
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "old.json is of another policy" in out and "length.json is of" not in out


def test_another_policy_is_measured_by_each_file_s_command(tmp_path):
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        if not document.get("policy") or path.stem.startswith(("fit", "paper_training")):
            continue
        for line in document["command"].split("; "):
            words = remeasure.command_for(line, tmp_path, tmp_path / "policy", "m.gguf" if "--model" in line else None)
            assert "EVAL_FOLDER" not in words and words[-2:] == ["--policy", str(tmp_path / "policy")]
            assert not {"snapkv", "kvzip", "keydiff"} & set(words)
    words = remeasure.command_for("experiments.x --methods lkv lkv-h+expected", tmp_path, tmp_path, is_paper=True)
    assert words == ["experiments.x", "--methods", "lkv", "--policy", str(tmp_path)]
    words = remeasure.command_for(
        "lkv eval ruler --data EVAL_FOLDER --methods lkv snapkv --pattern X", tmp_path, tmp_path
    )
    assert words == ["lkv", "eval", "ruler", "--data", str(tmp_path), "--methods", "lkv", "--policy", str(tmp_path)]
    with pytest.raises(ReportError, match="has no such method; there is nothing"):
        remeasure.command_for("lkv eval ruler --methods snapkv", tmp_path, tmp_path)
    words = remeasure.command_for("x --methods lkv snapkv kvzip --seed 0", tmp_path, tmp_path, methods=["kvzip"])
    assert words == ["x", "--methods", "kvzip", "--seed", "0", "--policy", str(tmp_path)]
    for methods, ending in ((["kvzip"], ["kvzip"]), (["kvzip", "lkv"], ["lkv", "kvzip", "--policy", str(tmp_path)])):
        words = remeasure.command_for("lkv eval ruler --methods lkv kvzip", tmp_path, tmp_path, methods=methods)
        options = parse_arguments([*words[1:], "--out", "x.jsonl"])
        check_policy_is_read(options, options.methods)
        assert words == ["lkv", "eval", "ruler", "--methods", *ending]


def test_rows_of_another_policy_take_the_place_of_those_that_read_it():
    def row(method, value, **more):
        return {"method": method, "task": "all", "tokens": 1000, "retention": 0.15, "n": 3, "value": value} | more

    about = {"date": "1", "machine": "a", "versions": {"torch": "1"}}
    rows = [row("full", 0), row("snapkv", 3, against="lkv", difference=2), row("lkv", 1), row("lkv (4 bits)", 4)]
    earlier = {"name": "x", **about, "policy": "old", "rows": [*rows, row("lkv-paper", 5)]}
    now = {"date": "2", "machine": "b", "versions": {"torch": "2"}, "policy": "new"}
    merged = remeasure.merge(earlier, now | {"rows": [row("full", 0), row("lkv", 2), row("lkv-h+expected", 6)]})
    assert merged == {
        "name": "x", **now, "kept": {"methods": ["lkv-paper", "snapkv"], **about},
        "rows": [row("full", 0), row("snapkv", 3), row("lkv", 2), row("lkv-paper", 5), row("lkv-h+expected", 6)],
    }  # fmt: skip
    again = remeasure.merge(merged, now | {"date": "3", "rows": [row("full", 0), row("lkv", 9)]})
    assert again["kept"]["date"] == "1" and again["date"] == "3" and len(again["rows"]) == 4
    merged["rows"].append(row("keydiff", 7))  # measured beside the second policy
    again = remeasure.merge(merged, now | {"date": "3", "rows": [row("full", 0), row("lkv", 9)]})
    later = {"methods": ["keydiff"], "date": "2", "machine": "b", "versions": {"torch": "2"}}
    assert again["kept"] == {"methods": ["keydiff", "lkv-paper", "snapkv"], **about, "later": later}
    with pytest.raises(ReportError, match="on other samples"):
        remeasure.merge(earlier, now | {"rows": [row("full", 0) | {"n": 4}, row("lkv", 2)]})
    # A policy with the paper's scorer, and then one with LKV's again.
    paper = now | {"date": "4", "policy": "paper"}
    measured = paper | {"rows": [row("full", 0), row("lkv", 8)]}
    merged = remeasure.merge_paper_scorer(again, measured)
    assert merged["rows"] == [row("full", 0), row("snapkv", 3), row("lkv", 9), row("lkv-paper", 8), row("keydiff", 7)]
    assert merged["lkv-paper"] == paper and (merged["date"], merged["policy"]) == ("3", "new")
    assert merged["kept"] == {"methods": ["keydiff", "snapkv"], **about, "later": later}
    assert remeasure.merge_paper_scorer(
        again | {"kept": {"methods": ["lkv-paper"], **about, "later": later}}, measured
    )["kept"] == {"methods": [], **about, "later": later}
    merged = remeasure.merge(merged, now | {"date": "5", "rows": [row("full", 0), row("lkv", 6)]})
    assert merged["lkv-paper"] == paper and merged["kept"]["methods"] == ["keydiff", "snapkv"]
    with pytest.raises(ReportError, match="on other samples"):
        remeasure.merge_paper_scorer(earlier, now | {"rows": [row("full", 0) | {"n": 4}, row("lkv", 2)]})
    # A method that reads no policy, and then a policy again.
    provenance = {"date": "6", "machine": "b", "versions": {"torch": "2"}}
    measured = now | provenance | {"rows": [row("full", 0), row("snapkv", 1)]}
    merged = remeasure.merge_methods(merged, measured, ["snapkv", "tova"])
    assert row("snapkv", 1) in merged["rows"] and row("snapkv", 3) not in merged["rows"] and merged["date"] == "5"
    assert merged["again"] == {"snapkv": provenance} and merged["kept"]["methods"] == ["keydiff"]
    merged = remeasure.merge(merged, now | {"date": "7", "rows": [row("full", 0), row("lkv", 6)]})
    assert merged["again"] == {"snapkv": provenance} and merged["kept"]["methods"] == ["keydiff"]
    with pytest.raises(ReportError, match="on other samples"):
        remeasure.merge_methods(merged, measured | {"rows": [row("full", 0) | {"n": 4}]}, ["snapkv"])


def test_a_file_of_which_all_methods_are_measured_again_keeps_its_command_alone(tmp_path, monkeypatch):
    rows = [{"method": name, "task": "able", "n": 3, "value": 1.0} for name in ("full", "snapkv", "lkv")]
    earlier = {"name": "x", "command": "lkv eval x --methods snapkv lkv", "seed": 0, "date": "1", "machine": "a"}
    earlier |= {"versions": {}, "policy": "old", "kept": {"methods": ["snapkv"]}, "rows": rows}
    now = {"date": "2", "machine": "b", "versions": {"torch": "2"}, "policy": "new"}
    measured = now | {"rows": [row | {"n": 4} for row in rows], "command": "lkv eval x", "name": "y"}
    monkeypatch.setattr(remeasure, "RESULTS", tmp_path)
    monkeypatch.setattr(remeasure, "_measure", lambda command, out, *_: out.write_text(json.dumps(measured)))
    monkeypatch.setattr(Policy, "from_pretrained", lambda _: SimpleNamespace(digest=lambda: "d", inputs=ScorerInputs()))
    words = ["remeasure", "x", "--data", ".", "--policy", ".", "--work", str(tmp_path / "work"), "--methods", "lkv"]
    for methods, refused in (([], True), (["snapkv"], False)):
        (tmp_path / "x.json").write_text(json.dumps(earlier))
        monkeypatch.setattr(sys, "argv", [*words, *methods])
        with pytest.raises(ReportError, match="on other samples") if refused else nullcontext():
            remeasure.main()
    made = json.loads((tmp_path / "x.json").read_text())
    assert made == {"name": "x", "command": earlier["command"], "seed": 0, **now, "rows": measured["rows"]}


def test_methods_measured_again_are_not_kept_in_any_precision():
    def row(method, value):
        return {"method": method, "tokens": 1000, "memory": 0.05, "n": 3, "value": value}

    about = {"date": "1", "machine": "a", "versions": {"torch": "1"}}
    names = ("kvzip", "kvzip (4 bits)", "snapkv", "snapkv (4 bits)")
    earlier = {"name": "x", **about, "policy": "old", "rows": [row("lkv", 1), *(row(name, 2) for name in names)]}
    now = {"date": "2", "machine": "b", "versions": {"torch": "2"}}
    merged = remeasure.merge(earlier, now | {"policy": "new", "rows": [row("lkv", 3)]})
    assert merged["kept"]["methods"] == [*names]
    measured = now | {"rows": [row(name, 4) for name in names[:2]]}
    merged = remeasure.merge_methods(merged, measured, ["kvzip"])
    assert merged["kept"] == {"methods": ["snapkv", "snapkv (4 bits)"], **about} and merged["again"] == {"kvzip": now}
    # Another policy, a method in a further precision that was measured beside the second policy, and that again.
    merged["rows"] += [row("snapkv (8 bits)", 5), row("keydiff (4 bits)", 5)]
    merged = remeasure.merge(merged, now | {"date": "3", "policy": "third", "rows": [row("lkv", 6)]})
    later = {"methods": ["keydiff (4 bits)"], **now}
    kept = ["keydiff (4 bits)", "snapkv", "snapkv (4 bits)", "snapkv (8 bits)"]
    assert merged["kept"] == {"methods": kept, **about, "later": later}
    merged = remeasure.merge_methods(merged, now | {"rows": [row("keydiff (4 bits)", 7)]}, ["keydiff"])
    assert merged["kept"] == {"methods": kept[1:], **about}


def test_no_result_file_keeps_what_it_has_measured_again():
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        kept = document.get("kept", {}).get("methods", ())
        assert not {name.partition(" (")[0] for name in kept} & {*document.get("again", ())}, path.name


def test_a_fit_is_taken_again_only_with_the_settings_that_it_was_made_with(tmp_path, monkeypatch):
    made, spec = [], patch_attention(tiny_llama()).spec

    def stub(model, tokenizer, minutes, out, name, **data):
        made.append((minutes, sorted(data)))
        Policy(spec).save_pretrained(out)
        return Policy.from_pretrained(out)

    monkeypatch.setattr(fit.fitting, "fit", stub)
    for name in ("data", "train", "more"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "texts.txt").write_text(name)
    subject = Subject(None, None, None, "owner/Tiny")

    def fitted(kind, **changed):
        options = {"threads": 1, "dtype": "bfloat16", "train": tmp_path / "train", "data": tmp_path / "data"}
        options |= {"work": tmp_path / "work"} | changed
        return fit.fitted(subject, kind, SimpleNamespace(**options))

    first = fitted("clean:5")
    assert fitted("clean:5").digest() == first.digest() and made == [(5.0, ["against", "data"])]
    for what, changed in (
        ("threads", {"threads": 2}), ("dtype", {"dtype": "float32"}), ("texts", {"train": tmp_path / "more"}),
        ("evaluated texts", {"data": tmp_path / "more"}),
    ):  # fmt: skip
        if "texts" in what:
            (tmp_path / "more" / "texts.txt").write_text("longer than it was")
        with pytest.raises(DataError, match=rf"tiny-clean-5 was fitted with other {what}; give another --work"):
            fitted("clean:5", **changed)
    monkeypatch.setattr(fit, "RECIPE", replace(fit.RECIPE, lr=1.0))
    with pytest.raises(DataError, match="was fitted with other recipe; give"):
        fitted("clean:5")
    (tmp_path / "work" / "tiny-clean-5.json").unlink()
    with pytest.raises(DataError, match="was fitted with unknown settings; give"):
        fitted("clean:5")
    with pytest.raises(DataError, match="name it with --train"):
        fitted("clean:1", train=None)
    # Without texts of its own a fit does not depend on --train; the mixture is compared with nothing.
    fitted("none:1")
    fitted("none:1", train=None)
    fitted("mixture:1")
    fitted("mixture:1", data=tmp_path / "more")
    assert [minutes for minutes, _ in made] == [5.0, 1.0, 1.0]
